"""The thread that stores behind a writer, and the end of writers that nobody closes."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.util import Finalize, is_exiting
from typing import TypeVar

# One thread that works off a queue bounded in bytes, so that storing overlaps with computing.

Task = Callable[[], object]
THREAD = "featcache-writer"  # its name


class Background:
    """Runs tasks in order, in a thread of its own.

    An error in the thread ends it; `put`, `run_here` and `drain` raise it from then on.

    Args:
        idle: called with this object between two tasks about every `idle_s` seconds, also while no
            tasks come.
        limit_bytes: `put` waits while tasks would hold more than this; a larger one passes alone.
        told: all tasks are run in it; it makes of an error what is raised.
    """

    def __init__(
        self,
        idle: Callable[[Background], object],
        idle_s: float,
        limit_bytes: int,
        told: AbstractContextManager[None],
    ) -> None:
        self._idle, self._idle_s, self._limit, self._told = idle, idle_s, limit_bytes, told
        self._tasks: deque[tuple[Task, int, int]] = deque()
        self._done = 0  # tasks so far
        self.is_stopping = False
        # taken by itself: an interrupt may come within `Condition.__enter__`, and it stays taken
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running = threading.Lock()  # held while `idle` runs, or a task in another thread
        self.queued_bytes = 0
        self._memory = 0  # that, and what else the tasks take
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        """Whether all tasks that were put are done."""
        return not self._tasks

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self.error is not None:
            raise self.error

    def wait_for_room(self, memory: int) -> None:
        """Return once there is room for a task that holds so much memory."""
        with self._lock:
            self._wait_for_room(memory)

    def put(self, task: Task, nbytes: int, memory: int) -> None:
        """Queue a task that stores `nbytes` and takes so much memory; waits while there is none."""
        with self._lock:
            self._wait_for_room(memory)
            if self.is_stopping:
                raise RuntimeError("the thread that stores has been stopped")
            self.queued_bytes += nbytes
            self._memory += memory
            self._tasks.append((task, nbytes, memory))  # an interrupt counts too much, never less
            self._changed.notify_all()

    @staticmethod
    def may_run_here() -> bool:
        """Whether no interrupt (Ctrl-C) comes to this thread: the main one alone has them."""
        return threading.current_thread() is not threading.main_thread()

    def run_here(self, task: Task) -> bool:
        """Run a task in this thread, which spares a wait for the other one; False: it was not run.

        That is where tasks are queued before it, and where it `may_run_here` not. One thread at a
        time may put tasks, and call this. An error ends the other thread, as that of a task does
        there, and `drain` raises it.
        """
        if not self.may_run_here():
            return False
        with self._running:
            self.check()
            if self._tasks or self.is_stopping:
                return False
            try:
                task()
            except BaseException as error:
                self.put(partial(_fail, error), 0, 0)
        return True

    def drain(self) -> None:
        """Return once all tasks that were put before are done, whatever others put meanwhile."""
        with self._lock:
            number = self._done + len(self._tasks)
            self._changed.wait_for(lambda: self.error or self._done >= number or self._is_over())
            self.check()

    def stop(self, finish: bool) -> None:
        """End the thread, after the queued tasks or before them; never raises."""
        with self._lock:
            self.is_stopping = True
            if not finish and self._tasks:  # the first one may be running: leave it to `_run`
                self._tasks = deque([self._tasks[0]])
            self._changed.notify_all()
        self._thread.join()
        # tasks know the one who queues them, who knows us: let go, or its files stay open until a
        # garbage collection
        self._idle = nothing
        self._tasks.clear()

    def _wait_for_room(self, memory: int) -> None:
        self._changed.wait_for(
            lambda: (
                self.error
                or self.is_stopping
                or not self._tasks
                or self._memory + memory <= self._limit
            )
        )
        self.check()

    def _is_over(self) -> bool:
        return self.is_stopping and not self._tasks

    def _run(self) -> None:
        try:
            with self._told:
                idle_at = time.monotonic() + self._idle_s
                while self._wait(idle_at):
                    if self._tasks:
                        task, nbytes, memory = self._tasks[0]
                        task()
                        with self._lock:  # only now, so that an empty queue means all done
                            self._tasks.popleft()
                            self._done += 1
                            self.queued_bytes -= nbytes
                            self._memory -= memory
                            self._changed.notify_all()
                    if time.monotonic() >= idle_at:
                        with self._running:
                            self._idle(self)
                        idle_at = time.monotonic() + self._idle_s
        except BaseException as error:
            with self._lock:
                self.error = error
                self._changed.notify_all()

    def _wait(self, until: float) -> bool:
        """Wait for a task or until a time; False once all is done and the thread shall end."""
        with self._lock:
            timeout = max(until - time.monotonic(), 0)
            self._changed.wait_for(lambda: self._tasks or self.is_stopping, timeout)
            return bool(self._tasks) or not self.is_stopping


def _fail(error: BaseException) -> None:
    raise error


def nothing(*_: object) -> None:
    """Do nothing, in the place of what is not needed, or not any more."""


def always() -> bool:
    """Answer yes, where nobody is asked."""
    return True


# Writers that nobody closed: closed when they are dropped, and when their process ends.

W = TypeVar("W")
CACHES = 10  # before multiprocessing waits for child processes, which may wait for the lock
PARTS = 11  # before the writers of caches, which publish them
PATIENCE_S = 5.0  # of who drops a writer, which goes on being closed then
_log = logging.getLogger("featcache")
_unclosed: list[tuple[int, Finalize]] = []  # priority, and what closes a writer
_ending = False  # the process


def close_at_exit(
    writer: W,
    what: str,
    close: Callable[[W], None],
    owner: object = None,
    *,
    expected: bool = False,
) -> Callable[[], object]:
    """Close a writer when its process ends, with a warning; returns what calls that off.

    There is no warning where that is the `expected` end of a writer.

    The writer of a cache has an `owner`, which it must not know, and is closed as soon as that is
    collected.

    `atexit` alone would not do: a process of `multiprocessing`, such as a worker of a DataLoader,
    leaves by `os._exit`, after it has run these. In a process that was forked from the writer's
    nothing is run.
    """
    priority = PARTS if owner is None else CACHES
    finalizer = Finalize(owner, _close, (writer, what, close, expected), exitpriority=priority)
    _unclosed[:] = [each for each in _unclosed if each[1].still_active()]
    _unclosed.append((priority, finalizer))
    return finalizer.cancel


def close_before_libraries_end() -> None:
    """Close writers before the libraries that are loaded by now take leave at exit.

    h5py takes its type conversions away then, and the thread that still writes crashes the process.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # what is registered last runs first


