"""Who collects statistics: this process, or workers of Dask; each adds to one part of the cache of features."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from featcache.batches import visible_ids
from featcache.errors import ComputeError, ConfigError, FeatcacheError, FeatureError, IncompleteError
from featcache.feature import FeatureStorageConfig
from featcache.interface import Array
from featcache.loading.batches import Ints
from featcache.parallel.config import ParallelConfig
from featcache.parallel.provider import EnvironmentProvider
from featcache.parallel.shards import FEATS, SHARDS, finish_shard, read_shard
from featcache.parallel.stats_hooks import made_from_what
from featcache.ranks import describe
from featcache.store.part_writer import PartWriter, close_after
from featcache.store.recover import committed

if TYPE_CHECKING:
    from distributed import Future, Worker

    from featcache.parallel.collect_stats import CollectStatsRunner

    Hooks = type[CollectStatsRunner]
Declared = Mapping[str, FeatureStorageConfig]
Answer = tuple[dict[str, object], Declared | None]
DEATHS = 3  # of workers at one shard: then it is the shard's fault
SHARDS_UNDER_WAY = 2  # of each worker: one that it is at, and one that it need not wait for


@dataclass(frozen=True)
class Job:
    """What is the same for all shards of a run."""

    hooks: Hooks
    directory: Path  # of the split
    batch_size: int | None
    features: Declared | None  # of the cache; None: no features are kept
    made_from: Mapping[str, object]


class Order(NamedTuple):
    """A shard to be made."""

    name: str
    indices: Ints
    again: bool = False  # a worker died when it made it


class ShardMaker:
    """A process's share in a run: its environment, and its part of the cache."""

    def __init__(self, env: Mapping[str, object]) -> None:
        for name in ("dataset", "model", "collate_fn"):
            if name not in env:
                raise ConfigError(f"the environment needs {name!r}; it has {', '.join(map(repr, env)) or 'nothing'}")
        self._env: dict[str, Any] = dict(env)
        self._writer: PartWriter | None = None
        self._one_at_a_time = threading.Lock()  # a worker may have several threads, its environment is made for one
        self._stopping = False

    def ask(self, hooks: Hooks, sample: Ints | None) -> Answer:
        """Return what statistics are made from here, and how features such as those of a sample are to be stored."""
        made_from = made_from_what(self._env)
        if sample is None:
            return made_from, None
        feats = self._compute(hooks, sample.tolist(), {**self._env, "write_collected_feats": True})[2]
        dtypes = {key: next(iter(of_key.values())).dtype.name for key, of_key in feats.items()}
        return made_from, {key: FeatureStorageConfig(key, dtype) for key, dtype in dtypes.items()}

    def make(self, job: Job, order: Order) -> None:
        """Make a shard; it is there when this returns."""
        with self._one_at_a_time:
            self._make(job, order)

    def finish(self) -> None:
        """End the shard that is being made after its next batch, and seal the part of the cache."""
        self._stopping = True
        with self._one_at_a_time:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.close()

    def _make(self, job: Job, order: Order) -> None:
        hooks, shards = job.hooks, job.directory / SHARDS
        if read_shard(shards / order.name) is not None:  # the worker that made it died right after
            return
        with tempfile.TemporaryDirectory(prefix="attempt-", dir=shards, ignore_cleanup_errors=True) as attempt:
            shard_dir = Path(attempt) / "shard"
            shard_dir.mkdir()
            env = {**self._env, "write_collected_feats": job.features is not None}
            if job.features is not None:
                env |= {"feats_dir": job.directory / FEATS, "part_writer": self._part(job, job.features, order)}
            state: dict[str, Any] = {}
            writers = hooks.open_writers(shard_dir, **env)
            size = job.batch_size or 1
            for start in range(0, len(order.indices), size):
                if self._stopping:
                    raise IncompleteError("the run has been stopped")
                batch = order.indices[start : start + size].tolist()
                result = self._compute(hooks, batch if job.batch_size else batch[0], env)
                hooks.write_record(writers, result, state, **env)
            hooks.close_writers(writers)
            if self._writer is not None:
                self._writer.commit()
            finish_shard(shard_dir, shards / order.name, order.indices)

    def _part(self, job: Job, features: Declared, order: Order) -> _NewOnly:
        path = job.directory / FEATS
        if self._writer is None:
            self._writer = PartWriter(path, features, job.made_from)
        return _NewOnly(self._writer, set(committed(path)) if order.again else set())

    def _compute(self, hooks: Hooks, batch: list[int] | int, env: Mapping[str, Any]) -> Any:
        """Call `forward`; an error names the utterance that it comes from, if it comes from a single one."""
        try:
            return hooks.forward(batch, **env)
        except Exception as failure:  # whatever the user's code raises
            error, culprits = failure, [batch] if isinstance(batch, int) else batch
        for index in culprits if len(culprits) > 1 else ():
            try:
                hooks.forward([index], **env)
            except Exception as failure:
                error, culprits = failure, [index]
                break
        if isinstance(error, FeatureError | ConfigError):
            raise error
        ids = visible_ids(env["dataset"])
        named = ", ".join(f"utterance {index}" if ids is None else repr(ids[index]) for index in culprits)
        raise ComputeError(
            f"collecting statistics of {named} failed with {describe(error)}; what was done before is kept"
        ) from error


