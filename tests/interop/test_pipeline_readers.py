"""Cached features in SpeechBrain's dynamic-item pipelines, loaders and samplers."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.sampler import DynamicBatchSampler

import featcache
from featcache.errors import (
    ConfigError,
    KeyNotFoundError,
    NotACacheError,
    StaleCacheError,
    UnknownNameError,
)

FRAMES = {f"utt-{number:02d}": 3 + number * 7 % 11 for number in range(24)}


def fbank_of(id: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(int(id[-2:])).standard_normal((FRAMES[id], 5), np.float32)


def units_of(id: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(int(id[-2:])).integers(0, 100, FRAMES[id])


@pytest.fixture
def storage(tmp_path: Path) -> featcache.FeatureStorage:
    fbank = featcache.FeatureStorageConfig("fbank", backend="hdf5")
    units = featcache.FeatureStorageConfig("units", dtype="uint8", backend="memmap")
    storage = featcache.FeatureStorage(tmp_path / "features", [fbank, units])
    with storage.writer("train") as writer:
        for id in reversed(FRAMES):
            writer.write(id, {"fbank": fbank_of(id), "units": units_of(id)})
    return storage


@pytest.fixture
def dataset() -> DynamicItemDataset:
    data = {id: {"duration": float(length)} for id, length in FRAMES.items()}
    return DynamicItemDataset(data, output_keys=["id"])


def assert_batches_hold_everything_once(loader: SaveableDataLoader) -> None:
    seen = []
    for batch in loader:
        for row, id in enumerate(batch.id):
            length = round(float(batch.fbank.lengths[row]) * batch.fbank.data.shape[1])
            np.testing.assert_array_equal(batch.fbank.data[row, :length].numpy(), fbank_of(id))
            np.testing.assert_array_equal(batch.units.data[row, :length].numpy(), units_of(id))
            seen.append(id)
    assert sorted(seen) == sorted(FRAMES)


def test_use_says_which_features_come_from_the_cache(
    storage: featcache.FeatureStorage, dataset: DynamicItemDataset, tmp_path: Path
) -> None:
    dataset.add_dynamic_item(lambda id: "computed", takes="id", provides="fbank")
    nowhere = featcache.FeatureStorage(tmp_path / "nowhere", storage.features)
    nowhere.attach(dataset, "train", use=False, dtypes={"fbank": "float32"}, missing="skip")
    storage.attach(dataset, "train", use=["units"])
    dataset.set_output_keys(["id", "fbank", "units"])
    assert dataset[1]["fbank"] == "computed"
    np.testing.assert_array_equal(dataset[1]["units"], units_of("utt-01"))
    with pytest.raises(ConfigError, match=r"key 'fbank' already.*use=False"):
        storage.attach(dataset, "train", "fbank", use=True)
    with pytest.raises(ConfigError, match="use names a feature 'units' that is not attached"):
        storage.attach(dataset, "train", "fbank", use="units")
    with pytest.raises(UnknownNameError, match="'unist' is not declared"):
        storage.attach(dataset, "train", use="unist")


@pytest.mark.parametrize("context", [None, "fork", "forkserver"])
def test_a_loader_gets_cached_features_in_process_and_in_workers(
    storage: featcache.FeatureStorage, dataset: DynamicItemDataset, context: str | None
) -> None:
    storage.attach(dataset, "train")
    dataset.set_output_keys(["id", "fbank", "units"])
    _ = dataset[0]  # opened in the parent before the workers start
    workers = {"num_workers": 2, "multiprocessing_context": context} if context else {}
    loader = sb_loader(dataset, batch_size=5, **workers)
    assert_batches_hold_everything_once(loader)
    np.testing.assert_array_equal(dataset[3]["fbank"], fbank_of("utt-03"))  # and still open after


def sb_loader(dataset: DynamicItemDataset, **kwargs: Any) -> SaveableDataLoader:
    from speechbrain.dataio.dataloader import make_dataloader

    return make_dataloader(dataset, **kwargs)


def test_a_reader_from_yaml_provides_a_key_by_id(
    storage: featcache.FeatureStorage, dataset: DynamicItemDataset
) -> None:
    text = f"reader: !new:featcache.FeatureReader {{path: {storage.path('train')}, feature: fbank}}"
    dataset.add_dynamic_item(load_hyperpyyaml(text)["reader"], takes="id", provides="fbank")
    dataset.set_output_keys(["fbank"])
    np.testing.assert_array_equal(dataset[7]["fbank"], fbank_of("utt-07"))


def test_a_sorted_and_filtered_dataset_reads_and_leaves_the_original_readable(
    storage: featcache.FeatureStorage, dataset: DynamicItemDataset
) -> None:
    storage.attach(dataset, "train")
    dataset.set_output_keys(["id", "fbank"])
    before = dataset[2]["fbank"]
    short = dataset.filtered_sorted(sort_key="duration", key_max_value={"duration": 6})
    for item in (short[number] for number in range(len(short))):
        np.testing.assert_array_equal(item["fbank"], fbank_of(item["id"]))
    np.testing.assert_array_equal(dataset[2]["fbank"], before)


def test_lengths_make_the_batches_of_a_dynamic_batch_sampler(
    storage: featcache.FeatureStorage, dataset: DynamicItemDataset
) -> None:
    storage.attach(dataset, "train")
    ordered = dataset.filtered_sorted(sort_key="duration")
    ordered.set_output_keys(["id", "fbank", "units"])
    lengths = storage.reader("train", "fbank").lengths(ordered.data_ids)
    assert lengths == [FRAMES[id] for id in ordered.data_ids]
    sampler = DynamicBatchSampler(ordered, max_batch_length=40, num_buckets=3, lengths_list=lengths)
    loader = sb_loader(ordered, batch_sampler=sampler)
    assert_batches_hold_everything_once(loader)
    assert all(batch.fbank.data.shape[0] * batch.fbank.data.shape[1] <= 40 for batch in loader)


def test_copies_of_a_reader_open_the_cache_for_themselves(
    storage: featcache.FeatureStorage,
) -> None:
    reader = storage.reader("train", "units")
    assert reader._opened is None  # costs nothing before the first call
    expected = reader("utt-05")
    for other in (copy.deepcopy(reader), copy.copy(reader), pickle.loads(pickle.dumps(reader))):  # noqa: S301
        assert other._opened is None
        assert torch.equal(other("utt-05"), expected)
        assert other.opened is not reader.opened
    assert torch.equal(reader("utt-05"), expected)
    expected.fill_(0)  # what is read belongs to the caller
    np.testing.assert_array_equal(reader("utt-05").numpy(), units_of("utt-05"))


def read_in_child(reader: featcache.FeatureReader, id: str) -> torch.Tensor:
    return reader(id)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_opened_reader_works_in_other_processes(
    storage: featcache.FeatureStorage, method: str
) -> None:
    reader = storage.reader("train", "fbank")
    reader("utt-00")
    with multiprocessing.get_context(method).Pool(2) as pool:
        tensors = pool.starmap(read_in_child, [(reader, id) for id in FRAMES])
    for id, tensor in zip(FRAMES, tensors, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), fbank_of(id))


def test_a_window_of_frames_is_read_as_a_tensor(storage: featcache.FeatureStorage) -> None:
    window = storage.reader("train", "fbank").read("utt-09", 2, 5)
    np.testing.assert_array_equal(window.numpy(), fbank_of("utt-09")[2:5])


def test_bfloat16_is_a_bfloat16_tensor_of_the_same_values(tmp_path: Path) -> None:
    value = torch.randn(9, 4).to(torch.bfloat16)
    with featcache.CacheWriter(
        tmp_path, [featcache.FeatureStorageConfig("ssl", dtype="bfloat16")]
    ) as writer:
        writer.write("utt", {"ssl": value})
    read = featcache.open(tmp_path).reader("ssl")("utt")
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, value)


def test_a_key_that_the_dataset_has_already_is_refused(
    storage: featcache.FeatureStorage, dataset: DynamicItemDataset
) -> None:
    static = DynamicItemDataset({id: {"units": 3} for id in FRAMES})
    with pytest.raises(ConfigError, match="key 'units' already"):
        storage.attach(static, "train")
    assert "fbank" not in static.pipeline.key_to_node  # nothing of it was attached
    storage.attach(dataset, "train", ["fbank"])
    with pytest.raises(ConfigError, match="feature 'fbank' is attached to the dataset already"):
        storage.attach(dataset, "train")


def test_attach_names_what_is_wrong_before_any_worker_starts(
    storage: featcache.FeatureStorage, dataset: DynamicItemDataset, tmp_path: Path
) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'fbank'"):
        storage.attach(dataset, "train", ["fbnak"])
    with pytest.raises(NotACacheError, match="does not exist"):
        storage.attach(dataset, "valid")
    other = featcache.FeatureStorage(
        storage.root, [featcache.FeatureStorageConfig("fbank", dtype="float16", backend="hdf5")]
    )
    with pytest.raises(
        StaleCacheError, match=r'features.fbank.dtype: was "float32", now "float16"'
    ):
        other.attach(dataset, "train")


def test_attached_features_are_converted_on_request(
    storage: featcache.FeatureStorage, dataset: DynamicItemDataset
) -> None:
    with pytest.raises(ConfigError, match=r"dtypes names a feature 'untis' that is not attached"):
        storage.attach(dataset, "train", dtypes={"untis": "int64"})
    with pytest.raises(UnknownNameError, match="'floa32' cannot be used"):
        storage.attach(dataset, "train", dtypes={"fbank": "floa32"})
    assert "fbank" not in dataset.pipeline.key_to_node
    storage.attach(dataset, "train", dtypes={"fbank": torch.float64})
    dataset.set_output_keys(["id", "fbank", "units"])
    item = pickle.loads(pickle.dumps(dataset))[0]  # noqa: S301
    reader = storage.reader("train", "fbank")
    assert item["fbank"].dtype == torch.float64
    assert torch.equal(item["fbank"], reader(item["id"]).double())
    assert item["units"].dtype == storage.reader("train", "units")(item["id"]).dtype


def test_what_the_cache_lacks_is_taken_out_of_the_data_set_on_request(
    storage: featcache.FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = ["a-stranger", "z-stranger"]
    ids = [strangers[0], *FRAMES, strangers[1]]
    dataset = DynamicItemDataset({id: {"number": n} for n, id in enumerate(ids)})
    with pytest.raises(KeyNotFoundError, match=r"2 of the dataset's .*'a-stranger', 'z-stranger'"):
        storage.attach(dataset, "train")
    storage.attach(dataset, "train", missing="skip")
    assert "2 of the dataset's" in caplog.text
    assert dataset.data_ids == [*FRAMES]  # in their order
    dataset.set_output_keys(["id", "fbank"])
    assert [dataset[n]["fbank"].shape[0] for n in range(len(dataset))] == [*FRAMES.values()]
    others = DynamicItemDataset({id: {} for id in strangers})
    with pytest.raises(KeyNotFoundError, match="2 of the dataset's 2 ids"):  # another split
        storage.attach(others, "train", missing="skip")
    with pytest.raises(UnknownNameError, match="did you mean 'skip'"):
        storage.attach(dataset, "train", missing="skp")  # type: ignore[arg-type]
