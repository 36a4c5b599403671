"""Digests of arrays and tensors: dtype, shape and values, wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash


def is_array(value: object) -> bool:
    """Tell whether a value is a tensor, or an array of anything but Python's objects."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return isinstance(value, torch.Tensor)


@dataclass(frozen=True, eq=False)
class Array:
    """An array or tensor that is to be read later."""

    value: Any

    def digest(self) -> str:
        """Return dtype, shape and xxh3-64 of the values."""
        state = xxhash.xxh3_64()
        dtype, shape = _add(state, self.value)
        return f"{dtype} {shape} {state.hexdigest()}"


def digests_of_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the xxh3-64 of each tensor: its dtype, shape and values, on any device."""
    found = {}
    for name, value in sorted(tensors.items()):
        state = xxhash.xxh3_64(f"{value.dtype}:{tuple(value.shape)};".encode())
        _add(state, value)
        found[name] = state.hexdigest()
    return found


def _add(state: Any, value: Any) -> tuple[str, list[int]]:
    if isinstance(value, np.ndarray):
        whole = np.ascontiguousarray(value)
        state.update(whole.reshape(-1).view(np.uint8).data if whole.size else b"")
        return value.dtype.str.lstrip("<=|"), list(value.shape)
    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if value.device.type == "meta":
        return dtype, shape
    if value.is_quantized:
        for part in _scales(value):
            _add(state, part)
        value = value.int_repr()
    if value.is_nested or value.layout is not torch.strided:
        parts = (
            value.unbind()
            if value.is_nested
            else (value.coalesce().indices(), value.coalesce().values())
        )
        for part in parts:
            _add(state, part)
        return dtype, shape
    value = value.detach().resolve_conj().resolve_neg().cpu()
    state.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return dtype, shape


def _scales(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of a quantised tensor, or those of its channels."""
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch.tensor(value.q_scale()), torch.tensor(value.q_zero_point())
    return value.q_per_channel_scales(), value.q_per_channel_zero_points()
