"""Stamps: what counts as an utterance's input, and as its entry."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from featcache.staleness.inputs import _SOME, entry_stamps, input_stamp

SIG = frozenset({"sig"})
WAVE = np.arange(2000, dtype=np.float32)


@dataclass
class Recording:
    source: str
    start: float = 0.0


def entry(value: object) -> int:
    return int(entry_stamps([value])[0])


# The input


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (WAVE, WAVE + 1),
        (WAVE, WAVE.astype(np.float64)),
        (WAVE, WAVE.reshape(2, 1000)),
        (torch.tensor(WAVE), torch.tensor(WAVE) + 1),
        (torch.tensor(WAVE).bfloat16(), torch.tensor(WAVE[::-1].copy()).bfloat16()),
        (np.array(["a", None], object), np.array(["a", "b"], object)),
        ([1, 2], [1, [2]]),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"b": 1}),
        ("1", 1),
        ("ab", b"ab"),
        (True, 1),
        ({1, 2}, {1, 3}),
        (Recording("a"), Recording("b")),
        (None, ""),
        (["ab", "c"], ["a", "bc"]),
    ],
)
def test_values_that_differ_have_other_stamps(one: Any, other: Any) -> None:
    first, second = input_stamp({"sig": one}, SIG), input_stamp({"sig": other}, SIG)
    assert first
    assert second
    assert first != second
    assert first == input_stamp({"sig": one}, SIG)


def test_an_array_counts_by_its_values_wherever_they_lie() -> None:
    assert input_stamp(WAVE[::2]) == input_stamp(WAVE[::2].copy())
    tensor = torch.tensor(WAVE).reshape(2, 1000)
    assert input_stamp(tensor.T) == input_stamp(tensor.T.contiguous())


def test_the_order_of_keys_and_of_sets_does_not_matter() -> None:
    assert input_stamp({"a": 1, "b": {"y", "x"}}) == input_stamp({"b": {"x", "y"}, "a": 1})


def test_only_the_keys_that_the_code_mentions_count() -> None:
    item = {"id": "a", "sig": WAVE, "text": "four"}
    other = {"id": "b", "sig": WAVE, "text": "vier"}
    assert input_stamp(item, SIG) == input_stamp(other, SIG)
    assert input_stamp(item) != input_stamp(other)
    # where it mentions none, all but the id
    assert input_stamp(item, frozenset({"x", "id"})) == input_stamp(item)
    assert input_stamp({**item, "id": "b"}) == input_stamp(item)


def test_what_nothing_describes_has_no_stamp() -> None:
    assert input_stamp({"sig": object()}) == 0
    assert input_stamp({"sig": WAVE, "decoder": object()}, SIG) != 0
    assert input_stamp(torch.eye(3).to_sparse()) == 0
    circle: list[object] = []
    circle.append(circle)
    assert input_stamp(circle) == 0


def test_the_path_beside_samples_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"a")
    (tmp_path / "b.flac").write_bytes(b"b")
    one = {"path": str(tmp_path / "a.wav"), "array": WAVE}
    other = {"path": str(tmp_path / "b.flac"), "array": WAVE}
    assert input_stamp({"audio": one}) == input_stamp({"audio": other})


@pytest.mark.parametrize("beside", [{}, {"label": np.float32(1)}, {"speaker": torch.ones(192)}])
def test_a_file_counts_by_its_content_where_its_path_is_the_item(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"one")
    before = input_stamp({"path": str(path), **beside})
    moved = path.rename(tmp_path / "b.wav")
    assert input_stamp({"path": moved, **beside}) == before
    moved.write_bytes(b"two")
    os.utime(moved, ns=(1, 1))
    assert input_stamp({"path": moved, **beside}) != before
    # gone: nothing can be said
    assert input_stamp({"path": path, **beside}) == 0


def test_a_file_counts_where_its_path_is_mentioned_beside_samples(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    path.write_bytes(b"one")
    item, names = {"sig": WAVE, "video": path}, frozenset({"sig", "video"})
    before = input_stamp(item, names), input_stamp(item)
    path.write_bytes(b"two!")
    assert input_stamp(item, names) != before[0]
    assert input_stamp(item) == before[1]


def test_stamps_are_the_same_in_every_process() -> None:
    code = (
        "import numpy as np; from featcache.staleness.inputs import *;"
        "print(input_stamp({'s': np.arange(9), 't': {'x', 'y'}}), entry_stamps(['a/b'])[0])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


# The entry


def test_an_entry_counts_by_its_values_and_the_state_of_its_files(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"one")
    listed = {"wav": {"file": str(path), "start": 0}, "words": "one"}
    before = entry(listed)
    assert entry(listed) == before
    assert entry({**listed, "words": "two"}) != before
    assert entry({**listed, "wav": {"file": str(path), "start": 1}}) != before
    os.utime(path, ns=(1, 1))
    touched = entry(listed)
    assert touched != before
    path.write_bytes(b"longer")
    os.utime(path, ns=(1, 1))
    assert entry(listed) not in (before, touched)
    path.unlink()
    assert entry(listed) != before


def test_an_entry_of_an_unknown_class_has_no_stamp() -> None:
    assert entry_stamps([1, object(), 1]).astype(bool).tolist() == [True, False, True]


def test_files_on_a_slow_disk_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.wav" for number in range(3 * _SOME)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(number))
    here = entry_stamps(paths)
    monkeypatch.setattr("featcache.staleness.inputs._SLOW_STAT_S", 0)
    np.testing.assert_array_equal(entry_stamps(paths), here)
    assert len(set(here.tolist())) == len(paths)
