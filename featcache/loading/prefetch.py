"""`Prefetch`: work planned and done ahead in threads, results in order, bounded in bytes."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from os import getpid
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast

from featcache.errors import ClosedError
from featcache.loading.pace import LoopPace
from featcache.reading.containers import Wanted

MOST_AHEAD = 64
PLANS_AHEAD = 4  # beside one for each thread: to take one from its iterator is quick
LOOK_S = 0.1  # between looks whether it was closed, of one that waits; then a thread ends
R = TypeVar("R")


class Planned(NamedTuple, Generic[R]):
    """The bytes of a result, what makes it, how many are no padding, what stores are to give."""

    nbytes: int
    make: Callable[[], R]
    filled: int = 0
    wanted: Wanted | None = None


Plan = Callable[[], Planned[R]]


class _Slot(Generic[R]):
    """The place of a result: first its plan, then the job, then the result."""

    def __init__(self, number: int, plan: Plan[R]) -> None:
        self.number = number
        self.plan = plan
        self.job: Planned[R] | None = None
        self.nbytes = 0  # that it takes, or will soon
        self.result: R | None = None
        self.error: BaseException | None = None
        self.is_done = False  # one of these is there
        self.thread = 0  # ident of the one that is at it; 0: none is
        self.cpu_s = 0.0  # of the processor, that doing it took
        self.work_s = 0.0  # that planning and doing it took


@dataclass
class Handed:
    """Sums over the results that an iteration handed on, and when it began and ended."""

    results: int = 0
    nbytes: int = 0
    filled: int = 0
    work_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)
    ended: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began, until now or until it ended."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.began

    def end(self) -> None:
        """Note that nothing more is handed on."""
        if self.ended is None:
            self.ended = time.perf_counter()

    def add(self, slot: _Slot[Any]) -> None:
        """Add one."""
        self.results += 1
        self.nbytes += slot.nbytes
        self.filled += 0 if slot.job is None else slot.job.filled
        self.work_s += slot.work_s


# told the thread that is at a result, and the seconds that were waited for it
Watch = Callable[[int, float], object]


class Prefetch(Iterator[R]):
    """Iterator over the results of plans, in their order; threads work on the next ones meanwhile.

    Plans are taken from their iterator in the caller's thread, and carried out in the others: the
    job that a plan returns is done there when there is room for its result. Threads live only while
    there is something to do, and `LOOK_S` longer: an iteration that is left, by an exception or
    otherwise, leaves none behind once the few jobs that were begun are done. A loop that asks again
    at once has nothing to do meanwhile: it works beside the one thread, or in place of it, as
    `LoopPace` finds. In place of it also where one thread does not get ahead, since the loop leaves
    it no processor, or not Python's lock.

    Args:
        plans: each returns the bytes of its result, and the function that makes it.
        threads: number of plans and jobs at a time; 0 does each when its result is asked for.
        most_bytes: most bytes of the results that wait or are worked on; at least one job is done
            in any case, and `MOST_AHEAD` at most.
        watchdog_s: seconds of waiting for a result after which `watch` is called, once, in a
            thread of its own, with the thread that is at the result.
        together: begins what the jobs of several plans wait for, such as requests to a store. As
            many plans as are ahead already, at least one, are then made together, as soon as there
            is room for as many: the first job is not kept waiting, and the last ones of those ahead
            have long been begun.
        waits: whether jobs wait for that now; it is seen before each result.
        pace: what was seen of the loop before.

    An error of a plan, of a job, or of their iterator, is raised in its place: after the results
    before it.
    """

    def __init__(
        self,
        plans: Iterator[Plan[R]],
        threads: int,
        most_bytes: int,
        watchdog_s: float | None = None,
        watch: Watch | None = None,
        *,
        together: Callable[[Sequence[Planned[R]]], object] | None = None,
        waits: Callable[[], bool] = lambda: True,
        pace: LoopPace | None = None,
    ) -> None:
        self.handed = Handed()
        self._pace = LoopPace() if pace is None else pace
        self._together, self._waits, self._is_together = together, waits, False
        self._watchdog_s, self._watch = watchdog_s, watch
        self._plans: Iterator[Plan[R]] | None = plans  # None: it came to its end
        self._most_threads = threads
        self._most_bytes = most_bytes if threads else 0
        self._process = getpid()
        self._slots: deque[_Slot[R]] = deque()  # all that are not handed on yet
        self._taken = self._round_ends = 0  # plans that are taken; with this round
        self._is_filling = False  # plans are being taken for all that there is room for
        self._to_plan: deque[_Slot[R]] = deque()
        self._unplanned = 0  # these, and those that are being planned
        self._to_do: list[_Slot[R]] = []  # planned
        self._bytes = 0
        self._threads: list[threading.Thread] = []
        self._handed_at = -math.inf  # when the last result was
        self._is_alone = not threads  # the caller's thread does the work itself, for now
        self._helps = False  # it works beside the other one
        self._busy = 0  # threads that look for more to do when they are done
        self._at_work: set[int] = set()  # idents of the threads that are at a plan or a job
        # taken by itself: an interrupt may come within `Condition.__enter__`, and it stays taken
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)
        _iterations.add(self)
        # nothing is begun any more, though there was more; nothing is being done any more
        self._closed, self._was_cut, self._is_over = _ending.is_set(), False, False
        self._inside: set[int] = set()  # idents of threads that ask for a result, or close it

    def __next__(self) -> R:
        me = threading.get_ident()
        try:
            self._inside.add(me)
            return self._next_result()
        finally:
            self._inside.discard(me)
            if _ending.is_set():
                _stop_thread()

    def _next_result(self) -> R:
        if getpid() != self._process:
            raise ClosedError(
                "this iteration belongs to the process that began it; begin another one in this "
                "process"
            )
        step_s = time.perf_counter() - self._handed_at
        was_alone = self._is_alone
        self._choose_way(step_s)
        self._take_plans()
        with self._lock:
            if self._closed or not self._slots:
                raise StopIteration
            slot = self._slots[0]
        try:
            if self._is_together and self._most_threads:
                self._take_more(slot)
            asked_at, is_late = time.perf_counter(), not slot.is_done
            result = self._result(slot)
            if not was_alone and not self._is_alone and not self._is_together:
                waited_s = time.perf_counter() - asked_at if is_late else 0.0
                self._see_whether_ahead(slot, step_s, waited_s)
            return result
        finally:
            with self._lock:
                if self._slots and self._slots[0] is slot:
                    self._slots.popleft()
                self._bytes -= slot.nbytes
            self.handed.add(slot)
            self._take_plans()
            before, self._handed_at = self._handed_at, time.perf_counter()
            if not self._is_together:
                self._pace.got(self._handed_at - before, slot.nbytes)

    def _choose_way(self, step_s: float) -> None:
        """Choose who does the next work; jobs that wait for more than this process are begun ahead.

        Of a loop that asks for results after `step_s`.
        """
        is_together = self._together is not None and self._waits()
        if is_together != self._is_together:
            with self._lock:  # the way comes last: an interrupt between them is seen to next time
                self._is_filling = is_together and self._most_threads > 0
                self._is_together = is_together
        if self._most_threads == 1 and not self._is_together:
            self._pace.asks(step_s)
            self._helps, self._is_alone = self._pace.is_beside, self._pace.is_alone
        else:
            self._helps, self._is_alone = False, not self._most_threads

    def _see_whether_ahead(self, slot: _Slot[R], step_s: float, waited_s: float) -> None:
        """Leave threads alone where the loop had to wait as long as the work takes, no longer.

        A wait for a disk takes longer than the processor works, and there a thread gets ahead.
        """
        had_time = slot.cpu_s < step_s < math.inf
        if had_time and not waited_s:
            self._pace.sees_thread(is_ahead=True)
        elif had_time and 0.8 * slot.cpu_s < waited_s < 2 * slot.cpu_s:
            self._pace.sees_thread(is_ahead=False)

    def _result(self, slot: _Slot[R]) -> R:
        with self._watched(slot):
            if self._is_alone or self._helps:
                self._work_here(slot)
            if not slot.is_done:
                with self._lock:
                    while not self._state.wait_for(lambda: slot.is_done or self._closed, LOOK_S):
                        pass
        if slot.error is not None:
            try:
                raise slot.error
            finally:
                slot.error = None  # nor is it held by the frames of its own traceback
        if not slot.is_done:  # another thread closes it
            raise StopIteration
        return cast(R, slot.result)

    @contextmanager
    def _watched(self, slot: _Slot[R]) -> Iterator[None]:
        if self._watchdog_s is None or self._watch is None or slot.is_done:
            yield
            return
        watch, seconds = self._watch, self._watchdog_s
        timer = threading.Timer(seconds, lambda: watch(slot.thread, seconds))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def ahead(self) -> tuple[int, int]:
        """Count the results that wait to be handed on, and their bytes."""
        done = [slot.nbytes for slot in list(self._slots) if slot.is_done]
        return len(done), sum(done)

    @property
    def is_closed(self) -> bool:
        """Whether it was left or closed, and gives no more."""
        return self._closed

    @property
    def was_cut(self) -> bool:
        """Whether it was left or closed before its end."""
        return self._was_cut

    def leave(self) -> None:
        """Begin nothing more, without waiting for what has begun.

        It takes no lock and changes no list: the garbage collector may call it anywhere.
        """
        self.handed.end()
        if not self._closed:
            self._was_cut = self._plans is not None or bool(self._slots)
        self._closed = True

    def close(self) -> None:
        """Drop what has not begun, and wait for what has.

        A handler of a signal, in a thread that asks for a result, cannot wait: what it interrupted
        gives no more.
        """
        self.leave()
        if self._is_over or getpid() != self._process:
            return  # a fork has none of the threads, and one of them may have held the lock
        me = threading.get_ident()
        if me in self._inside:
            return
        try:
            self._inside.add(me)
            self._drop_and_wait(me)
        finally:
            self._inside.discard(me)

    def _drop_and_wait(self, me: int) -> None:
        with self._lock:
            self._plans = None
            self._slots.clear()
            self._to_plan.clear()
            self._to_do.clear()
            self._unplanned = 0
            self._state.notify_all()
            # also for one that iterates without threads
            self._state.wait_for(lambda: self._at_work <= {me})
        for thread in self._threads:
            if thread.ident != me:
                thread.join()  # with nothing to do it ends at once
        self._is_over = True

    def _take_plans(self) -> None:
        """Take plans, as many as threads may soon want, and start threads for what there is."""
        while True:
            with self._lock:
                self._start_threads()
                if self._plans is None or self._taken >= self._wanted():
                    return
                plans = self._plans
            try:
                plan = next(plans, None)
            except Exception as error:
                plan, plans = partial(_raise, error), iter(())  # in its place
            with self._lock:
                if self._closed:  # by another thread, when the interpreter ends
                    return
                if plan is None:
                    self._plans = None
                    self._start_threads()  # for a round that is smaller than was wanted
                    return
                self._plans = plans
                self._taken += 1
                slot = _Slot(self._taken, plan)
                self._slots.append(slot)
                self._to_plan.append(slot)
                self._unplanned += 1

    def _wanted(self) -> int:
        """Return how many plans are to have been taken by now."""
        ahead = len(self._slots)
        if not self._is_together or not self._most_threads:
            waiting = len(self._to_plan) + len(self._to_do)
            room = self._most_threads + PLANS_AHEAD if self._most_threads else 1
            return self._taken + min(room - waiting, MOST_AHEAD - ahead)
        # a plan that failed is handed on before it counts as planned: there may be none ahead
        if self._round_ends > self._taken or (self._unplanned and ahead):
            return self._round_ends
        twice = 2 * sum(slot.nbytes for slot in self._slots)
        if not ahead or (2 * ahead <= MOST_AHEAD and twice <= self._most_bytes):
            self._round_ends = self._taken + max(ahead, 1)
        return self._round_ends

    def _take_more(self, slot: _Slot[R]) -> None:
        """Take plans while a result is waited for, as soon as those before have their sizes.

        Jobs begin after that: one that waits for what was begun would keep a thread from planning.
        """
        taken, self._is_filling = -1, True
        while taken < self._taken and not slot.is_done:
            with self._lock:
                while not self._state.wait_for(
                    lambda: slot.is_done or not self._unplanned or self._closed, LOOK_S
                ):
                    pass
            if self._closed:
                break
            taken = self._taken
            self._take_plans()
        with self._lock:
            self._is_filling = False
            self._start_threads()

    def _start_threads(self) -> None:
        if self._is_alone:
            return
        work = len(self._to_plan)
        work += not self._is_filling and any(map(self._fits, self._to_do))
        if work:
            self._state.notify_all()  # to those that wait for more
        while self._busy < min(self._most_threads, len(self._at_work) + work):
            # as a daemon: else the interpreter would wait at its end until all that was begun is
            # done
            thread = threading.Thread(target=self._work, name="featcache-loader", daemon=True)
            thread.start()
            self._busy += 1
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _fits(self, slot: _Slot[R]) -> bool:
        is_next = bool(self._slots) and slot is self._slots[0]
        return is_next or self._bytes + slot.nbytes <= self._most_bytes

    def _work(self) -> None:
        """Do what there is to do, in a thread."""
        while self._has_done_next(threading.get_ident()):  # and kept no result
            pass

    def _has_done_next(self, me: int) -> bool:
        with self._lock:
            self._at_work.discard(me)
            self._state.notify_all()
            slots = self._slots_to_do()
            if not slots:
                self._busy -= 1
                return False
            self._at_work.add(me)
            for slot in slots:
                slot.thread = me
        if slots[0].job is None:
            self._plan(slots)
        else:
            self._make(slots[0], slots[0].job)
        return True

    def _slots_to_do(self) -> list[_Slot[R]]:
        """Return what `_next_slots` does, as soon as there is something; none if all is done.

        To start a thread for each result would take the loop 0.1 ms: one waits a little for more.
        """
        slots: list[_Slot[R]] = []

        def has_some_or_ends() -> bool:
            if self._is_alone or self._closed:
                return True
            slots.extend(self._next_slots())
            is_last = self._plans is None and not self._unplanned and not self._to_do
            return bool(slots) or is_last

        self._state.wait_for(has_some_or_ends, LOOK_S)
        return slots

    def _work_here(self, slot: _Slot[R]) -> None:
        """Plan and make results in the caller's thread until one is there, or others are at all."""
        me = threading.get_ident()
        while (mine := self._first_free(slot, me)) is not None:
            try:
                if mine.job is None:
                    self._plan([mine], here=True)
                if mine.job is not None and self._take(mine, me):
                    self._make(mine, mine.job, here=True)
            finally:
                with self._lock:
                    self._at_work.discard(me)
                    self._state.notify_all()

    def _first_free(self, slot: _Slot[R], me: int) -> _Slot[R] | None:
        """Return the first result that no thread is at, unless that of `slot` is there.

        An interrupt (Ctrl-C) may have left this thread at one that is in no list any more.
        """
        with self._lock:
            if self._is_alone:
                self._state.wait_for(lambda: self._at_work <= {me})
            if slot.is_done or self._closed:
                return None
            free = (each for each in self._slots if each.thread in (0, me))
            first = next((each for each in free if not each.is_done), None)
            if first is None or (first.job is not None and not self._fits(first)):
                return None
            self._at_work.add(me)
            if first in self._to_plan:
                self._to_plan.remove(first)
            first.thread = me
            return first

    def _take(self, slot: _Slot[R], me: int) -> bool:
        """Take a planned result to make it, if nobody else did and there is room."""
        with self._lock:
            if slot.thread not in (0, me) or slot.is_done:
                return False  # the other thread was quicker
            if self._closed or not self._fits(slot):
                return False
            if slot in self._to_do:
                self._to_do.remove(slot)
                self._bytes += slot.nbytes
            slot.thread = me
            return True

    def _make(self, slot: _Slot[R], job: Planned[R], here: bool = False) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            slot.result = job.make()
            slot.work_s += time.perf_counter() - began
            slot.cpu_s = time.thread_time() - cpu
            slot.is_done = True  # who waits is told when this thread looks for more
        except BaseException as error:  # it is raised where the result is asked for
            _fail(slot, error, here)

    def _plan(self, slots: list[_Slot[R]], here: bool = False) -> None:
        """Make plans, begin what their jobs wait for, and let these be done."""
        planned: list[tuple[_Slot[R], Planned[R]]] = []
        for slot in slots:
            began = time.perf_counter()
            try:
                planned.append((slot, slot.plan()))
            except BaseException as error:
                _fail(slot, error, here)
            slot.work_s += time.perf_counter() - began
        if self._is_together and self._together is not None and planned and not self._closed:
            try:
                self._together([job for _, job in planned])
            except BaseException as error:
                for slot, _ in planned:
                    _fail(slot, error)
                planned = []
        with self._lock:
            self._unplanned -= len(slots)
            for slot, job in planned if not self._closed else ():
                slot.job, slot.nbytes, slot.thread = job, job.nbytes, 0
                self._to_do.append(slot)

    def _next_slots(self) -> list[_Slot[R]]:
        """Return the one to be done next, else those to be planned; none where there is no room.

        Plans that are made together come first: jobs wait for what they begin.
        """
        if self._is_together and self._to_plan:
            if self._taken < self._round_ends and self._plans is not None:
                return []  # more are being taken
            slots = list(self._to_plan)
            self._to_plan.clear()
            return slots
        if self._to_do and not self._is_filling:
            slot = min(filter(self._fits, self._to_do), key=lambda slot: slot.number, default=None)
            if slot is None:
                return []
            self._to_do.remove(slot)
            self._bytes += slot.nbytes
            return [slot]
        return [self._to_plan.popleft()] if self._to_plan else []


def _fail(slot: _Slot[R], error: BaseException, here: bool = False) -> None:
    """Raise an error where a result is asked for; `StopIteration` would look like the end.

    An interrupt of the caller's thread is raised at once: what it was at is begun anew.
    """
    if here and not isinstance(error, Exception):
        raise error
    stops = isinstance(error, StopIteration)
    slot.error = RuntimeError(f"a job raised {error!r}") if stops else error
    slot.is_done = True


def _raise(error: Exception) -> NoReturn:
    raise error


# An iteration that is left may live as long as the interpreter. Closed when that begins to end, it
# needs nothing of what is taken apart then.
_iterations: weakref.WeakSet[Prefetch[Any]] = weakref.WeakSet()
_ending = threading.Event()


@atexit.register
def _close_all() -> None:
    _ending.set()
    with suppress(KeyError):  # there are none left
        while True:
            _iterations.pop().close()


def _stop_thread() -> None:
    """Stop a daemon thread that iterates when the interpreter ends.

    Python ends such threads when they next want its lock; within torch, such as when a batch is
    dropped, that aborts the process.
    """
    if threading.current_thread() is threading.main_thread():
        raise ClosedError("the interpreter is ending: no more batches are read")
    threading.Event().wait()
