"""The probe of a cache: a few utterances are computed again, whatever the fingerprint says."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brain_helpers import HOP, Audio, Recipe, assert_holds, expected, make_brain, make_dataset
from parallel_helpers import LOCAL, ONE_WORKER

import featcache
from featcache import FeatureStorage, FeatureStorageConfig, unpad
from featcache.errors import ComputeError, ConfigError, NotACacheError, StaleCacheError
from featcache.extraction.checking import read_probe
from featcache.extraction.computation import DatasetBatches, Loading
from featcache.format import read_manifest


class Gained(Recipe):
    """Reads what no fingerprint sees."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        found = super().compute_features(batch, stage)
        gain = float(os.environ.get("PROBE_GAIN", "1"))
        return [{**each, "ssl": np.asarray(each["ssl"]) * gain} for each in found]


class Louder(Audio):
    """Audio that has changed on disk."""

    def __call__(self, id: str, frames: int) -> torch.Tensor:
        return super().__call__(id, frames) * 1.5


@pytest.fixture
def gained(storage: FeatureStorage, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A brain with a cache, and a gain that has changed since in the environment."""
    brain = make_brain(storage, Gained)
    brain.cache_features(make_dataset(20))
    monkeypatch.setenv("PROBE_GAIN", "1.5")
    return brain


def test_what_is_computed_otherwise_now_is_refused_by_name_and_amount(gained: Any) -> None:
    with pytest.raises(StaleCacheError) as refused:
        gained.cache_features(make_dataset(20))
    text = str(refused.value)
    assert "ssl of 'spk/utt-" in text
    assert "computed again, differs by" in text
    assert "of its spread" in text
    assert "overwrite=True" in text
    assert "units" not in text


def test_a_cache_that_lacks_some_is_refused_too_and_none_are_added(gained: Any) -> None:
    with pytest.raises(StaleCacheError, match="computed again"):
        gained.cache_features(make_dataset(30))
    assert len(gained.hparams.feature_storage.cache("train")) == 20


def test_an_overwrite_computes_it_anew_and_is_checked_by_its_own_probe(
    gained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gained.cache_features(make_dataset(20), overwrite=True)
    gained.cache_features(make_dataset(20))
    monkeypatch.delenv("PROBE_GAIN")
    with pytest.raises(StaleCacheError, match="computed again"):
        gained.cache_features(make_dataset(20))


def test_an_interrupted_overwrite_is_not_gone_on_with_otherwise(
    gained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gained.bad = frozenset(["spk/utt-19"])
    with pytest.raises(ComputeError):
        gained.cache_features(make_dataset(20), overwrite=True)
    gained.bad = frozenset()
    monkeypatch.delenv("PROBE_GAIN")
    # all is computed again, what was left of it included
    assert gained.cache_features(make_dataset(20), overwrite=True, check="all").complete
    gained.cache_features(make_dataset(20), check="all")


def test_a_killed_first_run_is_not_gone_on_with_otherwise(
    storage: FeatureStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    brain = make_brain(storage, Gained)
    brain.bad = frozenset(["spk/utt-19"])
    with pytest.raises(ComputeError):
        brain.cache_features(make_dataset(20))
    brain.bad = frozenset()
    monkeypatch.setenv("PROBE_GAIN", "1.5")
    with pytest.raises(StaleCacheError, match="computed again"):
        brain.cache_features(make_dataset(20))
    assert brain.cache_features(make_dataset(20), resume=False).complete


def first_of(number: int, start: int = 0) -> Any:
    """Return a data set of `number` utterances of 40, from `start` on."""
    ids = make_dataset(40).data_ids[start : start + number]
    return make_dataset(40).filtered_sorted(key_test={"id": lambda id: id in ids})


def test_a_part_of_the_data_set_is_compared_with_what_is_stored(
    storage: FeatureStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    brain = make_brain(storage, Gained)
    brain.cache_features(first_of(40))
    path = storage.path("train")
    probed = read_probe(path, read_manifest(path), building=False)
    assert probed is not None
    start = next(n for n in range(40) if first_of(1, n).data_ids[0] not in probed.utterances)
    brain.cache_features(first_of(1, start))
    monkeypatch.setenv("PROBE_GAIN", "1.5")
    with pytest.raises(StaleCacheError, match="stored otherwise"):
        brain.cache_features(first_of(1, start))


def test_appended_utterances_get_a_probe_of_their_own(
    storage: FeatureStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage, Gained)
    brain.cache_features(first_of(10))
    with caplog.at_level(logging.WARNING, "featcache"):
        brain.cache_features(first_of(10, 20), append=True)
    assert "nothing yet of this data set by which it could be checked" in caplog.text
    monkeypatch.setenv("PROBE_GAIN", "1.5")
    for start in (0, 20):
        with pytest.raises(StaleCacheError, match="computed again"):
            brain.cache_features(first_of(10, start))


def test_without_a_check_what_is_stored_is_served(gained: Any) -> None:
    assert len(gained.cache_features(make_dataset(20), check=None)) == 20


def test_changed_audio_is_told_as_an_input(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(20))
    with pytest.raises(StaleCacheError, match=r"input 'sig' of 'spk/utt-\d+' is another"):
        brain.cache_features(make_dataset(20, Louder()))


def test_check_features_compares_and_writes_nothing(gained: Any) -> None:
    storage = gained.hparams.feature_storage
    before = {path: path.read_bytes() for path in storage.root.rglob("*") if path.is_file()}
    with pytest.raises(StaleCacheError, match="computed again"):
        gained.check_features(make_dataset(20))
    os.environ["PROBE_GAIN"] = "1"
    gained.check_features(make_dataset(20))
    gained.check_features(make_dataset(20), check="all")
    with pytest.raises(StaleCacheError, match=r'model: was \(absent\), now "b"'):
        gained.check_features(make_dataset(20), fingerprint={"model": "b"})
    with pytest.raises(NotACacheError):
        gained.check_features(make_dataset(20), split="valid")
    after = {path: path.read_bytes() for path in storage.root.rglob("*") if path.is_file()}
    assert after == before


def test_another_fingerprint_is_told_with_what_is_computed_now(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(20), fingerprint={"version": 1})
    with pytest.raises(StaleCacheError) as same:
        brain.cache_features(make_dataset(20), fingerprint={"version": 2})
    assert "version: was 1, now 2" in str(same.value)
    assert "4 utterances computed again: all the same to the bit" in str(same.value)
    with torch.no_grad():
        brain.modules.encoder[0].weight *= 2
    with pytest.raises(StaleCacheError) as other:
        brain.cache_features(make_dataset(20), fingerprint={"version": 1})
    assert "modules.encoder" in str(other.value)
    assert "ssl of 'spk/utt-" in str(other.value)


def test_the_probe_is_the_shortest_the_median_and_others_by_their_ids(
    storage: FeatureStorage,
) -> None:
    brain, audio = make_brain(storage), Audio()
    brain.cache_features(make_dataset(20, audio))
    probe = list(dict.fromkeys(audio.loaded[:8]))
    audio.loaded.clear()
    brain.check_features(make_dataset(20, audio))
    assert sorted(audio.loaded) == sorted(probe)
    assert len(probe) == 4
    audio.loaded.clear()
    brain.cache_features(make_dataset(20, audio), check=7)
    assert len(set(audio.loaded)) == 7
    assert set(probe) < set(audio.loaded)


def test_an_utterance_that_fails_is_no_probe(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(f"spk/utt-{number}" for number in range(17))
    cache = brain.cache_features(make_dataset(20), on_error="skip")
    assert len(cache) == 3
    brain.bad = frozenset()
    with torch.no_grad():
        brain.modules.encoder[0].weight *= 2
    with pytest.raises(StaleCacheError, match=r"ssl of 'spk/utt-1[789]'"):
        brain.check_features(make_dataset(20))


def test_a_cache_of_which_all_has_failed_gets_a_probe_when_it_is_tried_again(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(make_dataset(5).data_ids)
    with pytest.raises(ComputeError, match="all 5 utterances failed"):
        brain.cache_features(make_dataset(5), on_error="skip")
    brain.bad = frozenset()
    caplog.clear()
    brain.cache_features(make_dataset(5))
    assert "without a probe" not in caplog.text
    path = storage.path("train")
    assert read_probe(path, read_manifest(path), building=False) is not None


def test_audio_that_is_gone_is_logged_and_code_that_fails_is_an_error(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain, audio = make_brain(storage), Audio()
    brain.cache_features(make_dataset(20))
    audio.missing = {f"spk/utt-{number}" for number in range(20)}
    assert brain.cache_features(make_dataset(20, audio)).complete
    assert "cannot be loaded any more: FileNotFoundError" in caplog.text
    brain.bad = audio.missing
    with pytest.raises(ComputeError, match="now fail with ValueError"):
        brain.cache_features(make_dataset(20))


@pytest.mark.parametrize("check", ["probes", 0, -1, 1.5, True])
def test_what_is_no_number_of_utterances_is_refused(storage: FeatureStorage, check: Any) -> None:
    with pytest.raises(ConfigError, match="check"):
        make_brain(storage).cache_features(make_dataset(), check=check)


def test_a_data_set_without_items_by_id_is_told_once(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(make_dataset(5))

    brain = make_brain(storage)
    for _ in range(2):
        brain.cache_features(Stream(), loader_kwargs={"collate_fn": one_item, "batch_size": 1})
    assert caplog.text.count("none are computed again") == 1


def one_item(items: list[Any]) -> Any:
    from speechbrain.dataio.batch import PaddedBatch

    return PaddedBatch(items)


# Workers


class Elsewhere(Recipe):
    """Computes with a factor that the main process alone knows."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        here = os.getpid() == self.hparams.main
        found = super().compute_features(batch, stage)
        return found if here else [{**each, "ssl": each["ssl"] * 2} for each in found]


@pytest.mark.usefixtures("quick_workers")
def test_workers_in_another_state_are_told(storage: FeatureStorage) -> None:
    brain = make_brain(storage, Elsewhere)
    brain.hparams.main = os.getpid()
    with pytest.warns(UserWarning, match=r"4 of 4 utterances are stored otherwise.*Workers"):
        brain.cache_features(make_dataset(12), parallel=ONE_WORKER)


@pytest.mark.usefixtures("quick_workers")
def test_a_cache_that_workers_made_is_checked_in_silence(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(12), parallel=ONE_WORKER, check="all")
    brain.cache_features(make_dataset(12))


# What is stored


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"backend": "lilcom", "options": {"tick_power": 0}},
        {"codec": "int8"},
        {"backend": "zarr", "codec": "zstd"},
    ],
)
def test_what_was_declared_to_be_lost_is_no_difference(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    features = [FeatureStorageConfig("ssl", **config), FeatureStorageConfig("units", "int16")]
    storage = FeatureStorage(tmp_path, features)
    make_brain(storage).cache_features(make_dataset(20), check="all")


class Drifting(Recipe):
    """Keeps a state from one utterance to the next, once the probe has been computed."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        found = super().compute_features(batch, stage)
        factor = 1 if self.count <= 8 else 2
        return [{**each, "ssl": each["ssl"] * factor} for each in found]


def test_what_changes_while_it_is_computed_is_told(storage: FeatureStorage) -> None:
    with pytest.warns(UserWarning, match="changed while they were computed"):
        make_brain(storage, Drifting).cache_features(make_dataset(12))


def test_a_later_check_of_all_refuses_what_one_utterance_has_otherwise(
    storage: FeatureStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    brain = make_brain(storage, OneGained)
    brain.cache_features(make_dataset(40))
    monkeypatch.setenv("PROBE_ODD", "spk/utt-3")
    brain.check_features(make_dataset(40))
    with pytest.raises(StaleCacheError, match=r"1 of 40 utterances.*'spk/utt-3'"):
        brain.check_features(make_dataset(40), check="all")


class OneGained(Recipe):
    def compute_features(self, batch: Any, stage: Any) -> Any:
        found = super().compute_features(batch, stage)
        odd = os.environ.get("PROBE_ODD")
        return [{**each, "ssl": each["ssl"] * 2} if each["id"] == odd else each for each in found]


# Random features


class Dithered(Recipe):
    """Adds noise of all three generators; in workers, threads of Dask draw from Python's, too."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        noise = torch.randn(batch.sig.data.shape) + np.random.random()
        if not getattr(self.hparams, "on_workers", False):
            noise += random.random()
        frames = (batch.sig.data + noise).unfold(1, HOP, HOP)
        units = frames.sum(dim=2).long()
        return unpad(batch.id, batch.frames, {"ssl": self.modules.encoder(frames), "units": units})


class NoisyAudio(Audio):
    def __call__(self, id: str, frames: int) -> torch.Tensor:
        return super().__call__(id, frames) + torch.randn(frames * HOP)


def stored(cache: Any) -> dict[str, Any]:
    return {id: {name: array.tobytes() for name, array in cache[id].items()} for id in cache}


RUNS: list[dict[str, Any]] = [
    {"loader_kwargs": {"batch_size": 4, "num_workers": 2}},
    {"loader_kwargs": {"batch_sampler": [[7, 3, 1], [0, 2, 4, 5], [6, 8, 9, 10, 11]]}},
    {"parallel": LOCAL},
]


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("cls", "audio"), [(Dithered, Audio), (Recipe, NoisyAudio)])
def test_random_features_are_the_same_whoever_computes_them_in_any_order(
    tmp_path: Path, cls: Any, audio: Any, run: dict[str, Any]
) -> None:
    caches = []
    for place, settings in (("a", {}), ("b", run)):
        features = [FeatureStorageConfig("ssl"), FeatureStorageConfig("units", dtype="int16")]
        brain = make_brain(FeatureStorage(tmp_path / place, features), cls, seed=5)
        brain.hparams.on_workers = "parallel" in run
        cache = brain.cache_features(make_dataset(12, audio()), check="all", **settings)
        assert featcache.open(cache.path).fingerprint["seed"] == 5
        caches.append(stored(cache))
    assert caches[0] == caches[1]


