"""Edits of several feature sets that crash: all sets are as before, or all are as after."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import pytest
from feature_set_helpers import ALL, ENERGY, add, energy_of
from store_disk import Crash, Disk
from store_helpers import FINGERPRINT, id_of, make_cache, two_features

import featcache
from featcache import Cache, CacheWriter
from featcache.format import NEXT
from featcache.store import open_features
from featcache.testing.contract import traces_in

Edit = Callable[[Cache], object]
FIRST = {id_of(number): {"speaker": "anna", "quality": "good"} for number in ALL}
SECOND = {id_of(number): {"speaker": "bert", "quality": "bad"} for number in ALL if number != 5}
EDITS: Mapping[str, Edit] = {
    "delete": lambda cache: cache.delete([id_of(7), id_of(2)]),
    "annotate": lambda cache: cache.annotate(SECOND),
    "tag": lambda cache: cache.tag("v2"),
    "untag": lambda cache: cache.untag("v1"),
    "compact": lambda cache: cache.compact(drop_tags=True),
}


def cache_of_sets(path: Path) -> Path:
    """Make a cache of two sets, each with an annotation and a tag, and something deleted."""
    make_cache(path, ALL)
    add(path, annotations={"quality": "good"})
    featcache.open(path).annotate(FIRST)
    featcache.open(path).tag("v1")
    featcache.open(path).delete([id_of(5)])
    return path


def picture(path: Path) -> object:
    """All that readers see of a cache, of each of its sets, and of its versions."""
    cache = featcache.open(path, verify="columns")
    sets = [open_features(path, [name]) for name in ("fbank", "energy")]
    tags = {tag: featcache.open(path, version=tag) for tag in cache.tags}
    seen = [cache, *tags.values()]
    rows = [({name: [*each.annotation(name)] for name in each.annotations}, *each) for each in seen]
    stats = [cache.stats(name).count for name in ("fbank", "energy")]
    whole = [each.complete for each in (*seen, *sets)]
    return rows, stats, whole, cache.missing("energy"), [[*each] for each in sets], [*tags]


def crashes_of(path: Path, edit: Edit) -> list[Crash]:
    """Edit a cache on a watched disk; returns what could be left at each step."""
    cache, disk = featcache.open(path), Disk(path.parent)
    disk.promise = False
    with disk.watching():
        edit(cache)
        disk.promise = True
    return disk.crashes


@pytest.mark.parametrize("name", EDITS)
def test_a_crash_leaves_all_sets_as_before_or_all_as_after(tmp_path: Path, name: str) -> None:
    path, edit = cache_of_sets(tmp_path / "disk" / "train"), EDITS[name]
    before = picture(path)
    crashes = crashes_of(path, edit)
    after = picture(path)
    assert before != after
    if "FEATCACHE_EVERY_CRASH" not in os.environ:
        crashes = Random(0).sample(crashes, 30)
    for number, crash in enumerate(crashes):
        root = tmp_path / f"crash-{number}"
        crash.restore(root)
        try:
            left = picture(root / "train")
            assert left == after if crash.promise else left in (before, after)
            for features in (two_features(), [ENERGY]):  # a writer of either set changes nothing
                CacheWriter(root / "train", features, FINGERPRINT).close()
                assert picture(root / "train") == left
            if left == before:
                edit(featcache.open(root / "train"))
                assert picture(root / "train") == after
            elif name == "compact":
                edit(featcache.open(root / "train"))
                gone = [energy_of(5)["energy"].tobytes(), b"anna"]
                assert not traces_in(root / "train", gone[:1])
            assert not [*root.rglob(NEXT)] or left == before
        except BaseException as error:
            error.add_note(f"after a crash: {crash.step}")
            raise
        shutil.rmtree(root)


def test_an_edit_that_was_decided_is_kept_by_the_edit_after_it(tmp_path: Path) -> None:
    path = cache_of_sets(tmp_path / "disk" / "train")
    states: list[object] = []
    for number, crash in enumerate(crashes_of(path, EDITS["delete"])):
        root = tmp_path / f"crash-{number}"
        crash.restore(root)
        if [*root.rglob(NEXT)] and len(featcache.open(root / "train")) == len(ALL) - 3:
            featcache.open(root / "train").tag("v2")
            states.append(picture(root / "train"))
        shutil.rmtree(root)
    assert len(states) > 3
    featcache.open(path).tag("v2")
    for state in states:  # one by one: a difference is shown
        assert state == picture(path)


def test_who_opens_sets_during_an_edit_sees_one_moment(tmp_path: Path) -> None:
    path, ended = cache_of_sets(tmp_path / "train"), threading.Event()

    def edit_on() -> None:
        for value in range(30):
            given = {id_of(1): {"speaker": str(value), "quality": str(value)}}
            featcache.open(path).annotate(given)
        ended.set()

    editor = threading.Thread(target=edit_on)
    editor.start()
    row = featcache.open(path).opened.row(id_of(1))
    seen = set()
    while not ended.is_set():
        cache = featcache.open(path)
        seen.add((cache.annotation("speaker")[row], cache.annotation("quality")[row]))
        pickle.loads(pickle.dumps(cache))  # noqa: S301
    editor.join()
    assert seen <= {("anna", "good"), *((str(value), str(value)) for value in range(30))}
