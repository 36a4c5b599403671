"""Ctrl-C at any line of a write costs no other utterance, and the cache can be closed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import LIBRARY, Interrupt
from numpy.typing import NDArray
from staging_helpers import FEATURES, arrays_of, check

import featcache
from featcache import CacheWriter
from featcache._recycled import RecycledMemory
from featcache.format import checksums
from featcache.writing import queue
from featcache.writing.arrays import CheckedUtterances, check_one, pieces_of

WRITING = LIBRARY / "writing"


@pytest.fixture
def no_trace() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


def write_alone(writer: CacheWriter, id: str, arrays: dict[str, NDArray[Any]]) -> None:
    writer.write(id, arrays)


def write_as_batch(writer: CacheWriter, id: str, arrays: dict[str, NDArray[Any]]) -> None:
    batch = {name: array[np.newaxis] for name, array in arrays.items()}
    lengths = {name: [array.shape[1]] for name, array in batch.items() if name != "vector"}
    writer.write_batch([id], batch, lengths)


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("write", [write_alone, write_as_batch])
def test_an_interrupt_at_any_line_of_a_write_spoils_no_other_utterance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None], goes_on: bool
) -> None:
    """Ctrl-C comes between any two lines; the script goes on, or closes the cache."""
    monkeypatch.setattr(queue, "COUNTED_VALUES", 40)
    monkeypatch.setattr(queue, "MOST_ROWS", 3)
    monkeypatch.setattr(queue, "COMMIT_INTERVAL_S", 60.0)
    line, whole = 0, False
    while not whole:
        line += 1
        path = tmp_path / str(line)
        interrupt = Interrupt(line, WRITING)
        returned: list[int] = []
        with CacheWriter(path, [FEATURES[0], FEATURES[1], FEATURES[3]]) as writer:
            for number in range(6):
                arrays = {name: arrays_of(number)[name] for name in ("fbank", "lossy", "vector")}
                if number == 3:  # hands over those before, and begins anew
                    sys.settrace(interrupt)
                try:
                    write(writer, f"utt-{number}", arrays)
                    returned.append(number)
                except KeyboardInterrupt:
                    if not goes_on:
                        break
                finally:
                    sys.settrace(None)
        whole = interrupt.left > 0
        stored = {*featcache.open(path).ids}
        assert {f"utt-{number}" for number in returned} <= stored
        check(path, dict.fromkeys(stored, 5))
    assert line > 100  # lines of a write


@pytest.mark.usefixtures("no_trace")
def test_two_interrupts_in_a_row_spoil_no_other_utterance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "COUNTED_VALUES", 40)
    features = {"fbank": FEATURES[0]}
    with CacheWriter(tmp_path, features.values()) as writer:
        writer.write("utt-0", {"fbank": arrays_of(0)["fbank"]})
        part = writer._parts._part
        assert part is not None
        memory, lines = RecycledMemory(1 << 24), range(1, 40)
        for first, second in itertools.product(lines, lines):
            waiting = queue.Staging(part, features, memory, utterance(0))
            added = [
                is_added(waiting, number, Interrupt(line, WRITING))
                for number, line in enumerate((0, first, second, 0))
            ]
            batch = waiting.batch()
            numbers = [int(id.split("-")[1]) for id in batch.ids]
            assert {*itertools.compress(range(4), added)} <= {*numbers}
            frames = np.concatenate([arrays_of(number)["fbank"] for number in numbers])
            stored = batch.arrays["fbank"]
            assert stored.array.tobytes() == frames.tobytes()
            assert stored.checksums is not None
            assert [*stored.checksums] == checksums(pieces_of(stored.array, stored.lengths))
            assert stored.stats is not None
            assert stored.stats.count == len(frames)
            np.testing.assert_allclose(stored.stats.mean, frames.mean(0), atol=1e-6)
        assert is_added(waiting, 9, Interrupt(max(lines), WRITING))  # all lines were interrupted


def utterance(number: int) -> CheckedUtterances:
    arrays = {"fbank": arrays_of(number)["fbank"]}
    return check_one(f"utt-{number}", arrays, {}, {}, {"fbank": FEATURES[0]})


def is_added(waiting: queue.Staging, number: int, interrupt: Interrupt) -> bool:
    added = utterance(number)
    try:
        sys.settrace(interrupt)
        waiting.add(added)
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(None)
    return True
