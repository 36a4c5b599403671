"""Torch's tensors and NumPy's arrays, each made of the other; torch need not be installed."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, Union

import numpy as np
from numpy.typing import NDArray

from featcache._loading import without_torch
from featcache._recycled import LEAST_BYTES, RECYCLED, RecycledMemory
from featcache.errors import FeatureError
from featcache.interface import Array

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
