"""A part that its writer left is sealed in place if its formats can be finished, else copied."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import native_readers
import numpy as np
import pytest
from numpy.typing import NDArray

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheError, CorruptCacheError, StorageFullError
from featcache.format import COLUMNS, SEAL, journal
from featcache.testing.promises import Interruption, contents_below, interrupted
from featcache.writing import recover
from featcache.writing.held import HeldCache
from featcache.writing.open_part import container_groups
from featcache.writing.recover import RECOVERED
from featcache_backends.memmap import MemmapBackend

Features = list[FeatureStorageConfig]
COMMITTED, MORE = range(12), range(12, 17)
MOST_INTERRUPTIONS = 30
DIMS: dict[str, tuple[int, ...]] = {"fbank": (40,), "units": (), "speaker": (8,)}
READERS = {
    "memmap": native_readers.read_npy,
    "lilcom": native_readers.read_lilcom,
    "webdataset": native_readers.read_shards,
    "zarr": native_readers.read_zarr,
    "hdf5": native_readers.read_hdf5,
}


def copy_as_dead(live: Path, path: Path) -> Path:
    """Copy a cache that this process writes, as if another had, which is gone."""
    return Path(shutil.copytree(live, path, ignore=shutil.ignore_patterns("writer.json")))


def fbank(backend: str, codec: str | None = None, **options: object) -> FeatureStorageConfig:
    return FeatureStorageConfig("fbank", backend=backend, codec=codec, options=options)


def units(backend: str, codec: str | None = None, **options: object) -> FeatureStorageConfig:
    return FeatureStorageConfig("units", "int16", backend=backend, codec=codec, options=options)


def speaker(backend: str, codec: str | None = None, **options: object) -> FeatureStorageConfig:
    return FeatureStorageConfig(
        "speaker", backend=backend, codec=codec, options=options, time_axis=None
    )


KINDS = (fbank, units, speaker)
SMALL: dict[str, Any] = {"chunk_bytes": 1 << 10, "shard_bytes": 1 << 13}
IN_PLACE: dict[str, Features] = {
    "memmap": [kind("memmap") for kind in KINDS],
    "lilcom": [fbank("lilcom"), speaker("lilcom")],
    "webdataset": [kind("webdataset") for kind in KINDS],
    "webdataset in shards": [kind("webdataset", shard_bytes=20_000) for kind in KINDS],
    "zarr": [kind("zarr", **SMALL) for kind in KINDS],
    "zarr with zstd": [kind("zarr", "zstd", **SMALL) for kind in KINDS],
    "zarr with blosc": [kind("zarr", "blosc", **SMALL) for kind in KINDS],
    "several formats": [fbank("webdataset"), units("memmap"), speaker("zarr")],
    "several groups of a format": [
        fbank("webdataset", shard_bytes=1 << 15),
        units("webdataset", shard_bytes=1 << 14),
        speaker("webdataset", shard_bytes=1 << 15),
    ],
}
COPIED: dict[str, Features] = {
    "hdf5": [kind("hdf5") for kind in KINDS],
    "hdf5 and memmap": [fbank("hdf5"), units("memmap"), speaker("hdf5")],
}
LAYOUTS = [*IN_PLACE.items(), *COPIED.items()]
each_layout = pytest.mark.parametrize(
    ("layout", "features"), LAYOUTS, ids=[name for name, _ in LAYOUTS]
)


def arrays_of(number: int, features: Features) -> dict[str, NDArray[np.generic]]:
    random = np.random.default_rng(number)
    frames = (number * 37) % 150
    arrays: dict[str, NDArray[np.generic]] = {
        "fbank": (random.standard_normal((frames, 40)) * 3).astype(np.float32),
        "units": random.integers(-500, 500, frames // 2, np.int16),
        "speaker": random.standard_normal(8).astype(np.float32),
    }
    return {feature.name: arrays[feature.name] for feature in features}


def write(writer: CacheWriter, features: Features, numbers: Iterable[int]) -> None:
    for number in numbers:
        writer.write(f"spk{number % 3}/utt-{number}", arrays_of(number, features))


def leave(path: Path, features: Features) -> str:
    """Leave what a killed writer leaves: what is committed, more behind it, and torn bytes.

    Returns the name of its part.
    """
    live = path.with_name("live")
    writer = CacheWriter(live, features)
    write(writer, features, COMMITTED)
    writer.commit()
    [part] = (live / "parts").iterdir()
    committed = (part / journal.JOURNAL).read_bytes()
    write(writer, features, MORE)
    writer.commit()  # or they might still be in memory
    copy_as_dead(live, path)
    writer.abort()
    left = path / "parts" / part.name
    (left / journal.JOURNAL).write_bytes(committed)
    for name in containers_of(left):
        with (left / name).open("ab") as file:
            file.write(b"torn" * 100)
    return part.name


def containers_of(part: Path) -> dict[str, bytes]:
    """Return the files of a part that are of its formats."""
    ours = {journal.JOURNAL, "writer.lock", "writer.json", COLUMNS, SEAL}
    return {name: data for name, data in contents_below(part).items() if name not in ours}


def closed(path: Path, features: Features) -> featcache.Cache:
    """Return a cache of what is committed, of a writer that was not killed."""
    with CacheWriter(path, features) as writer:
        write(writer, features, COMMITTED)
    return featcache.open(path)


def parts_of(path: Path) -> list[str]:
    return sorted(os.listdir(path / "parts"))  # noqa: PTH208


def assert_same(cache: featcache.Cache, expected: featcache.Cache) -> None:
    """Fail unless both hold the same, statistics to the last bit."""
    assert list(cache) == list(expected)
    for name in expected.features:
        for id in expected:
            found, wanted = cache.read(id, name), expected.read(id, name)
            np.testing.assert_array_equal(found, wanted, strict=True)
    stats = cache.stats("fbank"), expected.stats("fbank")
    assert stats[0].count == stats[1].count
    assert stats[0].mean.tobytes() == stats[1].mean.tobytes()
    assert stats[0].m2.tobytes() == stats[1].m2.tobytes()


@pytest.fixture
def left(tmp_path: Path) -> Path:
    return tmp_path / "left"


@each_layout
def test_a_part_is_sealed_where_it_lies(
    tmp_path: Path, left: Path, layout: str, features: Features
) -> None:
    part = leave(left, features)
    CacheWriter(left, features).close()
    expected = closed(tmp_path / "closed", features)
    assert parts_of(left) == [part if layout in IN_PLACE else part + RECOVERED]
    assert_same(featcache.open(left, verify="arrays"), expected)
    if layout in IN_PLACE:
        [other] = (tmp_path / "closed" / "parts").iterdir()
        assert containers_of(left / "parts" / part) == containers_of(other)
        assert set(contents_below(left / "parts" / part)) == set(contents_below(other))


@each_layout
def test_the_formats_own_libraries_read_a_recovered_part(
    left: Path, layout: str, features: Features
) -> None:
    part = leave(left, features)
    written = journal.read_journal(left, f"parts/{part}")
    assert written is not None
    CacheWriter(left, features).close()
    cache = featcache.open(left)
    [directory] = (left / "parts").iterdir()
    declared = {feature.name: feature for feature in features}
    for prefix, names in container_groups(declared):
        for name in names:
            places = {each.id: each.arrays[name].extents for each in written.utterances}
            read = READERS[declared[name].backend]
            arrays = read(directory / prefix, declared[name].spec(DIMS[name]), places)
            assert set(arrays) == set(cache)
            for id in cache:
                np.testing.assert_array_equal(arrays[id], cache.read(id, name), strict=True)


@pytest.mark.parametrize("layout", ["several formats", "webdataset in shards", "zarr with zstd"])
def test_recovery_goes_on_wherever_it_was_interrupted(
    tmp_path: Path, left: Path, layout: str
) -> None:
    features = IN_PLACE[layout]
    part = leave(left, features)
    expected = closed(tmp_path / "closed", features)
    declared = {feature.name: feature for feature in features}

    def recover_in(path: Path, number: int) -> int:
        shutil.copytree(left, path)
        with HeldCache(path) as held:
            assert held.manifest.building == 1  # read before it is counted
            return interrupted(lambda: recover.recover_parts(held, declared), number)

    recover_in(tmp_path / "first", 0)  # imports
    calls = recover_in(tmp_path / "whole", 0)
    for number in range(1, calls + 1, -(-calls // MOST_INTERRUPTIONS)):
        path = tmp_path / str(number)
        with suppress(Interruption):  # fewer calls where more syncs go in threads beside
            recover_in(path, number)
            assert number > calls // 2
        gc.collect()  # locks
        CacheWriter(path, features).close()
        assert parts_of(path) == [part]
        assert_same(featcache.open(path, verify="arrays"), expected)
    with CacheWriter(path, features) as writer:
        write(writer, features, MORE)
    assert len(featcache.open(path, verify="arrays")) == len(COMMITTED) + len(MORE)


def test_a_part_whose_arrays_are_damaged_is_copied_and_set_aside(left: Path) -> None:
    features = IN_PLACE["memmap"]
    part = leave(left, features)
    flip(left / "parts" / part / "fbank.npy", 300)
    CacheWriter(left, features).close()
    assert parts_of(left) == [part + RECOVERED, part + recover.DAMAGED]
    assert len(featcache.open(left, verify="arrays")) == len(COMMITTED) - 1


def test_a_part_whose_files_are_not_as_they_were_left_is_copied(
    tmp_path: Path, left: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features = IN_PLACE["webdataset"]
    part = leave(left, features)
    flip(left / "parts" / part / "shard-000000.tar", 0)  # the name of a member
    with caplog.at_level(logging.WARNING, "featcache"):
        CacheWriter(left, features).close()
    assert "is copied, for its files cannot be finished" in caplog.text
    assert parts_of(left) == [part + RECOVERED]
    assert_same(featcache.open(left, verify="arrays"), closed(tmp_path / "closed", features))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_part_that_was_copied_before_is_not_sealed_as_well(
    tmp_path: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = IN_PLACE["memmap"]
    part = leave(left, features)

    def refuse(*_: object) -> None:
        raise CorruptCacheError("for a while")

    with monkeypatch.context() as patch:
        patch.setattr(MemmapBackend, "finish", refuse)
        patch.setattr(recover, "remove_part", lambda directory: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            CacheWriter(left, features)
    assert parts_of(left) == [part, part + RECOVERED]
    CacheWriter(left, features).close()
    assert parts_of(left) == [part + RECOVERED]
    assert_same(featcache.open(left, verify="arrays"), closed(tmp_path / "closed", features))


@pytest.mark.parametrize("layout", ["webdataset", "several groups of a format"])
def test_the_features_may_be_declared_in_another_order(
    tmp_path: Path, left: Path, layout: str
) -> None:
    features = IN_PLACE[layout]
    part = leave(left, features)
    CacheWriter(left, features[::-1]).close()
    assert parts_of(left) == [part]
    assert_same(featcache.open(left, verify="arrays"), closed(tmp_path / "closed", features))


@pytest.mark.parametrize("backend", ["hdf5", "lilcom", "memmap", "webdataset", "zarr"])
def test_a_part_is_sealed_on_a_disk_that_cannot_hold_it_twice(
    small_disk: Path, tmp_path: Path, backend: str
) -> None:
    features = [fbank(backend, tick_power=-20) if backend == "lilcom" else fbank(backend)]
    frames = np.random.default_rng(0).standard_normal((1000, 40)).astype(np.float32)
    writer = CacheWriter(tmp_path / "live", features)
    for number in range(10):
        writer.write(str(number), {"fbank": frames})
    writer.commit()
    path = copy_as_dead(tmp_path / "live", small_disk / "cache")
    writer.abort()
    filling = small_disk / "filling"
    filling.write_bytes(bytes(shutil.disk_usage(small_disk).free - (1 << 18)))  # for the index
    if backend == "hdf5":
        with pytest.raises(StorageFullError, match=r"is copied once, which needs 1,8[0-9,]+: free"):
            CacheWriter(path, features)
        filling.unlink()
    CacheWriter(path, features).close()
    cache = featcache.open(path, verify="arrays")
    assert len(cache) == 10
    np.testing.assert_allclose(cache.read("9", "fbank"), frames, atol=1e-5)


def test_a_writer_whose_part_was_sealed_by_another_does_not_seal_it_again(tmp_path: Path) -> None:
    features = IN_PLACE["memmap"]
    writer = CacheWriter(tmp_path, features)
    write(writer, features, COMMITTED)
    writer.commit()
    [part] = (tmp_path / "parts").iterdir()
    (part / journal.JOURNAL).unlink()  # as one does who did not see the lock
    with pytest.raises(CacheError, match="was taken over by another writer"):
        writer.close()
    assert not (part / SEAL).exists()
