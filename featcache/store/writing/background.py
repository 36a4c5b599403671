"""One thread that works off a queue bounded in bytes, so that storing overlaps with computing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

Task = Callable[[], object]
THREAD = "featcache-writer"  # its name


class Background:
    """Runs tasks in order, in a thread of its own.

    An error in the thread ends it; `put` and `drain` raise it from then on.

    Args:
        idle: run between two tasks about every `idle_s` seconds, also while no tasks come.
        limit_bytes: `put` waits while tasks would hold more than this; a larger one passes alone.
    """

    def __init__(self, idle: Task, idle_s: float, limit_bytes: int) -> None:
        self._idle, self._idle_s, self._limit = idle, idle_s, limit_bytes
        self._tasks: deque[tuple[Task, int, int]] = deque()
        self._done = 0  # tasks so far
        self._stopping = False
        # taken by itself: an interrupt may come within `Condition.__enter__`, and it stays taken
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.queued_bytes = 0
        self._memory = 0  # that, and what else the tasks take
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        self._raise_error()

    def wait_for_room(self, memory: int) -> None:
        """Return once there is room for a task that holds so much memory."""
        with self._lock:
            self._wait_for_room(memory)

    def put(self, task: Task, nbytes: int, memory: int) -> None:
        """Queue a task that stores `nbytes` and takes so much memory; waits while there is none."""
        with self._lock:
            self._wait_for_room(memory)
            if self._stopping:
                raise RuntimeError("the thread that stores has been stopped")
            self.queued_bytes += nbytes
            self._memory += memory
            self._tasks.append((task, nbytes, memory))  # an interrupt counts too much, never less
            self._changed.notify_all()

    def drain(self) -> None:
        """Return once all tasks that were put before are done, whatever others put meanwhile."""
        with self._lock:
            number = self._done + len(self._tasks)
            self._changed.wait_for(lambda: self.error or self._done >= number or self._is_over())
            self._raise_error()

    def stop(self, finish: bool) -> None:
        """End the thread, after the queued tasks or before them; never raises."""
        with self._lock:
            self._stopping = True
            if not finish and self._tasks:  # the first one may be running: leave it to `_run`
                self._tasks = deque([self._tasks[0]])
            self._changed.notify_all()
        self._thread.join()
        # tasks know the one who queues them, who knows us: let go, or its files stay open until a
        # garbage collection
        self._idle = _nothing
        self._tasks.clear()

    def _wait_for_room(self, memory: int) -> None:
        self._changed.wait_for(
            lambda: (
                self.error
                or self._stopping
                or not self._tasks
                or self._memory + memory <= self._limit
            )
        )
        self._raise_error()

    def _is_over(self) -> bool:
        return self._stopping and not self._tasks

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
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
                    self._idle()
                    idle_at = time.monotonic() + self._idle_s
        except BaseException as error:
            with self._lock:
                self.error = error
                self._changed.notify_all()

    def _wait(self, until: float) -> bool:
        """Wait for a task or until a time; False once all is done and the thread shall end."""
        with self._lock:
            timeout = max(until - time.monotonic(), 0)
            self._changed.wait_for(lambda: self._tasks or self._stopping, timeout)
            return bool(self._tasks) or not self._stopping


def _nothing() -> None:
    pass
