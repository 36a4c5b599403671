"""Work done ahead in threads, results in order, bounded in bytes."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from os import getpid
from typing import Any, NoReturn, TypeVar

from featcache.errors import ClosedError

MOST_AHEAD = 64
T = TypeVar("T")
Job = tuple[int, Callable[[], T]]  # the bytes of its result, and what makes it


class Prefetch(Iterator[T]):
    """Iterator over the results of jobs, in their order; threads work on the next ones meanwhile.

    Jobs are taken from their iterator in the caller's thread. Threads live only while there is a
    job to do: an iteration that is left, by an exception or otherwise, leaves none behind once the
    few jobs that were taken are done.

    Args:
        jobs: the size of a result in bytes, and the function that makes it.
        threads: number of jobs at a time; 0 does each when its result is asked for.
        most_bytes: most bytes of the results that wait or are worked on; at least one job is taken
            in any case, and `MOST_AHEAD` at most.

    An error of a job, or of their iterator, is raised in its place: after the results before it.
    """

    def __init__(self, jobs: Iterator[Job[T]], threads: int, most_bytes: int) -> None:
        self._jobs = jobs
        self._next: Job[T] | None = None
        self._most_threads = threads
        self._most_bytes = most_bytes if threads else 0
        self._process = getpid()
        self._results: deque[tuple[int, Future[T]]] = deque()
        self._todo: deque[tuple[Future[T], Callable[[], T]]] = deque()
        self._bytes = 0
        self._threads: list[threading.Thread] = []
        self._busy = 0  # threads that look for another job when they have done one
        self._at_work: set[int] = set()  # idents of the threads that are at a job
        # reentrant: the garbage collector may close an iteration in any thread, at any moment
        self._state = threading.Condition(threading.RLock())
        _iterations.add(self)
        # no job is begun any more; none is being done any more
        self._closed, self._is_over = _ending.is_set(), False
        self._advance()

    def __next__(self) -> T:
        try:
            return self._next_result()
        finally:
            if _ending.is_set():
                _stop_thread()

    def _next_result(self) -> T:
        if getpid() != self._process:
            raise ClosedError(
                "this iteration belongs to the process that began it; begin another one in this "
                "process"
            )
        self._take_jobs()
        with self._state:
            if not self._results:
                raise StopIteration
            nbytes, future = self._results.popleft()
        if not self._most_threads:
            self._busy += 1
            self._work()
        result = future.result()
        self._bytes -= nbytes
        self._take_jobs()
        return result

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait for those that have."""
        if self._is_over or getpid() != self._process:
            return  # a fork has none of the threads, and one of them may have held the lock
        me = threading.get_ident()
        with self._state:
            self._closed = True
            self._next = None
            self._results.clear()
            self._todo.clear()
            # also for one that iterates without threads
            self._state.wait_for(lambda: self._at_work <= {me})
        for thread in self._threads:
            if thread.ident != me:
                thread.join()  # without a job it ends at once
        self._is_over = True

    def _take_jobs(self) -> None:
        """Take jobs as long as there is room for their results."""
        while True:
            with self._state:
                if self._next is None:
                    return
                nbytes, make = self._next
                fits = len(self._results) < MOST_AHEAD and self._bytes + nbytes <= self._most_bytes
                if self._results and not fits:
                    return
                future: Future[T] = Future()
                self._bytes += nbytes
                self._results.append((nbytes, future))
                self._todo.append((future, make))
                if self._busy < self._most_threads:
                    self._start_thread()
            self._advance()

    def _start_thread(self) -> None:
        # as a daemon: else the interpreter would wait at its end until all jobs that were taken
        # are done
        thread = threading.Thread(target=self._work, name="featcache-loader", daemon=True)
        thread.start()
        self._busy += 1
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _advance(self) -> None:
        try:
            job = next(self._jobs, None)
        except Exception as error:
            job = 0, partial(_raise, error)  # in its place: after the results before it
        with self._state:
            if not self._closed:  # by another thread, when the interpreter ends
                self._next = job

    def _work(self) -> None:
        me = threading.get_ident()
        while True:
            with self._state:
                self._at_work.discard(me)
                self._state.notify_all()
                if not self._todo:
                    self._busy -= 1
                    return
                future, make = self._todo.popleft()
                self._at_work.add(me)
            try:
                future.set_result(make())
            except BaseException as error:  # it is raised where the result is asked for
                # and would look like the end there
                stops = isinstance(error, StopIteration)
                future.set_exception(RuntimeError(f"a job raised {error!r}") if stops else error)


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
