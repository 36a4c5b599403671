"""Batches of a cache as SpeechBrain's `PaddedBatch`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speechbrain.dataio.batch import PaddedBatch, PaddedData
from speechbrain.dataio.dataloader import SaveableDataLoader
from torch.utils.data import DataLoader
from training_helpers import make_training_cache

import featcache
from featcache import FeatureDataset, FeatureLoader
from featcache.interop.speechbrain import padded_batch


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return make_training_cache(tmp_path_factory.mktemp("features") / "train")


def batches_in(cache: featcache.Cache, way: str) -> Any:
    indices = [[0, 5, 7], [3], [22, 1]]
    if way == "loader":
        return FeatureLoader(cache, batch_sampler=indices, collate=padded_batch)
    workers = {"saveable-with-2-workers": 2}.get(way, 0)
    make: Any = DataLoader if way == "torch" else SaveableDataLoader
    return make(
        FeatureDataset(cache), batch_sampler=indices, collate_fn=padded_batch, num_workers=workers
    )


@pytest.mark.parametrize("way", ["loader", "torch", "saveable", "saveable-with-2-workers"])
def test_a_batch_is_what_speechbrain_makes_of_the_same_utterances(
    cache: featcache.Cache, way: str
) -> None:
    dataset = FeatureDataset(cache)
    seen = 0
    for batch, indices in zip(batches_in(cache, way), [[0, 5, 7], [3], [22, 1]], strict=True):
        items = [
            {key: value for key, value in dataset[i].items() if not key.endswith("_lengths")}
            for i in indices
        ]
        theirs = PaddedBatch(items)
        assert type(batch) is PaddedBatch
        assert batch.id == batch["id"] == theirs.id
        assert len(batch) == batch.batchsize == len(indices)
        for feature in ("fbank", "units", "speaker"):
            ours, padded = batch[feature], theirs[feature]
            assert isinstance(ours, PaddedData)
            torch.testing.assert_close(ours.data, padded.data, rtol=0, atol=0)
            torch.testing.assert_close(ours.lengths, padded.lengths)
        assert [type(value) for value in batch] == [type(value) for value in theirs]
        seen += 1
    assert seen == 3


def test_the_tensor_of_a_batch_is_not_copied(cache: featcache.Cache) -> None:
    given = FeatureDataset(cache).__getitems__([0, 5, 7])
    made = padded_batch(given)
    for feature in ("fbank", "units", "speaker"):
        assert made[feature].data is given[feature]


def test_relative_lengths_give_the_frames_back() -> None:
    for longest in (1, 7, 999, 3001, 59_999):
        frames = torch.arange(longest + 1)
        batch = padded_batch(
            {"id": ["a"] * len(frames), "x": torch.empty(len(frames), longest), "x_lengths": frames}
        )
        assert batch.x.lengths.dtype == torch.float32
        assert torch.equal(torch.round(batch.x.lengths * longest).long(), frames)


def test_a_batch_without_any_frame_has_lengths_of_zero() -> None:
    batch = padded_batch(
        {
            "id": ["a", "b"],
            "x": torch.empty(2, 0, 4),
            "x_lengths": torch.zeros(2, dtype=torch.int64),
        }
    )
    assert batch.x.lengths.tolist() == [0, 0]


def test_numbers_and_other_things_of_a_transform_stay(cache: featcache.Cache) -> None:
    def with_labels(item: dict[str, Any], rng: object) -> dict[str, Any]:
        return {**item, "digit": int(item["id"][4:]), "gain": 0.5, "words": ["a", "word"]}

    loader = FeatureLoader(
        cache, "fbank", batch_sampler=[[2, 4]], transform=with_labels, collate=padded_batch
    )
    (batch,) = loader
    batch = batch.to("meta")
    assert (batch.id, batch.words) == (["utt-02", "utt-04"], [["a", "word"], ["a", "word"]])
    assert (batch.digit.dtype, batch.gain.dtype) == (torch.int64, torch.float32)
    for tensor in (batch.digit, batch.gain, *batch.fbank):
        assert tensor.device.type == "meta"


@pytest.mark.parametrize("layout", ["packed", "jagged"])
def test_features_without_padding_stay_as_they_are(cache: featcache.Cache, layout: str) -> None:
    indices = [[0, 5, 7]]
    (given,) = FeatureLoader(cache, batch_sampler=indices, layout=layout)
    (batch,) = FeatureLoader(cache, batch_sampler=indices, layout=layout, collate=padded_batch)
    assert type(batch) is PaddedBatch
    torch.testing.assert_close(batch.fbank_lengths, given["fbank_lengths"])
    for feature in ("fbank", "units"):
        ours, plain = batch[feature], given[feature]
        assert isinstance(ours, torch.Tensor)
        if layout == "jagged":
            ours, plain = ours.values(), plain.values()
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    if layout == "packed":
        assert batch.to("meta").fbank_cu_seqlens.device.type == "meta"
