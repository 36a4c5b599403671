"""Who collects statistics: this process, or the workers of a Dask client."""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from featcache.errors import ComputeError, IncompleteError
from featcache.loading.batches import Ints
from featcache.parallel.config import ParallelConfig
from featcache.parallel.plan import TaskTakenError, take_back
from featcache.parallel.provider import EnvironmentProvider
from featcache.parallel.stats_worker import Answer, Job, Order, ShardMaker
from featcache.store.closing import closed_after

if TYPE_CHECKING:
    from distributed import Client, Future

    from featcache.parallel.stats_worker import Hooks
DEATHS = 3  # of workers at one batch: then it is the batch's fault
PATIENCE_S = 60.0  # for a worker that the scheduler has lost to be through with its batch
SHARDS_UNDER_WAY = 2  # of each worker: one that it is at, and one that it need not wait for


class LocalTeam:
    """This process alone."""

    def __init__(self, provider: EnvironmentProvider) -> None:
        self._maker = ShardMaker(provider.build_env_local())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def ask(self, hooks: Hooks, sample: Ints | None) -> Answer:
        """See `ShardMaker.ask`."""
        return self._maker.ask(hooks, sample)

    def work(self, job: Job, orders: Sequence[Order]) -> Iterator[Order]:
        """Make shards, and iterate over those that are made; whatever happens, the part is sealed in the end."""
        with closed_after(self._maker.finish):
            for order in orders:
                self._maker.make(job, order)
                yield order


class DaskTeam:
    """Workers of Dask: its own, or those of a client."""

    def __init__(self, provider: EnvironmentProvider, parallel: ParallelConfig | Client) -> None:
        from featcache.parallel.staff import staff_of

        self._started = staff_of(parallel, partial(_set_up, provider.build_worker_setup_fn()))

    def __enter__(self) -> Self:
        self._staff = self._started.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._started.__exit__(kind, error, traceback)

    def ask(self, hooks: Hooks, sample: Ints | None) -> Answer:
        """Ask one worker; see `ShardMaker.ask`."""
        from distributed import KilledWorker

        try:
            return self._staff.client.submit(_ask, hooks, sample, pure=False).result()
        except KilledWorker as error:
            raise ComputeError("a worker died of the first batch (out of memory?); its log may say why") from error

    def work(self, job: Job, orders: Sequence[Order]) -> Iterator[Order]:
        """Have shards made, and iterate over those that are made; whatever happens, parts are sealed in the end."""
        waiting, under_way = deque(orders), dict[str, Order]()
        ended, deaths = queue.SimpleQueue[Any](), Counter[int]()
        attempts, staff = count(len(orders)), self._staff
        with closed_after(partial(staff.finish, under_way)):
            while waiting or under_way:
                while waiting and len(under_way) < SHARDS_UNDER_WAY * max(staff.there, 1):
                    order = waiting.popleft()
                    future = staff.client.submit(_make, job, order, pure=False)
                    under_way[str(future.key)] = order
                    future.add_done_callback(ended.put)  # type: ignore[no-untyped-call]
                staff.look_after()
                try:
                    future = ended.get(timeout=1)
                except queue.Empty:
                    continue
                order = under_way.pop(str(future.key))
                if _is_made(future):
                    yield order
                    continue
                batch = _take_back(job, order)
                deaths[batch[0]] += 1
                if deaths[batch[0]] == DEATHS:
                    raise ComputeError(
                        f"{DEATHS} workers died when they were at utterances {', '.join(map(str, batch))} of the data "
                        "set: out of memory, or a crash in a library? Their logs may say more; what was done is kept"
                    )
                waiting.append(order._replace(attempt=next(attempts), again=True))


def _is_made(future: Future[None]) -> bool:
    """Return False if the worker was lost; raises what the worker raised."""
    from distributed import CancelledError, KilledWorker
    from distributed.comm.core import CommClosedError

    try:
        future.result()
    except (KilledWorker, TaskTakenError):
        return False
    except (CancelledError, CommClosedError) as error:
        raise IncompleteError(f"the connection to Dask's scheduler was lost: {error}") from error
    return True


def _take_back(job: Job, order: Order) -> list[int]:
    """Make sure that a worker that was lost does nothing more, and return the utterances that it was at."""
    at = max(take_back(job.claims, order.task, PATIENCE_S) or 0, 0)
    batch: list[int] = order.indices[at : at + (job.batch_size or 1)].tolist()
    return batch


# what Dask calls:


def _set_up(setup_fn: Callable[[], object]) -> dict[str, object]:
    return {"work": ShardMaker(setup_fn())}


def _maker() -> ShardMaker:
    from distributed import get_worker

    from featcache.parallel.client import env_of

    return cast(ShardMaker, env_of(get_worker())["work"])


def _ask(hooks: Hooks, sample: Ints | None) -> Answer:
    return _maker().ask(hooks, sample)


def _make(job: Job, order: Order) -> None:
    _maker().make(job, order)