def _close_all() -> None:
    global _ending
    _ending = True
    for _, finalizer in sorted(_unclosed, key=lambda each: -each[0]):
        finalizer()


def _close(writer: W, what: str, close: Callable[[W], None], expected: bool) -> None:
    """Close a writer when its process ends, or from the middle of whatever collected it.

    That may be its own thread, for which closing would wait, or a call of h5py, whose lock its
    thread would wait for. So another thread closes it.
    """
    told: list[str] = []
    thread = threading.Thread(target=_closed, args=(writer, what, close, expected, told))
    if _ending or is_exiting():
        thread.run()
    else:
        thread.start()
        if threading.current_thread().name != THREAD:
            thread.join(PATIENCE_S)
    for text in told:
        warnings.warn(text, ResourceWarning, stacklevel=2)


def _closed(
    writer: W, what: str, close: Callable[[W], None], expected: bool, told: list[str]
) -> None:
    """Close a writer, and log and note what there is to tell of it."""
    text = (
        f"{what} was not closed: what it had taken is stored now; close it, or use it in a `with` "
        "block"
    )
    try:
        close(writer)
        if expected:
            return
    except Exception as error:  # there is nobody to raise it to
        text = f"{what} was not closed, and closing it now failed: {error}"
    _log.warning("%s", text)
    told.append(text)
