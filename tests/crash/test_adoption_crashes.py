"""Crashes while a store is adopted, deleted from, collected and compacted: nothing is half done.

Each step is one at which the writer is killed, or the power is cut. The source lies elsewhere, and
never changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from crash_disk import Disk, Tree, digest, write_tree
from crash_power import STYLES, PowerCut
from crash_steps import Step
from crash_trace import can_trace, mark, traced

import featcache
from featcache import Cache
from featcache.errors import NotACacheError

ADOPTED, DELETED, COLLECTED, COMPACTED = "adopted", "deleted", "collected", "compacted"
GONE = ("utt-1", "utt-5")
ALL = {f"utt-{n}": np.full((n % 4, 3), n, np.float32) for n in range(8)}
LEFT = {id: array for id, array in ALL.items() if id not in GONE}

pytestmark = pytest.mark.skipif(not can_trace(), reason="strace is not installed, or may not trace")


def work(source: Path, path: Path) -> None:
    """Do all, telling what is done."""
    cache = featcache.adopt(source, path)
    mark(ADOPTED)
    cache.delete(GONE)
    mark(DELETED)
    cache.collect()
    mark(COLLECTED)
    cache.compact()
    mark(COMPACTED)


def overwrite(source: Path, path: Path) -> None:
    """Adopt a store once more, in place of what is there."""
    featcache.adopt(source, path, overwrite=True)
    mark(ADOPTED)


def begun(source: Path, path: Path) -> None:
    """Adopt and delete; the marks are of what comes."""
    featcache.adopt(source, path).delete(GONE)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for id, array in ALL.items():
        np.save(folder / f"{id}.npy", array)
    return folder


def test_an_adoption_is_whole_or_not_there(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk()
    steps = traced(disk, root, lambda: work(source, root / "cache"))
    states = [check(source, tmp_path / "left", *state) for state in states_of(disk, steps)]
    print(f"\n{len(states)} states of {len(steps)} steps", end="")


def test_an_adoption_in_place_of_another_is_whole_or_not_there(
    tmp_path: Path, source: Path
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk()
    for step in traced(disk, root, lambda: begun(source, root / "cache")):
        step(disk)
    disk.settle()
    steps = traced(disk, root, lambda: overwrite(source, root / "cache"))
    for tree, marks in states_of(disk, steps):
        write_tree(tree, tmp_path / "left")
        cache = featcache.open(tmp_path / "left/cache", verify="columns")
        check_arrays(cache, (ALL,) if marks else (LEFT, ALL))
        check_arrays(featcache.adopt(source, cache.path, overwrite=True), (ALL,))
        shutil.rmtree(tmp_path / "left")


def states_of(disk: Disk, steps: Sequence[Step]) -> list[tuple[Tree, list[str]]]:
    """Return what is left after each step, killed or without power, and what was told by then."""
    random, seen = Random(0), set[bytes]()
    states: list[tuple[Tree, list[str]]] = []
    disk = disk.copy()
    for step in [None, *steps]:
        if step is not None:
            step(disk)
        trees = [disk.tree(), *(PowerCut(disk, style, random).tree() for style in STYLES)]
        for tree in trees:
            key = digest(tree) + repr(disk.marks).encode()
            if key not in seen:
                seen.add(key)
                states.append((tree, list(disk.marks)))
    return states


def check(source: Path, place: Path, tree: Tree, marks: list[str]) -> None:
    """See that what was told is there, and that another one goes on."""
    write_tree(tree, place)
    path = place / "cache"
    try:
        cache = featcache.open(path, verify="columns")
    except NotACacheError:
        assert not marks
        cache = featcache.adopt(source, path)
    if not len(cache):
        assert not marks
        cache = featcache.adopt(source, path)
    check_arrays(cache, (LEFT,) if DELETED in marks else (ALL, LEFT))
    if COLLECTED in marks:
        assert cache.stats("feats").count == sum(map(len, LEFT.values()))
        featcache.open(path, verify="arrays")
    left = len(cache)
    cache.delete(id for id in GONE if id in cache)
    cache.collect()
    cache.compact()
    assert left >= len(LEFT)
    check_arrays(featcache.open(path, verify="arrays", check_reads=True), (LEFT,))
    assert len(list((path / "parts").iterdir())) == 1
    shutil.rmtree(place)


def check_arrays(cache: Cache, expected: Sequence[Mapping[str, object]]) -> None:
    assert list(cache) in [list(arrays) for arrays in expected]
    assert all(np.array_equal(cache.read(id, "feats"), ALL[id]) for id in cache)
