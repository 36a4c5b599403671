"""Utterances whose features do not end together are named when a cache is verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.format import read_manifest, write_manifest


def timed_cache(path: Path, frames: Mapping[str, tuple[int, int]], second_s: float | None) -> Path:
    """Write a cache of a feature at 10 ms and one at another rate, and an embedding."""
    features = [
        FeatureStorageConfig("fbank", frame_s=0.01),
        FeatureStorageConfig("units", dtype="int16", frame_s=second_s),
        FeatureStorageConfig("voice", time_axis=None),
    ]
    with CacheWriter(path, features) as writer:
        for id, (first, second) in frames.items():
            units, voice = np.ones(second, np.int16), np.ones(3)
            writer.write(id, {"fbank": np.ones((first, 2)), "units": units, "voice": voice})
    return path


@pytest.mark.parametrize("level", ["columns", "arrays"])
def test_utterances_whose_features_end_apart_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, level: Literal["columns", "arrays"]
) -> None:
    frames = {"fine": (100, 50), "padded": (101, 48), "cut": (100, 47), "long": (106, 50)}
    timed_cache(tmp_path / "c", frames, 0.02)
    featcache.open(tmp_path / "c")
    assert not caplog.records
    featcache.open(tmp_path / "c", verify=level)
    (line,) = caplog.messages
    assert "of 3 of 4 utterances end more than 2 frames (0.04 s) apart" in line
    assert "'cut' (fbank 1 s, units 0.94 s), 'long' (fbank 1.06 s, units 1 s), 'padded'" in line
    assert "'fine'" not in line


def test_two_frames_apart_is_no_disagreement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = {f"{n}-{more}": (2 * n + more, n) for n in (3, 7, 333) for more in (-4, 0, 4)}
    featcache.open(timed_cache(tmp_path / "c", frames, 0.02), verify="columns")
    assert not caplog.records


def test_features_without_times_are_compared_with_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    featcache.open(timed_cache(tmp_path / "c", {"a": (100, 3)}, None), verify="columns")
    featcache.open(timed_cache(tmp_path / "none", {}, 0.02), verify="columns")
    assert not caplog.records


def test_times_that_cannot_be_are_damage(tmp_path: Path) -> None:
    path = timed_cache(tmp_path / "c", {"a": (100, 50)}, 0.02)
    manifest = read_manifest(path)
    declared = manifest.features["units"] | {"frame_s": "0.02"}
    fingerprint = {"features": manifest.features | {"units": declared}}
    write_manifest(path, replace(manifest, fingerprint=fingerprint))
    with pytest.raises(CorruptCacheError, match=r"featcache.json' is damaged: .*are not seconds"):
        featcache.open(path)


def test_a_long_list_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = {f"utt-{number:03}": (100, 40) for number in range(30)}
    featcache.open(timed_cache(tmp_path / "c", frames, 0.02), verify="columns")
    (line,) = caplog.messages
    assert "of 30 of 30" in line
    assert "'utt-019'" in line
    assert "'utt-020'" not in line
