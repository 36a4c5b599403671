"""`CollectStatsRunner`: statistics and shapes of a data set, in the files that ESPnet reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from featcache import _checks
from featcache._closing import close_after
from featcache.cluster.config import ParallelConfig, config_or_client
from featcache.collect_stats.executors import executor_for
from featcache.collect_stats.hooks import Hooks
from featcache.collect_stats.shard_directory import ShardDirectory, cut_shards
from featcache.collect_stats.shard_maker import ShardMaker, ShardTask, StatsSettings
from featcache.collect_stats.shards import FEATS, Shard, merge_shards
from featcache.errors import ConfigError, IncompleteError
from featcache.extraction.environment import EnvironmentProvider
from featcache.extraction.patience import retry_while_locked
from featcache.interface import Ints
from featcache.store.format.files import make_directory
from featcache.store.format.lock import WriterLock
from featcache.store.writing.cache_writer import CacheWriter

if TYPE_CHECKING:
    from dask.distributed import Client


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

    A subclass may override the four steps that `Hooks` has, as static methods.

    Raises `ComputeError` for an utterance that fails, naming it; `FeatureError` for what cannot be
    stored or has no statistics; `StaleCacheError` if the model is another than in what is done;
    `CacheLockedError` if another process is at work here. What is done is kept in each case.

    >>> import tempfile, torch, featcache
    >>> class Tones(featcache.EnvironmentProvider):
    ...     def build_env_local(self):
    ...         arrays = {n: torch.full((n, 2), 3.0).numpy() for n in (4, 5)}
    ...         dataset = [(f"utt-{n}", {"speech": array}) for n, array in arrays.items()]
    ...         collate = featcache.CommonCollateFn()
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
    ) -> None:
        if not isinstance(mode, str) or mode in ("", ".", "..") or "/" in mode or "\0" in mode:
            raise ConfigError(f"mode {mode!r} is not usable as the name of a directory")
        self.provider = provider
        self.directory = _checks.directory(output_dir, "output_dir").absolute() / mode
        self._shards = ShardDirectory(self.directory)
        self.write_collected_feats = write_collected_feats
        self.batch_size = (
            None if batch_size is None else _checks.whole_number("batch_size", batch_size, 1)
        )
        self.parallel = None if parallel is None else config_or_client(parallel)
        self.resume = resume

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
        make_directory(self.directory)
        lock = WriterLock(self.directory)
        try:
            self._shards.create(anew=not self.resume)
            return self.merge([shard.directory for shard in self._collect(wanted)])
        finally:
            lock.release()

    def _collect(self, wanted: Ints) -> list[Shard]:
        """Make the shards that are missing; return all of them by their first utterances."""
        with (
            self._shards.attempts() as attempts,
            ExitStack() as at_end,
            executor_for(self.provider, self.parallel, attempts) as executor,
        ):
            settings = StatsSettings(
                hooks=type(self),
                directory=self.directory,
                attempts=attempts,
                batch_size=self.batch_size,
                features={} if self.write_collected_feats else None,
            )
            sample = ShardTask("sample", wanted[: self.batch_size or 1])
            ((_, (made_from, features)),) = executor.run(ShardMaker.inspect, settings, [sample])
            self._shards.require_made_from(made_from)
            writer = None
            if features is not None:
                path = self.directory / FEATS
                writer = retry_while_locked(partial(CacheWriter, path, features, made_from))
                at_end.enter_context(writer)
                at_end.push(partial(_gather, writer))
            missing = self._shards.done(wanted, writer)[1]
            settings = replace(settings, features=features, made_from=made_from)
            tasks = cut_shards(wanted, missing, self.batch_size or 1)
            there = len(wanted) - np.count_nonzero(missing)
            with tqdm(total=len(wanted), initial=there, unit="utt", disable=None) as bar:
                for task, _ in executor.run(ShardMaker.make, settings, tasks):
                    bar.update(len(task.indices))
        shards, missing = self._shards.done(wanted, None)
        if missing.any():
            raise IncompleteError(
                f"shards in {str(self._shards.path)!r} are gone; the same call makes them again"
            )
        return shards


def _gather(writer: CacheWriter, _: object, error: BaseException | None, __: object) -> None:
    """Seal what all have stored, those that died included, so that it is published.

    After Ctrl-C nobody waits for those that still write: the next run gathers that.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    close_after(error, partial(retry_while_locked, writer.recover, unless=lambda: interrupted))


def _checked(indices: Iterable[int]) -> Ints:
    listed = np.asarray(indices if isinstance(indices, range | np.ndarray) else list(indices))
    if not listed.size or listed.dtype.kind not in "iu" or listed.ndim != 1 or listed.min() < 0:
        raise ConfigError(f"indices are numbers of utterances, at least one, not {indices!r}")
    if len(np.unique(listed)) < len(listed):
        raise ConfigError("indices hold an utterance twice, which would count twice")
    return listed.astype(np.int64)
