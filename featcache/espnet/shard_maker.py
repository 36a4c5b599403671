"""Making of shards: a range of utterances each, in a directory that other runs go on with."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache import CacheWriter, FeatureStorageConfig
from featcache.container_files import write_durably
from featcache.errors import (
    ComputeError,
    ConfigError,
    DuplicateIdError,
    FeatureError,
    IncompleteError,
    StaleCacheError,
    describe,
)
from featcache.espnet.arrays import Ints
from featcache.espnet.hooks import Hooks, NewFeatures
from featcache.espnet.shards import (
    FEATS,
    RUN,
    SHARDS,
    Shard,
    finish_shard,
    has_features,
    read_shard,
)
from featcache.extraction.datasets import visible_ids
from featcache.extraction.process_part import ProcessPart
from featcache.format.files import make_directory, pack_json, unpack_json
from featcache.format.fingerprint import canonical, differences
from featcache.format.manifest import NAME as CACHE
from featcache.format.part import committed
from featcache.inspect import provenance
from featcache.workers.attempts import Attempt
from featcache.writing.part_writer import PartWriter

# `ShardMaker`: makes shards in a process; all add to one part of the cache of features.

Declared = Mapping[str, FeatureStorageConfig]


@dataclass(frozen=True)
class StatsSettings:
    """Settings of a run, the same for all its shards."""

    hooks: type[Hooks]
    directory: Path  # of the split
    attempts: Path  # where workers note the batch that they are at
    batch_size: int | None
    features: Declared | None  # of the cache; None: no features are kept
    made_from: Mapping[str, object] = field(default_factory=dict)


class ShardTask(NamedTuple):
    """A shard to be made."""

    name: str
    indices: Ints
    retried: bool = False  # a worker that was at it was lost
    number: int = 0  # of this attempt: no two attempts of a run share it


class ShardMaker:
    """A process's share in a run: its environment, and its part of the cache."""

    def __init__(self, env: object) -> None:
        if not isinstance(env, Mapping):
            raise ConfigError(f"an environment is a dict by name, not {env!r}")
        for name in ("dataset", "model", "collate_fn"):
            if name not in env:
                raise ConfigError(
                    f"the environment needs {name!r}; it has "
                    f"{', '.join(map(repr, env)) or 'nothing'}"
                )
        self._env: dict[str, Any] = dict(env)
        self.share = ProcessPart()

    def inspect(
        self, settings: StatsSettings, task: ShardTask
    ) -> tuple[dict[str, object], Declared | None]:
        """Return what statistics are made from here, and declarations of the features.

        Those are found by computing the utterances of the task; None if no features are kept.
        """
        with self.share.attempt(settings.attempts, task.number) as attempt:
            made_from = fingerprint_of(self._env)
            if settings.features is None:
                return made_from, None
            attempt.note_batch(0)
            env = {**self._env, "write_collected_feats": True}
            feats = self._compute(settings.hooks, task.indices.tolist(), env)[2]
            dtypes = {key: next(iter(of_key.values())).dtype.name for key, of_key in feats.items()}
            return made_from, {key: FeatureStorageConfig(key, dtypes[key]) for key in dtypes}

    def make(self, settings: StatsSettings, task: ShardTask) -> None:
        """Make a shard; it is there when this returns.

        Raises `TaskTakenError` if another process has, or had, this attempt at it.
        """
        shards = settings.directory / SHARDS
        with self.share.attempt(settings.attempts, task.number) as attempt:
            if read_shard(shards / task.name) is not None:  # its maker was lost right after
                return
            with tempfile.TemporaryDirectory(
                prefix="attempt-", dir=shards, ignore_cleanup_errors=True
            ) as directory:
                shard_dir = Path(directory) / "shard"  # unlike the one above, others may read it
                shard_dir.mkdir()
                self._fill(settings, task, attempt, shard_dir)
                self.share.commit()  # a shard that is there has all its features
                finish_shard(shard_dir, shards / task.name, task.indices)

    def _fill(
        self, settings: StatsSettings, task: ShardTask, attempt: Attempt, shard_dir: Path
    ) -> None:
        """Run the hooks over the batches of a shard."""
        hooks, env, state = settings.hooks, self._env_of(settings, task), dict[str, Any]()
        writers = hooks.open_writers(shard_dir, **env)
        size = settings.batch_size or 1
        for start in range(0, len(task.indices), size):
            if self.share.stopping or not attempt.is_wanted:
                raise IncompleteError("the run has been stopped")
            attempt.note_batch(start)
            batch = task.indices[start : start + size].tolist()
            result = self._compute(hooks, batch if settings.batch_size else batch[0], env)
            hooks.write_record(writers, result, state, **env)
        hooks.close_writers(writers)

    def _env_of(self, settings: StatsSettings, task: ShardTask) -> dict[str, Any]:
        if settings.features is None:
            return {**self._env, "write_collected_feats": False}
        path = settings.directory / FEATS
        writer = self.share.writer(partial(PartWriter, path, settings.features, settings.made_from))
        known = set(committed(path)) if task.retried else set()
        collecting = {"feats_dir": path, "part_writer": NewFeatures(writer, known)}
        return {**self._env, "write_collected_feats": True, **collecting}

    def _compute(self, hooks: type[Hooks], batch: list[int] | int, env: Mapping[str, Any]) -> Any:
        """Call `forward`; an error names the utterance, if it comes from a single one."""
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
        if isinstance(error, FeatureError | DuplicateIdError | ConfigError):
            raise error
        ids = visible_ids(env["dataset"])
        named = ", ".join(
            f"utterance {index}" if ids is None else repr(ids[index]) for index in culprits
        )
        raise ComputeError(
            f"collecting statistics of {named} failed with {describe(error)}; what was done before "
            "is kept"
        ) from error


