"""`Workers`, which keeps a Dask client's workers going, and `Dispatch`, which hands tasks to them.

Workers get their environment, lost ones are replaced, and all have to finish.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    cast,
    runtime_checkable,
)

from featcache._closing import close_after, closed_after
from featcache._progress import Interval
from featcache.errors import FeatcacheError, IncompleteError
from featcache.workers.attempts import TaskTakenError, revoke
from featcache.workers.client import WANTED, get_client, names_of, replace_workers
from featcache.workers.config import ParallelConfig
from featcache.workers.environments import OWN, SetupFn, WorkerEnv, env_of, forget, register
from featcache.workers.pickling import returned

if TYPE_CHECKING:
    from distributed import Client, Future, Worker
    from distributed.deploy.cluster import Cluster

# Dask drops a lost worker after 15 s and can then be asked for another
REPLACE_AFTER_S = 30.0
RESTARTING_S = 30.0  # how long Dask may take to restart workers that hang
ASKING_S = 10.0  # how long the scheduler may take to list its workers
STOPPING_S = 30.0  # how long a worker may take to finish its batch
INTERRUPTED_S = 2.0  # the same after Ctrl-C
FORGETTING_S = 2.0  # how long that workers let go of an environment is waited for
SEALING_S = 600.0  # how long a worker between tasks may take to seal its part
_log = logging.getLogger("featcache")


@runtime_checkable
class Finishable(Protocol):
    """An entry of an environment that each worker finishes at the end of a run."""

    def finish(self) -> None:
        """End the current task after its batch, and make durable what it wrote."""


@contextmanager
def workers_of(parallel: ParallelConfig | Client, setup_fn: SetupFn) -> Iterator[Workers]:
    """Yield workers an environment: new ones that end with the block, or a client's, that stay."""
    if isinstance(parallel, ParallelConfig):
        with get_client(parallel, setup_fn) as client:
            yield Workers(client, OWN, stay=False)
    else:
        with run_env(parallel, setup_fn) as env:
            yield Workers(parallel, env, stay=True)


def number_of_workers(parallel: ParallelConfig | Client) -> int:
    """Return how many workers there are to be."""
    if isinstance(parallel, ParallelConfig):
        return parallel.n_workers
    return WANTED.get(parallel) or max(len(parallel.nthreads()), 1)  # type: ignore[no-untyped-call]


@contextmanager
def run_env(client: Client, setup_fn: SetupFn) -> Iterator[str]:
    """Build an environment in each worker, in those that join later, too, for a `with` block.

    Gives the name by which `env_of` finds it; a client's own, and those of other runs, stay beside
    it.
    """
    env = WorkerEnv(setup_fn, f"featcache-{uuid.uuid4().hex}")
    register(client, env)
    calls = (
        partial(client.unregister_worker_plugin, env.name),
        partial(client.run, forget, env.name, on_error="ignore"),
    )
    with closed_after(partial(answers_within, client, FORGETTING_S, *calls)):
        yield env.name


