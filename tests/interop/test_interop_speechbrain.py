"""Batches of a cache as SpeechBrain's `PaddedBatch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speechbrain.dataio.batch import PaddedBatch, PaddedData
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.processing.features import InputNormalization
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.parameter_transfer import Pretrainer
from torch.utils.data import DataLoader
from training_helpers import make_training_cache

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.interop.speechbrain import padded_batch, save_normalizer


@pytest.mark.parametrize("way", ["_load", "Pretrainer", "Checkpointer"])
def test_a_normaliser_of_a_cache_is_one_that_saw_all_data(tmp_path: Path, way: str) -> None:
    draw = np.random.default_rng(3)
    frames = [draw.standard_normal((n, 4)).astype(np.float32) * 3 + 50 for n in (5, 9, 2, 7)]
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        for number, array in enumerate(frames):
            writer.write(f"utt-{number}", {"fbank": array})
    saw_all = InputNormalization()
    lengths = torch.tensor([len(array) / 9 for array in frames])
    batch = torch.nn.utils.rnn.pad_sequence([*map(torch.from_numpy, frames)], batch_first=True)
    saw_all(batch, lengths, epoch=0)

    path = tmp_path / "normalizer.ckpt"
    save_normalizer(tmp_path / "cache", "fbank", path)
    norm = InputNormalization(update_until_epoch=-1)
    if way == "_load":
        norm._load(path)
    elif way == "Pretrainer":
        loads = Pretrainer(tmp_path / "in", {"normalizer": norm}, {"normalizer": str(path)})
        loads.collect_files()
        loads.load_collected()
    else:
        saver = Checkpointer(tmp_path / "saved", {"normalizer": norm})
        folder = saver.save_checkpoint().path
        (folder / "normalizer.ckpt").write_bytes(path.read_bytes())
        saver.recover_if_possible()
    assert norm.count == saw_all.count == sum(map(len, frames))
    for epoch in (1, 2):  # in training, too: nothing is updated
        torch.testing.assert_close(
            norm.train()(batch, lengths, epoch=epoch), saw_all.eval()(batch, lengths)
        )
    every = norm.eval()(torch.from_numpy(np.concatenate(frames))[None])
    torch.testing.assert_close(every.mean(1), torch.zeros(1, 4), atol=1e-5, rtol=0)
    assert every.dtype == torch.float32


def test_a_normaliser_is_of_the_utterances_of_a_view(tmp_path: Path) -> None:
    cache = make_training_cache(tmp_path / "cache")
    save_normalizer(cache.select([3, 4]), "fbank", tmp_path / "view.ckpt")
    norm = InputNormalization()
    norm._load(tmp_path / "view.ckpt")
    seen = np.concatenate([cache.read(f"utt-0{number}", "fbank") for number in (3, 4)])
    assert norm.count == len(seen)
    torch.testing.assert_close(norm.glob_mean, torch.from_numpy(seen.mean(0)))
    with CacheWriter(tmp_path / "part", [FeatureStorageConfig("x")]) as writer:
        writer.write("a", {"x": np.ones((1, 2), np.float32)})
        writer.close(complete=False)
    with pytest.raises(featcache.errors.IncompleteError):
        save_normalizer(tmp_path / "part", "x", tmp_path / "part.ckpt")
    save_normalizer(tmp_path / "part", "x", tmp_path / "part.ckpt", allow_incomplete=True)


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


def test_arrays_of_numpy_are_padded_data_as_tensors_are(cache: featcache.Cache) -> None:
    how: dict[str, Any] = {"batch_sampler": [[0, 5, 7]], "collate": padded_batch}
    (theirs,) = FeatureLoader(cache, **how)
    (ours,) = FeatureLoader(cache, arrays="numpy", **how)
    assert [type(value) for value in ours] == [type(value) for value in theirs]
    for feature in ("fbank", "units", "speaker"):
        assert torch.equal(ours[feature].data, theirs[feature].data)
        assert torch.equal(ours[feature].lengths, theirs[feature].lengths)


def test_a_packed_batch_has_as_many_utterances_as_ids(cache: featcache.Cache) -> None:
    def id_last(item: dict[str, Any], rng: object) -> dict[str, Any]:
        return {**{key: value for key, value in item.items() if key != "id"}, "id": item["id"]}

    how: dict[str, Any] = {"layout": "packed", "transform": id_last, "collate": padded_batch}
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=[[0, 5, 7]], **how)
    assert len(batch) == len(batch.id) == 3


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
