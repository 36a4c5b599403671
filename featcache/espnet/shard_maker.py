"""Making of shards: a range of utterances each, in a directory that other runs go on with."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    indented,
)
from featcache.espnet.arrays import Ints
from featcache.espnet.hooks import LENGTHS, Hooks
from featcache.espnet.shards import (
    FEATS,
    RUN,
    SHARDS,
    SPLIT,
    Shard,
    finish_shard,
    has_features,
    read_shard,
)
from featcache.inspect import differences, provenance
from featcache.workers import Attempt, Attempts

# `ShardMaker`: makes shards in a process.

Declared = Mapping[str, FeatureStorageConfig]


@dataclass(frozen=True)
class StatsSettings:
    """Settings of a run, the same for all its shards."""

    hooks: type[Hooks]
    shards: Path  # those that are done
    collected: Path  # the features
    attempts: Path  # where shards are made, and workers note the batch that they are at
    batch_size: int | None
    features: Declared | None  # of the cache; None: no features are kept
    all_keys: bool = False
    made_from: Mapping[str, object] = field(default_factory=dict)


class ShardTask(NamedTuple):
    """A shard to be made."""

    name: str
    indices: Ints
    number: int = 0  # of this attempt: no two attempts of a run share it


class ShardMaker:
    """A process's share in a run: its environment, and its attempts at shards."""

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
        self.attempts = Attempts()

    def inspect(
        self, settings: StatsSettings, task: ShardTask
    ) -> tuple[dict[str, object], Declared | None]:
        """Return what statistics are made from here, and declarations of the features.

        Those are found by computing the utterances of the task; None if no features are kept.
        """
        with self.attempts.begin(settings.attempts, task.number) as attempt:
            made_from = {**fingerprint_of(self._env), **_asked(settings)}
            if settings.features is None:
                return made_from, None
            attempt.note_batch(0)
            env = {**self._env, "write_collected_feats": True, **_asked(settings)}
            feats = self._compute(settings.hooks, task.indices.tolist(), env)[2]
            dtypes = {
                key: next(iter(of_key.values())).dtype.name
                for key, of_key in feats.items()
                if not key.endswith(LENGTHS)  # the cache has them anyway
            }
            return made_from, {key: FeatureStorageConfig(key, dtypes[key]) for key in dtypes}

    def make(self, settings: StatsSettings, task: ShardTask) -> None:
        """Make a shard; it lies under its name with the attempts when this returns.

        Raises `TaskTakenError` if another process has, or had, this attempt at it.
        """
        with self.attempts.begin(settings.attempts, task.number) as attempt:
            made, placed = (at / task.name for at in (settings.attempts, settings.shards))
            if made.exists() or placed.exists():  # its maker was lost right after
                return
            directory = settings.attempts / f"shard-{task.number:06d}"
            directory.mkdir()
            self._fill(settings, task, attempt, directory)
            finish_shard(directory, task.indices)
            directory.rename(made)

    def _fill(
        self, settings: StatsSettings, task: ShardTask, attempt: Attempt, shard_dir: Path
    ) -> None:
        """Run the hooks over the batches of a shard."""
        hooks, state = settings.hooks, dict[str, Any]()
        collects = settings.features is not None
        env = {**self._env, "write_collected_feats": collects, **_asked(settings)}
        env |= {"feats_dir": settings.collected} if collects else {}
        writers = hooks.open_writers(shard_dir, **env)
        size = settings.batch_size or 1
        for start in range(0, len(task.indices), size):
            if not attempt.is_wanted:
                raise IncompleteError("the run has been stopped")
            attempt.note_batch(start)
            batch = task.indices[start : start + size].tolist()
            result = self._compute(hooks, batch if settings.batch_size else batch[0], env)
            hooks.write_record(writers, result, state, **env)
        hooks.close_writers(writers)

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
        named = ", ".join(_name_of(env["dataset"], index) for index in culprits)
        raise ComputeError(
            f"collecting statistics of {named} failed with {describe(error)}; what was done before "
            "is kept"
        ) from error


def _asked(settings: StatsSettings) -> dict[str, object]:
    """Return what a run asks of the hooks beyond ESPnet's: nothing, by default."""
    return {"all_keys": True} if settings.all_keys else {}


def _name_of(dataset: Any, index: int) -> str:
    """Return an utterance's id, where the data set shows its ids or can load it, or its number."""
    ids: Any = getattr(dataset, "ids", None)
    if hasattr(ids, "__getitem__") and len(ids) == len(dataset):
        return repr(ids[index])
    try:
        id = dataset[index][0]
    except Exception:  # maybe that is what failed
        id = None
    return repr(id) if isinstance(id, str) else f"utterance {index}"


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
            if (self._split / FEATS / "featcache.json").exists():
                shutil.rmtree(self._split / FEATS)
        self.path.mkdir(exist_ok=True)

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
        path, new = self.path / MADE_FROM, json.dumps(made_from).encode()
        if path.exists():
            try:
                before = json.loads(path.read_bytes())
            except ValueError:  # damaged, so that nobody knows
                before = None
            changed = differences(before, json.loads(new))
            if not changed:
                return
            if any(map(read_shard, self.path.glob(f"{SPLIT}*"))):
                raise StaleCacheError(
                    f"what is done in {str(self._split)!r} was made from something else than it "
                    f"would be now:{indented(changed)}\n"
                    "start anew (resume=False), or give another directory"
                )
            self.create(anew=True)  # nothing is done: what failed at once was mended
        write_durably(path, new)

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
        ShardTask(f"{SPLIT}{run}-{number:05d}", indices)
        for number, indices in enumerate(cut)
        if len(indices)
    ]