class Workers:
    """Workers of a client that share an environment.

    Args:
        client: the client.
        env: the name of the environment.
        stay: whether the workers outlive the run.
    """

    def __init__(self, client: Client, env: str, *, stay: bool) -> None:
        self.client, self.env = client, env
        self.addresses = list(client.nthreads())  # type: ignore[no-untyped-call]
        self._stay = stay
        self._wanted = WANTED.get(client)  # None: somebody else sees to their number
        self._seen: set[str] = set()  # names of all workers so far
        self._listing, self._replacing = Interval(1.0), Interval(REPLACE_AFTER_S)
        self._told = False  # whether a warning said that workers are missing

    def look_after(self) -> None:
        """List the workers, at most once a second, and replace those that stay away."""
        if not self._listing.due():
            return
        self.addresses = list(self.client.nthreads())  # type: ignore[no-untyped-call]
        if self._wanted is None:
            return
        cluster, there = cast("Cluster", self.client.cluster), len(self.addresses)
        self._seen |= names_of(cluster)
        if there >= self._wanted:
            self._replacing, self._told = Interval(REPLACE_AFTER_S), False
        elif self._replacing.due():
            if not self._told:  # once: in a full queue that may be for hours
                text = "%d of %d workers are there; asking for the others"
                _log.warning(text, there, self._wanted)
            self._told = True
            replace_workers(cluster, self._seen, self._wanted)

    def finish(self, error: BaseException | None) -> None:
        """Make every worker seal its part of the cache, after its batch if an error ends the run.

        A worker that takes too long is given up: what it has committed is recovered when it has
        ended.
        """
        (there,) = answers_within(self.client, ASKING_S, self.client.nthreads)
        addresses = list(there) if isinstance(there, dict) else self.addresses
        patience_s = SEALING_S
        if isinstance(error, KeyboardInterrupt):
            patience_s = INTERRUPTED_S
        elif error is not None:
            patience_s = STOPPING_S
            text = "stopping: up to %.0f s for %d workers to end their batch"
            _log.warning(text, patience_s, len(addresses))
        ask = partial(self.client.run, finish_work, self.env, on_error="return")
        calls = [partial(ask, workers=[address]) for address in addresses]
        answers = dict(zip(addresses, answers_within(self.client, patience_s, *calls), strict=True))
        silent = [address for address, answer in answers.items() if answer is None]
        if silent:
            self._give_up(silent, patience_s, interrupted=isinstance(error, KeyboardInterrupt))
        for answer in answers.values():
            # another error is that of a connection that is lost, or of a worker that dies now: its
            # part is recovered
            for result in answer.values() if isinstance(answer, dict) else ():
                if isinstance(result, FeatcacheError):
                    raise result

    def _give_up(self, silent: list[str], patience_s: float, *, interrupted: bool) -> None:
        """Log which workers do not answer, and restart those that outlive the run."""
        if not interrupted:
            text = "given up after %.0f s, what it committed is kept: worker %s"
            _log.warning(text, patience_s, ", ".join(silent))
        if self._stay and self._wanted is not None:
            restart = partial(self.client.restart_workers, silent, RESTARTING_S, False)
            # after Ctrl-C it goes on in the background; else the next run would meet workers that
            # are just being killed
            answers_within(self.client, INTERRUPTED_S if interrupted else RESTARTING_S, restart)


async def finish_work(env: str, dask_worker: Worker) -> Exception | None:
    """Finish a worker's part of the run; returns errors, of which Dask would make much noise."""
    try:
        entries = env_of(dask_worker, env).values()
    except Exception:  # the worker has just come, or its environment failed
        return None
    loop = asyncio.get_running_loop()
    for entry in entries:
        if isinstance(entry, Finishable):
            error = await loop.run_in_executor(None, returned, entry.finish)
            if error is not None:
                return error
    return None


def answers_within(client: Client, seconds: float, *calls: Callable[[], Any]) -> list[Any]:
    """Make calls of a client side by side, and return their answers; None: none came in time.

    An error is an answer. Calls without one go on in the background.
    """

    async def answer(call: Callable[[], Any]) -> Any:
        try:
            return await call()  # here, in the client's own thread, its methods are coroutines
        except Exception as error:
            return error

    async def answers() -> list[object]:
        asked = [asyncio.ensure_future(answer(call)) for call in calls]
        if asked:
            await asyncio.wait(asked, timeout=seconds)
        return [task.result() if task.done() else None for task in asked]

    return cast(list[Any], client.sync(answers))  # type: ignore[no-untyped-call]


# `Dispatch`: hands tasks to the workers of Dask, and tells which attempts were lost.

ANSWER_S = 5.0  # how long the answer of a worker that may have died since may take
SILENCE_S = 300.0  # without a sign of any worker: then a warning names them
UNDER_WAY = 2  # tasks of each worker: the one that it computes, and the next one
T = TypeVar("T")


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
