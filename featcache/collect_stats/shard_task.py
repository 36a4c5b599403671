"""`ShardTask`: a shard to be made. `StatsSettings`: the settings of all shards of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from featcache.collect_stats.protocol import Hooks
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.interface import Ints

Declared = Mapping[str, FeatureStorageConfig]


@dataclass(frozen=True)
class StatsSettings:
    """Settings of a run, the same for all its shards."""

    hooks: Hooks
    directory: Path  # of the split
    attempts: Path  # where workers note the batch that they are at
    batch_size: int | None
    features: Declared | None  # of the cache; None: no features are kept
    made_from: Mapping[str, object]


class ShardTask(NamedTuple):
    """A shard to be made."""

    name: str
    indices: Ints
    retried: bool = False  # a worker that was at it was lost
    number: int = 0  # of this attempt: no two attempts at the same shard share it
