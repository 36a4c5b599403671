"""The rows that two tables have of the same ids, found by the hashes of all ids at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.format.index import Hashes

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

_AT_ONCE = 1 << 16  # ids that are compared at once


def paths_of(table: FeatureTable) -> str:
    """Name the caches of a table, as a part of a message."""
    paths = [repr(str(cache.path)) for block in table.caches for cache in block]
    return " and ".join(dict.fromkeys(paths))


def rows_by_id(first: FeatureTable, other: FeatureTable) -> Ints:
    """Return the other table's row of each row of the first.

    Raises `ConfigError` if an id is in one of them alone.
    """
    if len(first) == len(other):
        rows = _rows_by_hash(first, other)
        if _same_ids(first, other, rows):
            return rows
    # some hash is that of several ids, or the ids differ
    found = other.find(list(first))
    if len(other) == len(found) and found.min(initial=0) >= 0:
        return found
    pairs = ((first, other, found), (other, first, first.find(list(other))))
    for one, two, missing in pairs:
        if missing.min(initial=0) < 0:
            raise ConfigError(
                f"joined caches need the same ids, but {one.id(int(missing.argmin()))!r} is in "
                f"{paths_of(one)} ({len(one)} utterances) and not in {paths_of(two)} ({len(two)})"
            )
    return found


def check_no_shared_id(tables: Sequence[FeatureTable]) -> None:
    """Raise `ConfigError` if an id is in two of several tables."""
    ordered = [_sorted_hashes(table) for table in tables] if len(tables) > 1 else []
    for one, two in combinations(range(len(ordered)), 2):
        few, many = sorted((one, two), key=lambda number: len(tables[number]))
        if not len(ordered[few]):
            continue
        places = np.minimum(ordered[many].searchsorted(ordered[few]), len(ordered[many]) - 1)
        if (ordered[many][places] == ordered[few]).any():
            _refuse_shared(tables[one], tables[two])


def _refuse_shared(first: FeatureTable, other: FeatureTable) -> None:
    shared = np.flatnonzero(np.isin(first.selection.hashes(), other.selection.hashes()))
    ids = [first.id(row) for row in shared.tolist()]
    for id, row in zip(ids, other.find(ids).tolist(), strict=True):
        if row >= 0:
            raise ConfigError(f"utterance {id!r} is in {paths_of(first)} and in {paths_of(other)}")


def _sorted_hashes(table: FeatureTable) -> Hashes:
    blocks = table.selection.blocks.blocks
    if table.selection.row_map is None and len(blocks) == 1 and blocks[0].whole:
        return blocks[0].members[0].opened.index.hashes
    return np.sort(table.selection.hashes())


def _rows_by_hash(first: FeatureTable, other: FeatureTable) -> Ints:
    """Return the row of each hash in another table, right where no two ids have one hash."""
    if not len(first):
        return np.zeros(0, np.int64)
    hashes = other.selection.hashes()
    order = np.argsort(hashes, kind="stable")
    places = np.minimum(hashes[order].searchsorted(first.selection.hashes()), len(order) - 1)
    return order[places]


def _same_ids(first: FeatureTable, other: FeatureTable, rows: Ints) -> bool:
    """Tell whether each row of the first has the id of the row that is named beside it."""
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        mine = first.selection.packed_ids(np.arange(start, start + len(some)))
        others = other.selection.packed_ids(some)
        if not (np.array_equal(mine.ends, others.ends) and np.array_equal(mine.data, others.data)):
            return False
    return True
