"""Batch samplers for `FeatureLoader` and DataLoader: utterances that go together.

`Batches`, `Numbering`, `LengthsLike` and `resolve_rank` are for those who write others.
"""

from featcache.samplers.batches import Batches as Batches
from featcache.samplers.batches import Numbering as Numbering
from featcache.samplers.bucket import BucketBatchSampler as BucketBatchSampler
from featcache.samplers.by_length import LengthsLike as LengthsLike
from featcache.samplers.epoch import resolve_rank as resolve_rank
from featcache.samplers.packed import PackedBatchSampler as PackedBatchSampler
from featcache.samplers.shuffled import ShuffledBatchSampler as ShuffledBatchSampler
