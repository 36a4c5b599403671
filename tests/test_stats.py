from __future__ import annotations

import contextlib
import functools
import io
import itertools
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from featcache import FeatureStats
from featcache.errors import CorruptCacheError, FeatureError

Float64 = NDArray[np.float64]


def merged(parts: list[FeatureStats]) -> FeatureStats:
    return functools.reduce(FeatureStats.merge, parts)


def assert_equal_to_two_passes(
    stats: FeatureStats, frames: NDArray[np.generic], rtol: float
) -> None:
    values = frames.astype(np.float64)
    mean = values.mean(axis=0)
    m2 = ((values - mean) ** 2).sum(axis=0)
    assert stats.count == len(frames)
    # a mean near zero cancels: it is as exact as the frames are large
    np.testing.assert_allclose(
        stats.mean, mean, rtol=rtol, atol=rtol * np.abs(values).max(initial=0)
    )
    np.testing.assert_allclose(stats.m2, m2, rtol=rtol, atol=rtol * np.finfo(np.float64).tiny)


partitions = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(deadline=None)
@given(
    lengths=partitions,
    seed=st.integers(0, 2**32),
    dims=st.sampled_from([(), (1,), (5,), (2, 3)]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    offset=st.sampled_from([0.0, -5.0, 100.0]),
)
def test_any_partition_and_order_gives_the_statistics_of_the_whole(
    lengths: list[int], seed: int, dims: tuple[int, ...], dtype: str, offset: float
) -> None:
    random = np.random.default_rng(seed)
    arrays = [(random.normal(offset, 3, size=(length, *dims))).astype(dtype) for length in lengths]
    parts = [FeatureStats.of(array) for array in arrays]
    random.shuffle(parts)
    whole = np.concatenate(arrays)
    if len(whole):
        assert_equal_to_two_passes(merged(parts), whole, rtol=1e-12)
    else:
        assert merged(parts).count == 0


@settings(deadline=None)
@given(lengths=partitions, seed=st.integers(0, 2**32))
def test_data_far_from_zero_keeps_its_variance(lengths: list[int], seed: int) -> None:
    frames = np.random.default_rng(seed).normal(1e6, 1, size=(1 + sum(lengths), 4))
    cuts = np.cumsum([0, 1, *lengths])
    parts = [FeatureStats.of(frames[start:stop]) for start, stop in itertools.pairwise(cuts)]
    # at a mean of 1e6 standard deviations a difference of means holds 10 digits
    assert_equal_to_two_passes(merged(parts), frames, rtol=1e-9)


@pytest.mark.parametrize("dims", [(), (3,), (80,)])
def test_rounding_that_goes_one_way_in_all_sums_stays_small(dims: tuple[int, ...]) -> None:
    """Sums of two values alone, at the largest mean for which squares are summed as they are."""
    random = np.random.default_rng(5)
    for _ in range(10):
        middle = random.uniform(0.5, 1, dims)
        frames = np.tile(np.stack([middle * 1.101, middle * 0.899]), (8192, *[1] * len(dims)))
        exact = frames.astype(np.longdouble)
        m2 = ((exact - exact.mean(axis=0)) ** 2).sum(axis=0).astype(np.float64)
        np.testing.assert_allclose(FeatureStats.of(frames).m2, m2, rtol=1e-12)


def test_single_frames_add_up() -> None:
    frames = np.random.default_rng(0).normal(-4, 2, size=(500, 8)).astype(np.float32)
    assert_equal_to_two_passes(
        merged([FeatureStats.of(frame[None]) for frame in frames]), frames, rtol=1e-12
    )


def test_merging_is_associative_and_commutative() -> None:
    random = np.random.default_rng(1)
    a, b, c = (
        FeatureStats.of(random.normal(mean, 1 + mean, (10 * mean + 1, 3))) for mean in (1, 4, 9)
    )
    for one, other in [(a.merge(b), b.merge(a)), (a.merge(b).merge(c), a.merge(b.merge(c)))]:
        assert one.count == other.count
        np.testing.assert_allclose(one.mean, other.mean, rtol=1e-14)
        np.testing.assert_allclose(one.m2, other.m2, rtol=1e-14)


def test_a_billion_frames_keep_mean_10_and_standard_deviation_1() -> None:
    stats = FeatureStats.of(np.array([[9.0], [11.0]]))
    while stats.count < 10**9:
        stats = stats.merge(FeatureStats.of(np.array([[9.0], [11.0]]))).merge(stats)
    np.testing.assert_allclose([stats.mean[0], stats.std[0]], [10, 1], rtol=1e-12)


def test_an_array_longer_than_a_block_is_taken_block_by_block() -> None:
    frames = np.random.default_rng(2).normal(50, 1, size=(20_001, 9)).astype(np.float32)
    assert_equal_to_two_passes(FeatureStats.of(frames), frames, rtol=1e-12)
    assert_equal_to_two_passes(FeatureStats.of(frames[:, 0]), frames[:, 0], rtol=1e-12)


def test_one_frame_wider_than_a_block_is_one_block() -> None:
    frames = np.random.default_rng(3).normal(size=(2, 200_000))
    assert_equal_to_two_passes(FeatureStats.of(frames), frames, rtol=1e-12)


def test_views_and_fortran_order_are_read_as_they_look() -> None:
    frames = np.random.default_rng(4).normal(size=(30, 4, 6))
    for view in (frames[::-2], frames.transpose(1, 0, 2), np.asfortranarray(frames)):
        assert_equal_to_two_passes(FeatureStats.of(view), view, rtol=1e-12)


def test_frames_are_not_changed() -> None:
    frames = np.random.default_rng(5).normal(size=(30, 4))
    before = frames.copy()
    FeatureStats.of(frames)
    np.testing.assert_array_equal(frames, before)


def test_no_frames_change_nothing() -> None:
    stats = FeatureStats.of(np.ones((3, 2), dtype=np.float32))
    nothing = FeatureStats.of(np.empty((0, 2), dtype=np.float32))
    assert nothing.count == 0
    for both in (stats.merge(nothing), nothing.merge(stats)):
        assert both.count == 3
        np.testing.assert_array_equal(both.mean, [1, 1])
    assert np.isnan(nothing.var).all()
    assert np.isnan(nothing.std).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_integers_up_to_their_extremes_are_taken_as_floats(dtype: str) -> None:
    info = np.iinfo(dtype)
    frames = np.array([[info.min], [info.max], [info.max]], dtype=dtype)
    assert_equal_to_two_passes(FeatureStats.of(frames), frames, rtol=1e-12)


def test_booleans_are_taken_as_zeros_and_ones() -> None:
    stats = FeatureStats.of(np.array([True, False, True, True]))
    assert (float(stats.mean), float(stats.var)) == (0.75, 0.1875)


def test_nan_and_infinity_reach_the_statistics_without_a_warning() -> None:
    frames = np.array([[np.nan, np.inf, 1e200, 1.0], [1.0, 1.0, 0.0, 3.0]])
    stats = FeatureStats.of(frames)
    for one in (stats, stats.merge(FeatureStats.of(np.full((2, 4), 2.0)))):
        assert np.isfinite(one.m2).tolist() == [False, False, False, True]
        assert np.isfinite(one.sum_square).tolist() == [False, False, False, True]
        assert one.mean[3] == 2


def test_sums_are_those_of_the_frames() -> None:
    frames = np.random.default_rng(6).normal(3, 2, size=(100, 4))
    stats = FeatureStats.of(frames)
    np.testing.assert_allclose(stats.sum, frames.sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats.sum_square, (frames**2).sum(axis=0), rtol=1e-12)


def test_statistics_cannot_be_changed_and_leave_the_callers_arrays_writable() -> None:
    mean = np.zeros(2)
    stats = FeatureStats(1, mean, np.zeros(2))
    with pytest.raises(ValueError, match="read-only"):
        stats.mean[0] = 1
    mean[0] = 1


def test_frames_of_different_shapes_do_not_merge() -> None:
    with pytest.raises(FeatureError, match=r"\(2,\) and \(3,\)"):
        FeatureStats.empty((2,)).merge(FeatureStats.empty((3,)))


def test_what_cannot_be_statistics_is_refused() -> None:
    with pytest.raises(FeatureError, match="do not belong together"):
        FeatureStats(1, np.zeros(2), np.zeros(3))
    with pytest.raises(FeatureError, match="negative: -1"):
        FeatureStats(-1, np.zeros(2), np.zeros(2))
    with pytest.raises(FeatureError, match="single number"):
        FeatureStats.of(np.float32(1))


@pytest.mark.parametrize("dims", [(), (80,), (2, 3)])
def test_saving_and_loading_gives_the_same_bits(tmp_path: Path, dims: tuple[int, ...]) -> None:
    stats = FeatureStats.of(np.random.default_rng(7).normal(size=(11, *dims)))
    stats.save(tmp_path / "fbank.npz")
    loaded = FeatureStats.load(tmp_path / "fbank.npz")
    assert loaded.count == 11
    np.testing.assert_array_equal(loaded.mean, stats.mean)
    np.testing.assert_array_equal(loaded.m2, stats.m2)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "fbank.npz").read_bytes()


