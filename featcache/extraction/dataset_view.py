"""The utterances of a data set as a view of the cache that holds them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from featcache.extraction.datasets import named
from featcache.extraction.other_splits import rows_of
from featcache.store.cache import Cache
from featcache.tables.table import FeatureTable

_log = logging.getLogger("featcache")


def view_of(cache: Cache, ids: Sequence[str] | None, *, level: int = logging.INFO) -> FeatureTable:
    """Return the view of those utterances that a cache holds, in the order of its rows.

    Args:
        cache: the cache.
        ids: of the data set; None: not known, all of the cache is returned.
        level: that of the line in the log where the cache holds others, too.
    """
    table = FeatureTable.of(cache)
    if ids is None:
        return table
    mine = np.zeros(len(cache), bool)
    rows = rows_of(cache.opened, ids)
    mine[rows[rows >= 0]] = True
    if mine.all():
        return table
    others = np.flatnonzero(~mine)
    text = "cache %r holds %d utterances, %d of them not in this data set: %s; what is returned is "
    text += "the view of the others, and its `cache` the whole"
    some = named([cache.ids[row] for row in others[:3].tolist()])
    _log.log(level, text, str(cache.path), len(cache), len(others), some)
    return table.select(np.flatnonzero(mine))
