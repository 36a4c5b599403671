"""Part writers that outlive the run they belong to: what they store is kept, or refused."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest
from feature_set_helpers import ENERGY, add, both, energy_of
from store_disk import Disk
from store_helpers import (
    FINGERPRINT,
    assert_holds,
    check_cache,
    id_of,
    make_cache,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheError, CacheLockedError, NotACacheError, StaleCacheError
from featcache.writing import sets
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


def close_unpublished(writer: CacheWriter) -> None:
    writer._work.close(False, publish=False)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (add, NotACacheError),
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


def sealed_part(cache: Path) -> None:
    with PartWriter(cache, FEATURES, FINGERPRINT) as writer:
        write(writer, [7])


def dead_part(cache: Path) -> None:
    def work() -> None:
        writer = PartWriter(cache, FEATURES, FINGERPRINT)
        write(writer, [7])
        writer.commit()
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()


@contextmanager
def just_before(
    monkeypatch: pytest.MonkeyPatch, name: str, do: Callable[[], object]
) -> Iterator[None]:
    """Have something done by another writer just before a step of the making of a set."""
    call = getattr(sets, name)

    def step(*args: object) -> object:
        monkeypatch.setattr(sets, name, call)
        do()
        return call(*args)

    monkeypatch.setattr(sets, name, step)
    yield
    assert getattr(sets, name) is call


@pytest.mark.parametrize("step", ["_link_all", "write_sets"])
@pytest.mark.parametrize("part", [sealed_part, dead_part])
@pytest.mark.parametrize("next_writer", ["of the set", "of the other", "publish_sealed", "edit"])
def test_what_is_committed_while_a_cache_becomes_a_set_is_there_for_the_next_writer(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    part: Callable[[Path], None],
    next_writer: str,
) -> None:
    with just_before(monkeypatch, step, partial(part, cache)):
        add(cache, [*FEW, 7])
    fbank = cache / "sets" / "fbank"
    if next_writer == "of the set":
        make_cache(cache, [])
    elif next_writer == "publish_sealed":
        assert publish_sealed(fbank)
    elif next_writer == "edit":
        featcache.open(cache).compact()
    else:
        add(cache, [])
    with CacheWriter(cache, two_features(), FINGERPRINT) as writer:
        assert id_of(7) in writer
    assert_holds(featcache.open(cache, verify="arrays"), both([*FEW, 7]))
    featcache.open(cache).compact()
    assert {each.name for each in cache.iterdir()} == {"featcache.json", "sets", "writer.lock"}


def test_a_part_that_is_being_written_where_its_cache_was_is_waited_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PartWriter(cache, FEATURES, FINGERPRINT)
    with just_before(monkeypatch, "_link_all", partial(write, writer, [7])):
        add(cache, [*FEW, 7])
    with pytest.raises(CacheLockedError, match="is still being written by"):
        featcache.open(cache).compact()
    write(writer, [9])
    writer.close()
    with CacheWriter(cache, two_features(), FINGERPRINT) as again:
        assert id_of(7) in again
        assert id_of(9) in again
    check_cache(cache / "sets" / "fbank", [*FEW, 7, 9])


def test_a_crash_while_a_part_comes_home_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path / "disk" / "train", FEW)
    with just_before(monkeypatch, "write_sets", partial(dead_part, cache)):
        close_unpublished(CacheWriter(cache, [ENERGY], FINGERPRINT))
    disk = Disk(tmp_path / "disk")
    with disk.watching():
        CacheWriter(cache, two_features(), FINGERPRINT).close()
    assert len(disk.crashes) > 20
    coming = [crash for crash in disk.crashes if "/parts" in crash.step or "/sets" in crash.step]
    crashes = coming if "FEATCACHE_EVERY_CRASH" in os.environ else Random(0).sample(coming, 15)
    for number, crash in enumerate(crashes):
        root = tmp_path / str(number)
        crash.restore(root)
        with CacheWriter(root / "train", two_features(), FINGERPRINT) as writer:
            assert id_of(7) in writer, crash.step
        check_cache(root / "train" / "sets" / "fbank", [*FEW, 7])
        featcache.open(root / "train").compact()


def test_a_part_that_was_compacted_away_does_not_come_back_from_where_its_cache_was(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made the set is killed before the first names of its files are gone."""

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("featcache.writing.session.clear_up", killed)
        with pytest.raises(KeyboardInterrupt):
            CacheWriter(cache, [ENERGY], FINGERPRINT)
    assert (cache / "parts").exists()
    opened = featcache.open(cache)
    opened.delete([id_of(1)])
    assert not (cache / "parts").exists()
    opened.compact()
    make_cache(cache, [])
    check_cache(cache / "sets" / "fbank", [0, 2, 3])


def test_a_part_of_no_set_is_told_of_and_stays(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with CacheWriter(other, [FeatureStorageConfig("pitch")], FINGERPRINT) as writer:
        writer.write(id_of(1), {"pitch": energy_of(1)["energy"]})
    add(cache)
    shutil.copytree(other / "parts", cache / "parts")
    with pytest.raises(CacheError, match="belong to none of its feature sets"):
        featcache.open(cache).compact()
    assert [*cache.glob("parts/*/part.json")]


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
