"""`RowMap`: the rows that something has of what lies below it, both ways."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from featcache.interface import Ints
from featcache.tables.shared_array import SharedArray


class RowMap:
    """Row numbers of what lies below: row r here is row `below[r]` there. None comes twice."""

    def __init__(self, below: Ints | SharedArray[np.int64]) -> None:
        self._shared = (
            below if isinstance(below, SharedArray) else SharedArray(np.asarray(below, np.int64))
        )

    @property
    def below(self) -> Ints:
        """The row below of each row, int64, read-only."""
        return self._shared.values

    @property
    def digest(self) -> str:
        """A digest of the numbers."""
        return self._shared.digest

    def __len__(self) -> int:
        return len(self._shared)

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints | None]:
        """Rows below in ascending order, and the row of each; None where they ascend already."""
        below = self.below
        if bool((below[1:] > below[:-1]).all()):
            return below, None
        order = np.argsort(below, kind="stable")
        return below[order], order

    def find(self, below: Ints) -> Ints:
        """Return the row here of rows below, -1 where there is none, and of -1."""
        if not len(self):
            return np.full(len(below), -1, np.int64)
        ascending, order = self._sorted
        places = np.minimum(ascending.searchsorted(below), len(self) - 1)
        rows: Ints = places if order is None else order[places]
        return np.where(ascending[places] == below, rows, -1)

    def __reduce__(self) -> tuple[object, ...]:
        return RowMap, (self._shared,)
