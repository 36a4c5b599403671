"""Features added to the declaration of a Brain: they are computed alone, and join the others."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speechbrain as sb
import torch
from brain_helpers import (
    HOP,
    Audio,
    EnergyAlone,
    Recipe,
    assert_holds,
    expected,
    make_brain,
    make_dataset,
)
from speechbrain.dataio.dataset import DynamicItemDataset
from torchrun import run_ranks

import featcache
from featcache import FeatureStorage, FeatureStorageConfig, unpad
from featcache.errors import ConfigError, NotACacheError, StaleCacheError

pytestmark = pytest.mark.usefixtures("quick_workers")

OLD = [FeatureStorageConfig("ssl"), FeatureStorageConfig("units", dtype="int64")]
ENERGY = FeatureStorageConfig("energy")
TRAIN = sb.Stage.TRAIN


class More(Recipe):
    """The recipe, whose code computes one more feature now."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        self.calls = [*getattr(self, "calls", []), batch.id]
        frames = batch.sig.data.unfold(1, HOP, HOP)
        features = {"ssl": self.modules.encoder(frames), "units": frames.sum(dim=2).long()}
        return unpad(batch.id, batch.frames, {**features, "energy": frames.square().sum(dim=2)})


class Louder(Recipe):
    """The recipe with one more feature, and another encoding of the others."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        frames = 2 * batch.sig.data.unfold(1, HOP, HOP)
        features = {"ssl": self.modules.encoder(frames), "units": frames.sum(dim=2).long()}
        return unpad(batch.id, batch.frames, {**features, "energy": frames.square().sum(dim=2)})


class Clipped(Recipe):
    """The recipe, with a setting that changes nothing but loud frames."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        frames = batch.sig.data.unfold(1, HOP, HOP).clamp(max=self.hparams.most)
        features = {"ssl": self.modules.encoder(frames), "units": frames.sum(dim=2).long()}
        return unpad(batch.id, batch.frames, features)


class ClippedMore(Recipe):
    """The same, with one more feature that has a setting of its own."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        frames = batch.sig.data.unfold(1, HOP, HOP).clamp(max=self.hparams.most)
        features = {"ssl": self.modules.encoder(frames), "units": frames.sum(dim=2).long()}
        energy = frames.square().sum(dim=2) + self.hparams.floor
        return unpad(batch.id, batch.frames, {**features, "energy": energy})


@pytest.fixture
def old(tmp_path: Path) -> FeatureStorage:
    """Cache the recipe's features, as they were before."""
    storage = FeatureStorage(tmp_path, OLD)
    make_brain(storage).cache_features(make_dataset(), TRAIN)
    return storage


@pytest.fixture
def new(old: FeatureStorage) -> FeatureStorage:
    return FeatureStorage(old.root, [*OLD, ENERGY])


def part_files(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in path.rglob("parts/*/*.npy")}


def assert_has_energy(cache: featcache.Cache, dataset: Any) -> None:
    assert_holds(cache, expected(make_brain(FeatureStorage("none", OLD)), dataset))
    for item in dataset:
        energy = item["sig"].reshape(-1, HOP).square().sum(dim=1).numpy()
        np.testing.assert_allclose(cache.read(item["id"], "energy"), energy, rtol=1e-5)


