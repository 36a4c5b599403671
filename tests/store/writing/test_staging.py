"""Utterances that are copied one behind the other come back as they were."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest
from staging_helpers import FEATURES, arrays_of, check

import featcache
from featcache import CacheWriter, FeatureStats, FeatureStorageConfig
from featcache.writing import queue
from featcache.writing.arrays import CheckedUtterances
from featcache.writing.open_part import OpenPart
from featcache.writing.queue import BLOCK_BYTES


@pytest.mark.parametrize("counted", [1, 40, 1 << 16])
def test_lengths_of_every_kind_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    """The first shares out the memory; others are much longer, shorter, and without frames."""
    monkeypatch.setattr(queue, "COUNTED_VALUES", counted)
    monkeypatch.setattr(queue, "LEAST_BYTES", 8)
    monkeypatch.setattr(queue, "BLOCK_BYTES", 4096)
    frames = dict.fromkeys((f"utt-{number}" for number in range(60)), 1)
    for number, id in enumerate(frames):
        frames[id] = (3, 700, 1, 0, 40, 2, 90)[number % 7]
    with CacheWriter(tmp_path, FEATURES) as writer:
        for id, length in frames.items():
            writer.write(id, arrays_of(int(id.split("-")[1]), length))
    check(tmp_path, frames)


def test_frames_without_numbers_are_counted(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("none")]) as writer:
        for number in range(5):
            writer.write(str(number), {"none": np.empty((4, 0), np.float32)})
    assert featcache.open(tmp_path).stats("none").count == 20


def test_memory_of_utterances_that_fill_little_of_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `write` between batches takes memory for more that never come."""
    monkeypatch.setattr(queue, "QUEUE_BYTES", 4 * BLOCK_BYTES)
    array = np.ones((100, 40), np.float32)
    append = OpenPart.append

    def slow(part: OpenPart, batch: CheckedUtterances) -> None:
        time.sleep(0.002)
        append(part, batch)

    monkeypatch.setattr(OpenPart, "append", slow)
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        for number in range(150):
            writer.write(f"a{number}", {"fbank": array})
            writer.write_batch([f"b{number}"], {"fbank": array[np.newaxis]}, [100])
        memory = writer._parts._memory
    gc.collect()
    assert memory.known_bytes <= 9 * BLOCK_BYTES


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
