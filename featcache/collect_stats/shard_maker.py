"""`ShardMaker`: makes shards in a process; all add to one part of the cache of features."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from featcache.cluster.attempts import Attempt
from featcache.collect_stats.collected_feats import NewFeatures
from featcache.collect_stats.hooks import Hooks
from featcache.collect_stats.shards import FEATS, SHARDS, finish_shard, read_shard
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import (
    ComputeError,
    ConfigError,
    DuplicateIdError,
    FeatureError,
    IncompleteError,
    describe,
)
from featcache.extraction.datasets import visible_ids
from featcache.extraction.workers.process_part import ProcessPart
from featcache.interface import Ints
from featcache.staleness.provenance import provenance
from featcache.store.format.committed import committed
from featcache.store.writing.part_writer import PartWriter

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
