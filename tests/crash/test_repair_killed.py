"""A repair that is killed at any line leaves the cache as it was, or repaired."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
from interrupts import LIBRARY, Interrupt, interrupted

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.store import repair

KILLS = 200
FEATURES = [FeatureStorageConfig("fbank"), FeatureStorageConfig("units", dtype="int16")]
NUMBERS = range(40)
DELETED = (3, 17)
LINES = [LIBRARY / name for name in ("format", "writing")]  # those of reading change nothing


class Killed(Interrupt):
    """Kills the process at a line, as `Interrupt` interrupts it."""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        try:
            found = super().__call__(frame, event, arg)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGKILL)
        return self if found is not None else None


def array(number: int, feature: str) -> np.ndarray[Any, Any]:
    if feature == "units":
        return np.full(1600, number, np.int16)
    return np.full((100, 80), number, np.float32)


def make(path: Path) -> None:
    """Write three parts, of which two are damaged later, with a tag of an earlier generation."""
    for some in (NUMBERS[:15], NUMBERS[15:30], NUMBERS[30:]):
        with CacheWriter(path, FEATURES) as writer:
            for number in some:
                arrays = {each.name: array(number, each.name) for each in FEATURES}
                writer.write(f"utt-{number:02}", arrays)
        if some[0] == 15:
            featcache.open(path).tag("v1")
            featcache.open(path).delete([f"utt-{number:02}" for number in DELETED])


def part_of(path: Path, id: str) -> Path:
    """Return the directory of the part that holds an utterance."""
    index = featcache.open(path).opened.index
    columns = index.features["fbank"]
    container = int(columns.container[columns.first[index.find(id)]])
    return (path / index.containers.path(container)).parent


def damage(path: Path) -> set[str]:
    """Change an array of the first part, and the index of the second; return the lost ids."""
    file = part_of(path, "utt-04") / "fbank.npy"
    data = bytearray(file.read_bytes())
    data[256 + 4 * 32000 + 77] ^= 1
    file.write_bytes(data)
    file = part_of(path, "utt-16") / "index.columns"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    return {"utt-04"}


def held(path: Path, version: str | None = None) -> dict[str, int]:
    """Return the numbers of all utterances that read as they were written."""
    good = {}
    with featcache.open(path, version=version) as cache:
        for id in cache:
            number = int(id.split("-")[1])
            if all((cache.read(id, name) == array(number, name)).all() for name in cache.features):
                good[id] = number
    return good


def files_below(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def run_and_kill(path: Path, trace: Killed) -> bool:
    """Repair in a process of its own; returns whether it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with interrupted(trace):
                repair(path)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_repair_killed_at_any_line_leaves_the_old_cache_or_the_repaired_one(
    tmp_path: Path,
) -> None:
    make(tmp_path / "whole")
    lost = damage(tmp_path / "whole")
    expected = {f"utt-{n:02}" for n in NUMBERS if n not in DELETED} - lost
    tagged = {f"utt-{n:02}" for n in NUMBERS[:30]} - lost
    damaged = files_below(tmp_path / "whole" / "parts")
    shutil.copytree(tmp_path / "whole", tmp_path / "traced")
    trace = Interrupt(0, *LINES)
    with interrupted(trace):
        repair(tmp_path / "traced")
    random, outcomes = Random(0), {"old": 0, "new": 0}
    places = [(at, random.randrange(len(lines)) + 1) for at, lines in trace.passed.items()]
    chosen = (
        random.sample(places, KILLS) if len(places) > KILLS else random.choices(places, k=KILLS)
    )
    for number, (at, time) in enumerate(chosen):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", path)
        where = f"killed at run {time} of {at}"
        run_and_kill(path, Killed(time, *LINES, at=at))
        cache = featcache.open(path)
        is_new = not cache.complete
        outcomes["new" if is_new else "old"] += 1
        assert {*cache} == (expected if is_new else expected | lost), where
        assert held(path).keys() == expected, where
        assert held(path, "v1").keys() == tagged, where
        if number % 2:  # who comes next need not repair it
            with CacheWriter(path, FEATURES) as writer:
                assert {f"utt-{n:02}" for n in DELETED}.isdisjoint({*featcache.open(path)}), where
                assert expected <= {id for id in expected if id in writer}, where
            assert featcache.open(path).complete or lost.isdisjoint({*featcache.open(path)}), where
        outcome = repair(path)
        assert is_new or {*outcome.lost_ids} == lost, where
        after = featcache.open(path, verify="arrays")
        assert {*after} == expected, where
        assert held(path).keys() == expected, where
        assert held(path, "v1").keys() == tagged, where
        assert repair(path).is_whole, where
        aside = files_below(path / "parts")
        for name, data in damaged.items():
            part, _, rest = name.partition("/")
            if rest.endswith((".npy", ".columns", "part.json")) and "tombstones" not in rest:
                there = (aside.get(name), aside.get(f"{part}.damaged/{rest}"))
                assert data in there, (where, name)
        shutil.rmtree(path)
    print(f"\nrepair: {KILLS} kills, {outcomes}", end="")
    assert min(outcomes.values()) > 3
