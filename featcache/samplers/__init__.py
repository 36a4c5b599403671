"""Batch samplers for `FeatureLoader` and DataLoader: utterances that go together."""

from featcache.samplers.bucket import BucketBatchSampler as BucketBatchSampler
from featcache.samplers.shuffled import ShuffledBatchSampler as ShuffledBatchSampler
