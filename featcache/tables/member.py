"""`Member`: a cache of a block, with the rows of it that count."""

from __future__ import annotations

from typing import NamedTuple

from featcache.interface import Ints
from featcache.store.cache import Cache, cache_as_of
from featcache.store.reading.generation import Generation
from featcache.tables.row_map import RowMap


class Member(NamedTuple):
    """A cache of a block, and the rows of it in the order of the block; None: all, in order.

    All is read from the generation that was open when the table was made: the cache may be
    refreshed.
    """

    cache: Cache
    opened: Generation
    rows: RowMap | None = None

    @classmethod
    def of(cls, cache: Cache) -> Member:
        """Return the member of all rows of a cache as it is open now."""
        return cls(cache, cache.opened)

    def __len__(self) -> int:
        return len(self.opened.index) if self.rows is None else len(self.rows)

    @property
    def as_opened(self) -> Cache:
        """The cache with the generation that is read."""
        if self.cache.opened is self.opened:
            return self.cache
        return cache_as_of(self.opened, self.cache.version)

    def inner(self, rows: Ints) -> Ints:
        """Return the cache's rows of rows of the block."""
        return rows if self.rows is None else self.rows.below[rows]
