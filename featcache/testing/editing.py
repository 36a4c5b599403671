"""Editing: what is deleted is gone from every file after `compact`; the rest stays as it is."""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import featcache
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheError
from featcache.interface import Array
from featcache.store import Cache
from featcache.testing.backend_under_test import (
    Storage,
    as_given,
    some_features,
    some_utterances,
    write,
)
from featcache.writing.cache_writer import CacheWriter

FRAMES = {f"utterance-{number}": 40 + 300 * (number % 3) for number in range(9)} | {"empty": 0}
DELETED = ["utterance-1", "utterance-5", "utterance-8"]
LEFT = [id for id in FRAMES if id not in DELETED]
_TELLING = 32  # bytes of an array that no other has


class Editing:
    """A cache loses what is deleted, and its parts become one."""

    def test_what_was_deleted_is_in_no_file_after_compacting(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        features, path = some_features(storage), tmp_path / "cache"
        utterances = some_utterances(features, FRAMES)
        for ids in ([*FRAMES][:4], [*FRAMES][4:]):
            write(path, features, utterances, ids)
        cache = featcache.open(path)
        before = {id: [*stored_bytes(cache, id)] for id in FRAMES}
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
        utterances = some_utterances(features, FRAMES)
        write(path, features, utterances, [*FRAMES])
        read = dict(featcache.open(path))
        for _ in range(2):
            featcache.open(path).delete(DELETED)
            featcache.open(path).compact()
            write(path, features, utterances, DELETED)
        cache = featcache.open(path, verify="arrays")
        assert list(cache) == sorted(FRAMES)
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
    utterances = some_utterances(features, FRAMES)
    others = some_utterances(
        features, {f"seed-{n}": 1 for n in FRAMES} | dict.fromkeys(DELETED, 41)
    )
    write(path, features, utterances, [*FRAMES])
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
    assert list(compacted) == sorted(FRAMES)
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
