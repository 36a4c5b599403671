"""Work ahead of time: order, bounds, errors, and no thread left behind."""

from __future__ import annotations

import itertools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import Interrupt, interrupted

from featcache.loading import pace, prefetch
from featcache.loading.pace import LoopPace
from featcache.loading.prefetch import Plan, Planned, Prefetch

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]


def plans(
    count: int, nbytes: int = 1, run: Callable[[int], int] = lambda number: number
) -> Iterator[Plan[int]]:
    for number in range(count):
        yield partial(Planned, nbytes, partial(run, number))


def no_reading_threads() -> bool:
    for _ in range(100):
        if not [thread for thread in threading.enumerate() if thread.name == "featcache-loader"]:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
@pytest.mark.parametrize("most_bytes", [0, 3, 1000])
def test_results_come_in_the_order_of_the_plans(threads: int, most_bytes: int) -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.002 * (number % 3 == 0))
        return number

    assert list(Prefetch(plans(20, run=slow_first), threads, most_bytes)) == list(range(20))
    assert no_reading_threads()


def test_no_plans_give_no_results() -> None:
    assert list(Prefetch(plans(0), 2, 10)) == []


def test_no_more_is_done_ahead_than_the_bytes_allow() -> None:
    done: list[int] = []

    def note(number: int) -> int:
        done.append(number)
        return number

    results = Prefetch(plans(10, nbytes=4, run=note), 2, 12)
    assert next(results) == 0
    assert no_reading_threads()  # all that it may do ahead is done
    assert len(done) == 4  # three wait
    assert sorted(done)[:3] == [0, 1, 2]  # the last one is the next that was planned


def test_a_result_that_is_larger_than_the_bound_comes_alone() -> None:
    running: list[int] = []

    def most_at_once(number: int) -> int:
        running.append(number)
        return len(running)

    results = Prefetch(plans(3, nbytes=100, run=most_at_once), 2, 10)
    assert next(results) == 1
    assert no_reading_threads()
    assert running == [0, 1]


def test_without_threads_each_job_is_done_when_its_result_is_asked_for() -> None:
    done: list[int] = []

    def note(number: int) -> int:
        done.append(number)
        return number

    results = Prefetch(plans(10, run=note), 0, 1000)
    assert (next(results), done) == (0, [0])
    assert (next(results), done) == (1, [0, 1])


def test_a_loop_that_is_slower_than_the_work_is_served_by_one_thread() -> None:
    at_work = []

    def note(number: int) -> int:
        at_work.append(threading.current_thread())
        return number

    results = Prefetch(plans(30, run=note), 1, 2)
    for number, result in enumerate(results):
        assert result == number
        time.sleep(0.01)  # by then all that there is room for is done
    assert threading.current_thread() not in at_work
    assert len({*at_work}) < 10  # one, but on a machine that stands still for a while
    assert no_reading_threads()


def test_plans_are_taken_in_the_thread_that_iterates_and_carried_out_in_others() -> None:
    taken, planned = set(), set()

    def plan() -> Planned[int]:
        planned.add(threading.current_thread())
        return Planned(1, lambda: 0)

    def watched() -> Iterator[Plan[int]]:
        for _ in range(10):
            taken.add(threading.current_thread())
            yield plan

    list(Prefetch(watched(), 2, 3))
    assert taken == {threading.current_thread()}
    assert threading.current_thread() not in planned


def test_no_more_is_planned_ahead_than_threads_soon_want() -> None:
    taken = []

    def watched() -> Iterator[Plan[int]]:
        for number, plan in enumerate(plans(100, nbytes=10)):
            taken.append(number)
            yield plan

    results = Prefetch(watched(), 2, 30)
    assert next(results) == 0
    assert no_reading_threads()
    assert len(taken) < 12


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_results_of_any_size_come_within_the_bound(threads: int) -> None:
    sizes = [1, 90, 3, 200, 200, 1, 1, 50, 60, 70, 1000, 2] * 5
    held, most = 0, []
    lock = threading.Lock()

    def make(number: int) -> int:
        nonlocal held
        with lock:
            held += sizes[number]
            most.append(held)
        return number

    planned = (partial(Planned, size, partial(make, number)) for number, size in enumerate(sizes))
    for number, found in enumerate(Prefetch(planned, threads, 100)):
        assert found == number
        with lock:
            held -= sizes[number]
    # one that is larger than the bound comes when all before it are handed on
    assert max(most) <= 1000 + 200  # beside one that is handed on, and not yet taken off here
    assert no_reading_threads()


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_a_plan_or_of_their_iterator_is_raised_in_its_place(threads: int) -> None:
    def fails() -> Planned[int]:
        raise KeyError(3)

    def watched() -> Iterator[Plan[int]]:
        yield from plans(3)
        yield fails
        yield from plans(2)
        raise LookupError

    results = Prefetch(watched(), threads, 100)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(results)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(LookupError):
        next(results)
    assert list(results) == []


