"""The canonical order of utterances: by the UTF-8 bytes of their ids.

No Python object is made for any of them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Bytes, Ints

Number = TypeVar("Number", bound=np.generic)
# the first `width` bytes of a word
KEEP = ~np.array([(1 << 8 * (8 - width)) - 1 for width in range(9)], np.uint64)
_AT_ONCE = 4096  # ids whose bytes are moved at once: numbers of bytes take eight times their memory


def argsort_ids(data: Bytes, ends: Ints) -> Ints:
    """Return the rows in ascending order of their bytes; equal ones in the order of their rows.

    Args:
        data: the ids in UTF-8, without NUL, one after the other; then 8 bytes more, so that words
            can be read anywhere.
        ends: id r is `data[ends[r]:ends[r + 1]]`.
    """
    words: NDArray[np.uint64] = np.ndarray(len(data) - 7, ">u8", data, strides=(1,))
    lengths = np.diff(ends).astype(np.int32)
    order = np.arange(len(lengths))
    # eight bytes at a time, the last ones first: each turn keeps what those behind it decided
    for begin in reversed(range(0, int(lengths.max(initial=0)), 8)):
        longer = lengths[order] > begin  # the others come first
        rows = order[longer]
        word = KEEP[np.minimum(lengths[rows] - begin, 8)]
        word &= words[ends[rows] + begin]
        order[: len(order) - len(rows)] = order[~longer]
        order[len(order) - len(rows) :] = rows[np.argsort(word, kind="stable")]
    return order


def take(data: NDArray[Number], ends: Ints, rows: Ints) -> tuple[NDArray[Number], Ints]:
    """Return the ids of some rows, in that order, as `argsort_ids` takes them.

    Other things that lie one after the other, too: that of row r is `data[ends[r]:ends[r + 1]]`.
    """
    counts = ends[rows + 1] - ends[rows]
    new_ends = np.append(0, np.cumsum(counts))
    taken = np.empty(int(new_ends[-1]), data.dtype)
    for start in range(0, len(rows), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        first, last = new_ends[start], new_ends[min(start + _AT_ONCE, len(rows))]
        shifts = ends[rows[some]] - new_ends[:-1][some]
        taken[first:last] = data[np.repeat(shifts, counts[some]) + np.arange(first, last)]
    return taken, new_ends
