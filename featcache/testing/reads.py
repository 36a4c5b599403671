"""Reading: frame windows, batches, tensors, mapped or not, without the format's library."""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache.declaration import FeatureStorageConfig
from featcache.registry import RAW
from featcache.testing.backend_under_test import (
    Storage,
    Utterances,
    assert_tensor,
    some_features,
    some_utterances,
    write,
)

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
