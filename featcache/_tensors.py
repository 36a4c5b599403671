"""Torch's tensors and NumPy's arrays, each made of the other; torch need not be installed."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, Union

import numpy as np
from numpy.typing import NDArray

from featcache._loading import without_torch
from featcache._recycled import LEAST_BYTES, RECYCLED, RecycledMemory
from featcache.errors import FeatureError
from featcache.interface import Array, Bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor

ArrayLike = Union[Array, np.generic, "torch.Tensor"]
Lengths = Union[Sequence[int], NDArray[np.integer[Any]], "torch.Tensor"]


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor, which can only come from a loaded torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_numpy(value: ArrayLike) -> tuple[Array, bool]:
    """Return a NumPy array over the value, and whether it holds the bits of bfloat16."""
    if is_tensor(value):
        import torch

        tensor = value.detach()
        try:
            tensor = tensor.cpu().resolve_conj().resolve_neg()
            if tensor.dtype == torch.bfloat16:
                return tensor.contiguous().view(torch.uint16).numpy(), True
            return tensor.numpy(), False
        # sparse, quantised, without data, or of a dtype that numpy lacks
        except (TypeError, RuntimeError) as error:
            what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise FeatureError(f"a tensor of {what} cannot be stored: {error}") from error
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        return np.asarray(value), False
    raise FeatureError(f"a numpy array or a torch tensor is needed, not {type(value).__name__}")


def to_bfloat16(single: NDArray[np.float32]) -> Array:
    """Return numbers rounded to bfloat16, each as the uint16 of its bits."""
    import torch

    bits: Array = torch.from_numpy(single).to(torch.bfloat16).view(torch.uint16).numpy()
    return bits


def as_tensor(stored: Array, dtype: str, wanted: str | None = None, *, needed_by: str) -> Tensor:
    """Return a tensor over numbers as they are stored; a copy, if another dtype is wanted.

    Raises `MissingDependencyError`, which names what it is `needed_by`, without torch.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise without_torch(needed_by) from error

    tensor = torch.from_numpy(stored)
    if dtype == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
    if wanted is None or wanted == dtype:
        return tensor
    return empty_tensor(RECYCLED, tuple(tensor.shape), getattr(torch, wanted)).copy_(tensor)


def empty_tensor(memory: RecycledMemory, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor, whose memory serves others when nothing refers to it."""
    import torch

    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes <= LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    block = memory.empty((nbytes,), np.dtype(np.uint8))
    return torch.from_numpy(block).view(dtype).view(shape)


# Many copies at once, for threads that read beside a loop.
#
# NumPy lets go of the interpreter's lock for each copy, and a thread waits up to 5 ms to have it
# again where the loop computes in Python. Torch copies any number with the lock given away once.

LARGE_BYTES = 1 << 10  # of a copy: of less NumPy keeps the lock
SERIAL = (1 << 15) - 1  # numbers: of more torch does them in parallel (at::internal::GRAIN_SIZE)


def copies_at_once(nbytes: Sequence[int]) -> bool:
    """Whether `copy_all` is worth it in this thread, for arrays of so many bytes."""
    torch = sys.modules.get("torch")  # a process without it has no loop beside its threads
    beside = threading.current_thread() is not threading.main_thread()
    large = sum(nbytes) >= LARGE_BYTES * len(nbytes) > 0
    return beside and large and hasattr(torch, "_foreach_copy_")


def copy_all(outs: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Copy each of some arrays into one of `outs`."""
    import torch

    targets, found = ([*_in_pieces(arrays)] for arrays in (outs, sources))
    torch._foreach_copy_(targets, found)


def clear_all(outs: Sequence[Bytes]) -> None:
    """Fill arrays with zeros."""
    import torch

    torch._foreach_zero_([*_in_pieces(outs)])


def _in_pieces(arrays: Iterable[Bytes]) -> Iterator[Tensor]:
    """Yield tensors over some bytes, so small that torch takes no threads of its own for one.

    A forked process cannot use these, and each reading thread would start as many as there are.
    """
    import torch

    for array in arrays:
        whole = len(array) // 8 * 8
        if whole:
            numbers = torch.from_numpy(array[:whole].view(np.int64))
            yield from [numbers] if len(numbers) <= SERIAL else numbers.split(SERIAL)
        if whole < len(array):
            yield torch.from_numpy(array[whole:])


class Unguarded:
    """The memory of a read-only array as that of a writable one, for `copy_all` to read.

    Torch warns of read-only arrays. `np.asarray` of this refers to it, and so to the array.
    """

    def __init__(self, array: Bytes) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
