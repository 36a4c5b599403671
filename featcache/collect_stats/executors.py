"""Executors of a collect-stats run: this process, or the workers of a Dask client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from featcache._closing import closed_after
from featcache.cluster.config import ParallelConfig
from featcache.cluster.pickling import returned
from featcache.collect_stats.shard_maker import ShardMaker, ShardTask, StatsSettings
from featcache.errors import ComputeError
from featcache.extraction.environment import EnvironmentProvider

if TYPE_CHECKING:
    from distributed import Client

    from featcache.cluster.dispatch import Dispatch
    from featcache.cluster.workers import Workers

DEATHS = 3  # of workers at one batch: then it is the batch's fault
R = TypeVar("R")
Work = Callable[[ShardMaker, StatsSettings, ShardTask], R]


class LocalExecutor:
    """This process alone."""

    def __init__(self, maker: ShardMaker) -> None:
        self._maker = maker
        self.finish = maker.share.finish

    def run(
        self, work: Work[R], settings: StatsSettings, tasks: Iterable[ShardTask]
    ) -> Iterator[tuple[ShardTask, R]]:
        """Do some work on tasks; yields each that is done, with what came of it."""
        for number, task in enumerate(tasks):
            yield task, work(self._maker, settings, task._replace(number=number))


class DaskExecutor:
    """Workers of Dask."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._dispatch: Dispatch[ShardTask] | None = None

    def run(
        self, work: Work[R], settings: StatsSettings, tasks: Iterable[ShardTask]
    ) -> Iterator[tuple[ShardTask, R]]:
        """Have some work done on tasks; yields each that is done, with what came of it."""
        from featcache.cluster.dispatch import Dispatch, LostAttempt

        dispatch = Dispatch[ShardTask](
            self._workers, settings.attempts, _do, work, settings, self._workers.env
        )
        self._dispatch, deaths = dispatch, Counter[tuple[str, int]]()
        for task in tasks:
            dispatch.add(task)
        for task, outcome in dispatch.outcomes():
            if isinstance(outcome, Exception):
                raise outcome
            if not isinstance(outcome, LostAttempt):
                yield task, outcome
            elif outcome.batch is None:  # it was waiting there, the worker was at another
                dispatch.add(task)
            else:
                first = max(outcome.batch, 0)
                deaths[task.name, first] += 1
                if deaths[task.name, first] == DEATHS:
                    batch = task.indices[first : first + (settings.batch_size or 1)].tolist()
                    raise _deadly(batch) from outcome.error
                dispatch.add(task._replace(retried=True))

    def finish(self) -> None:
        """Have the workers end what is under way, and seal their parts of the cache."""
        if self._dispatch is not None:
            self._dispatch.finish()


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
    """Yield this process, new workers, which end with the block, or those of a client.

    All parts of the cache are sealed in the end, also on errors.
    """
    if parallel is None:
        here = LocalExecutor(ShardMaker(provider.build_env_local()))
        with closed_after(here.finish):
            yield here
        return
    from featcache.cluster.workers import workers_of

    with workers_of(parallel, partial(_set_up, provider.build_worker_setup_fn())) as workers:
        there = DaskExecutor(workers)
        with closed_after(there.finish):
            yield there


# what Dask calls:


def _set_up(setup_fn: Callable[[], object]) -> Mapping[str, object]:
    maker = ShardMaker(setup_fn())
    return {"work": maker, "part": maker.share}


def _do(task: ShardTask, work: Work[R], settings: StatsSettings, env: str) -> R | Exception:
    from distributed import get_worker

    from featcache.cluster.worker_env import env_of

    def do() -> R:
        return work(cast(ShardMaker, env_of(get_worker(), env)["work"]), settings, task)

    return returned(do)
