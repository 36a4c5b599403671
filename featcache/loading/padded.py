"""From arrays of different lengths to one padded tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import FeatureError, UnknownNameError, nearest
from featcache.feature import DTYPES
from featcache.loading.memory import Allocate, fresh

Item = dict[str, Any]
Batch = dict[str, Any]


def pad(items: Sequence[Item], allocate: Allocate = fresh) -> Batch:
    """Make a batch of items: tensors padded along axis 0 with zeros, numbers stacked, all else listed.

    Raises `FeatureError` for items whose keys or shapes do not fit each other.

    >>> pad([{"id": "a", "x": torch.ones(2)}, {"id": "b", "x": torch.ones(1)}])
    {'id': ['a', 'b'], 'x': tensor([[1., 1.],
            [1., 0.]]), 'x_lengths': tensor([2, 1])}
    """
    batch: Batch = {}
    for key, first in items[0].items():
        for item in items:
            if item.keys() != items[0].keys():
                raise FeatureError(f"items {items[0].get('id')!r} and {item.get('id')!r} have different keys")
        values = [item[key] for item in items]
        if isinstance(first, torch.Tensor) and first.ndim > 0:
            batch[key] = _padded(key, items, values, allocate)
            batch[f"{key}_lengths"] = torch.tensor([len(value) for value in values])
        elif isinstance(first, bool | int | float):
            batch.setdefault(key, torch.tensor(values))
        else:
            batch[key] = values
    return batch


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name; raises `UnknownNameError`."""
    if name not in DTYPES:
        raise UnknownNameError(f"there is no dtype {name!r}; {nearest(name, DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _padded(key: str, items: Sequence[Item], values: Sequence[torch.Tensor], allocate: Allocate) -> torch.Tensor:
    first = values[0]
    for item, value in zip(items, values, strict=True):
        if not isinstance(value, torch.Tensor) or value.shape[1:] != first.shape[1:] or value.dtype != first.dtype:
            raise FeatureError(f"{key!r} of items {items[0].get('id')!r} and {item.get('id')!r} cannot be one tensor")
    out = allocate((len(values), max(map(len, values)), *first.shape[1:]), first.dtype)
    for row, value in zip(out, values, strict=True):
        row[: len(value)] = value
        row[len(value) :] = 0
    return out


def rows_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous tensor as one row of bytes for each element of axis 0."""
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # numpy has no bfloat16
    rows = bits.view(len(bits), -1).numpy()
    return rows.view(np.uint8)
