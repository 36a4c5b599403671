"""`CollectStatsRunner`: ESPnet3's collect-stats, here or on workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from featcache import CacheWriter, EnvironmentProvider, ParallelConfig
from featcache.container_files import WriterLock
from featcache.errors import ComputeError, ConfigError, IncompleteError
from featcache.espnet.arrays import Ints
from featcache.espnet.hooks import Hooks
from featcache.espnet.shard_maker import (
    ShardDirectory,
    ShardMaker,
    ShardTask,
    StatsSettings,
    cut_shards,
)
from featcache.espnet.shards import FEATS, FinishedShards, Shard, merge_shards
from featcache.workers import config_or_client

if TYPE_CHECKING:
    from dask.distributed import Client

    from featcache.workers import Dispatch


# Executors of a collect-stats run: this process, or the workers of a Dask client.

DEATHS = 3  # of workers at one batch: then it is the batch's fault
R = TypeVar("R")
Work = Callable[[ShardMaker, StatsSettings, ShardTask], R]


class ShardJob(NamedTuple):
    """Work for a worker."""

    work: Work[object]
    settings: StatsSettings
    task: ShardTask


class LocalCollection:
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

    def __init__(self, dispatch: Dispatch[ShardJob]) -> None:
        self._dispatch = dispatch

    def run(
        self, work: Work[R], settings: StatsSettings, tasks: Iterable[ShardTask]
    ) -> Iterator[tuple[ShardTask, R]]:
        """Run tasks; yields each that is done, with what came of it."""
        from featcache.workers import LostAttempt

        deaths = Counter[tuple[str, int]]()
        for task in tasks:
            self._dispatch.add(ShardJob(work, settings, task))
        for job, outcome in self._dispatch.outcomes():
            task = job.task
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
                self._dispatch.add(job)


def _deadly(batch: list[int]) -> ComputeError:
    return ComputeError(
        f"{DEATHS} workers died when they were at utterances {', '.join(map(str, batch))} of the "
        "data set: out of memory, or a crash in a library? Their logs may say more; what was done "
        "is kept"
    )


@contextmanager
def executor_for(
    provider: EnvironmentProvider, parallel: ParallelConfig | Client | None, attempts: Path
) -> Iterator[LocalCollection | DaskExecutor]:
    """Yield this process, new workers, which end with the block, or those of a client.

    `attempts` is a directory for the notes of workers on what they are at.
    """
    if parallel is None:
        maker = ShardMaker(provider.build_env_local())
        yield LocalCollection(maker)
        return
    from featcache.workers import Dispatch, workers_of

    set_up = partial(_set_up, provider.build_worker_setup_fn())
    with (
        workers_of(parallel, set_up) as workers,
        Dispatch[ShardJob](workers, attempts) as dispatch,
    ):
        yield DaskExecutor(dispatch)


def _set_up(setup_fn: Callable[[], object]) -> dict[str, object]:
    maker = ShardMaker(setup_fn())
    return {"work": partial(_do, maker), "attempts": maker.attempts}


def _do(maker: ShardMaker, number: int, job: ShardJob, report: object) -> object:
    return job.work(maker, job.settings, job.task._replace(number=number))


# `CollectStatsRunner`: statistics and shapes of a data set, in the files that ESPnet reads.


class Totals(TypedDict):
    """Sums over all frames of a split, by key."""

    sum: dict[str, NDArray[np.float64]]
    sq: dict[str, NDArray[np.float64]]  # of squares
    count: dict[str, int]


class CollectStatsRunner(Hooks):
    """Collect statistics and shapes of a model's features, as ESPnet3's runner of this name does.

    `runner(range(len(dataset)))` writes into `output_dir/mode`, and returns what `merge` does:

    - `<key>_stats.npz`: "count", "sum", "sum_square" (and "mean", "m2"), float64, for each key of
      `collect_feats`;
    - `<key>_shape`: "id frames,dims" by line, in the order of the ids' UTF-8 bytes. Integer inputs
      of the model that have lengths get one, too: "id length";
    - `stats_keys`, `stats_keys.txt`, `shape_keys.txt`, `feat_keys_written.txt`: names of keys;
    - `shards/`: what is done. Stopped or killed at any moment, the same call goes on from there,
      also with other workers, batches or utterances. For the same utterances and batch size all
      files are the same to the last bit.

    Args:
        provider: builds the environment, once in each process: "dataset", "model", "collate_fn",
            and perhaps "device" and "collect_stats_kwargs", for `model.collect_feats`.
        output_dir: the directory of all splits.
        mode: name of the split.
        write_collected_feats: keep the features: in a cache, `collect_feats`, and as
            `collect_feats/<key>.scp` with one `.npy` for each utterance.
        batch_size: utterances a batch; None gives `forward` one number at a time.
        parallel: how many workers, and where: `ParallelConfig` or such a mapping, or a client of
            `get_client`; None computes in this process.
        resume: False removes what an earlier call has left of shards and features.
        all_keys: as ESPnet3, also count `<key>_lengths` as a key, of one number an utterance
            (`mel_lengths_stats.npz`, `mel_lengths_shape`), and write the shapes of all inputs of
            the model (`speech_shape`).

    A subclass may override the four steps that `Hooks` has, as static methods.

    Raises `ComputeError` for an utterance that fails, naming it; `FeatureError` for what cannot be
    stored or has no statistics; `StaleCacheError` if the model is another than in what is done;
    `CacheLockedError` if another process is at work here. What is done is kept in each case.

    >>> import tempfile, torch, featcache
    >>> class Tones(featcache.EnvironmentProvider):
    ...     def build_env_local(self):
    ...         arrays = {n: torch.full((n, 2), 3.0).numpy() for n in (4, 5)}
    ...         dataset = [(f"utt-{n}", {"speech": array}) for n, array in arrays.items()]
    ...         collate = featcache.espnet.CommonCollateFn()
    ...         return {"dataset": dataset, "model": self, "collate_fn": collate}
    ...
    ...     def collect_feats(self, speech, speech_lengths):
    ...         return {"feats": speech, "feats_lengths": speech_lengths}
    >>> runner = CollectStatsRunner(Tones(), tempfile.mkdtemp(), "train", batch_size=2)
    >>> runner(range(2))["count"]
    {'feats': 9}
    """

    def __init__(
        self,
        provider: EnvironmentProvider,
        output_dir: str | Path,
        mode: str,
        write_collected_feats: bool = False,
        *,
        batch_size: int | None = None,
        parallel: ParallelConfig | Mapping[str, object] | Client | None = None,
        resume: bool = True,
        all_keys: bool = False,
    ) -> None:
        if not isinstance(mode, str) or mode in ("", ".", "..") or "/" in mode or "\0" in mode:
            raise ConfigError(f"mode {mode!r} is not usable as the name of a directory")
        self.provider = provider
        if batch_size is not None and not (isinstance(batch_size, Integral) and batch_size >= 1):
            raise ConfigError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
        self.directory = Path(output_dir).expanduser().absolute() / mode
        self._shards = ShardDirectory(self.directory)
        self.write_collected_feats = write_collected_feats
        self.batch_size = batch_size
        self.parallel = None if parallel is None else config_or_client(parallel)
        self.resume = resume
        self.all_keys = all_keys

    def merge(self, shard_dirs: Sequence[Path]) -> Totals:
        """Merge shards into the files of the split; returns {"sum", "sq", "count"}, each by key.

        Statistics are merged in the order of `shard_dirs`; the order of lines is that of their ids.
        """
        if not shard_dirs:
            raise ConfigError("there are no shards to merge")
        merged = merge_shards(shard_dirs, self.directory, self.write_collected_feats)
        return {
            "sum": {key: stats.sum for key, stats in merged.items()},
            "sq": {key: stats.sum_square for key, stats in merged.items()},
            "count": {key: stats.count for key, stats in merged.items()},
        }

    def __call__(self, indices: Iterable[int]) -> Totals:
        """Collect the utterances of these numbers that are not done yet, and merge all of them."""
        wanted = _checked(indices)
        self.directory.mkdir(parents=True, exist_ok=True)
        with WriterLock(self.directory):
            self._shards.create(anew=not self.resume)
            return self.merge([shard.directory for shard in self._collect(wanted)])

    def _collect(self, wanted: Ints) -> list[Shard]:
        """Make the shards that are missing; return all of them by their first utterances."""
        with (
            self._shards.attempts() as attempts,
            ExitStack() as at_end,
            executor_for(self.provider, self.parallel, attempts) as executor,
        ):
            settings = StatsSettings(
                hooks=type(self),
                shards=self._shards.path,
                collected=self.directory / FEATS,
                attempts=attempts,
                batch_size=self.batch_size,
                features={} if self.write_collected_feats else None,
                all_keys=self.all_keys,
            )
            sample = ShardTask("sample", wanted[: self.batch_size or 1])
            ((_, (made_from, features)),) = executor.run(ShardMaker.inspect, settings, [sample])
            self._shards.require_made_from(made_from)
            writer = None
            if features is not None:
                writer = at_end.enter_context(CacheWriter(settings.collected, features, made_from))
            missing = self._shards.done(wanted, writer)[1]
            finished = at_end.enter_context(FinishedShards(attempts, self._shards.path, writer))
            settings = replace(settings, features=features, made_from=made_from)
            tasks = cut_shards(wanted, missing, self.batch_size or 1)
            there = len(wanted) - np.count_nonzero(missing)
            with tqdm(total=len(wanted), initial=there, unit="utt", disable=None) as bar:
                for task, _ in executor.run(ShardMaker.make, settings, tasks):
                    finished.place_if_due()
                    bar.update(len(task.indices))
        shards, missing = self._shards.done(wanted, None)
        if missing.any():
            raise IncompleteError(
                f"shards in {str(self._shards.path)!r} are gone; the same call makes them again"
            )
        return shards


def _checked(indices: Iterable[int]) -> Ints:
    listed = np.asarray(indices if isinstance(indices, range | np.ndarray) else list(indices))
    if not listed.size or listed.dtype.kind not in "iu" or listed.ndim != 1 or listed.min() < 0:
        raise ConfigError(f"indices are numbers of utterances, at least one, not {indices!r}")
    if len(np.unique(listed)) < len(listed):
        raise ConfigError("indices hold an utterance twice, which would count twice")
    return listed.astype(np.int64)
