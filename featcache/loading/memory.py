"""Memory for batches: used again, shared with workers, pinned, and moved to a device."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.multiprocessing.reductions import reduce_tensor

from featcache._recycled import LEAST_BYTES, RECYCLED
from featcache._tensors import empty_tensor
from featcache.errors import ConfigError

# Memory for the tensors of batches: fresh, recycled or pinned.

Shape = tuple[int, ...]
Allocate = Callable[[Shape, torch.dtype], torch.Tensor]
SMALL_BYTES = LEAST_BYTES
ROUND_BYTES = 1 << 16  # shared memory of about the same size serves all batches


fresh: Allocate = partial(
    empty_tensor, RECYCLED
)  # of what this process keeps for all that it reads


def pinned(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor that a GPU can read while the CPU goes on."""
    # torch recycles this memory itself
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def leased(
    memory: mmap.mmap, shape: Shape, dtype: torch.dtype, give_back: Callable[[], object]
) -> torch.Tensor:
    """Return a tensor over the first bytes of `memory`.

    `give_back` is called when neither the tensor nor a view of it is left. It must take no lock:
    the garbage collector may call it in a thread that holds it.
    """
    lease = memoryview(memory)[: math.prod(shape) * dtype.itemsize]
    weakref.finalize(lease, give_back).atexit = False
    return torch.frombuffer(lease, dtype=dtype).view(shape)


# Tensors that a DataLoader's worker hands over without a copy, in memory that it uses again.
#
# Fresh shared memory costs more in page faults than reading a batch takes. So a worker keeps its
# pieces of it (memfd, which have no name that could be left behind), and the process that got a
# tensor gives its piece back by clearing a byte in it when nothing refers to the tensor any more.
# Small tensors are sent by value.

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

    def __del__(self, close: Callable[[int], object] = os.close) -> None:
        close(self.descriptor)


class _SegmentTensor(torch.Tensor):
    """A tensor over a segment; what is computed from it is an ordinary tensor."""

    # as torch's own Parameter has it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001
    segment: _Segment | None  # None: small


class SharedTensors:
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
    return SharedTensors() if AVAILABLE else fresh


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


# Batches copied to a device, the next one while the last one is worked on.

T = TypeVar("T")


def on_device(batches: Iterable[T], device: torch.device) -> Iterator[T]:
    """Iterate over batches moved to a device, copied one ahead; on a GPU in a stream of its own."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    ahead: list[tuple[T, torch.cuda.Event | None]] = []
    for batch in batches:
        ahead.append(_moved(batch, device, stream))
        if len(ahead) == 2:
            yield _ready(*ahead.pop(0), device)
    for moved in ahead:
        yield _ready(*moved, device)


def usable_device(device: torch.device | str) -> torch.device:
    """Return a device; raises `ConfigError` for one that is not there, or torch does not know."""
    with _refused(f"device={str(device)!r}"):
        found = torch.device(device)
        torch.empty(0, device=found)
    return found


def check_pinned() -> None:
    """Raise `ConfigError` where memory cannot be pinned, which a GPU is needed for."""
    with _refused("pin_memory=True"):
        torch.empty(1, pin_memory=True)


@contextmanager
def _refused(setting: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{setting} cannot be used here: {reason}") from error


def to_device(data: T, device: torch.device | str, *, non_blocking: bool = False) -> T:
    """Move all tensors of a batch.

    Those of mappings, lists and tuples, and of whatever has a method `to`, which `non_blocking` is
    passed on to if it is true.
    """
    move = partial(to_device, device=device, non_blocking=non_blocking)
    moved: Any = data
    if hasattr(data, "to"):
        moved = data.to(device, non_blocking=True) if non_blocking else data.to(device)
    elif isinstance(data, Mapping):
        moved = {key: move(value) for key, value in data.items()}
    elif isinstance(data, tuple) and hasattr(data, "_fields"):
        moved = type(data)(*map(move, data))
    elif isinstance(data, list | tuple):
        moved = type(data)(map(move, data))
    return cast(T, moved)


def _moved(
    batch: T, device: torch.device, stream: torch.cuda.Stream | None
) -> tuple[T, torch.cuda.Event | None]:
    if stream is None:
        return to_device(batch, device, non_blocking=True), None
    # what was begun before may still read memory that is free by now: copy into it only after that
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return to_device(batch, device, non_blocking=True), stream.record_event()


def _ready(batch: T, copied: torch.cuda.Event | None, device: torch.device) -> T:
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)
    return batch