def test_an_added_feature_is_computed_alone(
    new: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    before = part_files(new.path("train"))
    brain, dataset = make_brain(new, More), make_dataset()
    with caplog.at_level(logging.WARNING, "featcache"):
        cache = brain.cache_features(dataset, TRAIN)
    assert cache.features == ("ssl", "units", "energy")
    assert cache.complete
    assert_has_energy(cache, dataset)
    assert before.items() <= part_files(new.path("train")).items()
    told = [each.getMessage() for each in caplog.records if each.name == "featcache"]
    assert len(told) == 1
    assert "accepted" in told[0]
    assert "More.compute_features" in told[0]


def test_the_same_call_again_computes_nothing(new: FeatureStorage) -> None:
    brain = make_brain(new, More)
    brain.cache_features(make_dataset(), TRAIN)
    audio = Audio()
    brain.calls.clear()
    cache = brain.cache_features(make_dataset(10, audio), TRAIN, check=None)
    assert (brain.calls, audio.loaded) == ([], [])
    assert len(cache) == 10
    brain.check_features(make_dataset(), TRAIN, check="all")


def test_new_utterances_get_all_features(new: FeatureStorage) -> None:
    brain, dataset = make_brain(new, More), make_dataset(13)
    brain.cache_features(make_dataset(), TRAIN)
    assert_has_energy(brain.cache_features(dataset, TRAIN), dataset)


def test_code_that_computes_the_old_features_otherwise_is_refused(new: FeatureStorage) -> None:
    brain = make_brain(new, Louder)
    with pytest.raises(StaleCacheError, match="compute_features"):
        brain.cache_features(make_dataset(), TRAIN)
    assert FeatureStorage(new.root, OLD).cache("train").features == ("ssl", "units")


def test_weights_that_changed_are_refused_whatever_is_added(new: FeatureStorage) -> None:
    with pytest.raises(StaleCacheError, match="weights"):
        make_brain(new, More, seed=1).cache_features(make_dataset(), TRAIN)


def test_a_setting_that_changed_is_refused_whatever_is_added(tmp_path: Path) -> None:
    before = make_brain(FeatureStorage(tmp_path, OLD), Clipped)
    before.hparams.most = 1e6
    before.cache_features(make_dataset(), TRAIN)
    brain = make_brain(FeatureStorage(tmp_path, [*OLD, ENERGY]), ClippedMore)
    brain.hparams.most, brain.hparams.floor = 1e5, 1.0
    with pytest.raises(StaleCacheError, match=r"hparams\.most: was[^$]*accept=True keeps"):
        brain.cache_features(make_dataset(), TRAIN)
    brain.hparams.most = 1e6  # and `floor` is new
    assert brain.cache_features(make_dataset(), TRAIN).features == ("ssl", "units", "energy")


def test_code_that_changed_is_refused_where_nothing_is_added(old: FeatureStorage) -> None:
    class Edited(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return list(super().compute_features(batch, stage))

    with pytest.raises(StaleCacheError, match="accept=True"):
        make_brain(old, Edited).cache_features(make_dataset(), TRAIN)


def test_an_overwrite_computes_all_at_once(new: FeatureStorage) -> None:
    dataset = make_dataset()
    view = make_brain(new, More).cache_features(dataset, TRAIN, overwrite=True)
    cache = featcache.open(view.path)
    assert not (cache.path / "sets").exists()
    assert_has_energy(cache, dataset)


def test_a_run_that_failed_goes_on_and_readers_wait_for_it(old: FeatureStorage) -> None:
    class Failing(EnergyAlone):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            self.calls = [*getattr(self, "calls", []), batch.id]
            self.bad = getattr(self, "bad", frozenset())  # as in the recipe
            if self.bad.intersection(batch.id):
                raise RuntimeError("no memory")
            return super().compute_features(batch, stage)

    storage, dataset = FeatureStorage(old.root, [ENERGY]), make_dataset()
    brain = make_brain(storage, Failing)
    with pytest.raises(NotACacheError):
        brain.check_features(dataset, TRAIN)
    brain.bad = frozenset(["spk/utt-7"])
    with pytest.raises(featcache.errors.ComputeError):
        brain.cache_features(dataset, TRAIN, check=None)
    assert featcache.open(old.path("train")).features == ("ssl", "units")
    assert not storage.cache("train").complete
    brain.bad, brain.calls = frozenset(), []
    brain.cache_features(dataset, TRAIN, check=None)
    assert 0 < len(brain.calls) < 10
    assert_has_energy(featcache.open(old.path("train")), dataset)


def test_a_second_brain_adds_its_features(old: FeatureStorage) -> None:
    storage, dataset = FeatureStorage(old.root, [ENERGY]), make_dataset()
    first = old.cache("train")
    mine = make_brain(storage, EnergyAlone).cache_features(dataset, TRAIN)
    assert mine.features == ("energy",)
    assert_has_energy(featcache.open(storage.path("train")), dataset)
    assert_holds(first, expected(make_brain(old), dataset))
    brain = make_brain(old)
    brain.cache_features(dataset, TRAIN)
    assert brain.cache_features(dataset, TRAIN).features == ("ssl", "units")
    both = featcache.open(storage.path("train"), expect=brain.expectation())
    assert both.features == ("ssl", "units")  # the other brain's were made from something else


def test_a_second_brain_with_the_data_set_of_another_split_is_refused(old: FeatureStorage) -> None:
    storage = FeatureStorage(old.root, [ENERGY])
    items = [{"func": Audio(), "takes": ["id", "frames"], "provides": "sig"}]
    valid = DynamicItemDataset({"v-1": {"frames": 3}}, items, ["id", "sig", "frames"])
    with pytest.raises(ConfigError, match="shares no utterance"):
        make_brain(storage, EnergyAlone).cache_features(valid, TRAIN)


def test_a_data_set_takes_features_of_all_sets(new: FeatureStorage) -> None:
    brain, dataset = make_brain(new, More), make_dataset()
    brain.cache_features(dataset, TRAIN)
    new.attach(dataset, "train", ["ssl", "energy"], expect=brain.expectation())
    dataset.set_output_keys(["id", "ssl", "energy"])
    item = dataset[0]
    assert isinstance(item["energy"], torch.Tensor)
    assert len(item["ssl"]) == len(item["energy"])


def test_on_workers_the_added_feature_is_computed_alone(new: FeatureStorage) -> None:
    dataset = make_dataset()
    parallel = {"env": "local", "n_workers": 1}
    cache = make_brain(new, More).cache_features(dataset, TRAIN, parallel=parallel)
    assert_has_energy(cache, dataset)


RANKS = """
import sys
from pathlib import Path
import speechbrain as sb
from speechbrain.utils.distributed import ddp_init_group
from brain_helpers import make_brain, make_dataset
from test_added_features import ENERGY, OLD, More
from featcache import FeatureStorage

ddp_init_group({"distributed_backend": "gloo"})
brain = make_brain(FeatureStorage(Path(sys.argv[1]), [*OLD, ENERGY]), More)
cache = brain.cache_features(make_dataset(), sb.Stage.TRAIN)
assert cache.features == ("ssl", "units", "energy") and len(cache) == 10 and cache.complete
"""


def test_ranks_share_what_is_added(new: FeatureStorage, tmp_path: Path) -> None:
    here = Path(__file__)
    paths = os.pathsep.join([str(here.parent), str(here.parents[1]), *sys.path])
    run_ranks(RANKS, tmp_path, new.root, environment={"PYTHONPATH": paths})
    assert_has_energy(new.cache("train"), make_dataset())
