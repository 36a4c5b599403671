"""Work done ahead in threads, results in order, bounded in bytes."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from os import getpid
from typing import Any, Generic, TypeVar

from featcache.errors import ClosedError

MOST_AHEAD = 64
T = TypeVar("T")
Job = tuple[int, Callable[[], T]]  # the bytes of its result, and what makes it


class Prefetch(Generic[T]):
    """Iterator over the results of jobs, in their order; the next ones are worked on meanwhile.

    Jobs are taken from their iterator in the caller's thread. Threads live only while there is a
    job to do: who stops to iterate, by an exception or otherwise, leaves none behind once the few
    jobs that were taken are done.

    Args:
        jobs: what to do.
        threads: how many jobs are worked on side by side; 0 does each when its result is asked for.
        most_bytes: jobs are taken ahead as long as their results, with those that wait, are not
            more than this, nor their number more than `MOST_AHEAD`; one is taken in any case.

    An error of a job, or of their iterator, is raised in its place: after the results before it.
    """

    def __init__(self, jobs: Iterator[Job[T]], threads: int, most_bytes: int) -> None:
        self._jobs = jobs
        self._next: Job[T] | None = None
        self._most_threads = threads
        self._most_bytes = most_bytes if threads else 0
        self._error: Exception | None = None
        self._process = getpid()
        self._results: deque[tuple[int, Future[T]]] = deque()
        self._todo: deque[tuple[Future[T], Callable[[], T]]] = deque()
        self._bytes = 0
        self._threads: list[threading.Thread] = []
        self._busy = 0  # threads that look for another job when they have done one
        self._at_work: set[int] = set()  # idents of the threads that are at a job
        # reentrant: the garbage collector may close an iteration in any thread, at any moment
        self._state = threading.Condition(threading.RLock())
        # no job is begun any more; none is being done any more
        self._closed = self._is_over = False
        self._advance()
        _open.add(self)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if getpid() != self._process:
            raise ClosedError(
                "this iteration belongs to the process that began it; begin another one in this "
                "process"
            )
        self._take_jobs()
        with self._state:
            if not self._results:
                error, self._error = self._error or StopIteration(), None
                raise error
            nbytes, future = self._results.popleft()
        if not self._most_threads:
            self._busy += 1
            self._work()
        result = future.result()
        self._bytes -= nbytes
        self._take_jobs()
        return result

    def close(self) -> None:
        """Drop what is not begun, and wait for what is."""
        if self._is_over or getpid() != self._process:
            return  # a fork has none of the threads, and one of them may have held the lock
        me = threading.get_ident()
        with self._state:
            self._closed = True
            self._next = self._error = None
            self._results.clear()
            self._todo.clear()
            # also for one that iterates without threads
            self._state.wait_for(lambda: self._at_work <= {me})
        for thread in self._threads:
            if thread.ident != me:
                thread.join()  # without a job it ends at once
        self._is_over = True

    def _take_jobs(self) -> None:
        while self._take_job():
            self._advance()

    def _take_job(self) -> bool:
        """Take the next job if there is room for its result; says whether it did."""
        with self._state:
            if self._next is None or (self._results and not self._has_room_for(self._next[0])):
                return False
            nbytes, make = self._next
            future: Future[T] = Future()
            self._bytes += nbytes
            self._results.append((nbytes, future))
            self._todo.append((future, make))
            if self._busy < self._most_threads:
                # as a daemon: else the interpreter would wait at its end until all jobs that were
                # taken are done
                thread = threading.Thread(target=self._work, name="featcache-loader", daemon=True)
                thread.start()
                self._busy += 1
                self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            return True

    def _has_room_for(self, nbytes: int) -> bool:
        return len(self._results) < MOST_AHEAD and self._bytes + nbytes <= self._most_bytes

    def _advance(self) -> None:
        job, failure = None, None
        try:
            job = next(self._jobs, None)
        except Exception as error:
            failure = error
        with self._state:
            if not self._closed:  # by another thread, when the interpreter ends
                self._next, self._error = job, failure

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
            except (
                StopIteration
            ) as error:  # where the result is asked for, it would look like the end
                future.set_exception(RuntimeError(f"a job raised {error!r}"))
            except BaseException as error:  # it is raised where the result is asked for
                future.set_exception(error)


# An iteration that is left may live as long as the interpreter. Closed when that begins to end, it
# needs nothing of what is taken apart then.
_open: weakref.WeakSet[Prefetch[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for prefetch in list(_open):
        prefetch.close()
