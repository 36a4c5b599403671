"""Rows of the ids that several indexes have: those that a search in lists of ids finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from featcache.format import (
    ContainerColumns,
    FeatureColumns,
    Index,
    Strings,
    common_rows,
    hash_of,
    rows_of_ids,
    some_rows,
)

ids = st.sets(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3), max_size=30
)


def index_of(listed: list[str]) -> Index:
    """An index whose row r has r frames, in r extents."""
    keys = [id.encode() for id in listed]
    hashes = np.fromiter(map(hash_of, keys), np.uint64, len(keys))
    order, rows = np.argsort(hashes), np.arange(len(keys))
    first = np.append(0, np.cumsum(rows))
    extents = np.repeat(rows, rows)
    columns = FeatureColumns(
        rows, hashes, first, extents.astype(np.int32), extents * 10, extents * 100
    )
    count = len(keys)  # of containers: each extent of row r is in container r
    files = ContainerColumns(
        Strings.of([f"{row}.npy" for row in rows]),
        np.zeros(count, np.int64),
        np.zeros(16 * count, np.uint8),
        np.zeros(count, np.int32),
    )
    return Index(hashes[order], order, Strings.of_bytes(keys), {"f": columns}, files, {})


@settings(deadline=None)
@given(st.lists(ids, min_size=2, max_size=3), ids)
def test_common_rows_are_those_of_the_ids_that_all_have(
    apart: list[set[str]], all_: set[str]
) -> None:
    lists = [sorted(each | all_, key=str.encode) for each in apart]
    indexes = [index_of(listed) for listed in lists]
    common = [id for id in lists[0] if all(id in listed for listed in lists)]
    found = common_rows(indexes)
    for listed, index, rows in zip(lists, indexes, found, strict=True):
        if rows is None:
            assert listed == common
            continue
        assert [listed[row] for row in rows] == common
        some = some_rows(index, rows)
        assert list(some.ids) == common
        assert [some.find(id) for id in common] == [*range(len(common))]
        columns = some.features["f"]
        assert columns.rows.tolist() == rows.tolist()
        for new, row in enumerate(rows.tolist()):
            extents = slice(*columns.first[new : new + 2].tolist())
            assert columns.offset[extents].tolist() == [row * 10] * row
    for other, index in zip(lists[1:], indexes[1:], strict=True):
        expected = [lists[0].index(id) if id in lists[0] else -1 for id in other]
        assert rows_of_ids(indexes[0], index).tolist() == expected
