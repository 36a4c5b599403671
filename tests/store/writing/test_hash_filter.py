"""The filter of ids never forgets one, and lets nearly all others pass."""

from __future__ import annotations

import numpy as np
import pytest

from featcache.writing.known_ids import HashFilter


@pytest.mark.parametrize("pieces", [[1], [3, 0, 500], [400] * 30, [20_000, 1]])
def test_what_was_added_is_never_taken_for_new(pieces: list[int]) -> None:
    random = np.random.default_rng(0)
    added = [random.integers(0, 2**64, count, np.uint64) for count in pieces]
    filter = HashFilter()
    for count, hashes in enumerate(added, 1):
        filter.add(hashes, added[:count])
    known = np.concatenate(added)
    assert all(map(filter.may_hold, known.tolist()))
    others = random.integers(0, 2**64, 5000, np.uint64).tolist()
    assert sum(map(filter.may_hold, others)) < 5000 / 50
