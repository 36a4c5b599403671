"""`BackendContract`: the suite that tells whether a backend keeps its word.

Here are its tests of whole caches: reading, writing in any order and until the process is killed,
editing. `promises` asks the backend itself, `round_trips` has any arrays and ids.
"""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import featcache
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheError, MissingDependencyError
from featcache.format import from_storage
from featcache.interface import Array
from featcache.registry import RAW
from featcache.store import Cache
from featcache.testing.backend_under_test import (
    Storage,
    Utterances,
    as_given,
    assert_tensor,
    some_features,
    some_utterances,
    write,
)
from featcache.testing.promises import (
    Decoding,
    Durability,
    Finishing,
    NativeFiles,
    Seam,
    append_all,
)
from featcache.testing.round_trips import RoundTrips
from featcache.writing.cache_writer import CacheWriter

# Reading: frame windows, batches, tensors, mapped or not, without the library of the format.

LENGTHS = {"long": 1203, "short": 6, "none": 0, "one": 1, "block": 500, "blocks": 1024}
CUTS = (0, 1, 255, 256, 257, 499, 500, 501, 1000, 1202, 1203)  # around the borders of blocks

_READ = """
import sys, featcache
cache = featcache.open(sys.argv[1])
for id in cache:
    cache.read(id, "fbank"), cache.read(id, "fbank", 0, 0), cache.read(id, "speaker")
    cache.read_batch([id], "energy")
"""


@dataclass(frozen=True)
class StoredCache:
    """A cache and what was written to it."""

    path: Path
    features: Sequence[FeatureStorageConfig]
    utterances: Utterances


