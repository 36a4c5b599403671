"""`Dispatch`: hands tasks to the workers of Dask, and tells which attempts were lost."""

from __future__ import annotations

import logging
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar, cast

from featcache._closing import close_after, closed_after
from featcache._interval import Interval
from featcache.errors import IncompleteError
from featcache.workers.attempts import TaskTakenError, revoke
from featcache.workers.environments import env_of
from featcache.workers.pickling import returned
from featcache.workers.workers import Workers, answers_within

if TYPE_CHECKING:
    from distributed import Future

ANSWER_S = 5.0  # how long the answer of a worker that may have died since may take
SILENCE_S = 300.0  # without a sign of any worker: then a warning names them
UNDER_WAY = 2  # tasks of each worker: the one that it computes, and the next one
T = TypeVar("T")
_log = logging.getLogger("featcache")


class WorkerReport(NamedTuple):
    """A message of a worker that is at a task, by `log_event`."""

    message: list[Any]  # begins with the number of the attempt


class LostAttempt(NamedTuple):
    """An attempt whose worker was killed, or was cut off from the scheduler and has stopped."""

    number: int
    batch: int | None  # the one that the worker was at, -1: before the first; None: not begun
    lines: tuple[str, ...]  # of the worker's notes
    error: Exception


class _UnderWay(NamedTuple, Generic[T]):
    """A task that a worker is to do."""

    number: int  # of the attempt: no two share one
    task: T
    future: Future[Any]
    address: str


def do_task(number: int, task: object, env: str) -> object:
    """Do a task in this worker, by the "work" of its environment; returns what that raises.

    Of an error Dask would make much noise. "work" is called with the number of the attempt, the
    task, and what sends a message that begins with that number.
    """

    def do() -> object:
        from distributed import get_worker

        worker = get_worker()
        work = cast(Callable[..., object], env_of(worker, env)["work"])
        return work(number, task, partial(worker.log_event, env))

    return returned(do)


class Dispatch(Generic[T]):
    """Hands tasks to workers.

    Args:
        workers: the workers.
        attempts: the directory of the notes on attempts.
        function: called in a worker with the number of the attempt, the task and the name of the
            environment; returns errors instead of raising them.
    """

    def __init__(
        self,
        workers: Workers,
        attempts: Path,
        function: Callable[[int, Any, str], object] = do_task,
    ) -> None:
        self._workers, self._attempts, self._function = workers, attempts, function
        self._numbers = count()
        self._waiting: deque[T] = deque()
        self._under_way: dict[int, _UnderWay[T]] = {}
        # numbers of attempts, with a message; without one, the attempt has ended
        self._inbox: queue.SimpleQueue[tuple[int, list[Any] | None]] = queue.SimpleQueue()
        self._silence = Interval(SILENCE_S)

    def __enter__(self) -> Self:
        self._workers.client.subscribe_topic(  # type: ignore[no-untyped-call]
            self._workers.env, lambda event: self._inbox.put((event[1][0], event[1]))
        )
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Make the workers end what is under way, and seal their parts."""
        close_after(error, partial(self._finish, error))

    def _finish(self, error: BaseException | None) -> None:
        client, futures = self._workers.client, [one.future for one in self._under_way.values()]
        with closed_after(partial(self._workers.finish, error)):
            client.unsubscribe_topic(self._workers.env)  # type: ignore[no-untyped-call]
            client.cancel(futures, force=True)  # type: ignore[no-untyped-call]

    def add(self, task: T) -> None:
        """Add a task."""
        self._waiting.append(task)

    def outcomes(self, tend: Callable[[], None] = lambda: None) -> Iterator[tuple[T, Any]]:
        """Yield tasks as they end, each with what the function returned or a `LostAttempt`.

        And those under way, each with a `WorkerReport` of its worker. `tend` is called about once a
        second. Raises what the function returned as an error, and `IncompleteError` if the
        scheduler is gone, or if a worker that the scheduler has lost does not end.
        """
        for task, outcome in self._outcomes(tend):
            if isinstance(outcome, Exception):  # raised here, where no frame holds a future
                raise outcome
            yield task, outcome

    def _outcomes(self, tend: Callable[[], None]) -> Iterator[tuple[T, object]]:
        while self._waiting or self._under_way:
            self._submit()
            self._workers.look_after()
            tend()
            yield from self._messages()
            for one in list(self._under_way.values()):
                # Dask never ends a task that comes to the scheduler when its worker is gone
                if one.address not in self._workers.addresses:
                    yield one.task, self._lost(one, _gone(one))
            if self._silence.due():
                at = ", ".join(sorted({one.address for one in self._under_way.values()}))
                _log.warning(
                    "nothing has come from workers for %.0f s; tasks are at %s", SILENCE_S, at
                )

    def _submit(self) -> None:
        # a share for each: all could go to a worker that hangs, and only that worker could give
        # them back
        at = Counter(one.address for one in self._under_way.values())
        there = self._workers.addresses
        room = [one for turn in range(UNDER_WAY) for one in there if at[one] <= turn]
        for address in room[: len(self._waiting)]:
            number, task = next(self._numbers), self._waiting.popleft()
            future = self._workers.client.submit(
                self._function, number, task, self._workers.env, pure=False, workers=[address]
            )
            self._under_way[number] = _UnderWay(number, task, future, address)
            future.add_done_callback(lambda _, number=number: self._inbox.put((number, None)))  # type: ignore[no-untyped-call]

    def _messages(self) -> Iterator[tuple[T, object]]:
        """Wait up to a second for messages, and yield what all of them say."""
        wait_s = 1.0
        with suppress(queue.Empty):
            while True:
                number, message = self._inbox.get(timeout=wait_s)
                wait_s = 0.0
                one = self._under_way.get(number)
                if one is None:  # it was lost
                    continue
                self._silence = Interval(SILENCE_S)
                yield one.task, self._ended(one) if message is None else WorkerReport(message)

    def _ended(self, one: _UnderWay[T]) -> object:
        """Return the outcome of a task that has ended."""
        from distributed import CancelledError, KilledWorker
        from distributed.comm.core import CommClosedError

        client = self._workers.client
        # it lies with the worker, which may have died since: then Dask would have it done again,
        # there; `future.result(timeout=...)` would leave an error behind that nobody reads
        ask = partial(client.gather, [one.future])
        (answer,) = answers_within(client, ANSWER_S, ask)
        if answer is None or isinstance(answer, KilledWorker):
            return self._lost(one, answer or _gone(one))
        if isinstance(answer, CancelledError | CommClosedError):
            raise IncompleteError(
                f"the connection to Dask's scheduler was lost: {answer}"
            ) from answer
        if isinstance(answer, Exception):
            raise answer
        (outcome,) = answer
        if isinstance(outcome, TaskTakenError):
            return self._lost(one, outcome)
        del self._under_way[one.number]
        return outcome

    def _lost(self, one: _UnderWay[T], error: Exception) -> LostAttempt:
        """Take a task back; its worker may still be at its batch, which is waited for."""
        del self._under_way[one.number]
        self._workers.client.cancel([one.future], force=True)  # type: ignore[no-untyped-call]
        return LostAttempt(one.number, *revoke(self._attempts, one.number), error)


def _gone(one: _UnderWay[T]) -> IncompleteError:
    return IncompleteError(f"worker {one.address} is gone")
