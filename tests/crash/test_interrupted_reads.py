"""Ctrl-C at any line of reading through: the same call goes on at once, and nothing is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import LIBRARY, STORE, Interrupt, interrupted
from numpy.typing import NDArray
from sharing_helpers import ROUNDS

import featcache
from featcache.lazy import share
from featcache.writing import queue

Step = Callable[[Any], object]
KEPT: list[BaseException] = []  # as a notebook keeps the last error, with all that it refers to


def value_of(id: str) -> NDArray[np.float32]:
    return np.full((3, 2), int(id), np.float32)


class Items:
    """A data set of such values."""

    ids = tuple("0123")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> NDArray[np.float32]:
        return value_of(str(number))


def call(id: str) -> Step:
    return lambda read: read(id) if callable(read) else read[int(id)]


STEPS: tuple[Step, ...] = (
    call("0"),  # makes the cache
    call("1"),
    call("0"),  # which is not published
    lambda read: read.publish(),
    call("1"),
    call("2"),
    lambda read: read.close(),
    call("3"),
)


def run(path: Path, compute: Any, trace: Interrupt) -> None:
    """Take all steps, each once more if it was interrupted; see that all is there, and right."""
    read: Any = featcache.through(path, compute)
    for step in STEPS:
        try:
            with interrupted(trace):
                step(read)
        except KeyboardInterrupt as error:
            KEPT[:] = [error]
            step(read)
    for id in "0123":
        found: Any = call(id)(read)
        assert np.array_equal(found, value_of(id))
    read.close()
    cache = featcache.open(path, verify="arrays")
    assert sorted(cache.ids) == ["0", "1", "2", "3"]
    (feature,) = cache.features
    for id in cache.ids:
        assert np.array_equal(cache.read(id, feature), value_of(id))
    cache.compact()  # nothing is left open
    assert not (path / "work-through").exists()
    shutil.rmtree(path)


# where locks are taken and let go: each line, in each run of the tests
HOLDING = {"lock.py", "held.py", "session.py", "cache_writer.py", "open_part.py", "queue.py"}
CASES: dict[
    str, tuple[Any, list[Path], int, int]
] = {  # what computes, which lines, how often of these
    "function": (value_of, [LIBRARY / "lazy"], max(1, ROUNDS // 20), 1),
    "data set": (Items(), [LIBRARY / "lazy" / "through.py"], 3, 1),
    "store": (value_of, STORE, 1, max(1, 300 // ROUNDS)),  # some, or all with 300
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a file that was just opened
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_lets_the_same_call_go_on_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(share, "PATIENCE_S", 20.0)  # whoever waits for itself is told
    monkeypatch.setattr(queue, "COMMIT_INTERVAL_S", 60.0)
    compute, places, times, stride = CASES[case]
    trace = Interrupt(0, *places)
    run(tmp_path / "whole", compute, trace)
    assert trace.passed
    for number, (place, passed) in enumerate(trace.passed.items()):
        if number % stride and Path(place[0]).name not in HOLDING:
            continue
        for time in range(1, min(times, len(passed)) + 1):
            try:
                run(tmp_path / f"{number}-{time}", compute, Interrupt(time, *places, at=place))
            except Exception as error:
                error.add_note(f"interrupted when {place} ran the {time}th time")
                raise
    KEPT.clear()
