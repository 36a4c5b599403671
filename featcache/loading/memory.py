"""Memory for batches: recycled or pinned."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

from featcache.interface import Bytes

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
SMALL_BYTES = 1 << 16
ROUND_BYTES = 1 << 16  # buffers of about the same size serve each other


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor."""
    return torch.empty(shape, dtype=dtype)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor that a GPU can read while the CPU goes on.

    Torch recycles its memory.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)


class Recycler:
    """Gives out uninitialised tensors, and takes their memory again when unused.

    That is when nothing refers to it any more.

    Fresh memory costs a page fault every 4 KiB, which takes as long as filling it.
    """

    def __init__(self, most_bytes: int) -> None:
        """Keeps up to about `most_bytes` that are not in use."""
        self._most_bytes = most_bytes
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes <= SMALL_BYTES:
            return fresh(shape, dtype)
        buffer = self._take(nbytes)
        lease = buffer.data  # all tensors over it refer to this object, so that its end is theirs
        # no lock in what is called: the garbage collector may call it while this thread holds it
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=math.prod(shape)).view(shape)

    def __reduce__(self) -> tuple[object, ...]:
        return Recycler, (self._most_bytes,)

    def _take(self, nbytes: int) -> Bytes:
        wanted = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        with self._lock:
            while sum(map(len, self._free)) > self._most_bytes:
                self._free.pop(0)
            # the last to come back is most likely in the CPU's cache
            for place in reversed(range(len(self._free))):
                if wanted <= len(self._free[place]) <= 2 * wanted:
                    return self._free.pop(place)
        return np.empty(wanted, np.uint8)
