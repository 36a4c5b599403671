"""Arrays that are copied from part to part: many at a time, whole, in any cut, checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from store_helpers import id_of, make_cache, oracle

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.format import Index, SealedPart, read_manifest, sealed_in
from featcache.writing import copies
from featcache.writing.copies import StoredArrays

CODECS = {
    "memmap": ("raw",),
    "hdf5": ("raw", "gzip", "lilcom"),
    "webdataset": ("raw",),
    "zarr": ("raw", "zstd", "blosc"),
    "lilcom": ("lilcom",),
}
SMALL: dict[str, dict[str, object]] = {
    "zarr": {"chunk_bytes": 512, "shard_bytes": 2048},  # arrays pass from shard to shard
    "webdataset": {"shard_bytes": 4096},
}


def declared(backend: str, codec: str) -> list[FeatureStorageConfig]:
    options = SMALL.get(backend, {})
    plain = "raw" if backend != "lilcom" else codec
    return [
        FeatureStorageConfig("fbank", backend=backend, codec=codec, options=options),
        FeatureStorageConfig("other", backend=backend, codec=plain, options=options),
        FeatureStorageConfig("xvector", backend=backend, codec=plain, time_axis=None),
    ]


def arrays_of(number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    return {
        "fbank": random.standard_normal((number * 37 % 90, 6)).astype(np.float32),
        "other": random.standard_normal((number * 5 % 11, 3)).astype(np.float32),
        "xvector": random.standard_normal(5).astype(np.float32),
    }


@pytest.mark.parametrize(("batch_bytes", "batch_arrays"), [(1, 8192), (3000, 8192), (1 << 20, 4)])
@pytest.mark.parametrize(
    ("backend", "codec"), [(name, codec) for name, codecs in CODECS.items() for codec in codecs]
)
def test_what_is_left_is_the_same_in_every_format(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    codec: str,
    batch_bytes: int,
    batch_arrays: int,
) -> None:
    monkeypatch.setattr(copies, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(copies, "BATCH_ARRAYS", batch_arrays)
    for begin in (0, 20):
        with CacheWriter(tmp_path, declared(backend, codec)) as writer:
            for number in range(begin, begin + 20):
                writer.write(id_of(number), arrays_of(number))
    with featcache.open(tmp_path) as cache:
        gone = [id_of(number) for number in (0, 3, 4, 5, 21, 39)]
        left = [id for id in cache if id not in gone]
        before = {id: cache[id] for id in left}  # as a lossy codec gives them
        cache.delete(gone)
        cache.compact()
    with featcache.open(tmp_path, verify="arrays") as after:
        assert list(after) == left
        for id in left:
            for name, array in before[id].items():
                np.testing.assert_array_equal(after[id][name], array, strict=True)
        assert len(read_manifest(tmp_path).parts) == 1


@pytest.fixture
def part(tmp_path: Path) -> tuple[Path, SealedPart, Index]:
    path = make_cache(tmp_path / "cache", range(20))
    manifest = read_manifest(path)
    (part,) = sealed_in(path, manifest)
    return path, part, part.index(path, list(manifest.features))


def arrays(path: Path, part: SealedPart, index: Index) -> StoredArrays:
    features = {
        name: FeatureStorageConfig.from_json(each)
        for name, each in read_manifest(path).features.items()
    }
    return StoredArrays(path, part.directory, index, features)


def test_batches_hold_the_bytes_of_their_rows(
    part: tuple[Path, SealedPart, Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "BATCH_ARRAYS", 6)
    _, _, index = part
    rows = np.array([4, 5, 6, 2, 9, 0, 19, 18])
    expected = oracle(range(20))
    seen = []
    for batch in [*arrays(*part).batches(rows)]:  # each of them for as long as it is held
        for name, found in batch.arrays.items():
            for row, array in zip(batch.rows.tolist(), found, strict=True):
                written = expected[index.id(row)][name]
                assert array.rows == len(written)
                assert b"".join(array.blocks) == written.tobytes()
        seen += batch.rows.tolist()
    assert seen == rows.tolist()


@pytest.mark.parametrize(
    ("column", "value"),
    [("offset", -1), ("offset", 1 << 62), ("nbytes", -1), ("nbytes", 1 << 62)],
)
def test_extents_that_no_file_has_are_refused_before_memory_is_taken(
    part: tuple[Path, SealedPart, Index], column: str, value: int
) -> None:
    path, sealed, index = part
    columns = index.features["units"]
    lying = getattr(columns, column).copy()
    lying[3] = value
    features = {**index.features, "units": dataclasses.replace(columns, **{column: lying})}
    index = dataclasses.replace(index, features=features)
    with pytest.raises(CorruptCacheError, match=r"units\.npy.* has no bytes"):
        [*arrays(path, sealed, index).batches(np.arange(20))]


def test_arrays_side_by_side_are_one_piece(part: tuple[Path, SealedPart, Index]) -> None:
    stored = arrays(*part)
    (batch,) = stored.batches(stored.in_order_of_bytes(np.arange(20)))
    assert [len(each.pieces) for each in batch.arrays.values()] == [1] * len(batch.arrays)
    assert all(len(each.each_block()) > 1 for each in batch.arrays.values())


def test_extents_of_no_bytes_move_no_array_to_another(
    part: tuple[Path, SealedPart, Index],
) -> None:
    path, sealed, index = part
    columns = index.features["fbank"]
    # of a format that tells a place for an array without bytes, too
    empty = np.flatnonzero(np.diff(columns.first) == 0)
    before = columns.first[empty]
    assert len(empty)
    told = dataclasses.replace(
        columns,
        first=columns.first + np.searchsorted(empty, np.arange(len(index) + 1)),
        **{
            name: np.insert(getattr(columns, name), before, 0)
            for name in ("container", "offset", "nbytes")
        },
    )
    index = dataclasses.replace(index, features={**index.features, "fbank": told})
    expected = oracle(range(20))
    # one piece without bytes, and one that holds two arrays
    rows = np.array([empty[0], *np.flatnonzero(np.diff(columns.first))[:2]])
    for some in (rows, np.arange(20)):
        (batch,) = arrays(path, sealed, index).batches(some)
        for row, array in zip(some.tolist(), batch.arrays["fbank"], strict=True):
            assert b"".join(array.blocks) == expected[index.id(row)]["fbank"].tobytes()


def test_an_array_that_is_not_what_was_written_is_named(
    part: tuple[Path, SealedPart, Index],
) -> None:
    path, sealed, index = part
    row, columns = 7, index.features["fbank"]
    file = path / sealed.directory / "fbank.npy"
    data = bytearray(file.read_bytes())
    data[int(columns.offset[columns.first[row]])] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCacheError, match=f"utterance '{index.id(row)}', feature 'fbank'"):
        [*arrays(*part).batches(np.arange(20))]