def test_random_features_are_resumed_as_they_began_and_their_seed_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features = [FeatureStorageConfig("ssl"), FeatureStorageConfig("units", dtype="int16")]
    whole = make_brain(FeatureStorage(tmp_path / "a", features), Dithered)
    one = whole.cache_features(make_dataset(12))
    assert "features are random: ssl of 'spk/utt-" in caplog.text
    assert torch.initial_seed() == 0
    stopped = make_brain(FeatureStorage(tmp_path / "b", features), Dithered)
    stopped.cache_features(make_dataset(5))
    other = stopped.cache_features(make_dataset(12), check=None)
    assert stored(one) == stored(other)
    torch.manual_seed(1)
    with pytest.raises(StaleCacheError, match="seed: was 0, now 1"):
        whole.cache_features(make_dataset(12))


class Counting(Recipe):
    """Differs each time, whatever the seed."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        found = super().compute_features(batch, stage)
        return [{**each, "ssl": each["ssl"] + self.count} for each in found]


def test_features_that_no_seed_repeats_are_said_to_be_unchecked(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage, Counting)
    view = brain.cache_features(make_dataset(12))
    assert "seed" not in featcache.open(view.path).fingerprint
    assert "even from the same seed" in caplog.text
    brain.cache_features(make_dataset(12))


def test_the_features_of_a_brain_are_what_they_were_without_the_probe(
    storage: FeatureStorage,
) -> None:
    brain, dataset = make_brain(storage), make_dataset(20)
    assert_holds(
        brain.cache_features(dataset, loader_kwargs={"batch_size": 6}), expected(brain, dataset)
    )
    seeded = DatasetBatches(dataset, [3, 1], {"batch_size": 2}, dataset.data_ids, Loading(seed=3))
    assert [batch.ids for batch in seeded] == [["spk/utt-3"], ["spk/utt-1"]]
