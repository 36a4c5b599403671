"""Batches of utterances as two arrays: a million of them take no longer to make than a sort."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.interface import Ints
from featcache.tables.table import Numbering, Rows


class Batches(Sequence[list[int] | list[str]]):
    """A list of batches, each a list of row numbers, or of ids where `keys` are given.

    Batch b is `items[ends[b]:ends[b + 1]]`. `numbering` says which utterances row numbers count,
    where that is known.

    >>> Batches([2, 0, 1], [0, 1, 3])[1]
    [0, 1]
    >>> list(Batches([2, 0, 1], [0, 1, 3], keys=["x", "y", "z"]))
    [['z'], ['x', 'y']]
    """

    def __init__(
        self,
        items: ArrayLike,
        ends: ArrayLike,
        keys: Sequence[str] | None = None,
        numbering: Numbering | None = None,
    ) -> None:
        self.items: Ints = np.asarray(items, np.int64)
        self.ends: Ints = np.asarray(ends, np.int64)
        self.keys = keys
        self.numbering = numbering

    @classmethod
    def of(cls, batches: Sequence[Sequence[int]]) -> Batches:
        """Make them from lists of row numbers."""
        return cls([item for batch in batches for item in batch], ends_of(list(map(len, batches))))

    @property
    def sizes(self) -> Ints:
        """Utterances of each batch."""
        return np.diff(self.ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, index: int) -> list[int] | list[str]: ...
    @overload
    def __getitem__(self, index: slice) -> Batches: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[str] | Batches:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self.batch(range(len(self))[index])

    def __iter__(self) -> Iterator[list[int] | list[str]]:
        for begin, end in zip(self.ends[:-1].tolist(), self.ends[1:].tolist(), strict=True):
            yield self._named(self.items[begin:end].tolist())

    def __repr__(self) -> str:
        return f"<{len(self)} batches of {len(self.items)} utterances>"

    def batch(self, number: int) -> list[int] | list[str]:
        """Return batch `number`, counted from 0 on: what `[number]` does, in half the time."""
        return self._named(self.items[self.ends.item(number) : self.ends.item(number + 1)].tolist())

    def take(self, order: Ints) -> Batches:
        """Return the batches that `order` numbers, in that order."""
        sizes = self.sizes[order]
        source = np.repeat(self.ends[order], sizes) + counted(sizes)
        return Batches(self.items[source], ends_of(sizes), self.keys, self.numbering)

    def _named(self, rows: list[int]) -> list[int] | list[str]:
        if self.keys is not None:
            return [self.keys[row] for row in rows]
        return rows if self.numbering is None else Rows(rows, self.numbering)


def ends_of(sizes: Sequence[int] | NDArray[np.integer]) -> Ints:
    """Return where each of consecutive groups of these sizes ends, after a 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def counted(sizes: Ints) -> Ints:
    """Number the elements within each of consecutive groups: 0, 1, ... up to each size.

    >>> counted(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = ends_of(sizes)
    return np.arange(ends[-1]) - np.repeat(ends[:-1], sizes)
