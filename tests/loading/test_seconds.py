"""Parts of utterances in seconds, as items, batches and windows of a loader."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig, Seconds
from featcache.errors import ConfigError, WindowError


def timed(path: Path, frame_s: float | None = 0.02) -> Path:
    """Write a cache of features at two rates, whose frames hold their own numbers."""
    features = [
        FeatureStorageConfig("fbank", frame_s=0.01),
        FeatureStorageConfig("units", dtype="int32", frame_s=frame_s),
        FeatureStorageConfig("voice", time_axis=None),
    ]
    with CacheWriter(path, features) as writer:
        for id, count in (("a", 200), ("b", 99)):
            units = np.arange(count // 2)
            writer.write(id, {"fbank": np.arange(count), "units": units, "voice": np.ones(3)})
    return path


def test_an_item_in_seconds_has_the_frames_of_that_time_of_each_feature(tmp_path: Path) -> None:
    dataset = FeatureDataset(timed(tmp_path / "c"))
    item = dataset["a", Seconds(0.5, 1.5)]
    assert item["fbank"].tolist() == list(range(50, 150))
    assert item["units"].tolist() == list(range(25, 75))
    assert (item["fbank_lengths"], item["units_lengths"]) == (100, 50)
    assert item["voice"].tolist() == [1.0] * 3
    assert dataset[-2, Seconds(1.9)]["fbank"].tolist() == list(range(190, 200))
    assert dataset["b", Seconds()]["fbank"].tolist() == list(range(98))


def test_a_batch_mixes_seconds_frames_and_whole_utterances(tmp_path: Path) -> None:
    dataset = FeatureDataset(timed(tmp_path / "c"))
    batch = dataset.__getitems__([("b", Seconds(0.2, 0.4)), ("a", slice(10, 20)), "b"])
    assert batch["fbank_lengths"].tolist() == [20, 10, 99]
    assert batch["units_lengths"].tolist() == [10, 10, 49]
    assert batch["units"][0, :10].tolist() == batch["units"][1, :10].tolist() == list(range(10, 20))


def test_a_loader_reads_windows_in_seconds(tmp_path: Path) -> None:
    windows = [[("a", Seconds(n / 2, n / 2 + 0.5)) for n in range(4)]]
    windows = pickle.loads(pickle.dumps(windows))  # noqa: S301
    loader = FeatureLoader(timed(tmp_path / "c"), batch_sampler=windows)
    (batch,) = loader
    assert batch["fbank"].reshape(-1).tolist() == list(range(200))
    assert batch["units"].reshape(-1).tolist() == list(range(100))


def test_a_loader_reads_a_view_of_windows(tmp_path: Path) -> None:
    view = featcache.FeatureTable.of(timed(tmp_path / "c")).segments(featcache.Windows(0.5))
    loader = FeatureLoader(view, batch_size=2)
    batches = list(loader)
    assert [id for batch in batches for id in batch["id"]] == list(view.ids)
    assert [n for batch in batches for n in batch["units_lengths"].tolist()] == [25] * 5 + [24]
    assert batches[1]["fbank"][1].tolist() == list(range(150, 200))


def test_seconds_beyond_the_end_are_refused_by_name(tmp_path: Path) -> None:
    dataset = FeatureDataset(timed(tmp_path / "c"))
    with pytest.raises(
        WindowError,
        match=r"Seconds\(start_s=1.5, stop_s=2.1\) of utterance 'a' stops at 2.1 s, but feature "
        "'fbank' ends at 2 s",
    ):
        dataset["a", Seconds(1.5, 2.1)]
    with pytest.raises(WindowError, match="'fbank' ends at 2 s"):
        dataset["a", Seconds(2.5)]  # to the end, which is before that
    assert len(dataset["a", Seconds(np.float32(1.5))]["fbank"]) == 50  # type: ignore[arg-type]


def test_seconds_that_are_none_are_refused() -> None:
    for start, stop in (
        (-1.0, 2.0),
        (2.0, 1.0),
        (1.0, 1.0),
        (0.0, float("inf")),
        (float("nan"), 1.0),
    ):
        with pytest.raises(ConfigError, match="0 <= start_s < stop_s"):
            Seconds(start, stop)
    with pytest.raises(ConfigError, match="numbers are needed"):
        Seconds("1")  # type: ignore[arg-type]


def test_a_feature_that_does_not_say_how_long_its_frames_are_is_refused(tmp_path: Path) -> None:
    path = timed(tmp_path / "c", None)
    with pytest.raises(ConfigError, match=r"feature 'units' cannot be cut in seconds.*features="):
        FeatureDataset(path)["a", Seconds(0.5, 1.5)]
    item = FeatureDataset(path, ["fbank", "voice"])["a", Seconds(0.5, 1.5)]
    assert item["fbank"].tolist() == list(range(50, 150))


def test_an_index_that_is_no_part_is_answered_with_both_ways(tmp_path: Path) -> None:
    dataset = FeatureDataset(timed(tmp_path / "c"))
    with pytest.raises(ConfigError, match=r"\[id, 100:200\].*featcache.Seconds\(1.0, 2.5\)"):
        dataset["a", 1.0]  # type: ignore[index]
    with pytest.raises(WindowError, match=r"whole numbers; seconds are featcache.Seconds"):
        dataset["a", 0.5:1.5]
