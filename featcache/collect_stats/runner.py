"""`CollectStatsRunner`: statistics and shapes of a data set, in the files that ESPnet reads."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from featcache import _checks
from featcache._closing import close_after
from featcache.cluster.config import ParallelConfig, config_or_client
from featcache.collect_stats import shard_writers
from featcache.collect_stats.batch_stats import collect_stats_batch
from featcache.collect_stats.executors import executor_for
from featcache.collect_stats.shard_directory import ShardDirectory, cut_shards
from featcache.collect_stats.shard_task import ShardTask, StatsSettings
from featcache.collect_stats.shards import FEATS, Shard, left_over, merge_shards
from featcache.errors import ConfigError, IncompleteError
from featcache.extraction.environment import EnvironmentProvider
from featcache.extraction.patience import retry_while_locked
from featcache.interface import Ints
from featcache.store.format.files import make_directory
from featcache.store.format.lock import WriterLock
from featcache.store.writing.cache_writer import CacheWriter

if TYPE_CHECKING:
    from dask.distributed import Client


class CollectStatsRunner:
    """Collect statistics and shapes of the features that a model computes of a data set.

    It does what ESPnet3's runner does.

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
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise ConfigError(
                f"batch_size is a whole number from 1 on, or None, not {batch_size!r}"
            )
        self.provider = provider
        self.directory = _checks.directory(output_dir, "output_dir").absolute() / mode
        self._shards = ShardDirectory(self.directory)
        self.write_collected_feats = write_collected_feats
        self.batch_size = batch_size
        self.parallel = None if parallel is None else config_or_client(parallel)
        self.resume = resume

    @staticmethod
    def forward(
        batch_indices: Iterable[int] | int,
        dataset: Any,
        model: Any,
        collate_fn: Any,
        device: Any = None,
        write_collected_feats: bool = False,
        collect_stats_kwargs: Mapping[str, Any] | None = None,
        **env: Any,
    ) -> tuple[Any, ...]:
        """Return statistics and shapes of a batch, and its features where they are wanted.

        `(stats, shape_info)` or `(stats, shape_info, feats)`: by key a `FeatureStats`, by key and
        id the shapes, by key and id the arrays. `**env`, the rest of the environment, is ignored.
        """
        stats, shapes, feats = collect_stats_batch(
            [batch_indices] if isinstance(batch_indices, int) else batch_indices,
            dataset=dataset,
            model=model,
            collate_fn=collate_fn,
            device=device,
            collect_stats_kwargs=collect_stats_kwargs,
        )
        return (stats, shapes, feats) if write_collected_feats else (stats, shapes)

    @staticmethod
    def open_writers(
        shard_dir: Path | None,
        write_collected_feats: bool = False,
        feats_dir: Path | None = None,
        part_writer: shard_writers.TakesFeatures | None = None,
        **env: Any,
    ) -> dict[str, Any]:
        """Return what `write_record` writes to.

        The keys: "_shard_dir", "_write_feats", "shape_handles", "feat_writers", ...

        Features go to `feats_dir` (None: `shard_dir/collect_feats`) and, unless None, to
        `part_writer`.
        """
        return shard_writers.open_writers(shard_dir, write_collected_feats, feats_dir, part_writer)

    @staticmethod
    def write_record(
        writers: dict[str, Any], result: Any, state: dict[str, Any], **env: Any
    ) -> None:
        """Add what `forward` returned to the writers, and its statistics to `state`.

        That holds a `FeatureStats` by key.
        """
        shard_writers.write_record(writers, result, state)

    @staticmethod
    def close_writers(writers: dict[str, Any]) -> None:
        """Write the shapes, the statistics and the lists of keys of a shard."""
        shard_writers.close_writers(writers)

    def merge(self, shard_dirs: Sequence[Path]) -> dict[str, dict[str, Any]]:
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

    def __call__(self, indices: Iterable[int]) -> dict[str, dict[str, Any]]:
        """Collect the utterances of these numbers that are not done yet, and merge all of them."""
        wanted = _checked(indices)
        make_directory(self.directory)
        lock = WriterLock(self.directory)
        try:
            if not self.resume:
                self._shards.clear()
            self._shards.create()
            return self.merge([shard.directory for shard in self._collect(wanted)])
        finally:
            lock.release()

    def _collect(self, wanted: Ints) -> list[Shard]:
        """Make the shards that are missing; return all of them by their first utterances."""
        error, writer = None, None
        try:
            with executor_for(self.provider, self.parallel) as executor:
                sample = wanted[: self.batch_size or 1] if self.write_collected_feats else None
                made_from, features = executor.inspect(type(self), sample)
                self._shards.require_made_from(made_from)
                if features is not None:
                    path = self.directory / FEATS
                    writer = retry_while_locked(partial(CacheWriter, path, features, made_from))
                rest = left_over(wanted, self._shards.done(wanted, writer))
                settings = StatsSettings(
                    hooks=type(self),
                    directory=self.directory,
                    attempts=self._shards.new_attempts(),
                    batch_size=self.batch_size,
                    features=features,
                    made_from=made_from,
                )
                tasks = cut_shards(wanted, rest, self.batch_size or 1)
                _make_all(executor.make(settings, tasks), len(rest), len(wanted))
        except BaseException as failure:
            error = failure
            raise
        finally:
            if writer is not None:
                close_after(error, partial(_publish, writer, complete=error is None))
        shards = self._shards.done(wanted, None)
        if len(left_over(wanted, shards)):
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


def _make_all(made: Generator[ShardTask], missing: int, total: int) -> None:
    """Run a generator of shards that are made to its end, with a bar over utterances."""
    done = total - missing
    with (
        tqdm(total=total, initial=done, unit="utt", disable=None) as bar,
        closing(made),
    ):
        for task in made:
            bar.update(len(task.indices))


def _publish(writer: CacheWriter, complete: bool) -> None:
    """Publish what all have stored, those that died included."""
    try:
        retry_while_locked(writer.recover)
        writer.close(complete)
    except BaseException:
        writer.abort()  # of nothing: what is sealed stays
        raise
