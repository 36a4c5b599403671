"""Batch samplers for `FeatureLoader`, DataLoader and the iterators: utterances that go together."""

from featcache.samplers.bucket import BucketBatchSampler as BucketBatchSampler
from featcache.samplers.espnet.build import build_batch_sampler as build_batch_sampler
from featcache.samplers.espnet.build import (
    build_category_batch_sampler as build_category_batch_sampler,
)
from featcache.samplers.shuffled import ShuffledBatchSampler as ShuffledBatchSampler
