"""Estimates of the features of a `Brain`, or the like, before they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from featcache.extraction.brain_environment import collate_fn_of, evaluating, provenance_of
from featcache.extraction.brain_settings import find_storage, split_and_stage
from featcache.extraction.computation import features_of
from featcache.extraction.dataset_batches import check_loader_kwargs
from featcache.extraction.datasets import check_source
from featcache.extraction.estimating.estimate import estimate
from featcache.extraction.estimating.estimate_table import Estimate
from featcache.extraction.random_state import kept_random_state
from featcache.storage import FeatureStorage


def estimate_of(
    extractor: Any,
    dataset: object,
    stage: object,
    split: str | None,
    storage: FeatureStorage | None,
    loader_kwargs: Mapping[str, object],
    utterances: int,
) -> Estimate:
    """Compute a few utterances of a dataset, all modules in evaluation mode, and estimate all."""
    check_source(dataset)
    check_loader_kwargs(loader_kwargs)
    _, stage = split_and_stage(extractor, split, stage)
    features = (find_storage(extractor) if storage is None else storage).features
    made_with = provenance_of(extractor, collate_fn_of(dataset, loader_kwargs))
    env = {"dataset": dataset, "loader_kwargs": loader_kwargs}
    with kept_random_state(), evaluating(extractor, made_with.modules.values()):
        compute = partial(features_of, extractor, stage)
        return estimate({**env, "compute_features": compute}, features, utterances=utterances)
