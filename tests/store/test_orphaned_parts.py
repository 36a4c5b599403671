"""Part writers that outlive the run they belong to: what they store is kept, or refused."""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_helpers import (
    FINGERPRINT,
    check_cache,
    id_of,
    make_cache,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter
from featcache.errors import CacheError, CacheLockedError, StaleCacheError
from featcache.writing.part_writer import PartWriter
from featcache.writing.session import publish_sealed

FEW = range(4)
FEATURES = {each.name: each for each in two_features()}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "train", FEW)


def overwrite(cache: Path) -> None:
    make_cache(cache, FEW, overwrite=True)


def begin_to_overwrite(cache: Path) -> None:
    CacheWriter(cache, two_features(), {"model": "other"}, overwrite=True).close(complete=False)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (overwrite, StaleCacheError),
        (begin_to_overwrite, StaleCacheError),
        (shutil.rmtree, CacheError),
    ],
)
def test_a_part_writer_whose_cache_has_become_another_one_is_refused_before_anything_is_stored(
    cache: Path, change: Callable[[Path], object], error: type[Exception]
) -> None:
    with PartWriter(cache, FEATURES, FINGERPRINT) as writer:
        change(cache)
        with pytest.raises(error):
            write(writer, [7])
        assert (len(writer), writer.commit()) == (0, 0)
    assert not [*cache.glob("parts/*/journal.jsonl")]


def test_a_part_writer_goes_on_when_the_same_is_written_by_another_run(cache: Path) -> None:
    with PartWriter(cache, FEATURES, FINGERPRINT) as writer:
        make_cache(cache, [8])
        featcache.open(cache).delete([id_of(0)])
        write(writer, [7])
    CacheWriter(cache, two_features(), FINGERPRINT).close()
    check_cache(cache, [1, 2, 3, 7, 8])


_before_each_look: list[Callable[[], None]] = []  # at a part that its writer removes


def _heard(event: str, args: tuple[object, ...]) -> None:
    if _before_each_look and any(GOING in str(each) for each in args):
        _before_each_look[0]()


GOING = "20200101T000000-0123abcd"  # a part, first in the order of names
sys.addaudithook(_heard)  # of all that asks the system for a file; it cannot be taken away


@contextmanager
def removed_before_look(part: Path, number: int) -> Iterator[list[int]]:
    """Remove a part just before a process looks at it the time of this number, from 1 on.

    Its writer does so while it holds the part's lock: never while another holds that.
    """
    looks: list[int] = []

    def look() -> None:
        if {"_recover", "remove_part"} & {each.name for each in traceback.extract_stack()}:
            return
        looks.append(number)
        if len(looks) == number:
            _before_each_look.clear()
            shutil.rmtree(part)

    _before_each_look.append(look)
    try:
        yield looks
    finally:
        _before_each_look.clear()


VERBS: dict[str, Callable[[Path], object]] = {
    "append": lambda cache: make_cache(cache, [8]),
    "overwrite": overwrite,
    "delete": lambda cache: featcache.open(cache).delete([id_of(0)]),
    "compact": lambda cache: featcache.open(cache).compact(),
    "publish_sealed": publish_sealed,
}


@pytest.mark.parametrize("journal", [b"", b"{"], ids=["begun", "torn"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_part_that_its_writer_removes_just_before_it_is_looked_at_is_in_nobodys_way(
    cache: Path, tmp_path: Path, verb: str, journal: bytes
) -> None:
    featcache.open(cache).delete([id_of(1)])  # so that a part has tombstones beside it
    for number in range(1, 1_000):
        path = tmp_path / str(number)
        shutil.copytree(cache, path)
        part = path / "parts" / GOING
        part.mkdir()
        (part / "journal.jsonl").write_bytes(journal)
        with removed_before_look(part, number) as looks:
            try:
                VERBS[verb](path)
            except CacheLockedError:  # true when its lock was asked for
                VERBS[verb](path)
        if len(looks) < number:  # it was not looked at that often
            break
        shutil.rmtree(path)
    assert number > 2
