"""Conversions that change no byte of an array: copied many at a time, and proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import KINDS, assert_same, make_source

import featcache
from featcache import FeatureStorageConfig
from featcache.container_files import Extents, append_many
from featcache.errors import CorruptCacheError
from featcache.format import SealedPart
from featcache.writing import copies, open_part, part_writer
from featcache.writing.open_part import OpenPart

BACKENDS = ["memmap", "hdf5", "webdataset", "zarr"]


def converted(src: object, dst: Path, backend: str, names: list[str]) -> featcache.Cache:
    features = [
        FeatureStorageConfig.from_json({**KINDS[name].to_json(), "backend": backend})
        for name in names
    ]
    return featcache.convert(src, dst, features=features, progressbar=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch_bytes", "batch_arrays"), [(1, 8192), (1 << 21, 24)])
def test_copies_in_batches_of_any_size_are_the_source(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    batch_bytes: int,
    batch_arrays: int,
) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 9)
    source = featcache.open(make_source(tmp_path / "a", [*KINDS]))
    monkeypatch.setattr(copies, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(copies, "BATCH_ARRAYS", batch_arrays)
    cache = converted(source, tmp_path / "b", backend, [*KINDS])
    assert_same(cache, source)
    featcache.open(cache.path, verify="arrays").close()


def test_statistics_of_some_rows_of_a_part_are_counted(tmp_path: Path) -> None:
    source = featcache.open(make_source(tmp_path / "a", ["fbank", "brain", "units"]))
    view = source.table.filter(fbank=(10, 40))
    cache = converted(view, tmp_path / "b", "zarr", ["brain", "fbank"])
    for name in cache.features:
        mine, theirs = cache.stats(name), view.stats(name)
        assert mine.count == theirs.count
        np.testing.assert_allclose(mine.mean, theirs.mean, rtol=1e-12)
        np.testing.assert_allclose(mine.m2, theirs.m2, rtol=1e-12)


def test_parts_are_no_larger_than_they_need_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 4)
    source = featcache.open(make_source(tmp_path / "a", ["units"]))
    assert len(source.opened.manifest.parts) == 10
    monkeypatch.setattr(part_writer, "PART_ROWS", 64)  # those of 8 rows are not small
    cache = converted(source, tmp_path / "b", "memmap", ["units"])
    rows = [part.rows for part in cache.opened.manifest.parts]
    assert sum(rows) == 40
    assert max(rows) < 8 + 4
    assert sum(each < 8 for each in rows) <= 1
    assert_same(cache, source)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_array_that_lies_elsewhere_than_told_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    def shifted(*args: object) -> Mapping[str, Extents]:
        placed = append_many(*args)  # type: ignore[arg-type]
        return {
            name: dataclasses.replace(each, offset=np.roll(each.offset, 1))
            for name, each in placed.items()
        }

    make_source(tmp_path / "a", ["fbank"])
    monkeypatch.setattr(open_part, "append_many", shifted)
    with pytest.raises(CorruptCacheError, match=r"'utt-.* is not what was written"):
        converted(tmp_path / "a", tmp_path / "b", backend, ["fbank"])
    assert not featcache.open(tmp_path / "b").complete


def test_of_a_format_that_knows_no_pages_every_array_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte is changed where no sample would look, before the pages of the file are hashed."""
    make_source(tmp_path / "a", ["fbank"], 200)
    seal = OpenPart.seal

    def damage(self: OpenPart, *args: object) -> SealedPart | None:
        (file,) = (tmp_path / "b").glob("parts/*/fbank.npy")
        data = file.read_bytes()
        with featcache.open(tmp_path / "a") as source:
            in_order = sorted(source, key=lambda id: data.find(source[id]["fbank"].tobytes()))
            place = data.find(source[in_order[150]]["fbank"].tobytes())
        assert place > 0
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(bytes([data[place] ^ 1]))
        return seal(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(open_part, "SupportsPages", ())  # which nothing is an instance of
    monkeypatch.setattr(OpenPart, "seal", damage)
    with pytest.raises(CorruptCacheError, match=r"'utt-.* is not what was written"):
        converted(tmp_path / "a", tmp_path / "b", "memmap", ["fbank"])
