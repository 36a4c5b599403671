"""Variances of a billion frames: right to 1e-9, where sums in float32 as ESPnet's give a negative
one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from featcache import FeatureStats

# of an utterance, all different, that come again: 10^9 frames
FRAMES, UTTERANCES, ROUNDS = 800, 1250, 1000
COUNT = FRAMES * UTTERANCES * ROUNDS
Float32 = NDArray[np.float32]


def utterances() -> Iterator[Float32]:
    """Frames of mean 10 and standard deviation 1."""
    random = np.random.default_rng(0)
    for _ in range(UTTERANCES):
        yield (10 + random.standard_normal((FRAMES, 2))).astype(np.float32)


@pytest.fixture(scope="module")
def variance() -> NDArray[np.longdouble]:
    """The variance of all frames: that of a round of them, in 80 bits."""
    frames = np.concatenate(list(utterances())).astype(np.longdouble)
    squares: NDArray[np.longdouble] = np.square(frames - frames.mean(0)).mean(0)
    return squares


@pytest.fixture(scope="module")
def parts() -> list[FeatureStats]:
    """What the shards of all frames add, each the utterances of a tenth of a round one by one."""
    all_of_round = [FeatureStats.of(frames) for frames in utterances()]
    return [merged_in_order(all_of_round[tenth::10]) for tenth in range(10)] * ROUNDS


def merged_in_order(several: list[FeatureStats]) -> FeatureStats:
    merged, *others = several
    for other in others:
        merged = merged.merge(other)
    return merged


def test_the_variance_of_a_billion_frames_is_right(
    parts: list[FeatureStats], variance: NDArray[np.longdouble]
) -> None:
    stats = merged_in_order(parts)
    assert stats.count == COUNT == 10**9
    np.testing.assert_allclose(stats.var, variance.astype(np.float64), rtol=1e-9)


@pytest.mark.parametrize("workers", [2, 7])
def test_it_is_the_same_however_many_workers_have_shared_the_frames(
    parts: list[FeatureStats], workers: int
) -> None:
    one = merged_in_order(parts)
    several = merged_in_order(
        [merged_in_order(parts[worker::workers]) for worker in range(workers)]
    )
    assert several.count == one.count
    np.testing.assert_allclose(several.mean, one.mean, rtol=1e-12)
    np.testing.assert_allclose(several.var, one.var, rtol=1e-12)


def test_what_espnet_computes_from_the_file_is_right_too(
    parts: list[FeatureStats], variance: NDArray[np.longdouble]
) -> None:
    file = io.BytesIO()
    merged_in_order(parts).save(file)
    file.seek(0)
    with np.load(file) as found:
        mean = found["sum"] / found["count"]
        var = found["sum_square"] / found["count"] - mean * mean  # its GlobalMVN
    np.testing.assert_allclose(var, variance.astype(np.float64), rtol=1e-9)


def test_sums_in_float32_give_a_negative_variance() -> None:
    # each utterance adds its sums to those of all before: `sum += seq.sum(0); sq += (seq **
    # 2).sum(0)`
    sums = np.array([frames.sum(0) for frames in utterances()], np.float32)
    squares = np.array([(frames**2).sum(0) for frames in utterances()], np.float32)
    total, total_square = (
        np.cumsum(np.tile(part, (ROUNDS, 1)), axis=0)[-1] for part in (sums, squares)
    )
    assert total.dtype == total_square.dtype == np.float32
    mean = total / COUNT
    var = total_square / COUNT - mean**2
    assert (abs(mean - 10) > 0.1).all()
    assert (var < -0.3).all()
