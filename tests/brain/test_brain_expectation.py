"""Training scripts that read the features of a Brain, and compute none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import speechbrain as sb
import torch
from brain_helpers import make_brain, make_dataset
from speechbrain.dataio.batch import PaddedBatch

import featcache
from featcache import FeatureStorage
from featcache.errors import ConfigError, StaleCacheError
from featcache.reading import stale

OTHER_WEIGHTS = r"modules\.encoder\.weights: was"


@pytest.fixture(autouse=True)
def nothing_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale, "_compared", {})
    monkeypatch.setattr(stale, "_told", {})


def attached(storage: FeatureStorage, expect: dict[str, object]) -> Any:
    dataset = make_dataset()
    storage.attach(dataset, "train", expect=expect)
    dataset.set_output_keys(["ssl"])
    return dataset[0]["ssl"]


OPENS: list[Callable[[FeatureStorage, dict[str, object]], Any]] = [
    lambda storage, expect: featcache.open(storage.path("train"), expect=expect),
    lambda storage, expect: storage.cache("train", expect=expect),
    lambda storage, expect: storage.reader("train", "ssl", expect=expect)("spk/utt-1"),
    attached,
    lambda storage, expect: featcache.FeatureLoader(
        storage.cache("train", expect=expect), batch_size=2
    ),
    lambda storage, expect: featcache.GlobalMVN.from_cache(
        storage.cache("train", expect=expect), "ssl"
    ),
]
every_way_to_read = pytest.mark.parametrize(
    "read", OPENS, ids=["open", "cache", "reader", "attach", "loader", "mvn"]
)


@every_way_to_read
def test_features_of_other_weights_are_not_read(
    storage: FeatureStorage, read: Callable[[FeatureStorage, dict[str, object]], Any]
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset())
    assert read(storage, brain.expectation()) is not None
    assert read(storage, make_brain(storage).expectation()) is not None
    with pytest.raises(StaleCacheError, match=OTHER_WEIGHTS):
        read(storage, make_brain(storage, seed=1).expectation())


@pytest.mark.parametrize(
    "read",
    [
        lambda path: featcache.FeatureLoader(path, batch_size=2),
        lambda path: featcache.FeatureDataset(path),
        lambda path: featcache.GlobalMVN.from_cache(path, "ssl"),
        lambda path: featcache.concat(path),
        lambda path: featcache.join(path),
        lambda path: featcache.samplers.BucketBatchSampler(
            featcache.FeatureDataset(path), max_frames=100
        ),
    ],
    ids=["loader", "dataset", "mvn", "concat", "join", "sampler"],
)
def test_a_path_that_is_read_without_an_expectation_is_told_of(
    storage: FeatureStorage,
    read: Callable[[Path], Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "featcache")
    make_brain(storage).cache_features(make_dataset())
    assert "not checked" not in caplog.text
    monkeypatch.setattr(stale, "_compared", {})
    read(storage.path("train"))
    assert caplog.text.count("not checked: give expect= when you open it") == 1


def test_an_expectation_holds_for_all_splits_unless_it_names_a_stage(
    storage: FeatureStorage,
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(), sb.Stage.TRAIN)
    brain.cache_features(make_dataset(), sb.Stage.VALID)
    for split in ("train", "valid"):
        assert storage.cache(split, expect=brain.expectation()).complete
    for stage in (sb.Stage.VALID, "VALID"):
        assert storage.cache("valid", expect=brain.expectation(stage)).complete
        with pytest.raises(StaleCacheError, match=r'stage: was "TRAIN", now "VALID"'):
            storage.cache("train", expect=brain.expectation(stage))


def test_an_expectation_is_the_fingerprint_of_the_cache(storage: FeatureStorage) -> None:
    brain, given = make_brain(storage), {"layer": 9, "modules": None}
    cache = featcache.open(brain.cache_features(make_dataset(), fingerprint=given).path)
    expected = brain.expectation(sb.Stage.TRAIN, fingerprint=given)
    assert {**expected, "features": cache.fingerprint["features"]} == cache.fingerprint
    with pytest.raises(StaleCacheError, match="layer: was 9, now 12"):
        storage.cache("train", expect=brain.expectation(fingerprint={**given, "layer": 12}))


def longest_first(items: list[Any]) -> PaddedBatch:
    return PaddedBatch(sorted(items, key=lambda item: -len(item["sig"])))


def in_order(items: list[Any]) -> PaddedBatch:
    return PaddedBatch(list(items))


def test_an_expectation_knows_the_collate_function(storage: FeatureStorage) -> None:
    brain, kwargs = make_brain(storage), {"batch_size": 2, "collate_fn": longest_first}
    brain.cache_features(make_dataset(), loader_kwargs=kwargs)
    assert storage.cache("train", expect=brain.expectation(collate_fn=longest_first)).complete
    with pytest.raises(StaleCacheError, match="in_order"):
        storage.cache("train", expect=brain.expectation(collate_fn=in_order))


class Ones(featcache.EnvironmentProvider):
    def __init__(self, gain: float) -> None:
        self.gain = gain

    def build_env_local(self) -> dict[str, Any]:
        return {"dataset": [3, 4], "ids": ["a", "b"], "compute_features": self.compute}

    def compute(self, items: list[int]) -> list[dict[str, Any]]:
        return [{"id": "ab"[n - 3], "x": self.gain * torch.ones(n, 2)} for n in items]


def test_features_of_a_function_are_expected_by_its_provenance(tmp_path: Path) -> None:
    featcache.extract(Ones(1.0), tmp_path, [featcache.FeatureStorageConfig("x")], progressbar=False)
    expect = featcache.inspect.provenance(Ones(1.0).compute).fingerprint({})
    assert featcache.open(tmp_path, expect=expect).complete
    with pytest.raises(StaleCacheError, match=r"gain: was 1\.0, now 2\.0"):
        featcache.open(
            tmp_path, expect=featcache.inspect.provenance(Ones(2.0).compute).fingerprint({})
        )


def test_an_expectation_leaves_the_brain_as_it_was(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.modules.train()
    state = torch.get_rng_state()
    brain.expectation()
    assert brain.modules.encoder.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_brain_is_no_expectation_but_has_one(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset())
    with pytest.raises(ConfigError, match=r"expect is a fingerprint, a dict such as brain\.exp"):
        storage.cache("train", expect=brain)


def test_training_on_the_features_changes_no_expectation(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset())
    expect = brain.expectation()
    for parameter in brain.modules.classifier.parameters():
        parameter.data.add_(1)  # trained on the features
    assert brain.expectation() == expect
    assert storage.cache("train", expect=brain.expectation()).complete


def test_a_script_that_caches_before_it_reads_is_told_nothing(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # in a second process all is there
        monkeypatch.setattr(stale, "_compared", {})
        cache = make_brain(storage).cache_features(make_dataset())
        dataset = make_dataset()
        storage.attach(dataset, "train")
        featcache.FeatureLoader(storage.path("train"), batch_size=2)
        storage.reader("train", "ssl")(cache.ids[0])
    assert "not checked" not in caplog.text
