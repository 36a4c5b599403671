"""Look-ups of ids among those of segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featcache.format import Hashes, Strings
from featcache.tables import IdLookup, segments

IDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    ids=st.lists(IDS, unique=True, max_size=40),
    others=st.lists(IDS, max_size=20),
    at_once=st.sampled_from([1, 7, 65536]),
    bits=st.sampled_from([0, 1, 3, 64]),
)
def test_each_id_is_found_and_no_other(
    ids: list[str], others: list[str], at_once: int, bits: int
) -> None:
    """Also where hashes of several ids are alike."""
    original = segments._hashes

    def poor(ids: Strings) -> Hashes:
        return original(ids) & np.uint64((1 << bits) - 1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "_AT_ONCE", at_once)
        patched.setattr(segments, "_hashes", poor)
        lookup = IdLookup(Strings.of(ids))
        wanted = [*reversed(ids), *others, *ids]
        rows = {id: row for row, id in enumerate(ids)}
        assert lookup.find(wanted).tolist() == [rows.get(id, -1) for id in wanted]


def test_ids_that_differ_in_one_place_have_hashes_of_their_own() -> None:
    ids = [f"recording-{number // 100:06d}-{number % 100 * 150}" for number in range(100_000)]
    ids += ["a" * size for size in range(1, 200)]
    assert len(np.unique(segments._hashes(Strings.of(ids)))) == len(ids)


def test_what_is_no_text_is_not_found() -> None:
    assert IdLookup(Strings.of(["a", "b"])).find(["\ud800", "b"]).tolist() == [-1, 1]
