"""Items and padded batches of a cache, in one process and in DataLoader workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import arrays_of, change_index, id_of, make_cache, two_features
from torch.utils.data import DataLoader

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureStorageConfig
from featcache.errors import (
    ConfigError,
    CorruptCacheError,
    FeatureError,
    KeyNotFoundError,
    RowError,
    UnknownNameError,
    WindowError,
)

NUMBERS = range(20)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), NUMBERS)


def check_batch(batch: dict[str, Any], numbers: Sequence[int]) -> None:
    """Compare a batch with what was written: numbers, zeros behind them, lengths."""
    assert batch["id"] == [id_of(number) for number in numbers]
    for name in ("fbank", "units"):
        arrays = [arrays_of(number)[name] for number in numbers]
        assert batch[f"{name}_lengths"].tolist() == [len(array) for array in arrays]
        assert batch[name].shape == (len(numbers), max(map(len, arrays)), *arrays[0].shape[1:])
        for row, array in zip(batch[name].numpy(), arrays, strict=True):
            np.testing.assert_array_equal(row[: len(array)], array, strict=True)
            assert not row[len(array) :].any()


def test_an_item_holds_id_arrays_and_lengths(cache: Path) -> None:
    dataset = FeatureDataset(cache)
    for index in (id_of(3), int(dataset.table.rows([id_of(3)])[0])):
        item = dataset[index]
        assert list(item) == ["id", "fbank", "fbank_lengths", "units", "units_lengths"]
        assert (item["id"], item["fbank_lengths"], item["units_lengths"]) == (id_of(3), 15, 7)
        np.testing.assert_array_equal(item["fbank"].numpy(), arrays_of(3)["fbank"], strict=True)
        np.testing.assert_array_equal(item["units"].numpy(), arrays_of(3)["units"], strict=True)


def test_a_dataset_is_iterated_over_in_row_order(cache: Path) -> None:
    assert [item["id"] for item in FeatureDataset(cache, "units")] == list(featcache.open(cache))  # type: ignore[attr-defined]


@given(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=30))
def test_a_batch_is_padded_with_zeros_and_may_repeat_utterances(
    cache: Path, numbers: list[int]
) -> None:
    check_batch(FeatureDataset(cache).__getitems__([id_of(number) for number in numbers]), numbers)


@pytest.mark.parametrize("backend", ["memmap", "hdf5", "webdataset", "zarr"])
@pytest.mark.parametrize("mapped", [True, False])
def test_batches_are_the_same_in_every_format(tmp_path: Path, backend: str, mapped: bool) -> None:
    cache = featcache.open(
        make_cache(tmp_path, NUMBERS, two_features(backend, backend)), mapped=mapped
    )
    check_batch(FeatureDataset(cache).__getitems__([id_of(number) for number in NUMBERS]), NUMBERS)
    window = FeatureDataset(cache, "fbank").__getitems__(
        [(id_of(4), slice(3, 9)), (id_of(3), slice(1, 1))]
    )
    np.testing.assert_array_equal(window["fbank"][0].numpy(), arrays_of(4)["fbank"][3:9])
    assert window["fbank_lengths"].tolist() == [6, 0]


@pytest.mark.parametrize(("backend", "codec"), [("zarr", "zstd"), ("hdf5", "gzip")])
def test_compressed_features_are_read_into_batches(
    tmp_path: Path, backend: str, codec: str
) -> None:
    config = FeatureStorageConfig("fbank", backend=backend, codec=codec)
    arrays = {
        f"u{n}": np.random.default_rng(n).integers(0, 9, (1200 + n, 3)).astype(np.float32)
        for n in range(3)
    }
    with CacheWriter(tmp_path, [config]) as writer:
        for id, array in arrays.items():
            writer.write(id, {"fbank": array})
    batch = FeatureDataset(tmp_path).__getitems__([("u2", slice(700, 1201)), "u0"])
    np.testing.assert_array_equal(batch["fbank"][0, :501].numpy(), arrays["u2"][700:1201])
    np.testing.assert_array_equal(batch["fbank"][1].numpy(), arrays["u0"])


def test_a_window_reads_just_its_frames(cache: Path) -> None:
    dataset = FeatureDataset(cache, ["fbank"])
    row = int(dataset.table.rows([id_of(4)])[0])
    np.testing.assert_array_equal(
        dataset[id_of(4), 5:8]["fbank"].numpy(), arrays_of(4)["fbank"][5:8]
    )
    np.testing.assert_array_equal(dataset[row, 5:]["fbank"].numpy(), arrays_of(4)["fbank"][5:])
    np.testing.assert_array_equal(dataset[row, :5]["fbank"].numpy(), arrays_of(4)["fbank"][:5])


@pytest.mark.parametrize(
    "cut", [slice(0, 21), slice(-3, None), slice(5, 4), slice(0, 9, 2), slice(21, 21)]
)
def test_frames_that_are_not_there_are_refused(cache: Path, cut: slice) -> None:
    with pytest.raises(
        WindowError, match=rf"'{id_of(4)}', feature 'fbank': frames .* are not within 0 to 20"
    ):
        FeatureDataset(cache)[id_of(4), cut]


def test_a_feature_without_time_axis_has_no_lengths_and_no_windows(tmp_path: Path) -> None:
    with CacheWriter(
        tmp_path, [FeatureStorageConfig("xvector", time_axis=None), *two_features()]
    ) as writer:
        for number in range(3):
            writer.write(id_of(number), {"xvector": np.full(5, number), **arrays_of(number)})
    batch = FeatureDataset(tmp_path, ["xvector", "fbank"]).__getitems__(
        [(id_of(2), slice(2, 4)), id_of(1)]
    )
    assert list(batch) == ["id", "xvector", "fbank", "fbank_lengths"]
    assert batch["xvector"].tolist() == [[2.0] * 5, [1.0] * 5]
    assert batch["fbank_lengths"].tolist() == [2, 5]


def test_batches_mix_the_caches_that_are_put_together(tmp_path: Path) -> None:
    parts = [make_cache(tmp_path / str(n), range(n, 20, 3)) for n in range(3)]
    numbers = [7, 2, 19, 0, 7]
    check_batch(
        FeatureDataset(featcache.concat(*parts)).__getitems__(
            [id_of(number) for number in numbers]
        ),
        numbers,
    )


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "uint16", "int8", "bool"])
@pytest.mark.parametrize("read", [None, "float32", "int64"])
def test_numbers_are_converted_on_request(tmp_path: Path, stored: str, read: str | None) -> None:
    values = torch.tensor([[0, 1, 2], [3, 100, 0]]).to(getattr(torch, stored))
    with CacheWriter(tmp_path, [FeatureStorageConfig("x", dtype=stored)]) as writer:
        writer.write("a", {"x": values})
        writer.write("b", {"x": values[:1]})
    dataset = FeatureDataset(tmp_path, dtypes={} if read is None else {"x": read})
    batch = dataset.__getitems__(["a", "b"])
    assert batch["x"].dtype == dataset["a"]["x"].dtype == getattr(torch, read or stored)
    assert batch["x"][0].tolist() == values.to(batch["x"].dtype).tolist()
    assert batch["x"][1].tolist() == [values[0].tolist(), [0, 0, 0]]


def test_a_transform_that_changes_nothing_gives_the_same_batch(tmp_path: Path) -> None:
    fixed = [
        FeatureStorageConfig("xvector", time_axis=None),
        FeatureStorageConfig("label", "int16", time_axis=None),
    ]
    with CacheWriter(tmp_path, [*fixed, *two_features()]) as writer:
        for number in range(1, 4):
            writer.write(
                id_of(number),
                {"xvector": np.full(5, number), "label": np.int16(number), **arrays_of(number)},
            )
    plain = FeatureDataset(tmp_path)
    transformed = FeatureDataset(tmp_path, transform=lambda item, rng: item)
    expected = plain.__getitems__([2, 0, 1])
    for found in (
        transformed.__getitems__([2, 0, 1]),
        FeatureDataset.collate([plain[2], plain[0], plain[1]]),
    ):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert (
                torch.equal(found[name], value)
                if isinstance(value, torch.Tensor)
                else found[name] == value
            )


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_arrays_of_a_transform_may_be_of_any_kind(
    cache: Path, arrays: Literal["torch", "numpy"]
) -> None:
    def odd(item: dict[str, Any], rng: object) -> dict[str, Any]:
        frames = np.asarray(item["fbank"])
        return {
            **item,
            "fbank": frames[::-1],
            "big": frames[0].astype(">f4"),
            "fixed": np.broadcast_to(np.float32(1), (3,)),
            "name": np.str_("x"),
            "words": np.array(["a", "b"]),
            "when": np.datetime64("2026-01-01"),
        }

    dataset = FeatureDataset(cache, "fbank", transform=odd, arrays=arrays)
    batch = dataset.__getitems__([id_of(3), id_of(1)])
    for place, number in enumerate([3, 1]):
        frames = arrays_of(number)["fbank"]
        np.testing.assert_array_equal(batch["fbank"][place][: len(frames)], frames[::-1])
        np.testing.assert_array_equal(batch["big"][place], frames[0])
    assert batch["fixed"].shape == (2, 3)
    assert batch["name"] == ["x", "x"]
    assert [list(words) for words in batch["words"]] == [["a", "b"]] * 2
    assert len(batch["when"]) == 2


def test_what_transform_returns_is_padded_anew(cache: Path) -> None:
    def spliced(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        twice = torch.cat([item["fbank"], item["fbank"]])
        mean, n = item["fbank"].sum(), item["fbank_lengths"]
        return {
            "id": item["id"],
            "fbank": twice,
            "fbank_lengths": n,
            "mean": mean,
            "n": n,
            "s": "x",
            "a": np.ones(2),
        }

    batch = FeatureDataset(cache, "fbank", transform=spliced).__getitems__([id_of(3), id_of(1)])
    assert batch["fbank_lengths"].tolist() == [30, 10]
    np.testing.assert_array_equal(batch["fbank"][0].numpy(), np.tile(arrays_of(3)["fbank"], (2, 1)))
    assert not batch["fbank"][1, 10:].any()
    assert (batch["n"].tolist(), batch["s"]) == ([15, 5], ["x", "x"])
    assert (batch["mean"].shape, batch["a"].tolist()) == ((2,), [[1.0, 1.0]] * 2)
    dataset = FeatureDataset(cache, "fbank", transform=spliced)
    assert dataset[id_of(3)]["n"] == 15
    assert FeatureDataset.collate([dataset[id_of(3)], dataset[id_of(1)]])[
        "fbank_lengths"
    ].tolist() == [30, 10]


@pytest.mark.parametrize("number", [2.5, np.float32(2.5), torch.tensor(2.5)])
def test_a_number_is_no_feature_whatever_stands_beside_it(cache: Path, number: Any) -> None:
    def described(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"id": item["id"], "x": number, "x_lengths": item["fbank_lengths"]}

    batch = FeatureDataset(cache, "fbank", transform=described).__getitems__([id_of(3), id_of(1)])
    assert batch["x"].tolist() == [2.5, 2.5]
    assert batch["x_lengths"].tolist() == [15, 5]


def test_gradients_do_not_go_through_a_batch(cache: Path) -> None:
    weight = torch.ones((), requires_grad=True)

    def weighted(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**item, "fbank": item["fbank"] * weight, "mean": item["fbank"].mean() * weight}

    batch = FeatureDataset(cache, "fbank", transform=weighted).__getitems__([id_of(3), id_of(1)])
    assert not batch["fbank"].requires_grad
    assert not batch["mean"].requires_grad
    np.testing.assert_array_equal(batch["fbank"][0], arrays_of(3)["fbank"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda item, rng: {item["id"]: 1}, "have different keys"),
        (
            lambda item, rng: {"x": torch.zeros(item["fbank_lengths"])},
            r"'x' of items .* give x_lengths, too",
        ),
        (
            lambda item, rng: {"x": torch.zeros(2, item["fbank_lengths"]), "x_lengths": 2},
            r"'x' of items .* \(2, 15\) and",
        ),
        (lambda item, rng: None, "transform returned None"),
    ],
)
def test_items_that_do_not_fit_together_are_refused(cache: Path, change: Any, match: str) -> None:
    with pytest.raises(FeatureError, match=match):
        FeatureDataset(cache, "fbank", transform=change).__getitems__([id_of(3), id_of(1)])


def test_an_utterance_whose_bytes_are_too_few_is_not_filled_with_those_of_another(
    tmp_path: Path,
) -> None:
    table = FeatureDataset(make_cache(tmp_path, NUMBERS)).table
    short, longest = (int(row) for row in table.rows([id_of(3), id_of(9)]))
    assert table.lengths("fbank")[short] < table.lengths("fbank")[longest]
    columns = featcache.open(tmp_path).opened.index.features["fbank"]
    nbytes = columns.nbytes.copy()
    nbytes[columns.first[short]] -= 16
    change_index(tmp_path, {"fbank.nbytes": nbytes})
    with pytest.raises(
        CorruptCacheError, match=f"utterance {id_of(3)!r}, feature 'fbank' is damaged"
    ):
        FeatureDataset(tmp_path).__getitems__([short, longest])


def test_what_cannot_be_read_is_refused_by_name(cache: Path, tmp_path: Path) -> None:
    dataset = FeatureDataset(cache)
    with pytest.raises(KeyNotFoundError, match="no utterance 'spk9'"):
        dataset["spk9"]
    with pytest.raises(RowError, match="no row 20"):
        dataset[20]
    with pytest.raises(KeyNotFoundError, match="did you mean 'fbank'"):
        FeatureDataset(cache, "fbnk")
    with pytest.raises(ConfigError, match="'unit' that is not read; did you mean 'units'"):
        FeatureDataset(cache, dtypes={"unit": "int64"})
    with pytest.raises(UnknownNameError, match="dtype 'float3' cannot be used"):
        FeatureDataset(cache, dtypes={"fbank": "float3"})
    with pytest.raises(ConfigError, match="at least one utterance"):
        dataset.__getitems__([])
    for index in ((0, 5), (0, slice(3), 7)):
        with pytest.raises(ConfigError, match="an index is a row number, an id, or"):
            dataset[index]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"no feature is asked for; there are 'fbank', 'units'"):
        FeatureDataset(cache, [])
    with pytest.raises(ConfigError, match=r"collate_fn=FeatureDataset\.collate"):
        next(iter(DataLoader(dataset, batch_size=4)))
    for name in ("x", "x_lengths", "x_max_seqlen"):
        with CacheWriter(tmp_path / name, [FeatureStorageConfig(name)]):
            pass
    for name in ("x_lengths", "x_max_seqlen"):
        with pytest.raises(ConfigError, match="other uses for these names"):
            FeatureDataset(featcache.join(tmp_path / "x", tmp_path / name), layout="packed")
    FeatureDataset(featcache.join(tmp_path / "x", tmp_path / "x_max_seqlen"))


class HandedOver(FeatureDataset):
    """Tells whether a worker made its batch in memory that it hands over."""

    def __getitems__(self, indices: Sequence[Any]) -> dict[str, Any]:
        batch = super().__getitems__(indices)
        return {**batch, "handed over": type(batch["fbank"]) is not torch.Tensor}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (2, "forkserver")])
def test_workers_give_whole_batches(cache: Path, workers: int, start: str | None) -> None:
    batches = [[id_of(n) for n in numbers] for numbers in ([1, 2, 3], [19, 0], [4])]
    loader = DataLoader(
        HandedOver(cache),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=FeatureDataset.collate,
        multiprocessing_context=None if start is None else multiprocessing.get_context(start),
    )
    for batch, numbers in zip(loader, ([1, 2, 3], [19, 0], [4]), strict=True):
        assert batch.pop("handed over") == bool(workers)
        check_batch(batch, numbers)
