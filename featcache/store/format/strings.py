"""Many strings as two columns: where each ends, and their UTF-8 one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from featcache.errors import CorruptCacheError
from featcache.interface import Bytes, Ints

_AT_ONCE = 65536  # strings that are decoded at once: ten million are never all in memory


@dataclass(frozen=True, slots=True)
class Strings:
    """String r is `data[ends[r]:ends[r + 1]]`.

    `ends` is one longer than the strings, and begins with 0.
    """

    ends: Ints
    data: Bytes

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, row: int) -> str:
        return _decoded(self.data[self.ends[row] : self.ends[row + 1]].tobytes())

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            ends = self.ends[start : start + _AT_ONCE + 1].tolist()
            data = self.data[ends[0] : ends[-1]].tobytes()
            yield from [
                _decoded(data[begin - ends[0] : end - ends[0]]) for begin, end in pairwise(ends)
            ]

    @classmethod
    def of(cls, strings: Sequence[str]) -> Strings:
        """Pack strings."""
        encoded = [string.encode() for string in strings]
        return cls(
            ends_of([len(each) for each in encoded]), np.frombuffer(b"".join(encoded), np.uint8)
        )

    def fits(self) -> bool:
        """Tell whether the columns belong together, as far as their lengths show."""
        return (
            len(self.ends) > 0 and int(self.ends[0]) == 0 and int(self.ends[-1]) == len(self.data)
        )


def ends_of(counts: Sequence[int] | Ints) -> Ints:
    """Return the running sums of counts, with a zero before them."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptCacheError(f"a string of the index is damaged: {error}") from error