def test_a_saved_file_holds_the_sums_that_espnet_reads(tmp_path: Path) -> None:
    stats = FeatureStats.of(np.random.default_rng(8).normal(size=(11, 3)))
    stats.save(tmp_path / "fbank.npz")
    with np.load(tmp_path / "fbank.npz") as arrays:
        mean = arrays["sum"] / arrays["count"]
        np.testing.assert_allclose(mean, stats.mean)
        np.testing.assert_allclose(arrays["sum_square"] / arrays["count"] - mean**2, stats.var)


def test_statistics_go_through_an_open_file() -> None:
    buffer = io.BytesIO()
    FeatureStats.of(np.ones((3, 2))).save(buffer)
    buffer.seek(0)
    assert FeatureStats.load(buffer).count == 3


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fbank.npz"
    FeatureStats.of(np.random.default_rng(9).normal(size=(4, 2))).save(path)
    data = path.read_bytes()
    other = io.BytesIO()
    np.savez(other, count=1)
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for damaged in (b"", b"nonsense", data[: len(data) // 2], other.getvalue(), array.getvalue()):
        path.write_bytes(damaged)
        with pytest.raises(CorruptCacheError, match=r"fbank\.npz"):
            FeatureStats.load(path)


def test_statistics_load_no_torch() -> None:
    code = "import sys, featcache.stats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def saved() -> bytes:
    buffer = io.BytesIO()
    FeatureStats.of(np.random.default_rng(9).normal(size=(4, 2))).save(buffer)
    return buffer.getvalue()


SAVED = saved()


def assert_the_same_or_refused(damaged: bytes) -> None:
    """Fail if damage changes what is read; bytes that nobody reads may be damaged unnoticed."""
    with contextlib.suppress(CorruptCacheError):
        loaded = FeatureStats.load(io.BytesIO(damaged))
        stats = FeatureStats.load(io.BytesIO(SAVED))
        assert loaded.count == stats.count
        np.testing.assert_array_equal(loaded.mean, stats.mean)
        np.testing.assert_array_equal(loaded.m2, stats.m2)


@settings(max_examples=4000)
@given(st.integers(0, len(SAVED) * 8 - 1))
def test_a_flipped_bit_never_changes_what_is_read(bit: int) -> None:
    damaged = bytearray(SAVED)
    damaged[bit // 8] ^= 1 << bit % 8
    assert_the_same_or_refused(bytes(damaged))


@settings(max_examples=500)
@given(st.integers(0, len(SAVED) - 1), st.integers(0, 600), st.binary(max_size=40))
def test_bytes_that_are_replaced_never_change_what_is_read(
    start: int, length: int, other: bytes
) -> None:
    assert_the_same_or_refused(SAVED[:start] + other + SAVED[start + length :])


@pytest.mark.parametrize(
    "arrays",
    [
        {"count": np.inf},
        {"count": np.float64(3)},
        {"count": np.array([3])},
        {"count": -1},
        {"mean": np.array(["a", "b"])},
        {"mean": np.zeros(2, ">f8")},
        {"mean": np.zeros(3)},
        {"m2": np.zeros(2, np.int64)},
    ],
)
def test_arrays_of_another_kind_are_refused(arrays: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **{"count": np.int64(3), "mean": np.zeros(2), "m2": np.zeros(2), **arrays})
    with pytest.raises(CorruptCacheError, match="does not hold statistics"):
        FeatureStats.load(io.BytesIO(buffer.getvalue()))


def test_a_compressed_file_is_refused_before_it_fills_the_memory() -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, count=np.int64(3), mean=np.zeros(10**6), m2=np.zeros(10**6))
    with pytest.raises(CorruptCacheError, match="is compressed"):
        FeatureStats.load(io.BytesIO(buffer.getvalue()))


def test_many_merge_to_the_bit_as_one_after_the_other() -> None:
    random = np.random.default_rng(0)
    lengths = [0, 3, 0, 1, 700, 5]
    each = [FeatureStats.of(random.normal(5, 2, (length, 4))) for length in lengths]
    one_by_one = reduce(FeatureStats.merge, each, FeatureStats.empty((4,)))
    merged = FeatureStats.empty((4,)).merge_all(each)
    assert merged.count == one_by_one.count
    assert merged.mean.tobytes() == one_by_one.mean.tobytes()
    assert merged.m2.tobytes() == one_by_one.m2.tobytes()
    with pytest.raises(FeatureError, match="do not merge"):
        merged.merge_all([FeatureStats.empty((5,))])


def test_frames_too_large_for_memory_are_refused_with_their_shape() -> None:
    with pytest.raises(FeatureError, match=r"frames of shape \(33554436, 33554436\)"):
        FeatureStats.empty((33554436, 33554436))


@pytest.mark.parametrize("frames", [3, 5000])  # of one block, and in one pass
def test_signalling_nan_is_a_nan_without_a_warning(frames: int) -> None:
    array = np.full((frames, 2), 0x7F800001, np.uint32).view(np.float32)
    assert np.isnan(FeatureStats.of(array).mean).all()


@pytest.mark.parametrize("dims", [(), (2,)])
@pytest.mark.parametrize("level", [0.0, 7.5, 1e9])
def test_frames_that_never_change_are_taken_away_exactly(
    level: float, dims: tuple[int, ...]
) -> None:
    whole = FeatureStats.of(np.full((10, *dims), level))
    found = whole.without(FeatureStats.of(np.full((4, *dims), level)))
    assert found is not None
    assert found.count == 6
    assert (found.mean == level).all()
    assert (found.m2 == 0).all()


@given(st.integers(2, 40), st.integers(1, 39), st.floats(-1e3, 1e3))
def test_what_is_taken_away_is_what_was_merged_or_nothing(rows: int, some: int, far: float) -> None:
    frames = np.random.default_rng(rows).standard_normal((rows + some, 2)) + far
    whole, part = FeatureStats.of(frames), FeatureStats.of(frames[rows:])
    found = whole.without(part)
    if found is not None:
        np.testing.assert_allclose(found.mean, frames[:rows].mean(axis=0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.var, frames[:rows].var(axis=0), rtol=1e-9)
