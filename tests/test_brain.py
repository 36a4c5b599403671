from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speechbrain as sb
import torch
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.sampler import DynamicBatchSampler
from speechbrain.utils.checkpoints import Checkpointer
from torch.utils.data import DataLoader, IterableDataset

from featcache.brain import FeatureCacheMixin
from featcache.config import FeatureStorage
from featcache.errors import ComputeError, ConfigError, DuplicateIdError, FeatureError, StaleCacheError
from featcache.feature import FeatureStorageConfig
from featcache.padding import unpad
from featcache.store.cache import Cache
from featcache.store.writer import CacheWriter

HOP = 10


class Recipe(FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
    """Computes two features with one module, and has a classifier beside it."""

    bad: frozenset[str]  # utterances that fail
    calls: list[list[str]]

    def compute_features(self, batch: Any, stage: Any) -> Any:
        self.calls = [*getattr(self, "calls", []), batch.id]
        for id in batch.id:
            if id in getattr(self, "bad", ()):
                raise ValueError(f"cannot compute {id}")
        frames = batch.sig.data.unfold(1, HOP, HOP)
        return unpad(batch.id, batch.frames, ssl=self.modules.encoder(frames), units=frames.sum(dim=2).long())

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.modules.classifier(self.modules.encoder(batch.sig.data.unfold(1, HOP, HOP)))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return predictions.mean()

    def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
        self.stages = [*getattr(self, "stages", []), stage]


class RecipeTheOtherWayRound(sb.Brain, FeatureCacheMixin):  # type: ignore[misc]
    compute_features = Recipe.compute_features


class Audio:
    """Gives the signal of an utterance, and remembers what was asked for."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.missing: set[str] = set()

    def __call__(self, id: str, frames: int) -> torch.Tensor:
        self.loaded.append(id)
        if id in self.missing:
            raise FileNotFoundError(f"no audio of {id}")
        number = int(id.rsplit("-", 1)[1])
        return torch.from_numpy(np.random.default_rng(number).normal(size=frames * HOP).astype(np.float32))


def make_dataset(utterances: int = 10, audio: Audio | None = None) -> Any:
    data = {f"spk/utt-{number}": {"frames": 3 + number % 4} for number in range(utterances)}
    items = [{"func": audio or Audio(), "takes": ["id", "frames"], "provides": "sig"}]
    return DynamicItemDataset(data, items, ["id", "sig", "frames"])


@pytest.fixture
def storage(tmp_path: Path) -> FeatureStorage:
    features = [FeatureStorageConfig("ssl"), FeatureStorageConfig("units", dtype="int16")]
    return FeatureStorage(tmp_path / "features", features)


def make_brain(storage: FeatureStorage, cls: Any = Recipe, seed: int = 0, **run_opts: Any) -> Any:
    torch.manual_seed(seed)
    encoder = torch.nn.Sequential(torch.nn.Linear(HOP, 4), torch.nn.Dropout(0.5))
    modules = {"encoder": encoder, "classifier": torch.nn.Linear(4, 2)}
    hparams = {"feature_storage": storage, "sample_rate": 8000}
    return cls(
        modules,
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        hparams=hparams,
        run_opts={"device": "cpu", "noprogressbar": True, **run_opts},
    )


def expected(brain: Any, dataset: Any) -> dict[str, dict[str, Any]]:
    """What each utterance's features are, computed one by one."""
    found = {}
    for item in dataset:
        frames = item["sig"].reshape(-1, HOP)
        weight = brain.modules.encoder[0]
        found[item["id"]] = {
            "ssl": torch.nn.functional.linear(frames, weight.weight, weight.bias).detach().numpy(),
            "units": frames.sum(dim=1).long().numpy(),
        }
    return found


def assert_holds(cache: Cache, utterances: dict[str, dict[str, Any]]) -> None:
    assert sorted(cache) == sorted(utterances)
    for id, arrays in utterances.items():
        np.testing.assert_allclose(cache[id]["ssl"], arrays["ssl"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(cache[id]["units"], arrays["units"])


def failures(storage: FeatureStorage, split: str = "train") -> list[dict[str, Any]]:
    path = storage.path(split) / "failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# The usual run


@pytest.mark.parametrize("cls", [Recipe, RecipeTheOtherWayRound])
@pytest.mark.parametrize("loader_kwargs", [None, {"batch_size": 4}, {"batch_size": 4, "num_workers": 2}])
def test_one_call_caches_a_split_whole(storage: FeatureStorage, cls: Any, loader_kwargs: dict[str, Any] | None) -> None:
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
    cache = brain.cache_features(make_dataset(1), None if stage is None else sb.Stage[stage], split=split)
    assert cache.path == storage.path(path)
    assert stages == [sb.Stage[seen]]


def test_what_is_cached_is_not_loaded_again(storage: FeatureStorage) -> None:
    audio = Audio()
    brain = make_brain(storage)
    brain.cache_features(make_dataset(4, audio))
    audio.loaded.clear()
    dataset = make_dataset(10, audio)
    cache = brain.cache_features(dataset, loader_kwargs={"batch_size": 4})
    assert audio.loaded == [f"spk/utt-{number}" for number in range(4, 10)]
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))


def test_a_complete_cache_returns_at_once_even_while_it_is_locked(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    made = brain.cache_features(make_dataset())
    brain.calls.clear()
    audio = Audio()
    dataset = make_dataset(10, audio)
    with CacheWriter(
        storage.path("train"), storage.features, {k: v for k, v in made.fingerprint.items() if k != "features"}
    ):
        cache = brain.cache_features(dataset)
    assert (audio.loaded, brain.calls) == ([], [])
    assert len(cache) == 10


def test_a_subset_of_a_complete_cache_is_complete(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset())
    brain.calls.clear()
    assert len(brain.cache_features(make_dataset(3))) == 10
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
    cache = brain.cache_features(dataset, loader_kwargs=loader_kwargs)
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
def test_modules_are_evaluated_and_get_their_modes_back(storage: FeatureStorage, bad: frozenset[str]) -> None:
    class Watching(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            parts = [*self.modules.modules(), self.hparams.dropout]
            self.seen = [torch.is_grad_enabled(), not self.modules.adapter.merged, *(part.training for part in parts)]
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
    assert brain.cache_features(make_dataset(1)).fingerprint["precision"] == "fp32"
    assert brain.dtype == torch.float32
    brain = make_brain(storage, Watching, eval_precision="bf16")
    with pytest.raises(StaleCacheError, match='precision: was "fp32", now "bf16"'):
        brain.cache_features(make_dataset(1))
    brain.cache_features(make_dataset(1), overwrite=True)
    assert brain.dtype == torch.bfloat16


# Fingerprint


def test_training_the_classifier_on_the_features_makes_no_cache_stale(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    brain.cache_features(dataset)
    for parameter in brain.modules.encoder.parameters():
        parameter.requires_grad_(False)
    before = brain.modules.classifier.weight.clone()
    brain.fit([1], dataset, train_loader_kwargs={"batch_size": 2})
    assert not torch.equal(before, brain.modules.classifier.weight)
    brain.calls.clear()
    brain.cache_features(dataset)
    assert brain.calls == []


def test_other_weights_make_a_cache_stale(storage: FeatureStorage) -> None:
    make_brain(storage).cache_features(make_dataset())
    with pytest.raises(StaleCacheError, match=r"modules\.encoder\.weights: was .*\noverwrite it") as caught:
        make_brain(storage, seed=1).cache_features(make_dataset())
    assert "classifier" not in str(caught.value)


def test_another_declaration_makes_a_cache_stale(storage: FeatureStorage, tmp_path: Path) -> None:
    make_brain(storage).cache_features(make_dataset())
    changed = FeatureStorage(storage.root, [FeatureStorageConfig("ssl"), FeatureStorageConfig("units", dtype="int32")])
    with pytest.raises(
        StaleCacheError, match=r'features\.units\.dtype: was "int16", now "int32"\n.*weights.*\noverwrite'
    ):
        make_brain(changed, seed=1).cache_features(make_dataset())


def test_what_the_user_gives_counts_too(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    cache = brain.cache_features(make_dataset(), fingerprint={"layer": 9, "modules": None})
    assert cache.fingerprint["layer"] == 9
    assert cache.fingerprint["sample_rate"] == 8000
    assert cache.fingerprint["stage"] == "TRAIN"
    make_brain(storage, seed=1).cache_features(make_dataset(), fingerprint={"layer": 9, "modules": None})
    given = {"layer": 9, "modules": None, "sample_rate": 16000}
    with pytest.raises(StaleCacheError, match=r":\n  sample_rate: was 8000, now 16000\n"):
        brain.cache_features(make_dataset(), fingerprint=given)
    with pytest.raises(StaleCacheError, match="layer: was 9, now 12"):
        brain.cache_features(make_dataset(), fingerprint={"layer": 12, "modules": None})


# Storage


def test_the_storage_is_found_in_hparams_or_given(storage: FeatureStorage, tmp_path: Path) -> None:
    brain = make_brain(storage)
    brain.hparams.other = FeatureStorage(tmp_path / "other", storage.features)
    with pytest.raises(ConfigError, match="several: 'feature_storage', 'other'"):
        brain.cache_features(make_dataset(1))
    brain.hparams.other = brain.hparams.feature_storage
    assert len(brain.cache_features(make_dataset(1))) == 1
    del brain.hparams.other, brain.hparams.feature_storage
    with pytest.raises(ConfigError, match="none among sample_rate"):
        brain.cache_features(make_dataset(1))
    del brain.hparams
    with pytest.raises(ConfigError, match="none among none"):
        brain.cache_features(make_dataset(1))
    assert len(brain.cache_features(make_dataset(1), split="other", storage=storage)) == 1


# Stopping and going on


def test_a_run_that_fails_keeps_what_it_has_and_the_next_one_goes_on(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    brain.bad = frozenset(["spk/utt-5"])
    with pytest.raises(
        ComputeError, match=r"'spk/utt-4', 'spk/utt-5'.* ValueError: cannot compute spk/utt-5"
    ) as caught:
        brain.cache_features(dataset, loader_kwargs={"batch_size": 2})
    assert isinstance(caught.value.__cause__, ValueError)
    assert "4 of 10 utterances are in cache" in caught.value.__notes__[0]
    cache = storage.cache("train")
    assert (len(cache), cache.complete) == (4, False)
    brain.bad = frozenset()
    brain.calls.clear()
    cache = brain.cache_features(dataset, loader_kwargs={"batch_size": 2})
    assert [id for batch in brain.calls for id in batch] == [f"spk/utt-{number}" for number in range(4, 10)]
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))


def test_ctrl_c_keeps_what_was_written_and_says_how_to_go_on(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupted(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            if batch.id == ["spk/utt-3"]:
                raise KeyboardInterrupt
            return super().compute_features(batch, stage)

    brain = make_brain(storage, Interrupted)
    with caplog.at_level(logging.WARNING, "featcache"), pytest.raises(KeyboardInterrupt):
        brain.cache_features(make_dataset())
    assert "stopped: 3 of 10 utterances are in cache" in caplog.text
    assert "goes on from there" in caplog.text
    cache = storage.cache("train")
    assert (len(cache), cache.complete) == (3, False)


def test_resume_false_computes_an_incomplete_cache_from_the_start(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(["spk/utt-5"])
    with pytest.raises(ComputeError):
        brain.cache_features(make_dataset())
    brain.bad = frozenset()
    brain.calls.clear()
    cache = brain.cache_features(make_dataset(), resume=False)
    assert len(brain.calls) == 10
    assert cache.complete
    brain.cache_features(make_dataset(), resume=False)
    assert len(brain.calls) == 10
    other = make_brain(storage, seed=1)
    assert other.cache_features(make_dataset(), resume=False, overwrite=True).complete


def test_the_old_cache_stays_until_an_overwrite_is_through(storage: FeatureStorage) -> None:
    old, new = make_brain(storage), make_brain(storage, seed=1)
    dataset = make_dataset()
    old.cache_features(dataset)
    new.bad = frozenset(["spk/utt-5"])
    with pytest.raises(ComputeError) as caught:
        new.cache_features(dataset, overwrite=True)
    assert "is as it was" in caught.value.__notes__[0]
    assert storage.cache("train").complete
    assert_holds(storage.cache("train"), expected(old, dataset))
    new.bad = frozenset()
    new.calls.clear()
    assert_holds(new.cache_features(dataset, overwrite=True), expected(new, dataset))
    assert len(new.calls) == 5


def test_a_debug_run_caches_a_few_batches_as_incomplete(storage: FeatureStorage) -> None:
    brain = make_brain(storage, debug=True, debug_batches=2)
    brain.step = 1
    cache = brain.cache_features(make_dataset(), loader_kwargs={"batch_size": 3})
    assert (len(cache), cache.complete) == (6, False)
    assert make_brain(storage).cache_features(make_dataset(6)).complete
    cache = make_brain(storage).cache_features(make_dataset())
    assert (len(cache), cache.complete) == (10, True)
    brain.cache_features(make_dataset(), overwrite=True)
    assert storage.cache("train").complete


# Failures


@pytest.mark.parametrize("workers", [0, 2])
def test_failing_utterances_are_skipped_recorded_and_tried_again(storage: FeatureStorage, workers: int) -> None:
    audio = Audio()
    brain, dataset = make_brain(storage), make_dataset(10, audio)
    brain.bad = frozenset(["spk/utt-2"])
    audio.missing = {"spk/utt-7"}
    loader_kwargs = {"batch_size": 4, "num_workers": workers}
    cache = brain.cache_features(dataset, loader_kwargs=loader_kwargs, on_error="skip")
    assert (len(cache), cache.complete) == (8, False)
    assert [(line["id"], line["type"], line["error"]) for line in failures(storage)] == [
        ("spk/utt-2", "ValueError", "cannot compute spk/utt-2"),
        ("spk/utt-7", "FileNotFoundError", "no audio of spk/utt-7"),
    ]
    assert "compute_features" in failures(storage)[0]["traceback"]
    brain.bad = frozenset()
    cache = brain.cache_features(dataset, loader_kwargs=loader_kwargs, on_error="skip")
    assert [line["id"] for line in failures(storage)] == ["spk/utt-7"]
    audio.missing = set()
    cache = brain.cache_features(dataset, loader_kwargs=loader_kwargs, on_error="skip")
    assert cache.complete
    assert not (cache.path / "failures.jsonl").exists()
    assert_holds(cache, expected(brain, dataset))


def test_a_batch_that_fails_as_a_whole_is_computed_one_by_one(storage: FeatureStorage) -> None:
    class SmallMemory(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            if len(batch.id) > 1:
                raise MemoryError
            return super().compute_features(batch, stage)

    brain, dataset = make_brain(storage, SmallMemory), make_dataset()
    cache = brain.cache_features(dataset, loader_kwargs={"batch_size": 4}, on_error="skip")
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))


def test_an_error_names_the_first_ten_of_a_batch(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(["spk/utt-3"])
    with pytest.raises(ComputeError, match=r"'spk/utt-9' and 2 more failed with ValueError: cannot compute spk/utt-3"):
        brain.cache_features(make_dataset(12), loader_kwargs={"batch_size": 12})


def test_a_loading_error_names_the_batch(storage: FeatureStorage) -> None:
    audio = Audio()
    audio.missing = {"spk/utt-3"}
    with pytest.raises(ComputeError, match="'spk/utt-2', 'spk/utt-3' failed with FileNotFoundError: no audio"):
        make_brain(storage).cache_features(make_dataset(10, audio), loader_kwargs={"batch_size": 2})


def test_arrays_that_cannot_be_stored_are_an_error_or_a_recorded_failure(storage: FeatureStorage) -> None:
    class Broken(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            utterances = super().compute_features(batch, stage)
            for utterance in utterances:
                if utterance["id"] == "spk/utt-1":
                    utterance["ssl"] = utterance["ssl"] / 0
            return utterances

    brain = make_brain(storage, Broken)
    with pytest.raises(FeatureError, match=r"utterance 'spk/utt-1', feature 'ssl'.*not finite"):
        brain.cache_features(make_dataset())
    cache = brain.cache_features(make_dataset(), loader_kwargs={"batch_size": 4}, on_error="skip")
    assert len(cache) == 9
    assert [line["id"] for line in failures(storage)] == ["spk/utt-1"]


def test_when_every_utterance_fails_it_is_an_error_also_when_failures_are_skipped(storage: FeatureStorage) -> None:
    class Misspelt(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return [{"id": id, "sll": torch.zeros(1), "units": torch.zeros(1)} for id in batch.id]

    with pytest.raises(FeatureError, match=r"'sll' is not declared; did you mean 'ssl'\?"):
        make_brain(storage, Misspelt).cache_features(make_dataset())
    with pytest.raises(ComputeError, match=r"all 10 utterances failed.*'spk/utt-0' with FeatureError: .*'sll'"):
        make_brain(storage, Misspelt).cache_features(make_dataset(), on_error="skip")
    assert len(failures(storage)) == 10


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "list of dicts, one per utterance, not None"),
        ([3], "dicts with the key 'id', not of 'int'"),
        ([{"ssl": 1}], r"dicts with the key 'id', not of \['ssl'\]"),
        ([{"id": "spk/utt-0"}], "0 dicts for 'spk/utt-1' instead of one"),
        ([{"id": "spk/utt-0"}, {"id": "spk/utt-1"}, {"id": "spk/utt-1"}], "2 dicts for 'spk/utt-1'"),
        ([{"id": "spk/utt-0"}, {"id": "spk/utt-2"}], "'spk/utt-2', which is not in the batch"),
    ],
)
def test_a_result_that_does_not_fit_the_batch_is_refused(storage: FeatureStorage, result: Any, message: str) -> None:
    class Wrong(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return result

    with pytest.raises(ComputeError, match=message):
        make_brain(storage, Wrong).cache_features(make_dataset(), loader_kwargs={"batch_size": 2})


def test_compute_features_may_be_a_generator(storage: FeatureStorage) -> None:
    class Lazy(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            for utterance in super().compute_features(batch, stage):
                assert not torch.is_grad_enabled()
                yield utterance

    assert len(make_brain(storage, Lazy).cache_features(make_dataset())) == 10


def test_a_class_without_compute_features_says_so(storage: FeatureStorage) -> None:
    class Empty(FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
        pass

    with pytest.raises(ComputeError, match=r"Empty has to define compute_features\(batch, stage\)"):
        make_brain(storage, Empty).cache_features(make_dataset())


def test_on_error_is_raise_or_skip(storage: FeatureStorage) -> None:
    with pytest.raises(ConfigError, match="'raise' or 'skip', not 'ignore'"):
        make_brain(storage).cache_features(make_dataset(), on_error="ignore")


# Other sources


def test_a_given_loader_is_used_as_it_is(storage: FeatureStorage) -> None:
    audio = Audio()
    brain, dataset = make_brain(storage), make_dataset(10, audio)
    order = [7, 1, 3, 0, 9, 2, 4, 5, 6, 8]
    loader = DataLoader(dataset, batch_size=3, sampler=order, collate_fn=PaddedBatch)
    brain.bad = frozenset(["spk/utt-4"])
    with pytest.raises(ComputeError):
        brain.cache_features(loader)
    assert brain.calls[0] == ["spk/utt-7", "spk/utt-1", "spk/utt-3"]
    brain.bad = frozenset()
    brain.calls.clear()
    cache = brain.cache_features(loader)
    assert brain.calls == [["spk/utt-4", "spk/utt-5", "spk/utt-6"], ["spk/utt-8"]]
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))
    audio.loaded.clear()
    brain.cache_features(loader)
    assert audio.loaded == []


def test_of_a_batch_of_which_some_is_cached_the_rest_is_written(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    brain.cache_features(make_dataset(4))
    cache = brain.cache_features(DataLoader(dataset, batch_size=3, collate_fn=PaddedBatch))
    assert brain.calls[4:] == [[f"spk/utt-{number}" for number in batch] for batch in ([3, 4, 5], [6, 7, 8], [9])]
    assert_holds(cache, expected(brain, dataset))


class Hidden:
    """A map-style dataset that does not show its ids."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def test_a_dataset_that_hides_its_ids_is_skipped_batch_by_batch(storage: FeatureStorage) -> None:
    audio = Audio()
    brain, dataset = make_brain(storage), make_dataset(10, audio)
    brain.cache_features(make_dataset(5))
    brain.calls.clear()
    cache = brain.cache_features(Hidden(dataset), loader_kwargs={"batch_size": 2, "collate_fn": PaddedBatch})
    assert brain.calls == [[f"spk/utt-{number}", f"spk/utt-{number + 1}"] for number in (4, 6, 8)]
    assert len(audio.loaded) == 10
    assert_holds(cache, expected(brain, dataset))
    audio.loaded.clear()
    assert brain.cache_features(Hidden(dataset)).complete
    assert audio.loaded == []


def test_an_utterance_that_a_dataset_gives_twice_is_an_error(storage: FeatureStorage) -> None:
    dataset = make_dataset().overfit_test(3, 5)
    with pytest.raises(DuplicateIdError, match="'spk/utt-0' was given twice: as number 0 and as number 3"):
        make_brain(storage).cache_features(dataset)


def test_batches_are_moved_to_the_device(storage: FeatureStorage) -> None:
    class Watching(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            assert batch.sig.data.device.type == "meta"
            return [{"id": id, "ssl": torch.zeros(1, 4), "units": torch.zeros(1).long()} for id in batch.id]

    brain = make_brain(storage, Watching)
    brain.device = "meta"
    assert len(brain.cache_features(make_dataset())) == 10


def test_a_worker_that_dies_ends_the_run_also_when_failures_are_skipped(storage: FeatureStorage) -> None:
    class Deadly(Audio):
        def __call__(self, id: str, frames: int) -> torch.Tensor:
            if id == "spk/utt-5":
                os._exit(1)
            return super().__call__(id, frames)

    brain = make_brain(storage)
    kwargs = {"num_workers": 1, "batch_size": 2}
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        brain.cache_features(make_dataset(10, Deadly()), loader_kwargs=kwargs, on_error="skip")
    assert not storage.cache("train").complete
    assert brain.cache_features(make_dataset()).complete


def test_a_failing_batch_of_a_given_loader_is_recorded_whole(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(["spk/utt-4"])
    loader = DataLoader(make_dataset(), batch_size=3, collate_fn=PaddedBatch)
    cache = brain.cache_features(loader, on_error="skip")
    assert (len(cache), cache.complete) == (7, False)
    assert [line["id"] for line in failures(storage)] == ["spk/utt-3", "spk/utt-4", "spk/utt-5"]


def test_an_utterance_that_a_loader_gives_twice_is_an_error(storage: FeatureStorage) -> None:
    loader = DataLoader(make_dataset(), sampler=[0, 1, 0], collate_fn=PaddedBatch)
    with pytest.raises(DuplicateIdError, match="'spk/utt-0' was given twice: as number 0 and as number 2"):
        make_brain(storage).cache_features(loader)


class Stream(IterableDataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset_ = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset_)


def test_an_iterable_dataset_is_skipped_batch_by_batch(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    brain.cache_features(Stream(make_dataset(4)), loader_kwargs={"batch_size": 2, "collate_fn": PaddedBatch})
    brain.cache_features(dataset)
    kwargs = {"batch_size": 4, "collate_fn": PaddedBatch, "shuffle": True}
    for overwrite, batches in [(False, 0), (True, 3)]:
        brain.calls.clear()
        assert_holds(
            brain.cache_features(Stream(dataset), loader_kwargs=kwargs, overwrite=overwrite), expected(brain, dataset)
        )
        assert len(brain.calls) == batches


def test_batch_samplers_keep_their_batches_less_what_is_done(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    lengths = [3 + number % 4 for number in range(10)]
    sampler = DynamicBatchSampler(
        dataset, 12, num_buckets=3, lengths_list=lengths, shuffle=True, batch_ordering="descending"
    )
    batches = [[f"spk/utt-{index}" for index in batch] for batch in sampler]
    brain.cache_features(make_dataset(3))
    brain.calls.clear()
    cache = brain.cache_features(dataset, loader_kwargs={"batch_sampler": sampler})
    rest = [[id for id in batch if int(id[-1]) > 2] for batch in batches]
    assert brain.calls == [batch for batch in rest if batch]
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))


def test_a_sampler_that_leaves_utterances_out_leaves_the_cache_incomplete(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"sampler": [5, 3, 1], "batch_size": 2}
    brain = make_brain(storage)
    cache = brain.cache_features(make_dataset(), loader_kwargs=kwargs)
    assert brain.calls == [["spk/utt-5", "spk/utt-3"], ["spk/utt-1"]]
    assert (len(cache), cache.complete) == (3, False)
    assert "7 utterances were not in the given sampler" in caplog.text
    kwargs["sampler"] = [5, 4, 3, 2]
    brain.cache_features(make_dataset(), loader_kwargs=kwargs)
    assert brain.calls[2:] == [["spk/utt-4", "spk/utt-2"]]


def test_utterances_come_singly_without_a_batch_size(storage: FeatureStorage) -> None:
    class Single(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            if batch["id"] == "spk/utt-3":
                raise ValueError
            frames = batch["sig"].reshape(-1, HOP)
            return [{"id": batch["id"], "ssl": self.modules.encoder(frames), "units": frames.sum(dim=1).long()}]

    brain, dataset = make_brain(storage, Single), make_dataset()
    kwargs = {"batch_size": None, "collate_fn": dict}
    cache = brain.cache_features(dataset, loader_kwargs=kwargs, on_error="skip")
    assert len(cache) == 9
    assert [line["id"] for line in failures(storage)] == ["spk/utt-3"]


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
            return [{"id": id, "ssl": torch.zeros(1, 4), "units": torch.zeros(1).long()} for id in batch.id]

    extractor = Extractor()
    assert extractor.cache_features(make_dataset(), split="valid", storage=storage, progressbar=False).complete
    assert extractor.training


def test_any_object_with_modules_and_a_device_will_do(tmp_path: Path) -> None:
    code = f"""if True:
        import sys, torch, featcache.brain
        from featcache import FeatureStorage, FeatureStorageConfig
        from featcache.padding import unpad

        class Set(torch.utils.data.Dataset):
            ids = ["a", "b", "c"]
            def __len__(self): return 3
            def __getitem__(self, index): return {{"id": self.ids[index], "x": torch.full((4, 2), float(index))}}

        class Extractor(featcache.brain.FeatureCacheMixin):
            device = "cpu"
            modules = {{"double": torch.nn.Linear(2, 1, bias=False)}}
            def compute_features(self, batch, stage):
                assert stage == "valid", stage
                return unpad(batch["id"], [4] * len(batch["id"]), y=self.modules["double"](batch["x"]))

        storage = FeatureStorage({str(tmp_path)!r}, [FeatureStorageConfig("y")])
        extractor = Extractor()
        torch.nn.init.constant_(extractor.modules["double"].weight, 2)
        cache = extractor.cache_features(
            Set(), split="valid", storage=storage, loader_kwargs={{"batch_size": 2}}, progressbar=False
        )
        assert cache.complete
        assert cache.read("c", "y").tolist() == [[8.0]] * 4
        assert extractor.modules["double"].training
        assert "speechbrain" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True)
