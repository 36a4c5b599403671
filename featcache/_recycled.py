"""Memory for large arrays, used again once nothing refers to it: fresh memory costs page faults.

A page fault every 4 KiB takes up to ten times as long as filling the memory does.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from featcache.interface import Array, Bytes

LEAST_BYTES = 1 << 16  # malloc keeps smaller memory itself
MOST_BYTES = 48 << 20  # that a process keeps for what it reads
LOOK_AT = 8  # blocks of a size that were given out long ago, for one that is free
LOOK_AT_LAST = 3  # and before these
ALIGNED = 64  # a cache line: copies into it are quicker

Blocks = deque[Bytes]
Scalar = TypeVar("Scalar", bound=np.generic)
references: Callable[[object], int] = getattr(sys, "getrefcount", lambda _: 1)


def _references_of_one() -> int:
    block = np.empty(1, np.uint8)
    return references(block)


ALONE = _references_of_one()  # 2, or 1 where Python does not count that of a variable (3.14)
# without its global lock Python counts references here and there
COUNTS = hasattr(sys, "getrefcount") and getattr(sys, "_is_gil_enabled", lambda: True)()


class RecycledMemory:
    """Makes uninitialised arrays in blocks of memory, and others there when they are gone.

    An array holds its block, and so does whatever is made over it: views, `memoryview`,
    `torch.from_numpy`. CPython counts these references, so a block that has none but this object's
    own is free. No finalizer runs and no lock is held: threads, forks and the garbage collector may
    come at any moment. A block that is forgotten goes when its array does.

    Args:
        most_bytes: most bytes of the blocks that are known, in use or not; those that have waited
            longest are forgotten beyond it. An array that is larger gets memory of its own.
    """

    def __init__(self, most_bytes: int) -> None:
        self._blocks: dict[int, Blocks] = {}  # by size; the one that was given out last is last
        self.keep(most_bytes)

    def keep(self, most_bytes: int) -> None:
        """Choose anew how many bytes of blocks are known at most, while others take some, too."""
        self._most_bytes = most_bytes if COUNTS else 0
        self._forget_beyond(self._most_bytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Scalar]) -> NDArray[Scalar]:
        """Return an uninitialised array, as `numpy.empty` does."""
        nbytes = math.prod(shape) * dtype.itemsize
        if LEAST_BYTES < nbytes <= self._most_bytes:
            return ndarray(shape, dtype, self._take(nbytes))
        return np.empty(shape, dtype)

    def copy(self, array: Array) -> Array:
        """Return a copy in C order, as `array.copy()` does."""
        nbytes = array.nbytes
        if LEAST_BYTES < nbytes <= self._most_bytes:
            copy: Array = ndarray(array.shape, array.dtype, self._take(nbytes))
            copy[...] = array  # np.copyto takes 0.2 us longer
            return copy
        return array.copy()

    def _take(self, nbytes: int) -> Bytes:
        """Return a block of so many bytes or more. Nobody else takes it while the caller has it."""
        step = nbytes.bit_length() - 3  # sizes are quarters of powers of two
        size = ((nbytes - 1) >> step) + 1 << step
        try:
            # the one of an array that was dropped at once is in the processor's cache; taken out
            # first, so that it belongs to this thread
            blocks = self._blocks[size]
            block = blocks.pop()
            if references(block) > ALONE:
                blocks.append(block)
                block = self._waiting(blocks)
            blocks.append(block)
            return block
        except (KeyError, IndexError):
            return self._new(size)

    def _waiting(self, blocks: Blocks) -> Bytes:
        """Return a block that is free; raises `IndexError`.

        One of the last that were given out, which may be in the processor's cache, else of the
        first.
        """
        held: list[Bytes] = []
        try:
            for _ in range(LOOK_AT_LAST):
                block = blocks.pop()
                if references(block) <= ALONE:  # a variable's: as `ALONE` was counted
                    return block
                held.append(block)
        finally:
            blocks.extend(reversed(held))
        for _ in range(LOOK_AT):
            block = blocks.popleft()
            if references(block) <= ALONE:
                return block
            blocks.append(block)
        raise IndexError

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks = {}

    @property
    def known_bytes(self) -> int:
        """Bytes of the blocks that are known, in use or not."""
        return sum(size * len(blocks) for size, blocks in list(self._blocks.items()))

    def _new(self, size: int) -> Bytes:
        memory = np.empty(size + ALIGNED, np.uint8)
        begin = -memory.ctypes.data % ALIGNED
        # views of it hold this array, and no other: it dies with the last of them
        block = np.frombuffer(memory.data[begin : begin + size], np.uint8)
        most_bytes = self._most_bytes  # which may become another one meanwhile
        if size <= most_bytes:
            self._forget_beyond(most_bytes - size)
            self._blocks.setdefault(size, deque()).append(block)
        return block

    def _forget_beyond(self, most_bytes: int) -> None:
        """Forget blocks, of the size that has most bytes, until the others come to no more."""
        while self.known_bytes > most_bytes:
            _, most = max(list(self._blocks.items()), key=lambda each: each[0] * len(each[1]))
            with suppress(IndexError):  # another thread took the last one
                most.popleft()

    def __reduce__(self) -> tuple[object, ...]:
        return RecycledMemory, (self._most_bytes,)


RECYCLED = RecycledMemory(MOST_BYTES)  # of this process, for all that it reads
if hasattr(os, "register_at_fork"):
    # written to in a child, memory of the parent would be copied first
    os.register_at_fork(after_in_child=RECYCLED.clear)
