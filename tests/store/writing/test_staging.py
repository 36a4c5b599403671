"""Utterances that are copied one behind the other come back as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from staging_helpers import FEATURES, arrays_of, check

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.stats import FeatureStats
from featcache.store.writing import staging
from featcache.store.writing.copy_memory import BLOCK_BYTES


@pytest.mark.parametrize("counted", [1, 40, 1 << 16])
def test_lengths_of_every_kind_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    """The first shares out the memory; others are much longer, shorter, and without frames."""
    monkeypatch.setattr(staging, "COUNTED_VALUES", counted)
    monkeypatch.setattr(staging, "LEAST_BYTES", 8)
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    frames = dict.fromkeys((f"utt-{number}" for number in range(60)), 1)
    for number, id in enumerate(frames):
        frames[id] = (3, 700, 1, 0, 40, 2, 90)[number % 7]
    with CacheWriter(tmp_path, FEATURES) as writer:
        for id, length in frames.items():
            writer.write(id, arrays_of(int(id.split("-")[1]), length))
    check(tmp_path, frames)


def test_an_utterance_larger_than_the_memory_passes_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = [
        random.standard_normal((frames, 64), np.float32)
        for frames in (3, BLOCK_BYTES // 256, 3, 2 * BLOCK_BYTES // 256 + 1, 3)
    ]
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        for number, array in enumerate(arrays):
            writer.write(str(number), {"fbank": array})
    with featcache.open(tmp_path, verify="arrays") as cache:
        for number, array in enumerate(arrays):
            np.testing.assert_array_equal(cache.read(str(number), "fbank"), array)
        expected = FeatureStats.of(np.concatenate(arrays))
        np.testing.assert_allclose(cache.stats("fbank").mean, expected.mean, rtol=0, atol=1e-12)
        np.testing.assert_allclose(cache.stats("fbank").var, expected.var, rtol=1e-12)


def test_arrays_may_be_used_again_when_write_returns(tmp_path: Path) -> None:
    array = np.empty((5, 4), np.float32)
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        for number in range(600):
            array[:] = number
            writer.write(str(number), {"fbank": array})
            array[:] = np.nan
    with featcache.open(tmp_path, verify="arrays") as cache:
        for number in range(600):
            assert (cache.read(str(number), "fbank") == number).all()
        assert cache.stats("fbank").mean.tolist() == [299.5] * 4
