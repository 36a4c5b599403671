"""`Workers`: keeps a Dask client's workers going.

Gives them their environment, replaces lost ones, has them finish.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from featcache._closing import closed_after
from featcache._interval import Interval
from featcache.errors import FeatcacheError
from featcache.workers.client import WANTED, get_client, names_of, replace_workers
from featcache.workers.config import ParallelConfig
from featcache.workers.environments import OWN, SetupFn, WorkerEnv, env_of, forget, register
from featcache.workers.pickling import returned

if TYPE_CHECKING:
    from distributed import Client, Worker
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
