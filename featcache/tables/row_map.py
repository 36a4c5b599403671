"""`RowMap`: the rows that something has of what lies below it, both ways."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from featcache.interface import Ints
from featcache.tables.shared_array import SharedArray


class RowMap:
    """Row numbers of what lies below: row r here is row `below[r]` there. None comes twice."""

    def __init__(
        self, below: Ints | SharedArray[np.int64], back: SharedArray[np.int32] | None = None
    ) -> None:
        self._shared = below if isinstance(below, SharedArray) else SharedArray(below)
        self._back = back

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
    def _ascends(self) -> bool:
        return bool((self.below[1:] > self.below[:-1]).all())

    def share(self) -> None:
        """Make now what `find` needs, for processes that are forked or spawned later to share."""
        if self._back is None and not self._ascends:
            back = np.full(int(self.below.max()) + 1, -1, np.int32)
            back[self.below] = np.arange(len(self), dtype=np.int32)
            self._back = SharedArray(back)

    def find(self, below: Ints) -> Ints:
        """Return the row here of rows below, -1 where there is none, and of -1."""
        if not len(self):
            return np.full(len(below), -1, np.int64)
        self.share()
        if self._back is not None:
            # in few arrays: each batch of a worker goes this way
            found = self._back.values.take(below, mode="clip").astype(np.int64)
            found[(below < 0) | (below >= len(self._back))] = -1
            return found
        places = self.below.searchsorted(below)
        np.minimum(places, len(self) - 1, out=places)
        places[self.below[places] != below] = -1
        return places

    def __reduce__(self) -> tuple[object, ...]:
        return RowMap, (self._shared, self._back)
