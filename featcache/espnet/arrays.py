"""Arrays of whole numbers: ends of consecutive groups, places within them, and stable orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Array = NDArray[Any]


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


def stable_order(values: Ints) -> Ints:
    """Return the rows by value, rows of one value in order; values are from 0 on."""
    bits, most = len(values).bit_length(), int(values.max(initial=0))
    if most < 2**16 or most.bit_length() + bits > 63:
        # the first kind is sorted by counting
        return np.argsort(values.astype(np.uint16) if most < 2**16 else values, kind="stable")
    # numbers are sorted several times faster than rows by number
    order: Ints = (values << bits) | np.arange(len(values))
    order.sort()
    order &= (1 << bits) - 1
    return order
