"""Damage is found and named, and never crashes the process."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import FINGERPRINT, check_cache, make_cache, read_everything, two_features

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError, FeatcacheError
from featcache.store.index import load_index

EVERY_LAYOUT = {
    "memmap": two_features(),
    "webdataset": two_features("webdataset", "webdataset"),
    "hdf5 gzip": [FeatureStorageConfig("fbank", backend="hdf5", codec="gzip"), two_features()[1]],
}


@pytest.fixture(scope="module", params=EVERY_LAYOUT)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of two parts; tests put back what they change."""
    path = tmp_path_factory.mktemp("damage") / "train"
    make_cache(path, range(12), EVERY_LAYOUT[request.param])
    make_cache(path, range(12, 20), EVERY_LAYOUT[request.param])
    yield path
    check_cache(path, range(20))


def files(path: Path) -> list[Path]:
    """All files that the current generation is made of."""
    generation = f"{featcache.open(path).generation:06d}"
    kept = [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix != ".lock"]
    return [
        file
        for file in kept
        if not file.relative_to(path).parts[0].startswith(("index-", "stats-")) or generation in str(file)
    ]


def containers(path: Path) -> list[tuple[Path, list[tuple[int, int]]]]:
    """All containers with the places of stored bytes in them."""
    cache = featcache.open(path)
    names = [file for part in cache._manifest.parts for file, _ in part.containers]
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for columns in cache._index.features.values():
        for container, offset, nbytes in zip(columns.container, columns.offset, columns.nbytes, strict=True):
            places[names[int(container)]].append((int(offset), int(nbytes)))
    return [(path / name, place) for name, place in places.items()]


class Changed:
    """A file with other bytes, until the end of the block."""

    def __init__(self, file: Path, data: bytes | None) -> None:
        self._file, self._data = file, data

    def __enter__(self) -> None:
        self._before = self._file.read_bytes()
        if self._data is None:
            self._file.unlink()
        else:
            self._file.write_bytes(self._data)

    def __exit__(self, *error: object) -> None:
        self._file.write_bytes(self._before)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def is_container(file: Path) -> bool:
    return file.suffix in (".h5", ".tar") or (file.suffix == ".npy" and file.parent.parent.name == "parts")


@given(data=st.data())
@settings(max_examples=150)
def test_every_bit_of_index_manifest_statistics_and_seals_counts(original: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from([file for file in files(original) if not is_container(file)]))
    content = file.read_bytes()
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    with Changed(file, flipped(content, bit)), pytest.raises(CorruptCacheError, match="damaged"):
        featcache.open(original, verify="columns")


@given(data=st.data())
@settings(max_examples=100)
def test_every_stored_bit_counts(original: Path, data: st.DataObject) -> None:
    file, places = data.draw(st.sampled_from(containers(original)))
    offset, nbytes = data.draw(st.sampled_from(places))
    bit = offset * 8 + data.draw(st.integers(0, nbytes * 8 - 1))
    with Changed(file, flipped(file.read_bytes(), bit)):
        featcache.open(original, verify="columns")
        with pytest.raises(CorruptCacheError, match=r"utterance 'spk./utt-\d+', feature '(fbank|units)' is damaged"):
            featcache.open(original, verify="arrays")
        with pytest.raises(CorruptCacheError, match="is damaged"):
            featcache.Cache(original, "arrays", mapped=False)


@given(data=st.data())
@settings(max_examples=150)
def test_a_file_that_was_cut_is_an_error_not_the_end_of_the_process(original: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files(original)))
    content = file.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    with Changed(file, content[:length]), pytest.raises(CorruptCacheError):
        read_everything(original, "columns")


@pytest.mark.parametrize("mapped", [True, False])
def test_a_container_of_another_length_or_none_is_never_mapped(original: Path, mapped: bool) -> None:
    for file, _ in containers(original):
        content = file.read_bytes()
        for changed, message in (
            (content[:-1], rf"has {len(content) - 1} bytes, not the {len(content)} that were written"),
            (content + b"x", "bytes, not the"),
            (b"", "has 0 bytes, not the"),
            (None, r"is not there; was the cache overwritten or moved"),
        ):
            with Changed(file, changed), pytest.raises(CorruptCacheError, match=message):
                read_everything(original, mapped=mapped)


def test_a_missing_file_is_named(original: Path) -> None:
    for file in files(original):
        if file.name == "featcache.json":
            continue
        with Changed(file, None), pytest.raises(featcache.errors.CacheError, match=file.name):
            read_everything(original, "columns")


@given(data=st.data())
@settings(max_examples=150)
def test_a_damaged_index_is_harmless_also_without_verification(original: Path, data: st.DataObject) -> None:
    cache = featcache.open(original)
    directory = original / cache._manifest.index_directory
    column = data.draw(st.sampled_from(sorted(file.name for file in directory.iterdir())))
    content = (directory / column).read_bytes()
    array = np.load(directory / column)
    place = data.draw(st.integers(0, len(array) - 1))
    limits = np.iinfo(array.dtype)
    array[place] = data.draw(st.one_of(st.integers(limits.min, limits.max), st.sampled_from([limits.min, limits.max])))
    with Changed(directory / column, content[: len(content) - array.nbytes] + array.tobytes()):
        for mapped in (True, False):
            with contextlib.suppress(FeatcacheError):
                read_everything(original, mapped=mapped)


def test_columns_that_do_not_fit_each_other_are_damage(tmp_path: Path) -> None:
    make_cache(tmp_path, range(6))
    index = tmp_path / featcache.open(tmp_path)._manifest.index_directory
    for column in sorted(index.iterdir()):
        before = column.read_bytes()
        np.save(column, np.load(column)[:-1])
        with pytest.raises(CorruptCacheError, match="columns have different lengths"):
            load_index(index, ["fbank", "units"])
        column.write_bytes(before)


def test_an_array_that_was_damaged_before_recovery_is_named(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path / "live", two_features(), FINGERPRINT)
    for number in range(1, 4):
        writer.write(str(number), {"fbank": np.ones((number, 4), np.float32), "units": np.ones(1, np.int16)})
    writer.commit()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    writer.abort()
    (container,) = tmp_path.glob("killed/parts/*/fbank.npy")
    content = container.read_bytes()
    for changed in (flipped(content, len(content) * 8 - 1), content[:-1], None):
        with (
            Changed(container, changed),
            pytest.raises(CorruptCacheError, match=r"(utterance '3', feature 'fbank'|fbank.npy).*"),
        ):
            CacheWriter(tmp_path / "killed", two_features(), FINGERPRINT)
    with CacheWriter(tmp_path / "killed", two_features(), FINGERPRINT) as writer:
        assert all(str(number) in writer for number in range(1, 4))
    featcache.open(tmp_path / "killed", verify="arrays")


def test_a_journal_that_was_damaged_counts_up_to_there(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path / "live", two_features(), FINGERPRINT)
    for number in range(4):
        writer.write(str(number), {"fbank": np.ones((2, 4), np.float32), "units": np.ones(1, np.int16)})
        writer.commit()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    writer.abort()
    (journal,) = tmp_path.glob("killed/parts/*/journal.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 4
    journal.write_bytes(b"".join(lines[:6]) + flipped(lines[6], 333) + b"".join(lines[7:]))
    with CacheWriter(tmp_path / "killed", two_features(), FINGERPRINT) as writer:
        assert [str(number) in writer for number in range(4)] == [True, True, False, False]
    cache = featcache.open(tmp_path / "killed", verify="arrays")
    assert cache.stats("fbank").count == 4
    assert json.loads(lines[8])[1]["commit"]["fbank"]["count"] == 8