def test_jobs_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(number: int) -> int:
        both.wait()
        return number

    assert list(Prefetch(plans(2, run=meet), 2, 10)) == [0, 1]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_is_raised_in_its_place(threads: int) -> None:
    results = Prefetch(plans(5, run=lambda number: 6 // (2 - number)), threads, 100)
    assert [next(results), next(results)] == [3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)
    results.close()
    assert no_reading_threads()


def test_closing_drops_what_is_not_begun_and_waits_for_what_is() -> None:
    assert no_reading_threads()  # of other tests
    begun: list[int] = []
    go = threading.Event()

    def wait(number: int) -> int:
        begun.append(number)
        assert number == 0 or go.wait(10)
        return number

    results = Prefetch(plans(50, run=wait), 1, 20)
    assert next(results) == 0
    while len(begun) < 2:  # or closing drops it, too
        time.sleep(0.001)
    closing = threading.Thread(target=results.close)
    closing.start()
    while results._to_plan:
        time.sleep(0.001)
    go.set()
    closing.join()
    assert begun == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name == "featcache-loader"]
    assert list(results) == []


def leave_at(line: int) -> bool:
    """Leave an iteration in one of its threads, before the n-th line that they run after that."""

    def slow(number: int) -> int:
        time.sleep(0.001)
        return number

    results = Prefetch(plans(30, nbytes=4, run=slow), 2, 1000)
    lines, is_begun, was_left = itertools.count(), threading.Event(), threading.Event()

    def trace(frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        if frame.f_code.co_filename != prefetch.__file__:
            return None
        if event == "line" and is_begun.is_set() and next(lines) == line:
            results.leave()
            was_left.set()
        return trace

    threading.settrace(trace)
    next(results)
    is_begun.set()
    threading.settrace(None)
    assert no_reading_threads()
    results.close()
    return was_left.is_set()


def test_an_iteration_may_be_left_at_any_line_of_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The garbage collector ends it in whatever thread makes the next object."""
    errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    assert sum(map(leave_at, range(150))) > 100
    assert not errors


def test_plans_that_end_within_a_round_are_made() -> None:
    def end_late(count: int) -> Iterator[Plan[int]]:
        yield from plans(count)
        no_reading_threads()  # those that wait for a whole round leave

    for count in range(1, 6):
        results = Prefetch(end_late(count), 2, 1000, together=lambda planned: None)
        given: list[int] = []
        reading = threading.Thread(target=lambda r=results, g=given: g.extend(r), daemon=True)
        reading.start()
        reading.join(10)
        assert given == list(range(count))


def test_errors_of_plans_made_together_end_nothing() -> None:
    def fails() -> Planned[int]:
        raise KeyError

    results = Prefetch(iter([fails] * 500), 2, 1000, together=lambda planned: None)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(500):
            with pytest.raises(KeyError):
                next(results)
    finally:
        sys.setswitchinterval(interval)
    assert list(results) == []


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(0, 3),
    st.integers(0, 60),
    st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_what_jobs_wait_for_may_be_here_now_and_afar_then(
    afar: list[bool], threads: int, count: int, most_bytes: int
) -> None:
    asked = 0

    def waits() -> bool:
        nonlocal asked
        asked += 1
        return afar[asked % len(afar)]

    begun: list[int] = []
    results = Prefetch(
        plans(count),
        threads,
        most_bytes,
        together=lambda planned: begun.extend(each.make() for each in planned),
        waits=waits,
    )
    assert list(results) == list(range(count))
    assert len(begun) == len({*begun})  # once at most
    if all(afar):
        assert sorted(begun) == list(range(count))


class Always(LoopPace):
    """A loop that tries nothing."""

    def __init__(self, *, is_beside: bool) -> None:
        super().__init__()
        self._is_beside = is_beside

    def got(self, seconds: float, nbytes: int) -> None:
        pass


@pytest.mark.parametrize("better", ["alone", "beside"])
def test_a_loop_with_nothing_else_to_do_goes_on_in_the_way_that_took_less_time(better: str) -> None:
    """A result has other bytes each time: what counts is the time of a byte."""
    loop, taken = LoopPace(), []
    loop.asks(math.inf)
    for number in range(2000):
        nbytes = 10 + number % 7
        taken.append(loop.is_beside)
        assert loop.is_beside + loop.is_alone == (number > pace.QUICK)
        loop.got(nbytes * (2.0 if loop.is_beside is (better == "alone") else 1.0), nbytes)
        loop.asks(0.0)
    assert taken.count(better == "beside") > 1900
    assert taken.count(better != "beside") > 4 * pace.TRIED  # it is tried again and again


def test_a_loop_that_may_not_work_beside_a_thread_works_in_its_place() -> None:
    loop, beside, alone = LoopPace(may_be_beside=False), 0, 0
    loop.asks(math.inf)
    for number in range(2000):
        loop.got(1.0, 10 + number % 7)
        loop.asks(0.0)
        beside, alone = beside + loop.is_beside, alone + loop.is_alone
    assert not beside
    assert alone > 1900


def test_a_loop_that_pauses_is_no_loop_with_nothing_else_to_do() -> None:
    loop = LoopPace()
    for number in range(1000):
        loop.asks(1.0 if number % 5 == 0 else 0.0)
        assert not loop.is_alone
        assert not loop.is_beside
        loop.got(1.0, 1)


def test_a_loop_that_a_thread_never_gets_ahead_of_looks_for_it_less_and_less_often() -> None:
    loop, alone = LoopPace(), []
    for _ in range(3000):
        loop.asks(1.0)
        alone.append(loop.is_alone)
        if not loop.is_alone:
            loop.sees_thread(is_ahead=False)
    assert alone.count(False) < 12
    loop.asks(math.inf)  # another iteration, whose loop may be another one
    assert not loop.is_alone
    loop.sees_thread(is_ahead=True)
    for times_late in (1, 2):
        loop.sees_thread(is_ahead=False)
        alone.clear()
        for _ in range(40):
            loop.asks(1.0)
            alone.append(loop.is_alone)
        assert alone.count(True) == (pace.ALONE if times_late == 2 else 0)


def test_a_loop_with_nothing_else_to_do_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = threading.get_ident()

    def done_in(number: int) -> int:
        return threading.get_ident()

    monkeypatch.setattr(pace, "HAND_OVER_S", math.inf)  # any loop is quicker
    found = [*Prefetch(plans(60, run=done_in), 1, 1, pace=Always(is_beside=False))]
    assert loop not in found[:8]
    assert set(found[20:]) == {loop}
    assert no_reading_threads()


def test_a_loop_with_nothing_else_to_do_works_beside_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "HAND_OVER_S", math.inf)
    monkeypatch.setattr(pace, "QUICK", 0)
    both, done_in = threading.Barrier(2), list[int]()

    def together(number: int) -> int:
        if 0 < number < 19:  # pairs, each of one of the thread and one of the loop
            both.wait(timeout=20)
        done_in.append(threading.get_ident())
        return number

    results = Prefetch(plans(20, run=together), 1, 100, pace=Always(is_beside=True))
    assert [*results] == [*range(20)]
    assert len(done_in) == 20
    assert done_in.count(threading.get_ident()) >= 9
    assert no_reading_threads()


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_a_loop_may_be_quick_now_and_slow_then(
    seed: int, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "HAND_OVER_S", 0.001)
    monkeypatch.setattr(pace, "QUICK", 1)
    random = np.random.default_rng(seed)
    at_work, most = [0], [0]

    def counted(number: int) -> int:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        time.sleep(0.002 * (number % 3))
        at_work[0] -= 1
        if number % 50 == 49:
            raise ValueError(number)
        return number

    loop = Always(is_beside=is_beside)
    results, found = Prefetch(plans(200, nbytes=4, run=counted), 1, 12, pace=loop), []
    while True:
        try:
            found.append(next(results))
        except ValueError as error:
            found.append(error.args[0])
        except StopIteration:
            break
        if random.random() < 0.3:
            time.sleep(0.003 * random.random())
    assert found == [*range(200)]
    # the loop works beside the thread, or waits for it, and the thread leaves it to the loop
    assert most == [2 if is_beside else 1]
    assert no_reading_threads()


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_loop_that_does_work_itself_goes_on_after_an_interrupt_at_any_line(
    is_beside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "HAND_OVER_S", math.inf)
    monkeypatch.setattr(pace, "QUICK", 0)
    line, is_over = 0, False
    while not is_over:
        line += 1
        trace = Interrupt(line, Path(prefetch.__file__))
        loop = Always(is_beside=is_beside)
        results, found = Prefetch(plans(20), 1, 1, pace=loop), list[int]()
        next(results)
        try:
            with interrupted(trace):
                found += [next(results), next(results)]
                is_over = True
        except KeyboardInterrupt:
            found += results
            # the one that was interrupted is gone, and maybe a plan that was being taken
            assert len(found) >= 16, (line, found)
            assert found == sorted(found)
        results.close()
    assert line > 50
    assert no_reading_threads()


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_an_interrupt_leaves_the_lock_to_other_threads_wherever_it_comes(threads: int) -> None:
    def slow(number: int) -> int:
        time.sleep(0.002)
        return number

    number, is_over = 0, False
    codes = {
        member.__code__
        for member in vars(threading.Condition).values()
        if hasattr(member, "__code__")
    }
    while not is_over:
        number += 1
        left, results = number, Prefetch(plans(6, run=slow), threads, 2)

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if frame.f_code is Prefetch.__next__.__code__:
                return trace
            if frame.f_code in codes and frame.f_locals["self"] is results._state:  # noqa: B023
                left -= 1
                if not left:
                    raise KeyboardInterrupt
                return trace
            return None

        try:
            with interrupted(trace):
                assert list(results) == [*range(6)]
                is_over = True
        except KeyboardInterrupt:
            pass
        except RuntimeError as error:  # one that waits has no lock to give back: Python's own words
            if error.__context__ is None:
                raise
        with ThreadPoolExecutor(1) as other:
            assert other.submit(results._state.acquire, timeout=30).result(), number
            other.submit(results._state.release).result()
        results.close()
    assert number > 6
    assert no_reading_threads()


def test_a_thread_whose_result_nobody_waits_for_any_more_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    is_interrupted = threading.Event()

    def plan() -> Planned[int]:
        assert is_interrupted.wait(30)
        return Planned(9, lambda: 1)

    def interrupt(*args: object) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    results = Prefetch(iter([plan]), 1, 5)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            next(results)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert no_reading_threads()
    assert not failed
    results.close()


def test_a_quick_loop_that_is_closed_by_another_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "HAND_OVER_S", math.inf)
    monkeypatch.setattr(pace, "QUICK", 0)
    begun = threading.Event()

    def slow(number: int) -> int:
        if number == 3:
            begun.set()
            time.sleep(0.05)
        return number

    results = Prefetch(plans(10, run=slow), 1, 1)

    def close() -> None:
        begun.wait()
        results.close()

    closing = threading.Thread(target=close)
    closing.start()
    assert list(results) == [0, 1, 2, 3]
    closing.join()


@pytest.mark.parametrize(("threads", "quick"), [(0, 20), (1, 20), (1, 0)])
def test_a_watchdog_tells_while_a_result_is_late_in_any_thread(
    threads: int, quick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "HAND_OVER_S", math.inf)
    monkeypatch.setattr(pace, "QUICK", quick)
    told: list[int] = []
    at: list[int] = []

    def stuck(number: int) -> int:
        if number == 3:
            at.append(threading.get_ident())
            for _ in range(10_000):
                if told:
                    break
                time.sleep(0.001)
        return number

    watch = lambda thread, seconds: told.append(thread)  # noqa: E731
    assert list(Prefetch(plans(5, run=stuck), threads, 1, 0.01, watch)) == [*range(5)]
    assert at == told


def busy_in_python(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_where_a_thread_cannot_get_ahead_the_loop_does_the_work() -> None:
    def work(number: int) -> int:
        for _ in range(20):
            busy_in_python(0.0001)
            time.sleep(0)  # leaves the lock to others, as a copy does
        return threading.get_ident()

    switched_s = sys.getswitchinterval()
    sys.setswitchinterval(1.0)  # a loop that is busy in Python leaves the thread nothing
    try:
        done_in = []
        for thread in Prefetch(plans(100, run=work), 1, 1):
            done_in.append(thread)
            busy_in_python(0.004)
    finally:
        sys.setswitchinterval(switched_s)
    assert done_in.count(threading.get_ident()) > 25
    assert no_reading_threads()


def test_a_disk_is_waited_for_in_the_thread() -> None:
    def read(number: int) -> int:
        time.sleep(0.02)
        return threading.get_ident()

    for thread in Prefetch(plans(30, run=read), 1, 1):
        assert thread != threading.get_ident()
        time.sleep(0.002)


@pytest.mark.parametrize("burst", [2, 5])
def test_a_thread_works_on_behind_a_burst(burst: int) -> None:
    def read(number: int) -> int:
        time.sleep(0.001)
        return threading.get_ident()

    results = Prefetch(plans(5 * burst, run=read), 1, burst)
    for number in range(5 * burst):
        thread = next(results)
        # the loop may help with those of the first burst, and with what then comes next
        assert number < 2 * burst or thread != threading.get_ident()
        if number % burst == burst - 1:
            while results.ahead()[0] < min(burst, 5 * burst - number - 1):
                time.sleep(0.001)
