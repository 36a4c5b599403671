"""ESPnet's iterator factories: give a configuration these names as `_target_`."""

from featcache.iterators.chunk_factories import CategoryChunkIterFactory, ChunkIterFactory
from featcache.iterators.from_config import build_iter_factory
from featcache.iterators.multiple import IterFactory, MultipleIterFactory, ShardedIterFactory
from featcache.iterators.sequence_factories import CategoryIterFactory, SequenceIterFactory

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
