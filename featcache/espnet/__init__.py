"""ESPnet's samplers, iterators and collect-stats, batch for batch, id for id, over caches.

Give a configuration the names of this package as `_target_`.
"""

from featcache.espnet.batch_samplers import build_batch_sampler as build_batch_sampler
from featcache.espnet.batch_samplers import (
    build_category_batch_sampler as build_category_batch_sampler,
)
from featcache.espnet.dataset_input import CommonCollateFn as CommonCollateFn
from featcache.espnet.factories import CategoryChunkIterFactory as CategoryChunkIterFactory
from featcache.espnet.factories import CategoryIterFactory as CategoryIterFactory
from featcache.espnet.factories import ChunkIterFactory as ChunkIterFactory
from featcache.espnet.factories import IterFactory as IterFactory
from featcache.espnet.factories import MultipleIterFactory as MultipleIterFactory
from featcache.espnet.factories import SequenceIterFactory as SequenceIterFactory
from featcache.espnet.factories import ShardedIterFactory as ShardedIterFactory
from featcache.espnet.factories import build_iter_factory as build_iter_factory
from featcache.espnet.runner import CollectStatsRunner as CollectStatsRunner
