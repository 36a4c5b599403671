"""Work ahead of time: order, bounds, errors, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from featcache.loading.loader import Prefetch

Jobs = Iterator[tuple[int, Callable[[], int]]]


def jobs(count: int, nbytes: int = 1, run: Callable[[int], int] = lambda number: number) -> Jobs:
    for number in range(count):
        yield nbytes, partial(run, number)


def no_reading_threads() -> bool:
    for _ in range(100):
        if not [thread for thread in threading.enumerate() if thread.name == "featcache-loader"]:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
@pytest.mark.parametrize("most_bytes", [0, 3, 1000])
def test_results_come_in_the_order_of_the_jobs(threads: int, most_bytes: int) -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.002 * (number % 3 == 0))
        return number

    assert list(Prefetch(jobs(20, run=slow_first), threads, most_bytes)) == list(range(20))
    assert no_reading_threads()


def test_no_jobs_give_no_results() -> None:
    assert list(Prefetch(jobs(0), 2, 10)) == []


def test_no_more_is_done_ahead_than_the_bytes_allow() -> None:
    done: list[int] = []

    def note(number: int) -> int:
        done.append(number)
        return number

    results = Prefetch(jobs(10, nbytes=4, run=note), 2, 12)
    assert next(results) == 0
    assert no_reading_threads()  # all that it may do ahead is done
    assert sorted(done) == [0, 1, 2, 3]  # three wait


def test_a_result_that_is_larger_than_the_bound_comes_alone() -> None:
    running: list[int] = []

    def most_at_once(number: int) -> int:
        running.append(number)
        return len(running)

    results = Prefetch(jobs(3, nbytes=100, run=most_at_once), 2, 10)
    assert next(results) == 1
    assert no_reading_threads()
    assert running == [0, 1]


def test_without_threads_each_job_is_done_when_its_result_is_asked_for() -> None:
    done: list[int] = []

    def note(number: int) -> int:
        done.append(number)
        return number

    results = Prefetch(jobs(10, run=note), 0, 1000)
    assert (next(results), done) == (0, [0])
    assert (next(results), done) == (1, [0, 1])


def test_jobs_are_taken_in_the_thread_that_iterates() -> None:
    seen = set()

    def watched() -> Jobs:
        for job in jobs(10):
            seen.add(threading.current_thread())
            yield job

    list(Prefetch(watched(), 2, 3))
    assert seen == {threading.current_thread()}


def test_jobs_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(number: int) -> int:
        both.wait()
        return number

    assert list(Prefetch(jobs(2, run=meet), 2, 10)) == [0, 1]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_is_raised_in_its_place(threads: int) -> None:
    results = Prefetch(jobs(5, run=lambda number: 6 // (2 - number)), threads, 100)
    assert [next(results), next(results)] == [3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)
    results.close()
    assert no_reading_threads()


def test_closing_drops_what_is_not_begun_and_waits_for_what_is() -> None:
    begun: list[int] = []
    go = threading.Event()

    def wait(number: int) -> int:
        begun.append(number)
        assert number == 0 or go.wait(10)
        return number

    results = Prefetch(jobs(50, run=wait), 1, 20)
    assert next(results) == 0
    while len(begun) < 2:  # or closing drops it, too
        time.sleep(0.001)
    closing = threading.Thread(target=results.close)
    closing.start()
    while results._todo:
        time.sleep(0.001)
    go.set()
    closing.join()
    assert begun == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name == "featcache-loader"]
    assert list(results) == []
