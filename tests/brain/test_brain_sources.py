"""What `cache_features` takes: datasets, samplers and loaders of every kind."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from brain_helpers import (
    COLLATED,
    HOP,
    Audio,
    Hidden,
    Recipe,
    Stream,
    assert_holds,
    expected,
    failures,
    make_brain,
    make_dataset,
)
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.sampler import DynamicBatchSampler
from torch.utils.data import DataLoader

from featcache import FeatureStorage
from featcache.errors import ComputeError, DuplicateIdError

# Other sources


def test_a_given_loader_is_used_as_it_is(storage: FeatureStorage) -> None:
    audio = Audio()
    brain, dataset = make_brain(storage), make_dataset(10, audio)
    order = [7, 1, 3, 0, 9, 2, 4, 5, 6, 8]
    loader = DataLoader(dataset, batch_size=3, sampler=order, collate_fn=PaddedBatch)
    brain.bad = frozenset(["spk/utt-4"])
    with pytest.raises(ComputeError):
        brain.cache_features(loader, check=None)
    assert brain.calls[0] == ["spk/utt-7", "spk/utt-1", "spk/utt-3"]
    brain.bad = frozenset()
    brain.calls.clear()
    cache = brain.cache_features(loader, check=None)
    assert brain.calls == [["spk/utt-4", "spk/utt-5", "spk/utt-6"], ["spk/utt-8"]]
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))
    audio.loaded.clear()
    brain.cache_features(loader, check=None)
    assert audio.loaded == []


def test_of_a_batch_of_which_some_is_cached_the_rest_is_written(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    brain.cache_features(make_dataset(4), check=None)
    cache = brain.cache_features(
        DataLoader(dataset, batch_size=3, collate_fn=PaddedBatch), check=None
    )
    assert brain.calls[4:] == [
        [f"spk/utt-{number}" for number in batch] for batch in ([3, 4, 5], [6, 7, 8], [9])
    ]
    assert_holds(cache, expected(brain, dataset))


def test_a_dataset_that_hides_its_ids_is_skipped_batch_by_batch(storage: FeatureStorage) -> None:
    audio = Audio()
    brain, dataset = make_brain(storage), make_dataset(10, audio)
    brain.cache_features(make_dataset(5))
    brain.calls.clear()
    cache = brain.cache_features(Hidden(dataset), loader_kwargs=COLLATED)
    assert brain.calls == [["spk/utt-5", "spk/utt-6"], ["spk/utt-7", "spk/utt-8"], ["spk/utt-9"]]
    assert len(audio.loaded) == 10 + 5  # all of them for their ids, then those that were missing
    assert_holds(cache, expected(brain, dataset))
    audio.loaded.clear()
    brain.calls.clear()
    assert brain.cache_features(Hidden(dataset)).complete
    assert (len(audio.loaded), brain.calls) == (10, [])  # its ids are seen no other way


def test_an_utterance_that_a_dataset_gives_twice_is_an_error(storage: FeatureStorage) -> None:
    dataset = make_dataset().overfit_test(3, 5)
    with pytest.raises(
        DuplicateIdError, match="'spk/utt-0' was given twice: as number 0 and as number 3"
    ):
        make_brain(storage).cache_features(dataset)


def test_batches_are_moved_to_the_device(storage: FeatureStorage) -> None:
    class Watching(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            assert batch.sig.data.device.type == "meta"
            return [
                {"id": id, "ssl": torch.zeros(1, 4), "units": torch.zeros(1).long()}
                for id in batch.id
            ]

    brain = make_brain(storage, Watching)
    brain.device = "meta"
    assert len(brain.cache_features(make_dataset())) == 10


class Deadly(Audio):
    def __call__(self, id: str, frames: int) -> torch.Tensor:
        if id == "spk/utt-5":
            os._exit(1)
        return super().__call__(id, frames)


# torch raises in a handler of signals, in the middle of whatever runs: hypothesis's callback of the
# garbage collector, say, where the error is lost; then the loader finds the worker gone
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_ends_the_run_also_when_failures_are_skipped(
    storage: FeatureStorage,
) -> None:
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
    assert (len(cache), cache.complete) == (7, True)
    assert [line["id"] for line in failures(storage)] == ["spk/utt-3", "spk/utt-4", "spk/utt-5"]


def test_an_utterance_that_a_loader_gives_twice_is_an_error(storage: FeatureStorage) -> None:
    loader = DataLoader(make_dataset(), sampler=[0, 1, 0], collate_fn=PaddedBatch)
    with pytest.raises(
        DuplicateIdError, match="'spk/utt-0' was given twice: as number 0 and as number 2"
    ):
        make_brain(storage).cache_features(loader)


def test_an_iterable_dataset_is_skipped_batch_by_batch(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    brain.cache_features(Stream(make_dataset(4)), loader_kwargs=COLLATED)
    brain.cache_features(dataset)
    kwargs = {"batch_size": 4, "collate_fn": PaddedBatch, "shuffle": True}
    for overwrite, batches in [(False, 0), (True, 3)]:
        brain.calls.clear()
        assert_holds(
            brain.cache_features(Stream(dataset), loader_kwargs=kwargs, overwrite=overwrite),
            expected(brain, dataset),
        )
        assert len(brain.calls) == batches


def test_batch_samplers_keep_their_batches_less_what_is_done(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    lengths = [3 + number % 4 for number in range(10)]
    sampler = DynamicBatchSampler(
        dataset, 12, num_buckets=3, lengths_list=lengths, shuffle=True, batch_ordering="descending"
    )
    batches = [[f"spk/utt-{index}" for index in batch] for batch in sampler]
    brain.cache_features(make_dataset(3), check=None)
    brain.calls.clear()
    cache = brain.cache_features(dataset, loader_kwargs={"batch_sampler": sampler}, check=None)
    rest = [[id for id in batch if int(id[-1]) > 2] for batch in batches]
    assert brain.calls == [batch for batch in rest if batch]
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))


def test_a_sampler_that_leaves_utterances_out_leaves_the_cache_incomplete(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"sampler": [5, 3, 1], "batch_size": 2}
    brain = make_brain(storage)
    cache = brain.cache_features(make_dataset(), loader_kwargs=kwargs, check=None)
    assert brain.calls == [["spk/utt-5", "spk/utt-3"], ["spk/utt-1"]]
    assert (len(cache), cache.complete) == (3, False)
    assert "7 utterances were not in the given sampler" in caplog.text
    kwargs["sampler"] = [5, 4, 3, 2]
    brain.cache_features(make_dataset(), loader_kwargs=kwargs, check=None)
    assert brain.calls[2:] == [["spk/utt-4", "spk/utt-2"]]


def test_utterances_come_singly_without_a_batch_size(storage: FeatureStorage) -> None:
    class Single(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            if batch["id"] == "spk/utt-3":
                raise ValueError
            frames = batch["sig"].reshape(-1, HOP)
            return [
                {
                    "id": batch["id"],
                    "ssl": self.modules.encoder(frames),
                    "units": frames.sum(dim=1).long(),
                }
            ]

    brain, dataset = make_brain(storage, Single), make_dataset()
    kwargs = {"batch_size": None, "collate_fn": dict}
    cache = brain.cache_features(dataset, loader_kwargs=kwargs, on_error="skip")
    assert len(cache) == 9
    assert [line["id"] for line in failures(storage)] == ["spk/utt-3"]
