"""Executors of a collect-stats run: this process, or the workers of a Dask client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

from featcache._closing import closed_after
from featcache.cluster.config import ParallelConfig
from featcache.cluster.pickling import returned
from featcache.collect_stats.protocol import Hooks
from featcache.collect_stats.shard_maker import Inspection, ShardMaker
from featcache.collect_stats.shard_task import ShardTask, StatsSettings
from featcache.errors import ComputeError, IncompleteError
from featcache.extraction.environment import EnvironmentProvider
from featcache.interface import Ints

if TYPE_CHECKING:
    from distributed import Client

    from featcache.cluster.workers import Workers

DEATHS = 3  # of workers at one batch: then it is the batch's fault


class LocalExecutor:
    """This process alone."""

    def __init__(self, provider: EnvironmentProvider) -> None:
        self._maker = ShardMaker(provider.build_env_local())

    def inspect(self, hooks: Hooks, sample: Ints | None) -> Inspection:
        """See `ShardMaker.inspect`."""
        return self._maker.inspect(hooks, sample)

    def make(self, settings: StatsSettings, tasks: Sequence[ShardTask]) -> Generator[ShardTask]:
        """Make shards, and yield each that is made; the part is sealed also on errors."""
        with closed_after(self._maker.share.finish):
            for number, task in enumerate(tasks):
                self._maker.make(settings, task._replace(number=number))
                yield task


class DaskExecutor:
    """Workers of Dask."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def inspect(self, hooks: Hooks, sample: Ints | None) -> Inspection:
        """Ask one worker; see `ShardMaker.inspect`."""
        from distributed import CancelledError, KilledWorker
        from distributed.comm.core import CommClosedError

        deaths = 0
        while True:
            future = self._workers.client.submit(
                _inspect, hooks, sample, self._workers.env, pure=False
            )
            try:
                answer: Inspection | Exception = future.result()
            except KilledWorker as error:
                deaths += 1
                if deaths == DEATHS:
                    raise ComputeError(
                        f"{DEATHS} workers died of the first batch (out of memory?); their logs "
                        "may say why"
                    ) from error
            except (CancelledError, CommClosedError) as error:
                raise IncompleteError(
                    f"the connection to Dask's scheduler was lost: {error}"
                ) from error
            else:
                if isinstance(answer, Exception):
                    raise answer
                return answer

    def make(self, settings: StatsSettings, tasks: Sequence[ShardTask]) -> Generator[ShardTask]:
        """Have shards made, and yield each that is made; parts are sealed also on errors."""
        from featcache.cluster.dispatch import Dispatch, LostAttempt

        attempts, deaths = settings.attempts, Counter[int]()
        dispatch = Dispatch[ShardTask](self._workers, attempts, _make, settings, self._workers.env)
        for task in tasks:
            dispatch.add(task)
        with dispatch:
            for task, outcome in dispatch.outcomes():
                if isinstance(outcome, Exception):
                    raise outcome
                if not isinstance(outcome, LostAttempt):
                    yield task
                elif outcome.batch is None:  # it was waiting there, the worker was at another
                    dispatch.add(task)
                else:
                    first = max(outcome.batch, 0)
                    batch = task.indices[first : first + (settings.batch_size or 1)].tolist()
                    deaths[batch[0]] += 1
                    if deaths[batch[0]] == DEATHS:
                        raise _deadly(batch) from outcome.error
                    dispatch.add(task._replace(retried=True))


def _deadly(batch: list[int]) -> ComputeError:
    return ComputeError(
        f"{DEATHS} workers died when they were at utterances {', '.join(map(str, batch))} of the "
        "data set: out of memory, or a crash in a library? Their logs may say more; what was done "
        "is kept"
    )


@contextmanager
def executor_for(
    provider: EnvironmentProvider, parallel: ParallelConfig | Client | None
) -> Iterator[LocalExecutor | DaskExecutor]:
    """Yield this process, new workers, which end with the block, or those of a client."""
    if parallel is None:
        yield LocalExecutor(provider)
        return
    from featcache.cluster.workers import workers_of

    with workers_of(parallel, partial(_set_up, provider.build_worker_setup_fn())) as workers:
        yield DaskExecutor(workers)


# what Dask calls:


def _set_up(setup_fn: Callable[[], object]) -> dict[str, object]:
    maker = ShardMaker(setup_fn())
    return {"work": maker, "part": maker.share}


def _inspect(hooks: Hooks, sample: Ints | None, env: str) -> Inspection | Exception:
    return returned(lambda: _maker(env).inspect(hooks, sample))


def _make(number: int, task: ShardTask, settings: StatsSettings, env: str) -> Exception | None:
    return returned(lambda: _maker(env).make(settings, task._replace(number=number)))


def _maker(env: str) -> ShardMaker:
    from distributed import get_worker

    from featcache.cluster.worker_env import env_of

    return cast(ShardMaker, env_of(get_worker(), env)["work"])
