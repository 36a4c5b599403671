"""Hints at shapes of sources: as a writer refuses or warns of them, so do `adopt` and `convert`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from npy_folders import save_all
from numpy.typing import NDArray

import featcache
from featcache.errors import AdoptionError

Arrays = dict[str, NDArray[Any]]
FRAMES = np.ones((20, 4), np.float32)


def npy(folder: Path, arrays: Arrays) -> Path:
    return save_all(folder, arrays)


def pt(folder: Path, arrays: Arrays) -> Path:
    folder.mkdir()
    for id, array in arrays.items():
        torch.save(torch.from_numpy(array), folder / f"{id}.pt")
    return folder


def hdf5(folder: Path, arrays: Arrays) -> Path:
    with h5py.File(folder.with_suffix(".h5"), "w") as file:
        for id, array in arrays.items():
            file[id] = array
    return folder.with_suffix(".h5")


def big_endian(folder: Path, arrays: Arrays) -> Path:
    """A file that is not adopted, but copied by `convert`."""
    with h5py.File(folder.with_suffix(".h5"), "w") as file:
        for id, array in arrays.items():
            file.create_dataset(id, data=array, dtype=">f4")
    return folder.with_suffix(".h5")


def adopt(source: Path, cache: Path, **settings: Any) -> featcache.Cache:
    return featcache.adopt(source, cache, **settings)


def convert(source: Path, cache: Path, **settings: Any) -> featcache.Cache:
    return featcache.convert(source, cache, adopting=settings, progressbar=False)


DOORS = [(adopt, npy), (adopt, pt), (adopt, hdf5), (convert, npy), (convert, hdf5),
         (convert, big_endian)]  # fmt: skip
pytestmark = pytest.mark.parametrize(("door", "kind"), DOORS)
Door = Callable[..., featcache.Cache]
Kind = Callable[[Path, Arrays], Path]


def test_a_batch_axis_is_refused_unless_the_user_is_sure(
    tmp_path: Path, door: Door, kind: Kind
) -> None:
    source = kind(tmp_path / "source", {"utt-1": FRAMES[np.newaxis], "utt-2": FRAMES[np.newaxis]})
    with pytest.raises(AdoptionError, match=r"'feats'.*'utt-1'; was a batch axis left in\?.*\[0\]"):
        door(source, tmp_path / "cache")
    assert not (tmp_path / "cache/parts").exists()
    cache = door(source, tmp_path / "cache", time_axis=0)
    assert cache.lengths("feats").tolist() == [1, 1]


def test_a_batch_axis_of_a_single_array_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door, kind: Kind
) -> None:
    with caplog.at_level(logging.WARNING, "featcache"):
        door(kind(tmp_path / "source", {"utt-1": FRAMES[np.newaxis]}), tmp_path / "cache")
    assert "was a batch axis left in" in caplog.text


def test_single_frames_among_others_are_no_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door, kind: Kind
) -> None:
    arrays = {"utt-1": np.ones((1, 5, 4), np.float32), "utt-2": np.ones((2, 5, 4), np.float32)}
    with caplog.at_level(logging.WARNING, "featcache"):
        door(kind(tmp_path / "source", arrays), tmp_path / "cache")
    assert "batch axis" not in caplog.text


@pytest.mark.parametrize(
    ("shapes", "hint"),
    [(((1, 20, 4), (1, 7, 4)), "was a batch axis left in"), (((4, 20), (4, 30)), "transposed")],
)
def test_frames_that_differ_say_why(
    tmp_path: Path, door: Door, kind: Kind, shapes: tuple[tuple[int, ...], ...], hint: str
) -> None:
    arrays: Arrays = {f"utt-{n}": np.ones(shape, np.float32) for n, shape in enumerate(shapes)}
    with pytest.raises(AdoptionError, match=rf"'utt-1' has \(.*{hint}"):
        door(kind(tmp_path / "source", arrays), tmp_path / "cache")


def test_transposed_arrays_of_one_length_are_told_unless_the_user_is_sure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door, kind: Kind
) -> None:
    turned = np.ascontiguousarray(FRAMES.T)
    source = kind(tmp_path / "source", {"utt-1": turned, "utt-2": turned})
    with caplog.at_level(logging.WARNING, "featcache"):
        door(source, tmp_path / "cache")
    assert "4 frames of 20 numbers: are they transposed" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "featcache"):
        door(source, tmp_path / "sure", time_axis=0)
    assert "are they transposed" not in caplog.text


def test_utterances_without_frames_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door, kind: Kind
) -> None:
    source = kind(tmp_path / "source", {"utt-1": FRAMES, "utt-2": FRAMES[:0], "utt-3": FRAMES[:0]})
    with caplog.at_level(logging.WARNING, "featcache"):
        door(source, tmp_path / "cache")
    assert "2 of the utterances" in caplog.text
    assert "the first is 'utt-2'" in caplog.text


@pytest.mark.parametrize("lengths", [(8, 8), (8, 8, 8, 3)])
def test_batches_are_refused_unless_the_user_is_sure(
    tmp_path: Path, door: Door, kind: Kind, lengths: tuple[int, ...]
) -> None:
    arrays: Arrays = {f"b{n}": np.ones((each, 5, 4), "f4") for n, each in enumerate(lengths)}
    source = kind(tmp_path / "source", arrays)
    with pytest.raises(AdoptionError, match=r"8 frames of shape \(5, 4\), the first is 'b0'; are"):
        door(source, tmp_path / "cache")
    sure = door(source, tmp_path / "cache", time_axis=0)
    assert sure.lengths("feats").tolist() == list(lengths)


def test_a_batch_alone_is_told_and_frames_of_two_axes_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door, kind: Kind
) -> None:
    with caplog.at_level(logging.WARNING, "featcache"):
        door(kind(tmp_path / "one", {"b0": np.ones((8, 5, 4), "f4")}), tmp_path / "cache")
    assert "are these batches" in caplog.text
    caplog.clear()
    layers: Arrays = {f"u{n}": np.ones((20 + n, 3, 4), np.float32) for n in range(4)}
    with caplog.at_level(logging.WARNING, "featcache"):
        door(kind(tmp_path / "layers", layers), tmp_path / "cache-2")
    assert not caplog.text


@pytest.mark.parametrize("names", [["mean", "std"], ["mel_stats"], ["CMVN"]])
def test_statistics_beside_utterances_are_none_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door, kind: Kind, names: list[str]
) -> None:
    frames: Arrays = {f"u{n}": np.ones((20 + n, 4), np.float32) for n in range(3)}
    source = kind(tmp_path / "source", {**frames, **dict.fromkeys(names, FRAMES[:2])})
    told = ", ".join(map(repr, names))
    with pytest.raises(AdoptionError, match=rf"source.*: {told} among .* give pattern='\{{id\}}'"):
        door(source, tmp_path / "cache")
    with caplog.at_level(logging.WARNING, "featcache"):
        cache = door(source, tmp_path / "cache", pattern="{id}")
    assert f"{told} among" in caplog.text
    cache.delete(names)
    assert set(featcache.open(cache.path)) == set(frames)


def test_names_that_all_end_like_statistics_are_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door, kind: Kind
) -> None:
    arrays: Arrays = {f"u{n}_mean": np.ones((20 + n, 4), np.float32) for n in range(4)}
    with caplog.at_level(logging.WARNING, "featcache"):
        assert set(door(kind(tmp_path / "source", arrays), tmp_path / "cache")) == set(arrays)
    assert not caplog.text


def test_arrays_called_like_splits_are_no_utterances_unless_the_user_is_sure(
    tmp_path: Path, door: Door, kind: Kind
) -> None:
    arrays: Arrays = {
        f"x_{name}": np.ones((n, 30, 4), "f4") for n, name in ((9, "train"), (3, "dev"))
    }
    source = kind(tmp_path / "source", arrays)
    with pytest.raises(AdoptionError, match=r"'x_dev'.* called like splits, and a cache is one"):
        door(source, tmp_path / "cache")
    assert set(door(source, tmp_path / "cache", pattern="{id}")) == set(arrays)


def test_utterances_of_one_split_are_utterances(tmp_path: Path, door: Door, kind: Kind) -> None:
    arrays: Arrays = {f"test_{n}": FRAMES[n:] for n in range(3)}
    assert set(door(kind(tmp_path / "source", arrays), tmp_path / "cache")) == set(arrays)


def test_few_arrays_of_frames_like_utterances_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door, kind: Kind
) -> None:
    arrays: Arrays = {"a": np.ones((9, 60, 4), "f4"), "b": np.ones((3, 60, 4), "f4")}
    with caplog.at_level(logging.WARNING, "featcache"):
        door(kind(tmp_path / "source", arrays), tmp_path / "cache")
    assert "up to 9 frames of shape (60, 4), the first is 'a'; are these batches?" in caplog.text
