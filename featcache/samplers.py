"""Batch samplers: which utterances go together, for `FeatureLoader`, DataLoader and the iterators."""

from featcache.loading.samplers.bucket import BucketBatchSampler as BucketBatchSampler
from featcache.loading.samplers.build import build_batch_sampler as build_batch_sampler
from featcache.loading.samplers.build import build_category_batch_sampler as build_category_batch_sampler
from featcache.loading.samplers.epoch import ShuffledBatchSampler as ShuffledBatchSampler
