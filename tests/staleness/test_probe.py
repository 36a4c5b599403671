"""Probes as bytes, arrays that are alike or not, and digests of inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from speechbrain.dataio.batch import PaddedBatch

from featcache.errors import CorruptCacheError
from featcache.staleness.inputs import input_digests
from featcache.staleness.probe import (
    MOST_BYTES,
    Probe,
    Probed,
    Tolerance,
    as_rows,
    compare,
    spread,
    tolerance,
    unlike,
)

NEAR = tolerance("fp32", same_device=True)
ARRAYS = [
    np.zeros((3, 4), np.float32),
    np.zeros((0, 4), np.float16),
    np.arange(5, dtype=np.int16),
    np.array([[True]]),
    np.float64(3.5),
    torch.ones(2, 3, dtype=torch.bfloat16),
]


def probe_of(*arrays: Any) -> Probe:
    named = {f"x{number}": as_rows(array) for number, array in enumerate(arrays)}
    return Probe({"äö/u-1": Probed({"sig": "00ff"}, named)}, "cpu", "bf16", 7, False, True)


def test_a_probe_comes_back_from_its_bytes() -> None:
    probe = probe_of(*ARRAYS)
    again = Probe.from_bytes(probe.to_bytes())
    assert (again.device, again.precision, again.seed) == ("cpu", "bf16", 7)
    assert (again.repeatable, again.batched) == (False, True)
    assert compare(probe.utterances, again.utterances, NEAR).same_bits
    assert again.utterances["äö/u-1"].inputs == {"sig": "00ff"}


def test_long_arrays_keep_their_first_rows_so_that_a_probe_stays_small() -> None:
    large = np.arange(MOST_BYTES // 4, dtype=np.float32).reshape(-1, 64)
    data = probe_of(large, large).to_bytes()
    assert len(data) <= MOST_BYTES
    again = Probe.from_bytes(data).utterances
    assert 0 < len(again["äö/u-1"].features["x0"].array) < len(large)
    assert compare(again, probe_of(large, large).utterances, NEAR).same_bits
    shorter = compare(again, probe_of(large[:-1], large).utterances, NEAR).features
    assert [each.told() for each in shorter] == ["has 262143 frames instead of 262144"]


@given(st.binary(max_size=200), st.integers(0, 200))
def test_bytes_that_are_no_probe_are_refused(noise: bytes, cut: int) -> None:
    for data in (noise, probe_of(*ARRAYS).to_bytes()[:cut]):
        with pytest.raises(CorruptCacheError, match="no probe"):
            Probe.from_bytes(data)


def differing(one: Any, other: Any, near: Tolerance = NEAR, slack: float = 0.0) -> str | None:
    before, now = as_rows(one), as_rows(other)
    found = unlike(("u", "x"), before, now, spread([before.array]), near, slack)
    return None if found is None else found.told()


def test_real_numbers_may_be_apart_by_a_share_of_their_spread() -> None:
    array = np.random.default_rng(0).normal(3, 10, (100, 8))
    assert differing(array, array + 0.0009) is None
    assert differing(array, array + 1) == "differs by 0.1 of its spread"
    assert differing(array, array + 1, slack=1.1) is None
    other = array.copy()
    other[-2:] += 20
    assert differing(array, other) == "differs by 2 of its spread, in its last frames"


def test_the_offset_of_a_dimension_is_no_spread() -> None:
    array = np.random.default_rng(0).normal(size=(1000, 2))
    array[:, 1] += 1e4
    assert spread([array]) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_constant_features_are_compared_by_their_magnitude(value: float) -> None:
    array = np.full((10, 2), value)
    assert differing(array, array) is None
    assert differing(array, array + 1) is not None


def test_of_tokens_one_in_a_hundred_frames_may_differ() -> None:
    tokens = np.arange(200) % 50
    other = tokens.copy()
    other[:2] += 1
    assert differing(tokens, other) is None
    other[2] += 1
    assert differing(tokens, other) == "differs in 0.015 of its frames"
    assert differing(tokens, other, tolerance("fp32", same_device=False)) is None


def test_numbers_that_are_none_are_alike_where_both_are() -> None:
    array = np.array([1.0, np.nan, np.inf, 2.0])
    assert differing(array, array.copy()) is None
    assert differing(array, array[::-1].copy()) is not None
    assert differing(array, array[:, None]) == "has the shape (4, 1) instead of (4,)"


def test_another_device_may_be_further_apart_and_half_precision_too() -> None:
    spreads = [tolerance(each, same_device=True).spread for each in ("fp32", "tf32", "fp16")]
    assert spreads == sorted(spreads)
    for precision in ("fp32", "tf32", "fp16", "bf16"):
        near, far = (tolerance(precision, same_device=same) for same in (True, False))
        assert near.spread < far.spread
        assert near.share < far.share


def test_inputs_are_told_apart_by_name() -> None:
    batch = PaddedBatch([{"id": "u1", "sig": torch.ones(4), "text": "yes", "speaker": 3}])
    digests = input_digests(batch, "u1")
    assert sorted(digests) == ["sig", "speaker", "text"]
    other = PaddedBatch([{"id": "u1", "sig": torch.ones(5), "text": "yes", "speaker": 3}])
    changed = {
        name for name, digest in input_digests(other, "u1").items() if digest != digests[name]
    }
    assert changed == {"sig"}
    assert sorted(input_digests(batch, "u1", frozenset({"sig", "id"}))) == ["sig"]


@pytest.mark.parametrize(
    "data",
    [
        [{"id": "u1", "sig": np.ones(3)}],
        {"id": ["u1"], "sig": torch.ones(1, 3, dtype=torch.float64)},
        (["u1"], {"sig": np.ones(3)}),
        [("u1", {"sig": np.ones(3)})],
    ],
)
def test_batches_of_all_forms_show_their_inputs(data: Any) -> None:
    assert "sig" in input_digests(data, "u1")


def test_inputs_count_whatever_they_are_called() -> None:
    assert sorted(input_digests({"id": "u1", "_sig": np.ones(3), "__x": 1}, "u1")) == [
        "__x",
        "_sig",
    ]


def test_what_nothing_describes_does_not_count_and_neither_do_places() -> None:
    one = {"f": lambda: 1, "wav": "/data/a/u1.wav", "x": {"y": [1, (2.5, None, b"z")]}}
    other = {"f": lambda: 2, "wav": "/moved/u1.wav", "x": {"y": [1, (2.5, None, b"z")]}}
    assert input_digests(one, "u1") == input_digests(other, "u1")
    assert "x" in input_digests(one, "u1")
