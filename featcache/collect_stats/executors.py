"""Who collects statistics: this process, or the workers of a Dask client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

from featcache._closing import closed_after
from featcache.cluster.config import ParallelConfig
from featcache.cluster.pickling import returned
from featcache.collect_stats.shard_maker import Answer, Job, Order, ShardMaker
from featcache.errors import ComputeError, IncompleteError
from featcache.extraction.environment import EnvironmentProvider
from featcache.samplers.batches import Ints

if TYPE_CHECKING:
    from distributed import Client

    from featcache.cluster.workers import Workers
    from featcache.collect_stats.shard_maker import Hooks

DEATHS = 3  # of workers at one batch: then it is the batch's fault


class LocalTeam:
    """This process alone."""

    def __init__(self, provider: EnvironmentProvider) -> None:
        self._maker = ShardMaker(provider.build_env_local())

    def ask(self, hooks: Hooks, sample: Ints | None) -> Answer:
        """See `ShardMaker.ask`."""
        return self._maker.ask(hooks, sample)

    def work(self, job: Job, orders: Sequence[Order]) -> Generator[Order]:
        """Make shards, and iterate over those that are made.

        Whatever happens, the part is sealed in the end.
        """
        with closed_after(self._maker.share.finish):
            for number, order in enumerate(orders):
                self._maker.make(job, order._replace(number=number))
                yield order


class DaskTeam:
    """Workers of Dask."""

    def __init__(self, staff: Workers) -> None:
        self._staff = staff

    def ask(self, hooks: Hooks, sample: Ints | None) -> Answer:
        """Ask one worker; see `ShardMaker.ask`."""
        from distributed import CancelledError, KilledWorker
        from distributed.comm.core import CommClosedError

        deaths = 0
        while True:
            future = self._staff.client.submit(_ask, hooks, sample, self._staff.env, pure=False)
            try:
                answer: Answer | Exception = future.result()
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

    def work(self, job: Job, orders: Sequence[Order]) -> Generator[Order]:
        """Have shards made, and iterate over those that are made.

        Whatever happens, parts are sealed in the end.
        """
        from featcache.cluster.dispatch import Dispatch, LostAttempt

        dispatch, deaths = (
            Dispatch[Order](self._staff, job.claims, _make, job, self._staff.env),
            Counter[int](),
        )
        for order in orders:
            dispatch.add(order)
        with closed_after(dispatch.finish):
            for order, outcome in dispatch.outcomes():
                if isinstance(outcome, Exception):
                    raise outcome
                if not isinstance(outcome, LostAttempt):
                    yield order
                elif outcome.batch is None:  # it was waiting there, the worker was at another
                    dispatch.add(order)
                else:
                    at = max(outcome.batch, 0)
                    batch: list[int] = order.indices[at : at + (job.batch_size or 1)].tolist()
                    deaths[batch[0]] += 1
                    if deaths[batch[0]] == DEATHS:
                        raise ComputeError(
                            f"{DEATHS} workers died when they were at utterances "
                            f"{', '.join(map(str, batch))} of the "
                            "data set: out of memory, or a crash in a library? Their logs may say "
                            "more; what was done "
                            "is kept"
                        ) from outcome.error
                    dispatch.add(order._replace(again=True))


@contextmanager
def team_of(
    provider: EnvironmentProvider, parallel: ParallelConfig | Client | None
) -> Iterator[LocalTeam | DaskTeam]:
    """Give this process, new workers, which end with the block, or those of a client."""
    if parallel is None:
        yield LocalTeam(provider)
        return
    from featcache.cluster.workers import workers_of

    with workers_of(parallel, partial(_set_up, provider.build_worker_setup_fn())) as staff:
        yield DaskTeam(staff)


# what Dask calls:


def _set_up(setup_fn: Callable[[], object]) -> dict[str, object]:
    maker = ShardMaker(setup_fn())
    return {"work": maker, "part": maker.share}


def _ask(hooks: Hooks, sample: Ints | None, env: str) -> Answer | Exception:
    return returned(lambda: _maker(env).ask(hooks, sample))


def _make(order: Order, job: Job, env: str) -> Exception | None:
    return returned(lambda: _maker(env).make(job, order))


def _maker(env: str) -> ShardMaker:
    from distributed import get_worker

    from featcache.cluster.worker_env import env_of

    return cast(ShardMaker, env_of(get_worker(), env)["work"])
