"""Reading: from any thread or process, copied or pickled, mapped or not, always the same arrays."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from store_helpers import (
    arrays_of,
    assert_holds,
    check_cache,
    id_of,
    make_cache,
    oracle,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter, FeatureReader, FeatureStorageConfig

FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize("mapped", [True, False])
def test_eight_threads_read_the_same(tmp_path: Path, mapped: bool) -> None:
    make_cache(tmp_path, range(40), two_features("webdataset", "hdf5"))
    cache = featcache.open(tmp_path, mapped=mapped)
    errors: list[BaseException] = []

    def read(seed: int) -> None:
        try:
            for number in np.random.default_rng(seed).integers(0, 40, 200).tolist():
                for name, array in arrays_of(number).items():
                    np.testing.assert_array_equal(
                        cache.read(id_of(number), name), array, strict=True
                    )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_many_threads_may_open_the_same_cache(tmp_path: Path) -> None:
    make_cache(tmp_path, range(20))
    errors: list[BaseException] = []

    def open_often() -> None:
        try:
            for _ in range(25):
                featcache.open(tmp_path).read(id_of(3), "fbank")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=open_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def read_all(reader: Any, results: Any) -> None:
    results.put({number: reader(id_of(number)).numpy() for number in range(9)})


@FORKS
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("opened", [True, False])
def test_a_reader_goes_to_other_processes(tmp_path: Path, method: str, opened: bool) -> None:
    make_cache(tmp_path, range(9))
    reader = FeatureReader(tmp_path, "fbank")
    if opened:
        reader(id_of(1))
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=read_all, args=(reader, results))
    process.start()
    found = results.get(timeout=60)
    process.join()
    for number, array in found.items():
        np.testing.assert_array_equal(array, arrays_of(number)["fbank"], strict=True)


@FORKS
def test_a_cache_may_be_forked_while_other_threads_open_its_files(tmp_path: Path) -> None:
    shards = FeatureStorageConfig("fbank", backend="webdataset", options={"shard_bytes": 1})
    make_cache(tmp_path, range(40), [shards, two_features()[1]])
    stop = threading.Event()

    def reopen() -> None:
        while not stop.is_set():
            cache.opened.containers.let_go()
            for number in range(40):
                cache.read(id_of(number), "fbank")

    cache = featcache.open(tmp_path)
    threads = [threading.Thread(target=reopen) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                fine = all(
                    len(cache.read(id_of(number), "fbank")) == number * 5 % 23
                    for number in range(40)
                )
                os._exit(0 if fine else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("mapped", [True, False])
def test_a_cache_is_pickled_and_copied_by_opening_it_again(tmp_path: Path, mapped: bool) -> None:
    make_cache(tmp_path, range(9))
    cache = featcache.open(tmp_path, mapped=mapped)
    cache.read(id_of(1), "fbank")
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache), copy.copy(cache)):  # noqa: S301
        assert other.opened.settings.mapped == mapped
        assert_holds(other, oracle(range(9)))
        other.close()
    assert_holds(cache, oracle(range(9)))


def test_a_reader_is_pickled_and_copied_without_its_files(tmp_path: Path) -> None:
    make_cache(tmp_path, range(9))
    reader = FeatureReader(tmp_path, "fbank")
    reader(id_of(1))
    for other in (pickle.loads(pickle.dumps(reader)), copy.deepcopy(reader), copy.copy(reader)):  # noqa: S301
        assert other._opened is None
        assert repr(other) == repr(reader) == f"FeatureReader({str(tmp_path)!r}, 'fbank')"
        assert other(id_of(2)).tolist() == arrays_of(2)["fbank"].tolist()
    assert reader._opened is not None


def test_a_reader_costs_nothing_until_it_is_used(tmp_path: Path) -> None:
    reader = FeatureReader(tmp_path / "later", "fbank")
    with pytest.raises(featcache.errors.NotACacheError, match="later' does not exist"):
        reader("a")
    make_cache(tmp_path / "later", range(3))
    assert reader(id_of(1)).tolist() == arrays_of(1)["fbank"].tolist()


def test_a_reader_gives_tensors_of_its_own_of_the_declared_dtype(tmp_path: Path) -> None:
    features = [
        FeatureStorageConfig("half", dtype="bfloat16"),
        FeatureStorageConfig("xvector", dtype="bfloat16", time_axis=None),
        FeatureStorageConfig("label", dtype="int64", time_axis=None),
        FeatureStorageConfig("mask", dtype="bool"),
        FeatureStorageConfig("wide", dtype="uint64"),
    ]
    given = {
        "half": torch.randn(5, 3).bfloat16(),
        "xvector": torch.randn(4).bfloat16(),
        "label": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "wide": torch.tensor([2**63 - 1]).to(torch.uint64),
    }
    with CacheWriter(tmp_path, features) as writer:
        writer.write("u", given)
    cache = featcache.open(tmp_path)
    for name, tensor in given.items():
        found = cache.reader(name)("u")
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
        found.zero_()  # writable, and of no one else
        assert torch.equal(cache.reader(name)("u"), tensor)
    assert cache.reader("half").read("u", 1, 3).shape == (2, 3)
    assert cache.reader("half").lengths(["u", "u"]) == [5, 5]
    assert cache.read("u", "label").shape == ()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("backend", ["memmap", "hdf5", "webdataset", "zarr"])
def test_what_is_read_is_a_copy(tmp_path: Path, backend: str, mapped: bool) -> None:
    make_cache(tmp_path, range(9), two_features(backend, backend))
    cache = featcache.open(tmp_path, mapped=mapped)
    for number in range(9):
        for array in (
            *cache[id_of(number)].values(),
            cache.read_batch([id_of(number)], "fbank").data,
        ):
            array.fill(9)
    check_cache(tmp_path, range(9))
    assert_holds(cache, oracle(range(9)))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    "fbank",
    [
        FeatureStorageConfig("fbank"),
        FeatureStorageConfig("fbank", backend="hdf5", codec="gzip"),
        FeatureStorageConfig("fbank", backend="zarr"),
    ],
    ids=["memmap", "gzip", "zarr"],
)
def test_a_batch_is_padded_with_zeros_in_the_order_that_was_asked_for(
    tmp_path: Path, mapped: bool, fbank: FeatureStorageConfig
) -> None:
    make_cache(tmp_path, range(20), [fbank, two_features()[1]])
    cache = featcache.open(tmp_path, mapped=mapped)
    for numbers in ([3, 1, 2], [0], [7, 7], [0, 0], list(range(20))):
        data, lengths = cache.read_batch([id_of(number) for number in numbers], "fbank")
        arrays = [arrays_of(number)["fbank"] for number in numbers]
        assert lengths.tolist() == [len(array) for array in arrays]
        assert data.shape == (len(numbers), max(map(len, arrays)), 4)
        assert data.dtype == np.float32
        for row, array in zip(data, arrays, strict=True):
            np.testing.assert_array_equal(row[: len(array)], array)
            assert not row[len(array) :].any()
    assert cache.read_batch([], "fbank").data.shape == (0, 0, 4)


def test_a_batch_of_what_has_no_time_axis_is_stacked(tmp_path: Path) -> None:
    features = [
        FeatureStorageConfig("xvector", dtype="bfloat16", time_axis=None),
        FeatureStorageConfig("label", dtype="int16", time_axis=None),
    ]
    with CacheWriter(tmp_path, features) as writer:
        for number in range(4):
            writer.write(
                str(number),
                {"xvector": np.full((2, 3), number, np.float32), "label": np.int16(number)},
            )
    cache = featcache.open(tmp_path, verify="arrays")
    data, lengths = cache.read_batch(["3", "1"], "xvector")
    assert (data.shape, str(data.dtype), data[:, 0, 0].tolist()) == ((2, 2, 3), "float32", [3, 1])
    assert lengths.tolist() == [1, 1]
    data, lengths = cache.read_batch(["3", "1"], "label")
    assert (data.shape, data.tolist()) == ((2,), [3, 1])
    assert cache.stats("xvector").count == 4
    assert cache.stats("xvector").mean.tolist() == np.full((2, 3), 1.5).tolist()
    assert cache["2"]["label"] == 2


def test_lengths_come_in_row_order_or_as_asked_and_cannot_be_written_to(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(9)))
    assert not cache.lengths("fbank").flags.writeable
    assert cache.lengths("fbank").tolist() == [len(oracle(range(9))[id]["fbank"]) for id in cache]
    assert cache.lengths("fbank", ids=[id_of(8), id_of(1), id_of(8)]).tolist() == [17, 5, 17]


def test_a_cache_tells_what_it_is(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features()) as writer:
        write(writer, range(3))
        writer.publish()
        cache = featcache.open(tmp_path)
        assert repr(cache).startswith(f"<Cache {str(tmp_path)!r}: 3 utterances; fbank (frames, ")
        assert "; incomplete, being written by process " in repr(cache)
        assert (cache.features, cache.generation, cache.dtype("units")) == (
            ("fbank", "units"),
            1,
            "int16",
        )
        assert writer.bytes_written == sum(
            array.nbytes for n in range(3) for array in arrays_of(n).values()
        )
    assert featcache.open(tmp_path).complete


def test_ids_of_one_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcache.format.index.hash_of", lambda key: len(key) % 3)
    make_cache(tmp_path, range(150))
    cache = featcache.open(tmp_path)
    assert_holds(cache, oracle(range(150)))
    assert all(f"{id_of(number)}x" not in cache for number in range(150))
    ids = [id_of(number) for number in range(149, -1, -1)]
    assert cache.lengths("fbank", ids=ids).tolist() == [
        len(arrays_of(number)["fbank"]) for number in range(149, -1, -1)
    ]


def test_a_window_of_a_long_recording_looks_at_its_own_blocks_alone(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).standard_normal((40_000, 4)).astype(np.float32)
    with CacheWriter(tmp_path / "c", [FeatureStorageConfig("x", backend="lilcom")]) as writer:
        writer.write("long", {"x": frames})
    cache = featcache.open(tmp_path / "c")
    arrays = cache.opened.features["x"]
    whole = cache.read("long", "x")
    looked_at: list[int] = []

    class Counted:
        def __init__(self, column: Any) -> None:
            self.column = column

        def __getitem__(self, extent: int) -> int:
            looked_at.append(extent)
            return int(self.column[extent])

    arrays._nbytes = cast(Any, Counted(arrays._nbytes))
    blocks = len(arrays._columns.nbytes)
    assert blocks > 50
    for start, stop in ((20_000, 20_100), (0, 1), (39_999, 40_000), (7, 30_000)):
        looked_at.clear()
        out = arrays.empty(stop - start)
        arrays.read_into(0, out, start)
        np.testing.assert_array_equal(out, whole[start:stop])
        assert len(set(looked_at)) <= 3 + (stop - start) * blocks // len(frames)
