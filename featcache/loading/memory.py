"""Memory for the tensors of batches: fresh, recycled or pinned."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from functools import partial
from mmap import mmap

import numpy as np
import torch

from featcache.interface import Bytes

Shape = tuple[int, ...]
Allocate = Callable[[Shape, torch.dtype], torch.Tensor]
SMALL_BYTES = 1 << 16
ROUND_BYTES = 1 << 16  # buffers of about the same size serve each other


def fresh(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor."""
    return torch.empty(shape, dtype=dtype)


def pinned(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor that a GPU can read while the CPU goes on."""
    # torch recycles this memory itself
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def leased(
    memory: memoryview | mmap, shape: Shape, dtype: torch.dtype, give_back: Callable[[], object]
) -> torch.Tensor:
    """Return a tensor over the first bytes of `memory`.

    `give_back` is called when neither the tensor nor a view of it is left. It must take no lock:
    the garbage collector may call it in a thread that holds it.
    """
    lease = memoryview(memory)[: math.prod(shape) * dtype.itemsize]
    weakref.finalize(lease, give_back).atexit = False
    return torch.frombuffer(lease, dtype=dtype).view(shape)


class Recycler:
    """Gives out uninitialised tensors, and takes back their memory when nothing refers to it.

    Fresh memory costs a page fault every 4 KiB, which takes as long as filling it.
    """

    def __init__(self, most_bytes: int) -> None:
        """Keep up to about `most_bytes` that are not in use."""
        self._most_bytes = most_bytes
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def __call__(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes <= SMALL_BYTES:
            return fresh(shape, dtype)
        buffer = self._take(nbytes)
        return leased(buffer.data, shape, dtype, partial(self._free.append, buffer))

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
