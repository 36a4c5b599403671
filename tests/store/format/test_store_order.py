"""The canonical order of utterances."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from featcache.format import argsort_ids, take

IDS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20
)
ALIKE = st.text(st.sampled_from("ab\u00e9\U0001f600"), min_size=1, max_size=30)


@given(st.lists(IDS | ALIKE, max_size=40))
def test_rows_are_in_the_order_of_the_utf8_bytes_and_equal_ones_in_that_of_their_rows(
    ids: list[str],
) -> None:
    keys = [id.encode() for id in ids]
    data, ends = np.frombuffer(b"".join(keys) + bytes(8), np.uint8), np.cumsum([0, *map(len, keys)])
    order = argsort_ids(data, ends)
    assert order.tolist() == sorted(range(len(keys)), key=keys.__getitem__)
    taken, taken_ends = take(data, ends, order)
    assert [taken[a:b].tobytes() for a, b in pairwise(taken_ends)] == sorted(keys)


def test_more_ids_than_are_moved_at_once_keep_their_bytes() -> None:
    keys = [f"{number * 7919 % 15_000}".encode() for number in range(15_000)]
    data, ends = np.frombuffer(b"".join(keys) + bytes(8), np.uint8), np.cumsum([0, *map(len, keys)])
    taken, _ = take(data, ends, argsort_ids(data, ends))
    assert taken.tobytes() == b"".join(sorted(keys))
