"""Rows of an index: those of the ids of another one, and an index of some of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache.interface import Ints
from featcache.store.format.id_order import take
from featcache.store.format.index import FeatureColumns, Index
from featcache.store.format.strings import Strings, ends_of


def have_same_ids(first: Index, other: Index) -> bool:
    """Tell whether two indexes are of the same ids: by the digests of their columns, if known."""
    if first.ids_digest and other.ids_digest:
        return first.ids_digest == other.ids_digest
    a, b = first.ids, other.ids
    return np.array_equal(a.ends, b.ends) and np.array_equal(a.data, b.data)


def rows_of_ids(index: Index, of: Index) -> Ints:
    """Return the row in `index` of each id of another index, in the order of its rows, or -1.

    No Python object is made for any of them. Both are in the order of their ids.
    """
    rows = np.full(len(of), -1, np.int64)
    if not len(index) or not len(of):
        return rows
    places = np.minimum(index.hashes.searchsorted(of.hashes), len(index) - 1)
    alike = index.hashes[places] == of.hashes
    rows[of.hash_rows[alike]] = index.hash_rows[places[alike]]
    mine = np.flatnonzero(rows >= 0)
    if not _are_same(of.ids, mine, index.ids, rows[mine]):
        for row in mine.tolist():  # ids of the same hash
            rows[row] = index.find(of.id(row))
    return rows


def _are_same(first: Strings, rows: Ints, other: Strings, others: Ints) -> bool:
    """Tell whether two lists of rows have the same strings; rows that follow on go together."""
    if not np.array_equal(np.diff(first.ends)[rows], np.diff(other.ends)[others]):
        return False
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(others) != 1)) + 1
    begins, lasts = np.append(0, breaks)[: len(rows)], np.append(breaks, len(rows)) - 1
    bounds = [
        (column.ends[some[begins]].tolist(), column.ends[some[lasts[: len(begins)]] + 1].tolist())
        for column, some in ((first, rows), (other, others))
    ]
    pieces = zip(*bounds[0], *bounds[1], strict=True)
    return all(first.data[a:b].tobytes() == other.data[c:d].tobytes() for a, b, c, d in pieces)


def common_rows(indexes: Sequence[Index]) -> list[Ints | None]:
    """Return, for each index, the rows of the ids that all of them have; None: all its rows."""
    if all(have_same_ids(indexes[0], each) for each in indexes[1:]):
        return [None] * len(indexes)
    found = [np.arange(len(indexes[0]))]
    found += [rows_of_ids(each, indexes[0]) for each in indexes[1:]]
    there = np.logical_and.reduce([rows >= 0 for rows in found])
    return [rows[there] for rows in found]


def some_rows(index: Index, rows: Ints) -> Index:
    """Return an index of some rows, in their order; its containers are the same."""
    data, ends = take(index.ids.data, index.ids.ends, rows)
    new = np.full(len(index), -1, np.int64)
    new[rows] = np.arange(len(rows))
    hash_rows = new[index.hash_rows]
    stay = hash_rows >= 0
    return Index(
        hashes=index.hashes[stay],
        hash_rows=hash_rows[stay],
        ids=Strings(ends, data),
        features={name: _some_rows(each, rows) for name, each in index.features.items()},
        containers=index.containers,
        stats=index.stats,
    )


def _some_rows(columns: FeatureColumns, rows: Ints) -> FeatureColumns:
    begins = columns.first[rows]
    counts = columns.first[rows + 1] - begins
    first = ends_of(counts)
    extents = np.repeat(begins - first[:-1], counts) + np.arange(first[-1])
    return FeatureColumns(
        rows=columns.rows[rows],
        checksum=columns.checksum[rows],
        first=first,
        container=columns.container[extents],
        offset=columns.offset[extents],
        nbytes=columns.nbytes[extents],
        block_rows=None if columns.block_rows is None else columns.block_rows[rows],
        skip=None if columns.skip is None else columns.skip[rows],
    )
