"""The header of a `.npy` file, version 1.0: "\\x93NUMPY" 01 00, a length, the dtype and shape."""

from __future__ import annotations

import numpy as np
from numpy.lib.format import dtype_to_descr


def npy_header(dtype: np.dtype[np.generic], shape: tuple[int, ...], least: int = 0) -> bytes:
    """Return the header of an array: `least` bytes, or the next multiple of 64 that holds it.

    The room that numpy's own writer leaves differs from version to version.
    """
    descr = dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin1")
    # 10 bytes in front of the text, "\n" behind it
    length = max(least, -(-(10 + len(text) + 1) // 64) * 64) - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"
