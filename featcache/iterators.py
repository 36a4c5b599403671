"""ESPnet's iterator factories: give a configuration these names as `_target_`."""

from featcache.loading.iterators.chunk import CategoryChunkIterFactory, ChunkIterFactory
from featcache.loading.iterators.configured import build_iter_factory
from featcache.loading.iterators.multiple import IterFactory, MultipleIterFactory, ShardedIterFactory
from featcache.loading.iterators.sequence import CategoryIterFactory, SequenceIterFactory

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
