"""Features of one utterance whose `frame_s` and lengths cannot both be right are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ConfigError, FeatureError

SAID = "'u': by frame_s and lengths feature 'a' ends at 1 s and 'b' at 0.5 s"


def arrays(first: int, second: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {"a": np.ones((first, 2), np.float32), "b": np.ones((second, 3), np.float32)}


def one_by_one(writer: CacheWriter, first: int, second: int) -> None:
    writer.write("u", arrays(first, second))


def together(writer: CacheWriter, first: int, second: int) -> None:
    both = {name: np.stack([array, array]) for name, array in arrays(first, second).items()}
    lengths = {"a": [min(first, second), first], "b": [min(first, second), second]}
    writer.write_batch(["fine", "u"], both, lengths)


def features(second_s: float | None) -> list[FeatureStorageConfig]:
    return [
        FeatureStorageConfig("a", frame_s=0.01),
        FeatureStorageConfig("b", frame_s=second_s),
    ]


@pytest.mark.parametrize("write", [one_by_one, together])
def test_a_frame_s_that_cannot_be_right_is_refused_when_it_is_written(
    tmp_path: Path, write: Callable[[CacheWriter, int, int], None]
) -> None:
    with CacheWriter(tmp_path, features(0.01)) as writer:
        with pytest.raises(FeatureError, match=re.escape(SAID) + ".*declare the right frame_s"):
            write(writer, 100, 50)
        assert "u" not in writer
        write(writer, 100, 98)  # a little padding more or less
        assert "u" in writer


@pytest.mark.parametrize(("first", "second"), [(30, 15), (1000, 920), (100, 0), (0, 100)], ids=repr)
def test_padding_and_empty_arrays_contradict_nothing(
    tmp_path: Path, first: int, second: int
) -> None:
    with CacheWriter(tmp_path, features(0.01)) as writer:
        writer.write("u", arrays(first, second))
    assert "u" in featcache.open(tmp_path)


def test_features_without_times_are_not_compared(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, features(None)) as writer:
        writer.write("u", arrays(100, 50))
    cache = featcache.open(tmp_path)
    assert [cache.lengths(name).tolist() for name in cache.features] == [[100], [50]]


def added_later(path: Path) -> featcache.Cache:
    """Write the two features by two writers, none of which sees the other's lengths."""
    for feature, array in zip(features(0.01), arrays(100, 50).values(), strict=True):
        with CacheWriter(path, [feature]) as writer:
            writer.write("u", {feature.name: array})
    return featcache.open(path)


def test_seconds_are_not_cut_by_times_that_cannot_be_right(tmp_path: Path) -> None:
    cache = added_later(tmp_path)
    dataset = featcache.FeatureDataset(cache)
    for cut in (
        lambda: cache.table.segments({"x": ("u", 0.2, 0.25)}),
        lambda: cache.table.segments(featcache.Windows(0.1)),
        lambda: dataset["u", featcache.Seconds(0.2, 0.25)],
    ):
        with pytest.raises(ConfigError, match=re.escape(SAID)):
            cut()
    assert dataset["u", 20:25]["a"].shape == (5, 2)


def test_a_tolerance_that_the_caller_names_cuts_all_the_same(tmp_path: Path) -> None:
    view = added_later(tmp_path).table.segments({"x": ("u", 0.2, 0.25)}, tolerance_frames=50)
    assert view.lengths("a").tolist() == view.lengths("b").tolist() == [5]
