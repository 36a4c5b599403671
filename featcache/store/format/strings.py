"""Many strings as two columns: where each ends, and their UTF-8 one after the other.

No Python object is made of any of them before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.interface import Bytes, Ints

DAMAGED = "the index is damaged (open the cache with verify='columns' to see which file)"
_AT_ONCE = 65536  # strings that are decoded at once: ten million are never all in memory


@dataclass(frozen=True)
class Strings:
    """String r is `data[ends[r]:ends[r + 1]]`.

    `ends` is one longer than the strings, and begins with 0.
    """

    ends: Ints
    data: Bytes

    def __len__(self) -> int:
        return len(self.ends) - 1

    @cached_property
    def views(self) -> tuple[memoryview, memoryview]:
        """`ends` and `data`: an item of a memoryview costs a third of one of an array."""
        return self.ends.data, self.data.data

    def __getitem__(self, row: int) -> str:
        ends, data = self.views
        try:
            return str(data[ends[row] : ends[row + 1]], "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptCacheError(f"{DAMAGED}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            ends = self.ends[start : start + _AT_ONCE + 1].tolist()
            data = self.data[ends[0] : ends[-1]].tobytes()
            try:
                yield from [
                    data[begin - ends[0] : end - ends[0]].decode() for begin, end in pairwise(ends)
                ]
            except UnicodeDecodeError as error:
                raise CorruptCacheError(f"{DAMAGED}: {error}") from error

    def take(self, rows: Ints) -> Strings:
        """Return some of the strings, in the order of `rows`."""
        begins = self.ends[rows]
        sizes = self.ends[rows + 1] - begins
        ends = ends_of(sizes)
        return Strings(ends, self.data[np.repeat(begins - ends[:-1], sizes) + np.arange(ends[-1])])

    @classmethod
    def of(cls, strings: Sequence[str]) -> Strings:
        """Pack strings."""
        return cls.of_bytes([string.encode() for string in strings])

    @classmethod
    def of_bytes(cls, encoded: Sequence[bytes]) -> Strings:
        """Pack strings that are UTF-8 already."""
        return cls(ends_of(list(map(len, encoded))), np.frombuffer(b"".join(encoded), np.uint8))

    def fits(self) -> bool:
        """Tell whether the columns belong together, as far as their lengths show."""
        return len(self.ends) > 0 and self.ends[0] == 0 and bool(self.ends[-1] == len(self.data))


def are_equal(these: Strings, those: Strings) -> NDArray[np.bool_]:
    """Tell of each string whether it is that of the same row of the others, which are as many."""
    same: NDArray[np.bool_] = np.diff(these.ends) == np.diff(those.ends)
    rows = np.flatnonzero(same)
    if len(rows) < len(same):
        these, those = these.take(rows), those.take(rows)
    wrong = np.append(0, np.cumsum(these.data != those.data))
    same[rows] = wrong[these.ends[1:]] == wrong[these.ends[:-1]]
    return same


def ends_of(counts: Sequence[int] | Ints) -> Ints:
    """Return the running sums of counts, with a zero before them."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def joined_ends(parts: Iterable[Ints]) -> Ints:
    """Return the ends of strings that were put together, given those of each part."""
    return ends_of(np.concatenate([np.empty(0, np.int64), *map(np.diff, parts)]))
