"""Collecting of statistics in a process.

It makes shards, which all add to one part of the cache of features.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from featcache.cluster.attempts import Attempt
from featcache.collect_stats.hooks import made_from_what
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
from featcache.interface import Array
from featcache.samplers.batches import Ints
from featcache.store.format.committed import committed
from featcache.store.writing.part_writer import PartWriter

if TYPE_CHECKING:
    from featcache.collect_stats.runner import CollectStatsRunner

    Hooks = type[CollectStatsRunner]
Declared = Mapping[str, FeatureStorageConfig]
Answer = tuple[dict[str, object], Declared | None]


@dataclass(frozen=True)
class Job:
    """What is the same for all shards of a run."""

    hooks: Hooks
    directory: Path  # of the split
    claims: Path  # where workers note what they are at
    batch_size: int | None
    features: Declared | None  # of the cache; None: no features are kept
    made_from: Mapping[str, object]


class Order(NamedTuple):
    """A shard to be made."""

    name: str
    indices: Ints
    again: bool = False  # a worker that was at it was lost
    number: int = 0  # of this attempt: no two attempts at the same shard share it


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

    def ask(self, hooks: Hooks, sample: Ints | None) -> Answer:
        """Return what statistics are made from here, and how a sample's features are stored."""
        made_from = made_from_what(self._env)
        if sample is None:
            return made_from, None
        feats = self._compute(hooks, sample.tolist(), {**self._env, "write_collected_feats": True})[
            2
        ]
        dtypes = {key: next(iter(of_key.values())).dtype.name for key, of_key in feats.items()}
        return made_from, {key: FeatureStorageConfig(key, dtype) for key, dtype in dtypes.items()}

    def make(self, job: Job, order: Order) -> None:
        """Make a shard; it is there when this returns.

        Raises `TaskTakenError` if another process has, or had, this attempt at it.
        """
        with self.share.attempt(job.claims, order.number) as claim:
            # or its maker was lost right after
            if read_shard(job.directory / SHARDS / order.name) is None:
                self._make(job, order, claim)

    def _make(self, job: Job, order: Order, claim: Attempt) -> None:
        hooks, shards = job.hooks, job.directory / SHARDS
        with tempfile.TemporaryDirectory(
            prefix="attempt-", dir=shards, ignore_cleanup_errors=True
        ) as attempt:
            shard_dir = Path(attempt) / "shard"
            shard_dir.mkdir()
            env = {**self._env, "write_collected_feats": job.features is not None}
            if job.features is not None:
                env |= {
                    "feats_dir": job.directory / FEATS,
                    "part_writer": self._part(job, job.features, order),
                }
            state: dict[str, Any] = {}
            writers = hooks.open_writers(shard_dir, **env)
            size = job.batch_size or 1
            for start in range(0, len(order.indices), size):
                if self.share.stopping or not claim.is_wanted:
                    raise IncompleteError("the run has been stopped")
                claim.note_batch(start)
                batch = order.indices[start : start + size].tolist()
                result = self._compute(hooks, batch if job.batch_size else batch[0], env)
                hooks.write_record(writers, result, state, **env)
            hooks.close_writers(writers)
            self.share.commit()  # a shard that is there has all its features
            finish_shard(shard_dir, shards / order.name, order.indices)

    def _part(self, job: Job, features: Declared, order: Order) -> _NewOnly:
        path = job.directory / FEATS
        writer = self.share.writer(path, features, job.made_from)
        return _NewOnly(writer, set(committed(path)) if order.again else set())

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
