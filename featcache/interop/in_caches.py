"""Caches that stay open for other toolkits' references, and the cache that each row lies in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from featcache.errors import ConfigError
from featcache.format import NAME
from featcache.interface import Ints
from featcache.store import Cache
from featcache.store import open as open_cache
from featcache.tables import FeatureTable

_OPEN = 64  # caches that a process keeps open


def opened(path: str) -> Cache:
    """Return a cache that stays open in this process; one that was written anew is opened anew."""
    # each publish makes a new manifest
    try:
        stamp = os.stat(f"{path}/{NAME}")  # noqa: PTH116  # 50,000 a second
    except (FileNotFoundError, NotADirectoryError):
        return open_cache(path)  # which says what is wrong
    return _open_as_of(path, stamp.st_mtime_ns, stamp.st_ino)


@lru_cache(maxsize=_OPEN)
def _open_as_of(path: str, mtime_ns: int, inode: int) -> Cache:
    return open_cache(path)


def caches_of_rows(table: FeatureTable, feature: str) -> tuple[Sequence[Cache], Sequence[int]]:
    """Return the caches of a table, and the number of that which holds a feature of each row.

    Raises `ConfigError` for rows that are no utterances of them, as segments are, and for caches
    behind URLs.
    """
    for each in table.selection.blocks.generations:
        if each.settings.remote is not None:
            raise ConfigError(
                f"{each.place} is behind a URL, and other toolkits read caches by their paths: "
                "featcache.transfer.pull it, and open it there"
            )
    lengths: Ints | None = table.lengths(feature) if table.has_frames(feature) else None
    numbers = np.full(len(table), -1)
    # a segment may have the id and the length of another utterance
    is_whole = table.selection.cuts is None
    caches = [open_cache(path) for path in table.paths if is_whole]
    for number, cache in reversed([*enumerate(caches)]):
        if feature in cache.features:
            rows = cache.find(table)
            known = rows >= 0
            if lengths is not None:
                known[known] = cache.lengths(feature, rows=rows[known]) == lengths[known]
            numbers[known] = number
    if (unknown := np.flatnonzero(numbers < 0)).size:
        raise ConfigError(
            f"{table.id(int(unknown[0]))!r} is no utterance of {', '.join(map(str, table.paths))}: "
            "other toolkits take whole utterances, and cut segments themselves"
        )
    return caches, numbers.tolist()
