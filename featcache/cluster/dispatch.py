"""`Dispatch`: hands tasks to the workers of Dask, and tells which attempts were lost."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from distributed import CancelledError, KilledWorker
from distributed.comm.core import CommClosedError

from featcache._interval import Interval
from featcache.cluster.attempts import PATIENCE_S, AtWorkError, TaskTakenError, revoke
from featcache.cluster.workers import Workers
from featcache.errors import IncompleteError

if TYPE_CHECKING:
    from distributed import Future

GONE_S = 5.0  # how long Dask may take to report that a worker died
SILENCE_S = 300.0  # without a sign of any worker: then a warning names them
UNDER_WAY = 2  # tasks of each worker: the one that it computes, and the next one
_log = logging.getLogger("featcache")


class Numbered(Protocol):
    """A task, a `NamedTuple` whose `number` is that of the attempt: no two attempts share one."""

    @property
    def number(self) -> int:
        """The number of this attempt."""

    def _replace(self, *, number: int) -> Self: ...


T = TypeVar("T", bound=Numbered)


class LostAttempt(NamedTuple):
    """An attempt whose worker was killed, or was cut off from the scheduler and has stopped."""

    batch: int | None  # the one that the worker was at, -1: before the first; None: not begun
    error: Exception


class Dispatch(Generic[T]):
    """Hands tasks to workers.

    Args:
        workers: the workers.
        attempts: the directory of the notes on attempts.
        function: called in a worker with a task and `args`; returns errors instead of raising
            them.
    """

    def __init__(
        self, workers: Workers, attempts: Path, function: Callable[..., object], *args: object
    ) -> None:
        self._workers, self._attempts, self._function, self._args = (
            workers,
            attempts,
            function,
            args,
        )
        self._numbers = count()
        self._waiting: deque[T] = deque()
        # and the worker that is to do it
        self._under_way: dict[int, tuple[T, Future[Any], str]] = {}
        # workers of tasks under way that are no longer there, since when
        self._gone: dict[str, float] = {}
        # whose workers may still be at their batch, until when
        self._lost: deque[tuple[T, Exception, float]] = deque()
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._silence = Interval(SILENCE_S)

    def add(self, task: T) -> None:
        """Add a task, as a new attempt."""
        self._waiting.append(task._replace(number=next(self._numbers)))

    def is_under_way(self, number: int) -> bool:
        """Say whether an attempt is with a worker."""
        return number in self._under_way

    def outcomes(self, tend: Callable[[], None] = lambda: None) -> Iterator[tuple[T, Any]]:
        """Yield tasks as they end, each with what the function returned or a `LostAttempt`.

        `tend` is called about once a second. Raises `IncompleteError` if the scheduler is gone, or
        if a worker that the scheduler has lost does not end.
        """
        try:
            while self._waiting or self._under_way or self._lost:
                self._submit()
                self._workers.look_after()
                tend()
                self._abandon_tasks_of_lost_workers()
                for outcome in (*self._ended_tasks(), *self._revoked()):
                    self.reset_silence()
                    yield outcome
                self._warn_of_silence()
        except KeyboardInterrupt:
            self._workers.interrupted = True
            raise

    def _warn_of_silence(self) -> None:
        if self._silence.due():
            at = sorted({address for _, _, address in self._under_way.values()})
            _log.warning(
                "nothing has come from workers for %.0f s; tasks are at %s",
                SILENCE_S,
                ", ".join(at),
            )

    def reset_silence(self) -> None:
        """Begin to count `SILENCE_S` anew: a worker gave a sign of life."""
        self._silence = Interval(SILENCE_S)

    def finish(self) -> None:
        """Have the workers end what is under way, and seal their parts."""
        futures = [future for _, future, _ in self._under_way.values()]
        if futures:
            self._workers.client.cancel(futures, force=True)  # type: ignore[no-untyped-call]
        self._workers.finish(at_work=bool(futures or self._lost))

    def _submit(self) -> None:
        # a share for each: all could go to a worker that hangs, and only that worker could give
        # them back
        at = Counter(address for _, _, address in self._under_way.values())
        room = [
            address
            for turn in range(UNDER_WAY)
            for address in self._workers.addresses
            if at[address] <= turn
        ]
        for address in room[: len(self._waiting)]:
            task = self._waiting.popleft()
            future = self._workers.client.submit(
                self._function, task, *self._args, pure=False, workers=[address]
            )
            self._under_way[task.number] = task, future, address
            future.add_done_callback(lambda _, number=task.number: self._ended.put(number))  # type: ignore[no-untyped-call]

    def _abandon_tasks_of_lost_workers(self) -> None:
        # a task that comes to the scheduler when its worker is gone, never ends; of others Dask
        # tells soon
        now, there = time.monotonic(), set(self._workers.addresses)
        gone = {address for _, _, address in self._under_way.values()} - there
        self._gone = {address: self._gone.get(address, now) for address in gone}
        for number, (task, future, address) in list(self._under_way.items()):
            if now - self._gone.get(address, now) > GONE_S:
                del self._under_way[number]
                self._abandon(task, future, address)

    def _abandon(self, task: T, future: Future[Any], address: str) -> None:
        self._workers.client.cancel([future], force=True)  # type: ignore[no-untyped-call]
        self._lost.append(
            (task, IncompleteError(f"worker {address} is gone"), time.monotonic() + PATIENCE_S)
        )

    def _ended_tasks(self) -> Iterator[tuple[T, Any]]:
        wait_s = 0.2 if self._lost else 1.0
        try:
            while True:
                number = self._ended.get(timeout=wait_s)
                wait_s = 0.0
                if number not in self._under_way:
                    continue
                task, future, address = self._under_way.pop(number)
                try:
                    # it lies with the worker, which may have died since: then Dask would have it
                    # done again, there
                    outcome = future.result(timeout=GONE_S)
                except KilledWorker as error:
                    outcome = error
                except TimeoutError:
                    self._abandon(task, future, address)
                    continue
                except (CancelledError, CommClosedError) as error:
                    raise IncompleteError(
                        f"the connection to Dask's scheduler was lost: {error}"
                    ) from error
                if isinstance(outcome, KilledWorker | TaskTakenError):
                    self._lost.append((task, outcome, time.monotonic() + PATIENCE_S))
                else:
                    yield task, outcome
        except queue.Empty:
            return

    def _revoked(self) -> Iterator[tuple[T, LostAttempt]]:
        for _ in range(len(self._lost)):
            task, error, until = self._lost.popleft()
            try:
                batch = revoke(self._attempts, task.number)
            except AtWorkError as still:
                if time.monotonic() > until:
                    raise IncompleteError(
                        "a worker that Dask's scheduler has lost still works on task "
                        f"{task.number}, after {PATIENCE_S:.0f} s; end that process, or wait for "
                        "it, and try again"
                    ) from still
                self._lost.append((task, error, until))
            else:
                yield task, LostAttempt(batch, error)
