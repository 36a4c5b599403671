"""Tensors that a DataLoader's worker hands over without a copy, in memory that it uses again.

Fresh shared memory costs more in page faults than reading a batch takes. So a worker keeps its
pieces of it (memfd, which have no name that could be left behind), and the process that got a
tensor gives its piece back by clearing a byte in it when nothing refers to the tensor any more.
Small tensors are sent by value.
"""

from __future__ import annotations

import math
import mmap
import os
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from featcache.loading.memory import ROUND_BYTES, SMALL_BYTES, Allocate, Shape, fresh, leased

PAGE = mmap.PAGESIZE
MOST_FREE = 8
AVAILABLE = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()  # Linux


class _Segment:
    """Memory that two processes map; its last page begins with 1 while the other one holds it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.descriptor = os.memfd_create("featcache-batch")
        os.ftruncate(self.descriptor, capacity + PAGE)
        self.memory = mmap.mmap(self.descriptor, capacity + PAGE)
        self.held_here = False

    @property
    def free(self) -> bool:
        return not self.held_here and self.memory[self.capacity] == 0

    def __del__(self, close: Any = os.close) -> None:
        close(self.descriptor)


class _SegmentTensor(torch.Tensor):
    """A tensor over a segment; what is computed from it is an ordinary tensor."""

    # as torch's own Parameter has it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001
    segment: _Segment | None  # None: small


class Segments:
    """Gives out uninitialised tensors in shared memory of this process."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []

    def __call__(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that another process, once it was sent there, sees without a copy."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes <= SMALL_BYTES:
            small = fresh(shape, dtype).as_subclass(_SegmentTensor)
            small.segment = None
            return small
        segment = self._take(nbytes)
        segment.held_here = True
        give_back = partial(setattr, segment, "held_here", False)
        plain = leased(segment.memory, shape, dtype, give_back)
        tensor = plain.as_subclass(_SegmentTensor)
        tensor.segment = segment
        return tensor

    def _take(self, nbytes: int) -> _Segment:
        wanted = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        free = [segment for segment in self._segments if segment.free]
        for segment in free:
            if wanted <= segment.capacity <= 2 * wanted:
                return segment
        for segment in free[: len(free) + 1 - MOST_FREE]:
            self._segments.remove(segment)
        self._segments.append(_Segment(wanted))
        return self._segments[-1]


@cache
def worker_memory() -> Allocate:
    """Return the memory for the batches of a DataLoader's worker, the same at each call."""
    return Segments() if AVAILABLE else fresh


def _reduce(tensor: _SegmentTensor) -> Any:
    segment, plain = tensor.segment, tensor.as_subclass(torch.Tensor)
    shape, dtype = tuple(plain.shape), plain.dtype
    if segment is None:
        return _from_bytes, (bytearray(plain.view(-1).view(torch.uint8).numpy()), shape, dtype)
    if segment.memory[segment.capacity]:  # it was sent before
        return reduce_tensor(plain)  # type: ignore[no-untyped-call]
    segment.memory[segment.capacity] = 1
    return _mapped, (os.getpid(), segment.descriptor, segment.capacity, shape, dtype)


def _from_bytes(data: bytearray, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else fresh(shape, dtype)


def _mapped(
    pid: int, descriptor: int, capacity: int, shape: Shape, dtype: torch.dtype
) -> torch.Tensor:
    with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), capacity + PAGE)
    return leased(memory, shape, dtype, partial(memory.__setitem__, capacity, 0))


ForkingPickler.register(_SegmentTensor, _reduce)