class _NewOnly:
    """Leaves out what a run that died, or a worker, has stored already."""

    def __init__(self, writer: PartWriter, known: set[str]) -> None:
        self._writer, self._known = writer, known

    def write(self, id: str, arrays: Mapping[str, Array]) -> None:
        if id not in self._known and id not in self._writer:
            self._writer.write(id, arrays)


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
        with _after(self._maker.finish):
            for order in orders:
                self._maker.make(job, order)
                yield order


class DaskTeam:
    """Workers of a Dask client, which it starts and ends."""

    def __init__(self, provider: EnvironmentProvider, parallel: ParallelConfig) -> None:
        from featcache.parallel.client import get_client

        self._workers = parallel.n_workers
        self._started = get_client(parallel, partial(_set_up, provider.build_worker_setup_fn()))

    def __enter__(self) -> Self:
        self._client = self._started.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._started.__exit__(kind, error, traceback)

    def ask(self, hooks: Hooks, sample: Ints | None) -> Answer:
        """Ask one worker; see `ShardMaker.ask`."""
        from distributed import KilledWorker

        try:
            return self._client.submit(_ask, hooks, sample, pure=False).result()
        except KilledWorker as error:
            raise ComputeError("a worker died of the first batch (out of memory?); its log may say why") from error

    def work(self, job: Job, orders: Sequence[Order]) -> Iterator[Order]:
        """Have shards made, and iterate over those that are made; whatever happens, parts are sealed in the end."""
        from distributed import as_completed

        waiting, under_way, deaths = deque(orders), dict[str, Order](), Counter[str]()
        done = as_completed()  # type: ignore[no-untyped-call]
        with _after(partial(self._finish, under_way)):
            while waiting or under_way:
                while waiting and len(under_way) < SHARDS_UNDER_WAY * self._workers:
                    order = waiting.popleft()
                    future = self._client.submit(_make, job, order, pure=False)
                    under_way[str(future.key)] = order
                    done.add(future)  # type: ignore[no-untyped-call]
                future = next(done)
                order = under_way.pop(str(future.key))
                if _is_made(future):
                    yield order
                    continue
                deaths[order.name] += 1
                if deaths[order.name] == DEATHS:
                    raise ComputeError(
                        f"{DEATHS} workers died between utterances {order.indices[0]} and {order.indices[-1]}: out of "
                        "memory, or a crash in a library? Their logs may say more; what was done before is kept"
                    )
                waiting.append(order._replace(again=True))

    def _finish(self, under_way: Mapping[str, Order]) -> None:
        if under_way:
            self._client.cancel(list(under_way), force=True)  # type: ignore[no-untyped-call]
        for result in self._client.run(_finish, on_error="return").values():
            if isinstance(result, FeatcacheError):  # others were lost with their worker, whose part is recovered
                raise result


def _is_made(future: Future[None]) -> bool:
    """Return False if the worker died; raises what the worker raised."""
    from distributed import CancelledError, KilledWorker
    from distributed.comm.core import CommClosedError

    try:
        future.result()
    except KilledWorker:
        return False
    except (CancelledError, CommClosedError) as error:
        raise IncompleteError(f"the connection to Dask's scheduler was lost: {error}") from error
    return True


@contextmanager
def _after(close: Callable[[], None]) -> Iterator[None]:
    error: BaseException | None = None
    try:
        yield
    except BaseException as failure:
        error = failure
        raise
    finally:
        close_after(error, close)


# what Dask calls:


def _set_up(setup_fn: Callable[[], Mapping[str, object]]) -> dict[str, object]:
    env = setup_fn()
    if not isinstance(env, Mapping):
        raise ConfigError(f"build_worker_setup_fn() returns a function that returns a dict by name, not {env!r}")
    return {"maker": ShardMaker(env)}


def _maker() -> ShardMaker:
    from featcache.parallel.client import worker_env

    return cast(ShardMaker, worker_env()["maker"])


def _ask(hooks: Hooks, sample: Ints | None) -> Answer:
    return _maker().ask(hooks, sample)


def _make(job: Job, order: Order) -> None:
    _maker().make(job, order)


async def _finish(dask_worker: Worker) -> None:
    try:
        maker = dask_worker.plugins["env"].env()["maker"]  # type: ignore[attr-defined]
    except (KeyError, FeatcacheError):  # it has just come, or its environment failed
        return
    await asyncio.get_running_loop().run_in_executor(None, maker.finish)
