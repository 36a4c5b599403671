"""What makes the cache of a Brain stale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from brain_helpers import make_brain, make_dataset

import featcache
from featcache import FeatureStorage, FeatureStorageConfig
from featcache.errors import StaleCacheError

CHANGED = (
    r"modules\.encoder\.weights: was .*\n  ssl of .*\n"
    r"changed since: weights of encoder: .*\noverwrite it"
)

# Fingerprint


def test_training_the_classifier_on_the_features_makes_no_cache_stale(
    storage: FeatureStorage,
) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    brain.cache_features(dataset, check=None)
    for parameter in brain.modules.encoder.parameters():
        parameter.requires_grad_(False)
    before = brain.modules.classifier.weight.clone()
    brain.fit([1], dataset, train_loader_kwargs={"batch_size": 2})
    assert not torch.equal(before, brain.modules.classifier.weight)
    brain.calls.clear()
    brain.cache_features(dataset, check=None)
    assert brain.calls == []


def test_other_weights_make_a_cache_stale(storage: FeatureStorage) -> None:
    make_brain(storage).cache_features(make_dataset())
    with pytest.raises(StaleCacheError, match=CHANGED) as caught:
        make_brain(storage, seed=1).cache_features(make_dataset())
    assert "classifier" not in str(caught.value)


def test_another_declaration_makes_a_cache_stale(storage: FeatureStorage, tmp_path: Path) -> None:
    make_brain(storage).cache_features(make_dataset())
    changed = FeatureStorage(
        storage.root, [FeatureStorageConfig("ssl"), FeatureStorageConfig("units", dtype="int32")]
    )
    with pytest.raises(
        StaleCacheError,
        match='units\\.dtype: was "int16", now "int32"\n.*' + CHANGED,
    ):
        make_brain(changed, seed=1).cache_features(make_dataset())


def test_what_the_user_gives_counts_too(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    given = {"layer": 9, "modules": None}
    view = brain.cache_features(make_dataset(), fingerprint=given, check=None)
    cache = featcache.open(view.path)
    assert cache.fingerprint["layer"] == 9
    assert cache.fingerprint["sample_rate"] == 8000
    assert cache.fingerprint["stage"] == "TRAIN"
    make_brain(storage, seed=1).cache_features(
        make_dataset(), fingerprint={"layer": 9, "modules": None}, check=None
    )
    given = {"layer": 9, "modules": None, "sample_rate": 16000}
    with pytest.raises(StaleCacheError, match=r":\n  sample_rate: was 8000, now 16000\n"):
        brain.cache_features(make_dataset(), fingerprint=given, check=None)
    with pytest.raises(StaleCacheError, match="layer: was 9, now 12"):
        brain.cache_features(make_dataset(), fingerprint={"layer": 12, "modules": None}, check=None)
