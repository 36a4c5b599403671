"""The utterances of a data set as a view of the cache that holds them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from featcache.extraction.datasets import named
from featcache.extraction.other_splits import rows_of
from featcache.interface import Ints
from featcache.store.cache import Cache
from featcache.tables.table import FeatureTable

_log = logging.getLogger("featcache")


class RowsOfIds:
    """Rows of a data set's ids in a cache, looked up once while it holds the same utterances."""

    def __init__(self) -> None:
        self._known: tuple[str, Sequence[str], Ints] | None = None

    def of(self, cache: Cache, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, read-only, -1 where there is none."""
        digest = cache.opened.index.ids_digest
        if self._known is not None and digest and self._known[0] == digest:
            _, known_ids, rows = self._known
            if known_ids is ids:
                return rows
        rows = rows_of(cache.opened, ids)
        rows.flags.writeable = False
        self._known = (digest, ids, rows)
        return rows


def view_of(
    cache: Cache,
    ids: Sequence[str] | None,
    *,
    rows_of_ids: RowsOfIds,
    level: int = logging.INFO,
) -> FeatureTable:
    """Return the view of those utterances that a cache holds, in the order of its rows.

    Args:
        cache: the cache.
        ids: of the data set; None: not known, all of the cache is returned.
        rows_of_ids: looks the ids up, or knows their rows.
        level: that of the line in the log where the cache holds others, too.
    """
    table = FeatureTable.of(cache)
    if ids is None:
        return table
    mine = np.zeros(len(cache), bool)
    rows = rows_of_ids.of(cache, ids)
    mine[rows[rows >= 0]] = True
    if mine.all():
        return table
    others = np.flatnonzero(~mine)
    text = "cache %r holds %d utterances, %d of them not in this data set: %s; what is returned is "
    text += "the view of the others, and its `cache` the whole"
    some = named([cache.ids[row] for row in others[:3].tolist()])
    _log.log(level, text, str(cache.path), len(cache), len(others), some)
    return table.select(np.flatnonzero(mine))
