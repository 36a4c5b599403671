"""Executors of a collect-stats run: this process, or the workers of a Dask client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from featcache._closing import closed_after
from featcache.cluster.config import ParallelConfig
from featcache.cluster.pickling import returned
from featcache.collect_stats.shard_maker import ShardMaker, ShardTask, StatsSettings
from featcache.errors import ComputeError
from featcache.extraction.environment import EnvironmentProvider

if TYPE_CHECKING:
    from distributed import Client

    from featcache.cluster.dispatch import Dispatch

DEATHS = 3  # of workers at one batch: then it is the batch's fault
R = TypeVar("R")
Work = Callable[[ShardMaker, StatsSettings, ShardTask], R]


class Job(NamedTuple):
    """Work for a worker."""

    work: Work[object]
    settings: StatsSettings
    task: ShardTask


class LocalExecutor:
    """This process alone."""

    def __init__(self, maker: ShardMaker) -> None:
        self._maker = maker
        self._numbers = count()  # of attempts

    def run(
        self, work: Work[R], settings: StatsSettings, tasks: Iterable[ShardTask]
    ) -> Iterator[tuple[ShardTask, R]]:
        """Do some work on tasks; yields each that is done, with what came of it."""
        for task, number in zip(tasks, self._numbers, strict=False):
            yield task, work(self._maker, settings, task._replace(number=number))


class DaskExecutor:
    """Workers of Dask."""

    def __init__(self, dispatch: Dispatch[Job]) -> None:
        self._dispatch = dispatch

    def run(
        self, work: Work[R], settings: StatsSettings, tasks: Iterable[ShardTask]
    ) -> Iterator[tuple[ShardTask, R]]:
        """Have some work done on tasks; yields each that is done, with what came of it."""
        from featcache.cluster.dispatch import LostAttempt

        deaths = Counter[tuple[str, int]]()
        for task in tasks:
            self._dispatch.add(Job(work, settings, task))
        for job, outcome in self._dispatch.outcomes():
            task = job.task
            if isinstance(outcome, Exception):
                raise outcome
            if not isinstance(outcome, LostAttempt):
                yield task, outcome
            elif outcome.batch is None:  # it was waiting there, the worker was at another
                self._dispatch.add(job)
            else:
                first = max(outcome.batch, 0)
                deaths[task.name, first] += 1
                if deaths[task.name, first] == DEATHS:
                    batch = task.indices[first : first + (settings.batch_size or 1)].tolist()
                    raise _deadly(batch) from outcome.error
                self._dispatch.add(job._replace(task=task._replace(retried=True)))


def _deadly(batch: list[int]) -> ComputeError:
    return ComputeError(
        f"{DEATHS} workers died when they were at utterances {', '.join(map(str, batch))} of the "
        "data set: out of memory, or a crash in a library? Their logs may say more; what was done "
        "is kept"
    )


@contextmanager
def executor_for(
    provider: EnvironmentProvider, parallel: ParallelConfig | Client | None, attempts: Path
) -> Iterator[LocalExecutor | DaskExecutor]:
    """Yield this process, new workers, which end with the block, or those of a client.

    All parts of the cache are sealed in the end, also on errors. `attempts` is a directory for the
    notes of workers on what they are at.
    """
    if parallel is None:
        maker = ShardMaker(provider.build_env_local())
        with closed_after(maker.share.finish):
            yield LocalExecutor(maker)
        return
    from featcache.cluster.dispatch import Dispatch
    from featcache.cluster.workers import workers_of

    set_up = partial(_set_up, provider.build_worker_setup_fn())
    with (
        workers_of(parallel, set_up) as workers,
        Dispatch[Job](workers, attempts, _do, workers.env) as dispatch,
    ):
        yield DaskExecutor(dispatch)


# what Dask calls:


def _set_up(setup_fn: Callable[[], object]) -> dict[str, object]:
    maker = ShardMaker(setup_fn())
    return {"work": maker, "part": maker.share}


def _do(number: int, job: Job, env: str) -> object:
    from distributed import get_worker

    from featcache.cluster.worker_env import env_of

    def do() -> object:
        maker = cast(ShardMaker, env_of(get_worker(), env)["work"])
        return job.work(maker, job.settings, job.task._replace(number=number))

    return returned(do)
