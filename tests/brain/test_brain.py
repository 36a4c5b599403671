"""`cache_features` of a Brain: the usual run, where its storage comes from, what it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import speechbrain as sb
import torch
from brain_helpers import (
    Audio,
    Recipe,
    RecipeTheOtherWayRound,
    assert_holds,
    expected,
    make_brain,
    make_dataset,
)
from speechbrain.utils.checkpoints import Checkpointer

import featcache
from featcache import CacheWriter, FeatureCacheMixin, FeatureStorage
from featcache.errors import ComputeError, ConfigError, StaleCacheError

# The usual run


@pytest.mark.parametrize("cls", [Recipe, RecipeTheOtherWayRound])
@pytest.mark.parametrize(
    "loader_kwargs", [None, {"batch_size": 4}, {"batch_size": 4, "num_workers": 2}]
)
def test_one_call_caches_a_split_whole(
    storage: FeatureStorage, cls: Any, loader_kwargs: dict[str, Any] | None
) -> None:
    brain, dataset = make_brain(storage, cls), make_dataset()
    cache = brain.cache_features(dataset, loader_kwargs=loader_kwargs)
    assert cache.complete
    assert cache.path == storage.path("train")
    assert_holds(cache, expected(brain, dataset))
    assert cache.stats("ssl").count == sum(3 + number % 4 for number in range(10))


@pytest.mark.parametrize(
    ("stage", "split", "path", "seen"),
    [
        (None, None, "train", "TRAIN"),
        ("VALID", None, "valid", "VALID"),
        ("TEST", "test-clean", "test-clean", "TEST"),
        (None, "dev-other", "dev-other", "VALID"),
        (None, "test-clean", "test-clean", "TEST"),
        (None, "Test-other", "Test-other", "TEST"),
        (None, "unlabelled", "unlabelled", "TRAIN"),
    ],
)
def test_split_and_stage_default_to_each_other(
    storage: FeatureStorage, stage: str | None, split: str | None, path: str, seen: str
) -> None:
    brain = make_brain(storage)
    stages = []
    compute = Recipe.compute_features

    class Watching(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            stages.append(stage)
            return compute(self, batch, stage)

    brain.__class__ = Watching
    cache = brain.cache_features(
        make_dataset(1), None if stage is None else sb.Stage[stage], split=split, check=None
    )
    assert cache.path == storage.path(path)
    assert stages == [sb.Stage[seen]]


@pytest.mark.parametrize("name", ["valid", "VALID", "Valid"])
def test_a_stage_by_name_is_the_stage(storage: FeatureStorage, name: str) -> None:
    seen = []

    class Watching(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            seen.append(stage)
            return super().compute_features(batch, stage)

    brain, dataset = make_brain(storage, Watching), make_dataset(3)
    table = brain.cache_features(dataset, name)
    assert set(seen) == {sb.Stage.VALID}
    assert table.path == storage.path("valid")
    again = brain.cache_features(dataset, sb.Stage.VALID)  # one and the same
    assert featcache.open(again.path).generation == featcache.open(table.path).generation
    brain.check_features(dataset, name)
    storage.cache("valid", expect=brain.expectation(name))


def test_what_is_cached_is_not_loaded_again(storage: FeatureStorage) -> None:
    audio = Audio()
    brain = make_brain(storage)
    brain.cache_features(make_dataset(4, audio), check=None)
    audio.loaded.clear()
    dataset = make_dataset(10, audio)
    cache = brain.cache_features(dataset, loader_kwargs={"batch_size": 4}, check=None)
    assert audio.loaded == [f"spk/utt-{number}" for number in range(4, 10)]
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))


def test_a_complete_cache_returns_at_once_even_while_it_is_locked(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    made = featcache.open(brain.cache_features(make_dataset(), check=None).path)
    brain.calls.clear()
    audio = Audio()
    dataset = make_dataset(10, audio)
    with CacheWriter(
        storage.path("train"),
        storage.features,
        {k: v for k, v in made.fingerprint.items() if k != "features"},
    ):
        cache = brain.cache_features(dataset, check=None)
    assert (audio.loaded, brain.calls) == ([], [])
    assert len(cache) == 10


def test_a_subset_of_a_complete_cache_is_complete(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(), check=None)
    brain.calls.clear()
    view = brain.cache_features(make_dataset(3), check=None)
    assert (len(view), len(featcache.open(view.path)), view.complete) == (3, 10, True)
    assert brain.calls == []


def test_neither_hooks_nor_checkpoints_nor_the_callers_arguments_are_touched(
    storage: FeatureStorage, tmp_path: Path
) -> None:
    brain = make_brain(storage)
    brain.checkpointer = Checkpointer(tmp_path / "save")
    brain.step = 7
    loader_kwargs = {
        "batch_size": 4,
        "shuffle": True,
        "drop_last": True,
        "ckpt_prefix": None,
        "looped_nominal_epoch": 1,
    }
    given = dict(loader_kwargs)
    dataset = make_dataset()
    cache = brain.cache_features(dataset, loader_kwargs=loader_kwargs, check=None)
    assert len(cache) == 10
    assert brain.calls[0] == [f"spk/utt-{number}" for number in range(4)]
    assert not hasattr(brain, "stages")
    assert brain.checkpointer.recoverables == {}
    assert brain.step == 7
    assert brain.train_sampler is None
    assert loader_kwargs == given
    assert all("id" not in item for item in dataset.data.values())


class Merging(torch.nn.Module):
    """Merges something into its weights for evaluation, as adapters do."""

    merged = False

    def train(self, mode: bool = True) -> Any:
        self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("bad", [frozenset(), frozenset(["spk/utt-2"])])
def test_modules_are_evaluated_and_get_their_modes_back(
    storage: FeatureStorage, bad: frozenset[str]
) -> None:
    class Watching(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            parts = [*self.modules.modules(), self.hparams.dropout]
            self.seen = [
                torch.is_grad_enabled(),
                not self.modules.adapter.merged,
                *(part.training for part in parts),
            ]
            return super().compute_features(batch, stage)

    brain = make_brain(storage, Watching)
    brain.bad = bad
    brain.modules["adapter"] = Merging()
    brain.hparams.dropout = torch.nn.Dropout(0.5)
    brain.modules.train()
    brain.modules.encoder[0].eval()  # a frozen part
    before = [part.training for part in brain.modules.modules()]
    if bad:
        with pytest.raises(ComputeError):
            brain.cache_features(make_dataset())
    else:
        brain.cache_features(make_dataset())
    assert not any(brain.seen)
    assert brain.hparams.dropout.training
    assert not brain.modules.adapter.merged
    assert [part.training for part in brain.modules.modules()] == before
    assert torch.is_grad_enabled()


def test_the_precision_of_evaluation_is_used_and_remembered(storage: FeatureStorage) -> None:
    class Watching(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            utterances = super().compute_features(batch, stage)
            self.dtype = utterances[0]["ssl"].dtype
            return utterances

    brain = make_brain(storage, Watching, precision="bf16", eval_precision="fp32")
    view = brain.cache_features(make_dataset(1))
    assert featcache.open(view.path).fingerprint["precision"] == "fp32"
    assert brain.dtype == torch.float32
    brain = make_brain(storage, Watching, eval_precision="bf16")
    with pytest.raises(StaleCacheError, match='precision: was "fp32", now "bf16"'):
        brain.cache_features(make_dataset(1))
    brain.cache_features(make_dataset(1), overwrite=True)
    assert brain.dtype == torch.bfloat16


# Storage


def test_the_storage_is_found_in_hparams_or_given(storage: FeatureStorage, tmp_path: Path) -> None:
    brain = make_brain(storage)
    brain.hparams.other = FeatureStorage(tmp_path / "other", storage.features)
    with pytest.raises(ConfigError, match="several: 'feature_storage', 'other'"):
        brain.cache_features(make_dataset(1))
    brain.hparams.other = brain.hparams.feature_storage
    assert len(brain.cache_features(make_dataset(1))) == 1
    del brain.hparams.other, brain.hparams.feature_storage
    with pytest.raises(ConfigError, match="they have none, only 'sample_rate'"):
        brain.cache_features(make_dataset(1))
    del brain.hparams
    with pytest.raises(ConfigError, match="there are no hparams"):
        brain.cache_features(make_dataset(1))
    assert len(brain.cache_features(make_dataset(1), split="other", storage=storage)) == 1


# Progress


def test_progress_shows_utterances_and_megabytes_per_second(
    storage: FeatureStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(4), progressbar=True)
    shown = capsys.readouterr().err
    assert "caching train: 100%" in shown
    assert "4/4" in shown
    assert "MB/s" in shown
    brain.cache_features(make_dataset(6))
    assert capsys.readouterr().err == ""


# Not a Brain


def test_an_extractor_may_be_a_module(storage: FeatureStorage) -> None:
    class Extractor(FeatureCacheMixin, torch.nn.Module):
        device = "cpu"

        def compute_features(self, batch: Any, stage: Any) -> Any:
            assert stage == "valid"
            assert not self.training
            return [
                {"id": id, "ssl": torch.zeros(1, 4), "units": torch.zeros(1).long()}
                for id in batch.id
            ]

    extractor = Extractor()
    assert extractor.cache_features(
        make_dataset(), split="valid", storage=storage, progressbar=False
    ).complete
    assert extractor.training


def test_any_object_with_modules_and_a_device_will_do(tmp_path: Path) -> None:
    code = f"""if True:
        import sys, torch
        from featcache import FeatureCacheMixin, FeatureStorage, FeatureStorageConfig, unpad

        class Set(torch.utils.data.Dataset):
            ids = ["a", "b", "c"]
            def __len__(self): return 3
            def __getitem__(self, index):
                return {{"id": self.ids[index], "x": torch.full((4, 2), float(index))}}

        class Extractor(FeatureCacheMixin):
            device = "cpu"
            modules = {{"double": torch.nn.Linear(2, 1, bias=False)}}
            def compute_features(self, batch, stage):
                assert stage == "valid", stage
                y = self.modules["double"](batch["x"])
                return unpad(batch["id"], [4] * len(batch["id"]), {{"y": y}})

        storage = FeatureStorage({str(tmp_path)!r}, [FeatureStorageConfig("y")])
        extractor = Extractor()
        torch.nn.init.constant_(extractor.modules["double"].weight, 2)
        cache = extractor.cache_features(
            Set(), split="valid", storage=storage, loader_kwargs={{"batch_size": 2}},
            progressbar=False,
        )
        assert cache.complete
        assert cache.read("c", "y").tolist() == [[8.0]] * 4
        assert extractor.modules["double"].training
        assert "speechbrain" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True)
