"""Where a batch ends exactly, and in what order categories come."""

from __future__ import annotations

import pytest

from featcache.espnet import build_batch_sampler


@pytest.mark.parametrize("padding", [True, False])
def test_a_batch_of_exactly_the_bins_is_not_closed_yet(padding: bool) -> None:
    batches = build_batch_sampler(
        "length", batch_bins=20, lengths=[10, 10, 10, 10], padding=padding
    )
    assert batches.sizes.tolist() == [3, 1]


def test_the_only_batch_is_not_dropped() -> None:
    assert list(build_batch_sampler("length", batch_bins=99, lengths=[2, 1], drop_last=True)) == [
        [0, 1]
    ]


def test_numbered_categories_come_in_the_order_of_their_first_rows() -> None:
    args = {"batch_size": 2, "lengths": [1] * 5, "categories": [2, 0, 2, 1, 0]}
    assert list(build_batch_sampler("unsorted", **args)) == [[0, 2], [1, 4], [3]]  # type: ignore[arg-type]
