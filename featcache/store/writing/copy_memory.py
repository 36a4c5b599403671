"""`CopyMemory`: memory for copies of arrays, used again once nobody looks at them any more.

Fresh memory costs as much as the copy: the system hands it out, zeroed, a page at a time.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

from featcache.interface import Array, Bytes

BLOCK_BYTES = 4 << 20  # NumPy asks for large pages from here on
LEAST_BYTES = 1 << 15  # smaller copies are quick in any case


class CopyMemory:
    """Copies arrays into blocks of memory of its own; threads may share it."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []  # never more than the copies that are held at a time fill
        self._block: Bytes | None = None
        self._used = 0
        self._lock = threading.Lock()

    def copy(self, array: Array) -> Array:
        """Return a copy in C order."""
        if not LEAST_BYTES <= array.nbytes <= BLOCK_BYTES:
            return np.array(array, order="C")
        copy = self.take(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy

    def take(self, nbytes: int) -> Bytes:
        """Return memory of any content."""
        if nbytes > BLOCK_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            if self._block is None or self._used + nbytes > BLOCK_BYTES:
                self._block, self._used = None, 0
                self._block = self._free_block()
            begin = self._used
            self._used += nbytes + -nbytes % 64
            return self._block[begin : begin + nbytes]

    def _free_block(self) -> Bytes:
        memory = self._free.pop() if self._free else np.empty(BLOCK_BYTES, np.uint8)
        # views of it hold this array, and no other: it dies with the last of them
        block = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(block, self._free.append, memory).atexit = False
        return block
