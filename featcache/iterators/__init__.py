"""ESPnet's iterator factories: give a configuration these names as `_target_`."""

from featcache.iterators.factories import (
    CategoryChunkIterFactory,
    CategoryIterFactory,
    ChunkIterFactory,
    IterFactory,
    MultipleIterFactory,
    SequenceIterFactory,
    ShardedIterFactory,
    build_iter_factory,
)

__all__ = [
    "CategoryChunkIterFactory",
    "CategoryIterFactory",
    "ChunkIterFactory",
    "IterFactory",
    "MultipleIterFactory",
    "SequenceIterFactory",
    "ShardedIterFactory",
    "build_iter_factory",
]