class Reading:
    """Everything that is read is a part of what was written."""

    @pytest.fixture(scope="class")
    @classmethod
    def stored(cls, storage: Storage, tmp_path_factory: pytest.TempPathFactory) -> StoredCache:
        features = some_features(storage)
        stored = StoredCache(
            tmp_path_factory.mktemp("stored") / "cache",
            features,
            some_utterances(features, LENGTHS),
        )
        write(stored.path, stored.features, stored.utterances)
        return stored

    def test_every_window_is_a_slice(self, stored: StoredCache) -> None:
        cache = featcache.open(stored.path)
        for id, feature in itertools.product(cache, ("fbank", "energy")):
            whole = cache.read(id, feature)
            for start, stop in windows(len(whole)):
                window = cache.read(id, feature, start, stop)
                assert window.dtype == whole.dtype
                np.testing.assert_array_equal(
                    window, whole[start:stop], str((id, feature, start, stop))
                )
            assert (
                cache.read(id, feature, stop=len(whole) // 2).shape
                == whole[: len(whole) // 2].shape
            )

    def test_a_window_reads_its_own_bytes_only(
        self, storage: Storage, stored: StoredCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = featcache.open(stored.path, mapped=False)
        pieces = record_reading(monkeypatch)
        for feature in stored.features[:2]:
            array = stored.utterances["long"][feature.name]
            blocks = feature.blocks(array.shape[1:])
            for start, stop in windows(len(array)):
                pieces.clear()
                cache.read("long", feature.name, start, stop)
                if blocks is None:
                    assert sum(pieces) == array[start:stop].nbytes
                else:
                    rows = blocks.rows or len(array)
                    assert len(pieces) == (-(-stop // rows) - start // rows if start < stop else 0)

    def test_mapped_and_unmapped_reading_agree(self, stored: StoredCache) -> None:
        mapped, unmapped = featcache.open(stored.path), featcache.open(stored.path, mapped=False)
        for id, feature in itertools.product(mapped, mapped.features):
            assert mapped.read(id, feature).tobytes() == unmapped.read(id, feature).tobytes()
            if feature != "speaker":
                for start, stop in windows(LENGTHS[id]):
                    here, there = (
                        cache.read(id, feature, start, stop) for cache in (mapped, unmapped)
                    )
                    assert here.tobytes() == there.tobytes()

    def test_what_is_read_belongs_to_the_reader(self, stored: StoredCache) -> None:
        cache = featcache.open(stored.path)
        for feature in cache.features:
            before = cache.read("short", feature)
            cache.read("short", feature).fill(1)
            assert cache.read("short", feature).tobytes() == before.tobytes()

    def test_a_batch_is_the_arrays_padded_with_zeros(self, stored: StoredCache) -> None:
        cache = featcache.open(stored.path)
        for ids in (["short", "none", "long", "short"], ["none"], ["none", "none"], []):
            for feature in ("fbank", "energy"):
                arrays = [cache.read(id, feature) for id in ids]
                expected = np.zeros(
                    (
                        len(ids),
                        max(map(len, arrays), default=0),
                        *cache.read("one", feature).shape[1:],
                    )
                )
                for row, array in zip(expected, arrays, strict=True):
                    row[: len(array)] = array
                batch = cache.read_batch(ids, feature)
                assert batch.data.dtype == cache.read("one", feature).dtype
                np.testing.assert_array_equal(batch.data, expected, strict=False)
                assert batch.data.shape == expected.shape
                assert batch.lengths.tolist() == [LENGTHS[id] for id in ids]
            speakers = [cache.read(id, "speaker") for id in ids]
            assert cache.read_batch(ids, "speaker").data.tolist() == [
                speaker.tolist() for speaker in speakers
            ]

    def test_lengths_are_numbers_of_frames(self, stored: StoredCache) -> None:
        cache = featcache.open(stored.path)
        assert cache.lengths("fbank").tolist() == [LENGTHS[id] for id in cache]
        assert cache.lengths("energy", ids=["long", "none"]).tolist() == [1203, 0]
        assert cache.reader("fbank").lengths(["one", "short"]) == [1, 6]

    def test_a_pickled_reader_gives_tensors(self, stored: StoredCache) -> None:
        cache = featcache.open(stored.path)
        for feature in stored.features:
            reader = pickle.loads(pickle.dumps(cache.reader(feature.name)))  # noqa: S301
            for id in stored.utterances:
                assert_tensor(reader(id), cache.read(id, feature.name), feature.dtype)

    def test_uncompressed_reading_needs_no_library(
        self, storage: Storage, stored: StoredCache
    ) -> None:
        if storage.codec != RAW:
            pytest.skip("a codec may need its library")
        loaded = packages(_READ, stored.path) - packages("import featcache.store")
        assert loaded <= sys.stdlib_module_names


def windows(frames: int) -> Iterator[tuple[int, int]]:
    """List first and last frames of windows.

    All of a short array, those around the borders of blocks of a long one.
    """
    cuts = (
        range(frames + 1)
        if frames < 10
        else sorted({cut for cut in CUTS if cut <= frames} | {frames})
    )
    return itertools.combinations_with_replacement(cuts, 2)


def record_reading(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that takes the number of bytes of each piece of a file that is read.

    It takes those read unmapped, from now on.
    """
    pieces: list[int] = []
    preadv = os.preadv

    def recorded(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        pieces.append(sum(len(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", recorded)
    return pieces


@functools.cache
def packages(script: str, *arguments: object) -> set[str]:
    """List what is imported in a new process after running a script in it."""
    command = [
        sys.executable,
        "-c",
        script + "\nimport json, sys; print(json.dumps([*sys.modules]))",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [*command, *map(str, arguments)], env=environment, check=True, stdout=subprocess.PIPE
    )
    return {name.partition(".")[0] for name in json.loads(ended.stdout)}


# Writing: in any order, in several runs, until the process is killed; the cache is the same.

WRITTEN = {
    "utt-10": 600,
    "utt-9": 3,
    "Utt-9": 0,
    "spk/1": 1025,
    "spk.1": 1,
    "ü": 90,
    "u": 7,
    "z" * 300: 256,
}
WRITTEN_IDS = list(WRITTEN)


class Writing:
    """The cache is the same in whatever way the utterances come."""

    def test_the_order_of_arrival_does_not_matter(self, storage: Storage, tmp_path: Path) -> None:
        features = some_features(storage)
        utterances = some_utterances(features, WRITTEN)
        write(tmp_path / "cache", features, utterances)
        write(tmp_path / "other", features, utterances, ids=WRITTEN_IDS[::-1])
        write(tmp_path / "third", features, utterances, ids=WRITTEN_IDS[3:] + WRITTEN_IDS[:3])
        cache = featcache.open(tmp_path / "cache")
        storage.assert_holds(cache, features, utterances)
        for other in ("other", "third"):
            assert_equal(featcache.open(tmp_path / other), cache)

    def test_a_second_writer_goes_on(self, storage: Storage, tmp_path: Path) -> None:
        features = some_features(storage)
        utterances = some_utterances(features, WRITTEN)
        write(tmp_path / "once", features, utterances)
        write(tmp_path / "twice", features, utterances, ids=WRITTEN_IDS[::2])
        storage.assert_holds(
            featcache.open(tmp_path / "twice"),
            features,
            {id: utterances[id] for id in WRITTEN_IDS[::2]},
        )
        write(tmp_path / "twice", features, utterances, ids=WRITTEN_IDS[1::2])
        assert_equal(
            featcache.open(tmp_path / "twice", verify="arrays"), featcache.open(tmp_path / "once")
        )

    def test_statistics_are_those_of_the_written_arrays(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        features = some_features(storage)
        utterances = some_utterances(features, WRITTEN)
        for ids in (WRITTEN_IDS[:3], WRITTEN_IDS[3:]):
            write(tmp_path / "cache", features, utterances, ids)
        for feature in features:
            if feature.stats:
                arrays = [
                    from_storage(each[feature.name], feature.dtype) for each in utterances.values()
                ]
                frames = np.concatenate(
                    [a if feature.time_axis == 0 else a[None] for a in arrays]
                ).astype(np.float64)
                stats = featcache.open(tmp_path / "cache").stats(feature.name)
                assert stats.count == len(frames)
                np.testing.assert_allclose(stats.mean, frames.mean(axis=0), rtol=1e-12)
                np.testing.assert_allclose(stats.std, frames.std(axis=0), rtol=1e-12)

    def test_what_was_committed_survives_a_killed_writer(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        features = some_features(storage)
        utterances = some_utterances(features, WRITTEN)
        path = tmp_path / "cache"
        write_until_killed(
            path, features, utterances, committed=WRITTEN_IDS[:5], lost=WRITTEN_IDS[5:7]
        )
        with featcache.CacheWriter(path, features) as writer:
            assert all(id in writer for id in WRITTEN_IDS[:5])
            for id in WRITTEN_IDS:
                if id not in writer:
                    writer.write(
                        id, {f.name: as_given(utterances[id][f.name], f.dtype) for f in features}
                    )
        storage.assert_holds(featcache.open(path, verify="arrays"), features, utterances)
        write(tmp_path / "alive", features, utterances)
        assert_equal(featcache.open(path), featcache.open(tmp_path / "alive"))


def assert_equal(cache: Cache, other: Cache) -> None:
    """Fail unless two caches hold the same, bit for bit; statistics may differ by rounding."""
    assert list(cache) == list(other)
    assert cache.fingerprint == other.fingerprint
    assert (cache.complete, other.complete) == (True, True)
    for feature in cache.features:
        batch, expected = (
            cache.read_batch(list(cache), feature),
            other.read_batch(list(cache), feature),
        )
        assert batch.data.tobytes() == expected.data.tobytes()
        assert (
            batch.lengths.tolist() == cache.lengths(feature).tolist() == expected.lengths.tolist()
        )
        if cache.fingerprint["features"][feature]["stats"]:
            stats, wanted = cache.stats(feature), other.stats(feature)
            assert stats.count == wanted.count
            np.testing.assert_allclose(stats.mean, wanted.mean, rtol=1e-12)
            np.testing.assert_allclose(stats.std, wanted.std, rtol=1e-12)


def write_until_killed(
    path: Path,
    features: list[FeatureStorageConfig],
    utterances: Utterances,
    committed: list[str],
    lost: list[str],
) -> None:
    """Write in a process that kills itself with SIGKILL after writing, not committing, `lost`."""
    arrays = {
        f"{number}.{feature.name}": from_storage(utterances[id][feature.name], feature.dtype)
        for number, id in enumerate(committed + lost)
        for feature in features
    }
    file = path.with_name("arrays.npz")
    np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy takes them for `allow_pickle`
    job = {
        "features": [feature.to_json() for feature in features],
        "committed": committed,
        "lost": lost,
    }
    script = Path(__file__).with_name("killed_writer.py")
    ended = subprocess.run(
        [sys.executable, "-P", script, path, json.dumps(job), file],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


# Editing: what is deleted is gone from every file after `compact`; the rest stays as it is.

EDITED = {f"utterance-{number}": 40 + 300 * (number % 3) for number in range(9)} | {"empty": 0}
DELETED = ["utterance-1", "utterance-5", "utterance-8"]
LEFT = [id for id in EDITED if id not in DELETED]
_TELLING = 32  # bytes of an array that no other has


class Editing:
    """A cache loses what is deleted, and its parts become one."""

    def test_what_was_deleted_is_in_no_file_after_compacting(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        features, path = some_features(storage), tmp_path / "cache"
        utterances = some_utterances(features, EDITED)
        for ids in ([*EDITED][:4], [*EDITED][4:]):
            write(path, features, utterances, ids)
        cache = featcache.open(path)
        before = {id: [*stored_bytes(cache, id)] for id in EDITED}
        read = {id: cache[id] for id in LEFT}
        traces = [each for id in DELETED for each in before[id] if len(each) >= _TELLING]
        traces += [id.encode() for id in DELETED]
        assert traces_in(path, traces)
        cache.delete(DELETED)
        cache.compact()
        assert not traces_in(path, traces)
        compacted = featcache.open(path, verify="arrays")
        assert list(compacted) == sorted(LEFT)
        assert_same(compacted, read)
        for id in LEFT:  # nothing was decoded
            assert b"".join(stored_bytes(compacted, id)) == b"".join(before[id])
        assert len(list(path.glob("parts/*"))) == 1
        assert compacted.complete

    def test_an_utterance_can_be_written_after_compacting(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        features, path = some_features(storage), tmp_path / "cache"
        utterances = some_utterances(features, EDITED)
        write(path, features, utterances, [*EDITED])
        read = dict(featcache.open(path))
        for _ in range(2):
            featcache.open(path).delete(DELETED)
            featcache.open(path).compact()
            write(path, features, utterances, DELETED)
        cache = featcache.open(path, verify="arrays")
        assert list(cache) == sorted(EDITED)
        assert_same(cache, read)

    def test_an_utterance_that_is_written_again_has_its_new_bytes_alone(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        features = some_features(storage)
        for by in ("cache", "writer"):
            assert_replaces(tmp_path / by, features, by)


def assert_replaces(path: Path, features: Sequence[FeatureStorageConfig], by: str) -> None:
    """Fail unless utterances that are deleted and written again are the new ones alone.

    Args:
        path: a new cache.
        features: `some_features`.
        by: "cache" deletes with `Cache.delete`, "writer" with the `CacheWriter` that writes.
    """
    utterances = some_utterances(features, EDITED)
    others = some_utterances(
        features, {f"seed-{n}": 1 for n in EDITED} | dict.fromkeys(DELETED, 41)
    )
    write(path, features, utterances, [*EDITED])
    cache = featcache.open(path)
    cache.tag("before")
    left = {id: cache[id] for id in LEFT}
    traces = [each for id in DELETED for each in stored_bytes(cache, id) if len(each) >= _TELLING]
    if by == "cache":
        cache.delete(DELETED)
    with CacheWriter(path, features) as writer:
        if by == "writer":
            writer.delete(DELETED)
        for id in DELETED:
            writer.write(id, {f.name: as_given(others[id][f.name], f.dtype) for f in features})
    cache.refresh()
    new = {id: cache[id] for id in DELETED}
    assert cache.lengths("fbank", ids=DELETED).tolist() == [41] * len(DELETED)
    with pytest.raises(CacheError, match="'before'"):
        cache.compact()
    assert_same(featcache.open(path, verify="arrays"), left | new)
    cache.compact(drop_tags=True)
    assert not traces_in(path, traces)
    assert len(list(path.glob("parts/*"))) == 1
    compacted = featcache.open(path, verify="arrays")
    assert list(compacted) == sorted(EDITED)
    assert_same(compacted, left | new)


def assert_same(cache: Cache, expected: Mapping[str, Mapping[str, Array]]) -> None:
    """Fail unless a cache gives arrays bit for bit as it did."""
    for id, arrays in expected.items():
        for name, array in arrays.items():
            assert cache.read(id, name).tobytes() == array.tobytes(), (id, name)


def stored_bytes(cache: Cache, id: str) -> Iterator[bytes]:
    """Yield the extents of an utterance's arrays, one after another."""
    opened, row = cache.opened, cache.opened.row(id)
    for each in opened.index.features.values():
        for extent in range(int(each.first[row]), int(each.first[row + 1])):
            columns = each.container, each.offset, each.nbytes
            container, offset, nbytes = (int(column[extent]) for column in columns)
            yield opened.containers.view(container, offset, nbytes).tobytes()


def traces_in(path: Path, traces: Iterable[bytes]) -> list[tuple[str, bytes]]:
    """Return which of some bytes are in which file of a directory."""
    found = []
    for file in path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            found += [(file.name, trace[:_TELLING]) for trace in traces if trace in data]
    return found


# The suite.


class BackendContract(
    RoundTrips, Reading, Writing, Editing, Seam, Decoding, Durability, Finishing, NativeFiles
):
    """Test a backend with each of its codecs; inherit from it and name the backend.

    A backend whose library is not installed is skipped.

    Attributes:
        backend: as it is registered; None: all that are installed.
        options: options of the backend and its codecs to test with, e.g. a size of files that a
            test exceeds.
        tolerance: for lossy codecs, by name, how far a number within -100 to 100 may move; a lossy
            codec that is not listed may return any numbers, but always the same.
        examples: how many caches hypothesis tries for each property.
    """

    backend: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, object]] = {}
    tolerance: ClassVar[Mapping[str, float]] = {}
    examples: ClassVar[int] = 10

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test with every codec."""
        if "storage" not in metafunc.fixturenames:
            return
        backends = featcache.registry.backend_names() if self.backend is None else [self.backend]
        storages = [
            Storage(backend, codec, self.options, self.tolerance.get(codec))
            for backend in backends
            for codec in featcache.registry.get_backend(backend).codecs
        ]
        metafunc.parametrize("storage", storages, ids=str, indirect=True, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def storage(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Storage:
        """The backend and the codec to test."""
        storage: Storage = request.param
        try:
            append_all(storage, tmp_path_factory.mktemp("installed"))[0].close()
        except MissingDependencyError as error:
            pytest.skip(str(error))
        return storage
