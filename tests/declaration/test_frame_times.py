"""From seconds to frames: by one rule, in which no frame is lost and none is given twice."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featcache.declaration import FrameTimes

RATES = st.sampled_from(
    [1 / 16000, 1 / 22050, 256 / 22050, 1 / 75, 0.01, 0.0125, 0.02, 0.04, 1 / 3, 1.0]
)
OFFSETS = st.sampled_from([0.0, 0.0075, 0.0025, -0.005, -0.0125, 0.3])
TIMES = st.floats(0, 1e5)


@given(RATES, OFFSETS, st.lists(TIMES, min_size=2, max_size=20))
def test_neighbours_neither_overlap_nor_leave_out_a_frame(
    frame_s: float, offset_s: float, cuts: list[float]
) -> None:
    cuts = sorted(cuts)
    times = FrameTimes(frame_s, offset_s)
    spans = [times.boundaries(np.array(pair)).tolist() for pair in pairwise(cuts)]
    frames = [frame for start, stop in spans for frame in (start, stop)]
    assert frames == sorted(frames)
    assert all(one[1] == other[0] for one, other in pairwise(spans))


@given(RATES, OFFSETS, TIMES)
def test_a_cut_is_within_half_a_frame_of_its_time_however_far_into_a_recording(
    frame_s: float, offset_s: float, time: float
) -> None:
    (frame,) = FrameTimes(frame_s, offset_s).boundaries(np.array([time])).tolist()
    off = abs(Fraction(offset_s) + frame * Fraction(frame_s) - Fraction(time))
    assert off <= Fraction(frame_s) * Fraction(500002, 1000000) or (
        frame == 0 and time <= max(offset_s, 0)
    )


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_features_of_three_rates_stay_aligned_at_multiples_of_the_longest_frame(
    start: int, count: int
) -> None:
    cut = np.array([start * 20, (start + count) * 20]) / 1000
    samples, tens, twenties = (
        FrameTimes(frame_s).boundaries(cut) for frame_s in (1 / 16000, 0.01, 0.02)
    )
    assert twenties.tolist() == [start, start + count]
    assert tens.tolist() == (2 * twenties).tolist()
    assert samples.tolist() == (320 * twenties).tolist()


def test_no_frame_is_before_the_first() -> None:
    assert FrameTimes(0.01, 0.3).boundaries(np.array([0.0, 0.29, 0.31])).tolist() == [0, 0, 1]


@given(RATES, OFFSETS)
def test_a_cut_at_the_beginning_leaves_no_frame_out(frame_s: float, offset_s: float) -> None:
    assert FrameTimes(frame_s, offset_s).boundaries(np.array([0.0])).tolist() == [0]


@given(RATES, OFFSETS, st.integers(0, 10**8))
def test_all_frames_of_a_feature_end_at_its_end(
    frame_s: float, offset_s: float, frames: int
) -> None:
    times = FrameTimes(frame_s, offset_s)
    ends = times.ends_s(np.array([frames]))
    assert times.boundaries(ends).tolist() == [frames]


@given(st.integers(0, 10**9), st.sampled_from([10, 20, 25]))
def test_half_way_is_the_later_boundary_whatever_float64_makes_of_it(ms: int, frame: int) -> None:
    (found,) = FrameTimes(frame / 1000).boundaries(np.array([ms / 1000])).tolist()
    assert found == (2 * ms + frame) // (2 * frame)  # in whole numbers


def test_frames_are_those_of_lhotse() -> None:
    lhotse = pytest.importorskip("lhotse.utils")
    times = FrameTimes(0.01)
    for samples in range(0, 32000, 7):
        seconds = samples / 16000
        expected = lhotse.compute_num_frames(seconds, 0.01, 16000)
        assert times.boundaries(np.array([seconds])).tolist() == [expected]


def test_times_are_those_of_the_declaration() -> None:
    said = {"time_axis": 0, "frame_s": 0.02, "offset_s": 0.0025}
    assert FrameTimes.declared(said) == FrameTimes(0.02, 0.0025)
    assert FrameTimes.declared({"time_axis": 0, "frame_s": 1}) == FrameTimes(1.0, 0.0)
    assert FrameTimes.declared({"time_axis": 0}) is None
    assert FrameTimes.declared({"time_axis": None}) is None


@pytest.mark.parametrize("wrong", [0, -1.0, "0.01", True, float("inf"), float("nan"), [0.01]])
def test_a_damaged_declaration_is_no_time(wrong: object) -> None:
    with pytest.raises(ValueError, match="are not seconds"):
        FrameTimes.declared({"time_axis": 0, "frame_s": wrong})
    if wrong not in (0, -1.0):
        with pytest.raises(ValueError, match="are not seconds"):
            FrameTimes.declared({"time_axis": 0, "frame_s": 0.01, "offset_s": wrong})
