"""Rows of an index: those of the ids of another one, and an index of some of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache.interface import Ints
from featcache.store.format.id_order import take
from featcache.store.format.index import FeatureColumns, Index
from featcache.store.format.strings import Strings, ends_of


def have_same_ids(first: Index, other: Index) -> bool:
    """Tell whether two indexes are of the same ids."""
    a, b = first.ids, other.ids
    return np.array_equal(a.ends, b.ends) and np.array_equal(a.data, b.data)


def rows_of_ids(index: Index, of: Index) -> Ints:
    """Return the row in `index` of each id of another index, in the order of its rows, or -1.

    No Python object is made for any of them.
    """
    rows = np.full(len(of), -1, np.int64)
    if not len(index) or not len(of):
        return rows
    places = np.minimum(index.hashes.searchsorted(of.hashes), len(index) - 1)
    alike = index.hashes[places] == of.hashes
    mine, theirs = of.hash_rows[alike], index.hash_rows[places[alike]]
    rows[mine] = theirs
    bytes_, ends = take(of.ids.data, of.ids.ends, mine)
    found_bytes, found_ends = take(index.ids.data, index.ids.ends, theirs)
    if not (np.array_equal(ends, found_ends) and np.array_equal(bytes_, found_bytes)):
        for row in mine.tolist():  # ids of the same hash
            rows[row] = index.find(of.id(row))
    return rows


def common_rows(indexes: Sequence[Index]) -> list[Ints | None]:
    """Return, for each index, the rows of the ids that all of them have; None: all its rows."""
    if all(have_same_ids(indexes[0], each) for each in indexes[1:]):
        return [None] * len(indexes)
    found = [rows_of_ids(each, indexes[0]) for each in indexes]
    there = np.logical_and.reduce([rows >= 0 for rows in found])
    return [rows[there] for rows in found]


def some_rows(index: Index, rows: Ints) -> Index:
    """Return an index of some rows; its containers are the same."""
    data, ends = take(index.ids.data, index.ids.ends, rows)
    by_row = np.empty(len(index), np.uint64)
    by_row[index.hash_rows] = index.hashes
    hashes = by_row[rows]
    hash_rows = np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
    return Index(
        hashes=hashes[hash_rows],
        hash_rows=hash_rows,
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
    )
