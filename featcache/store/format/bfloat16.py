"""bfloat16 is stored as the uint16 of its bits; NumPy has no such dtype."""

from __future__ import annotations

import numpy as np

from featcache.interface import Array


def from_storage(stored: Array, dtype: str, *, writable: bool = True) -> Array:
    """Return stored numbers as NumPy has them: bfloat16 as the float32 of the same value.

    Read-only unless they are to be `writable`.
    """
    array = from_bfloat16(stored) if dtype == "bfloat16" else stored
    if not writable:
        array.flags.writeable = False
    return array


def from_bfloat16(stored: Array) -> Array:
    """Return the float32 of the same values."""
    return (stored.astype(np.uint32) << 16).view(np.float32)
