"""Caches that were written once and for all: they can be read, and continued, for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from format_reader import Reader
from golden_caches import (
    ANNOTATED,
    CHANGED,
    CHANGED_FEATURES,
    FAILED,
    FILES,
    FINGERPRINT,
    FIRST,
    GIVEN,
    GOLDEN,
    LAYOUTS,
    NEW,
    SECOND,
    STAMPED,
    annotations_of,
    arrays_of,
    assert_array,
)

import featcache
from featcache import CacheWriter
from featcache.format import Stamps

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def test_each_layout_has_a_golden_cache() -> None:
    found = {path.name for path in GOLDEN.iterdir() if path.is_dir()} - {"__pycache__"}
    assert found == {*LAYOUTS, CHANGED, ANNOTATED}


@layouts
def test_a_golden_cache_is_read(layout: str) -> None:
    cache = featcache.open(GOLDEN / layout, verify="arrays")
    assert cache.complete
    assert cache.failed == (FAILED,)
    assert cache.expected == len(FIRST) + len(SECOND) + 1
    assert_holds(layout, cache, [*FIRST, *SECOND])
    assert Reader(GOLDEN / layout).ids == list(cache)


@layouts
def test_a_copy_of_a_golden_cache_is_continued(layout: str, tmp_path: Path) -> None:
    copy = shutil.copytree(GOLDEN / layout, tmp_path / layout)
    with CacheWriter(copy, LAYOUTS[layout], FINGERPRINT) as writer:
        assert all(id in writer for id in (*FIRST, *SECOND))
        writer.write(NEW, arrays_of(NEW, list(writer.features)))
    cache = featcache.open(copy, verify="arrays")
    assert_holds(layout, cache, [*FIRST, *SECOND, NEW])
    assert cache.failed == (FAILED,)


def test_the_golden_cache_that_was_changed_is_read() -> None:
    cache = featcache.open(GOLDEN / CHANGED, verify="arrays")
    assert cache.complete
    assert_holds(CHANGED, cache, [*FIRST, *SECOND])
    assert_stamps_and_files(cache, STAMPED)


def test_a_copy_of_the_golden_cache_that_was_changed_is_continued(tmp_path: Path) -> None:
    copy = shutil.copytree(GOLDEN / CHANGED, tmp_path / "copy")
    with CacheWriter(copy, CHANGED_FEATURES, FINGERPRINT) as writer:
        writer.write(NEW, arrays_of(NEW, list(writer.features)), stamps=Stamps(5, 6))
        writer.restamp({SECOND[0]: Stamps(7, 8)})
    cache = featcache.open(copy, verify="arrays")
    assert_holds(CHANGED, cache, [*FIRST, *SECOND, NEW])
    assert_stamps_and_files(cache, STAMPED | {NEW: Stamps(5, 6), SECOND[0]: Stamps(7, 8)})


def test_the_golden_cache_with_annotations_is_read() -> None:
    assert_annotated(GOLDEN / ANNOTATED, [*FIRST, *SECOND])


def test_a_copy_of_the_golden_cache_with_annotations_is_continued(tmp_path: Path) -> None:
    copy = shutil.copytree(GOLDEN / ANNOTATED, tmp_path / "copy")
    with CacheWriter(copy, CHANGED_FEATURES, FINGERPRINT) as writer:
        arrays = arrays_of(NEW, list(writer.features))
        writer.write(NEW, arrays, annotations=annotations_of(NEW))
    assert_annotated(copy, [*FIRST, *SECOND, NEW])


def assert_annotated(path: Path, ids: list[str]) -> None:
    cache = featcache.open(path, verify="arrays")
    assert_holds(CHANGED, cache, ids)
    reader = Reader(path)
    expected = {id: annotations_of(id) | GIVEN.get(id, {}) for id in ids}
    assert {*cache.annotations} == {name for values in expected.values() for name in values}
    for name in cache.annotations:
        found = list(cache.annotation(name))
        assert found == [expected[id].get(name) for id in cache]
        assert found == reader.annotation(name)


def assert_stamps_and_files(cache: featcache.Cache, known: dict[str, Stamps]) -> None:
    stamps = cache.opened.index.stamps
    assert stamps is not None
    found = dict(zip(cache, zip(*(column.tolist() for column in stamps), strict=True), strict=True))
    assert found == {id: known.get(id, (0, 0)) for id in cache}
    reader = Reader(cache.path)
    assert reader.stamps() == found
    for role, data in FILES.items():
        assert cache.opened.file(role) == reader.file(role) == data


def assert_holds(layout: str, cache: featcache.Cache, ids: list[str]) -> None:
    assert list(cache) == sorted(ids, key=str.encode)
    for id in ids:
        for name, array in cache[id].items():
            assert_array(layout, id, name, array)
            length = 1 if name == "speaker" else len(array)
            assert cache.lengths(name, ids=[id]).tolist() == [length]
    for name in {"fbank", "half"} & {*cache.features}:
        frames = np.concatenate([arrays_of(id, [name])[name] for id in ids]).astype(np.float64)
        assert cache.stats(name).count == len(frames)
        # where an id was doubled, they are of what a lossy codec gives back
        near = 2.0**-5 if layout.endswith(("lilcom", "int8")) else 0
        for found, of in (cache.stats(name).mean, frames.mean), (cache.stats(name).var, frames.var):
            np.testing.assert_allclose(found, of(axis=0), rtol=1e-12, atol=near)
