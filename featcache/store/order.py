"""The canonical order of utterances: by the UTF-8 bytes of their ids, with no Python object for any of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
_KEEP = ~np.array([(1 << 8 * (8 - width)) - 1 for width in range(9)], np.uint64)  # the first `width` bytes of a word
_AT_ONCE = 65536  # ids whose bytes are moved at once: numbers of bytes take eight times their memory


def order_of(data: Bytes, ends: Ints) -> Ints:
    """Return the rows in ascending order of their bytes; equal ones in the order of their rows.

    Args:
        data: the ids in UTF-8, without NUL, one after the other.
        ends: id r is `data[ends[r]:ends[r + 1]]`.
    """
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    words: NDArray[np.uint64] = np.ndarray(len(data) + 1, ">u8", padded, strides=(1,))
    lengths = np.diff(ends)
    order = np.arange(len(lengths))
    # places in the order whose ids are alike so far, by groups; eight bytes further in each turn
    places, groups = order.copy(), np.zeros_like(order)
    for begin in range(0, int(lengths.max(initial=0)), 8):
        rows = order[places]
        left = np.clip(lengths[rows] - begin, 0, 8)
        word = words[np.minimum(ends[rows] + begin, len(data))].astype(np.uint64) & _KEEP[left]
        by = np.lexsort((word, groups))  # stays within the group's places
        rows, word = rows[by], word[by]
        order[places] = rows
        new = np.append(True, (np.diff(groups) != 0) | (word[1:] != word[:-1]))
        alike = ~(new & np.append(new[1:], True))
        places, groups, rows = places[alike], np.cumsum(new)[alike], rows[alike]
        if lengths[rows].max(initial=0) <= begin + 8:  # a NUL cannot follow: what is alike now is equal
            break
    return order


def take(data: Bytes, ends: Ints, rows: Ints) -> tuple[Bytes, Ints]:
    """Return the ids of some rows, in that order, as `order_of` takes them."""
    counts = np.diff(ends)[rows]
    new_ends = np.append(0, np.cumsum(counts))
    taken = np.empty(int(new_ends[-1]), np.uint8)
    for start in range(0, len(rows), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        first, last = new_ends[start], new_ends[min(start + _AT_ONCE, len(rows))]
        shifts = ends[rows[some]] - new_ends[:-1][some]
        taken[first:last] = data[np.repeat(shifts, counts[some]) + np.arange(first, last)]
    return taken, new_ends
