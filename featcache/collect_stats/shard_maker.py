"""`ShardMaker`: makes shards in a process; all add to one part of the cache of features."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from featcache.cluster.attempts import Attempt
from featcache.collect_stats.protocol import Hooks
from featcache.collect_stats.shard_task import Declared, ShardTask, StatsSettings
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
from featcache.extraction.provenance import find_ingredients
from featcache.extraction.workers.process_part import ProcessPart
from featcache.interface import Array, Ints
from featcache.store.format.committed import committed
from featcache.store.writing.part_writer import PartWriter


class Inspection(NamedTuple):
    """Fingerprint of the model that is measured, and its features (None: not asked for)."""

    made_from: dict[str, object]
    features: Declared | None


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

    def inspect(self, hooks: Hooks, sample: Ints | None) -> Inspection:
        """Return what statistics are made from here, and how features of a sample are stored."""
        made_from = fingerprint_of(self._env)
        if sample is None:
            return Inspection(made_from, None)
        env = {**self._env, "write_collected_feats": True}
        feats = self._compute(hooks, sample.tolist(), env)[2]
        dtypes = {key: next(iter(of_key.values())).dtype.name for key, of_key in feats.items()}
        features = {key: FeatureStorageConfig(key, dtype) for key, dtype in dtypes.items()}
        return Inspection(made_from, features)

    def make(self, settings: StatsSettings, task: ShardTask) -> None:
        """Make a shard; it is there when this returns.

        Raises `TaskTakenError` if another process has, or had, this attempt at it.
        """
        with self.share.attempt(settings.attempts, task.number) as attempt:
            # or its maker was lost right after
            if read_shard(settings.directory / SHARDS / task.name) is None:
                self._make(settings, task, attempt)

    def _make(self, settings: StatsSettings, task: ShardTask, attempt: Attempt) -> None:
        shards = settings.directory / SHARDS
        with tempfile.TemporaryDirectory(
            prefix="attempt-", dir=shards, ignore_cleanup_errors=True
        ) as directory:
            shard_dir = Path(directory) / "shard"
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
        part_writer = _NewOnly(writer, set(committed(path)) if task.retried else set())
        return {
            **self._env,
            "write_collected_feats": True,
            "feats_dir": path,
            "part_writer": part_writer,
        }

    def _compute(self, hooks: Hooks, batch: list[int] | int, env: Mapping[str, Any]) -> Any:
        """Call `forward`.

        An error names the utterance that it comes from, if it comes from a single one.
        """
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


class _NewOnly:
    """Leaves out what an earlier run, or a worker that was lost, has stored already."""

    def __init__(self, writer: PartWriter, known: set[str]) -> None:
        self._writer, self._known = writer, known

    def write(self, id: str, arrays: Mapping[str, Array]) -> None:
        if id not in self._known and id not in self._writer:
            self._writer.write(id, arrays)


def fingerprint_of(env: Mapping[str, Any]) -> dict[str, object]:
    """Return the fingerprint of what `collect_feats` of the model makes.

    It covers its code and the modules that it names.
    """
    model, found = env["model"], {}
    function = getattr(type(model), "collect_feats", None)
    if isinstance(function, FunctionType):
        stand_in: Any = object.__new__(
            type(type(model).__name__, (type(model),), {"compute_features": function})
        )
        vars(stand_in).update(vars(model))
        found = find_ingredients(stand_in).fingerprint({})
    kwargs = env.get("collect_stats_kwargs") or {}
    return {**found, "collect_stats_kwargs": {name: repr(value) for name, value in kwargs.items()}}