def fingerprint_of(env: Mapping[str, Any]) -> dict[str, object]:
    """Return the fingerprint of `collect_feats` of the model: its code, the modules it names."""
    model, found = env["model"], {}
    if callable(collect := getattr(model, "collect_feats", None)):
        found = provenance(collect, model).fingerprint({})
    kwargs = env.get("collect_stats_kwargs") or {}
    return {**found, "collect_stats_kwargs": {name: repr(value) for name, value in kwargs.items()}}


# `ShardDirectory`: the shards of a split on disk, those that are done and those to be made.

Mask = NDArray[np.bool_]
MADE_FROM = "made_from.json"
# whatever the number of workers, so that the same numbers are added in the same order
MOST_SHARDS = 512


class ShardDirectory:
    """The directory `shards` of a split."""

    def __init__(self, split: Path) -> None:
        self._split = split
        self.path = split / SHARDS

    def create(self, *, anew: bool = False) -> None:
        """Make the directory, unless it is there.

        `anew` removes all shards first, and the cache of their features.
        """
        if anew:
            shutil.rmtree(self.path, ignore_errors=True)
            if (self._split / FEATS / CACHE).exists():
                shutil.rmtree(self._split / FEATS)
        make_directory(self.path)

    @contextmanager
    def attempts(self) -> Iterator[Path]:
        """Yield a directory for the attempts of a run, which ends with it."""
        for left in self._split.glob(f"{RUN}*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        directory = self._split / f"{RUN}{secrets.token_hex(4)}"
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # NFS keeps files that are open

    def require_made_from(self, made_from: Mapping[str, object]) -> None:
        """Note what the statistics are made from, or compare it with what is noted."""
        path, new = self.path / MADE_FROM, canonical(made_from)
        if path.exists():
            changed = differences(unpack_json(path.read_bytes(), repr(str(path))), new)
            if not changed:
                return
            if any(map(read_shard, self.path.glob("split.*"))):
                lines = "".join(f"\n  {line}" for line in changed)
                raise StaleCacheError(
                    f"what is done in {str(self._split)!r} was made from something else than it "
                    f"would be now:{lines}\n"
                    "start anew (resume=False), or give another directory"
                )
            self.create(anew=True)  # nothing is done: what failed at once was mended
        write_durably(path, pack_json(new))

    def done(self, wanted: Ints, writer: CacheWriter | None) -> tuple[list[Shard], Mask]:
        """Return the shards that are done, by their first utterances, and what of `wanted` is not.

        Removes shards that are of no use: damaged, of other utterances, or without features where
        a `writer` of these is given.
        """
        places = np.full(wanted.max() + 1, -1)  # of the utterances that are still to be found
        places[wanted] = np.arange(len(wanted))
        found: dict[int, Shard] = {}
        for directory in sorted(self.path.glob("*/")):
            shard = read_shard(directory)
            if (
                shard is not None
                and shard.indices.max() < len(places)
                and (places[shard.indices] >= 0).all()
                and (writer is None or has_features(shard, writer))
            ):
                found[int(places[shard.indices[0]])] = shard
                places[shard.indices] = -1
            else:  # renamed first: a worker that was lost may be at it
                gone = directory.rename(directory.with_name(f"removed-{secrets.token_hex(4)}"))
                shutil.rmtree(gone, ignore_errors=True)
        return [found[place] for place in sorted(found)], places[wanted] >= 0


def cut_shards(wanted: Ints, missing: Mask, batch_size: int) -> list[ShardTask]:
    """Cut utterances into shards of whole batches, then leave out those that are not missing.

    So a run that goes on has the shards that it had.
    """
    size = batch_size * -(-len(wanted) // (batch_size * MOST_SHARDS))
    starts, run = range(0, len(wanted), size), secrets.token_hex(4)
    cut = [wanted[start : start + size][missing[start : start + size]] for start in starts]
    return [
        ShardTask(f"split.{run}-{number:05d}", indices)
        for number, indices in enumerate(cut)
        if len(indices)
    ]
