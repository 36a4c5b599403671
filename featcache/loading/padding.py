"""Padded batches: arrays of several utterances in one tensor."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from featcache.declaration import dtype_name
from featcache.errors import FeatureError
from featcache.interface import Bytes
from featcache.loading.memory import Allocate, fresh
from featcache.tables.shown import MANY, boxed, grid

# Padding: arrays of different lengths to one tensor.

Item = dict[str, Any]
Batch = dict[str, Any]
NUMBERS = (torch.Tensor, np.ndarray, np.generic, bool, int, float)


class ShownBatch(dict[str, Any]):
    """A batch by name: tensors, and lists of ids; as text, a line of names, shapes and dtypes."""

    def __repr__(self) -> str:
        told = [f"{name} {_said(value)}" for name, value in self.items()]
        return f"<batch: {'; '.join(told)}>"

    def _repr_html_(self) -> str:
        rows = [
            (name, *_cells(value), self._padding(name)) for name, value in [*self.items()][:MANY]
        ]
        more = max(len(self) - MANY, 0)
        return boxed(grid(("name", "shape", "dtype", "padding"), rows, more=more))

    def _padding(self, name: str) -> str:
        """Share of a padded tensor that no utterance fills."""
        lengths, padded = self.get(f"{name}_lengths"), self.get(name)
        if not (isinstance(lengths, torch.Tensor) and isinstance(padded, torch.Tensor)):
            return ""
        places = padded.shape[0] * padded.shape[1] if padded.ndim > 1 else 0
        return f"{1 - int(lengths.sum()) / places:.0%}" if places else ""


def _cells(value: object) -> tuple[str, str]:
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f", {value.device}"
        return str(tuple(value.shape)), str(value.dtype).removeprefix("torch.") + where
    if isinstance(value, list):
        return f"{len(value)}", "list"
    return "", type(value).__name__


def _said(value: object) -> str:
    shape, dtype = _cells(value)
    return f"{dtype} of {shape}" if isinstance(value, list) else f"{shape} {dtype}".strip()


def pad(items: Sequence[Item], allocate: Allocate = fresh, listed: Container[str] = ()) -> Batch:
    """Make one batch of items.

    A tensor of shape (frames, ...) with "<name>_lengths" beside it is padded along axis 0 with
    zeros, and its lengths are counted again, int64. Other tensors, arrays and numbers are stacked
    along a new axis 0, all else is listed, and so are the keys that `listed` holds.

    Raises `FeatureError` for items whose keys or shapes do not fit each other.

    >>> first = {"id": "a", "x": torch.ones(2), "x_lengths": 2}
    >>> dict(pad([first, {"id": "b", "x": torch.ones(1), "x_lengths": 1}]))
    {'id': ['a', 'b'], 'x': tensor([[1., 1.],
            [1., 0.]]), 'x_lengths': tensor([2, 1])}
    """
    for item in items:
        if not isinstance(item, Mapping):
            raise FeatureError(f"an item is a dict; transform returned {item!r}")
        if item.keys() != items[0].keys():
            raise FeatureError(
                f"items {items[0].get('id')!r} and {item.get('id')!r} have different keys"
            )
    batch: Batch = ShownBatch()
    for key in items[0]:
        values = [item[key] for item in items]
        name = key.removesuffix("_lengths")
        if name != key and isinstance(items[0].get(name), torch.Tensor | np.ndarray):
            values = [len(item[name]) for item in items]
        if key not in listed and all(isinstance(value, NUMBERS) for value in values):
            batch[key] = _joined(key, items, list(map(torch.as_tensor, values)), allocate)
        else:
            batch[key] = values
    return batch


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return torch's dtype of that name, or the dtype itself; raises `UnknownNameError`."""
    found: torch.dtype = getattr(torch, dtype_name(dtype))
    return found


def _joined(
    key: str, items: Sequence[Item], tensors: list[torch.Tensor], allocate: Allocate
) -> torch.Tensor:
    first, padded = tensors[0], f"{key}_lengths" in items[0]
    kind = first.dtype, first.shape[padded:]
    for item, tensor in zip(items, tensors, strict=True):
        if (tensor.dtype, tensor.shape[padded:]) != kind or tensor.ndim < padded:
            raise FeatureError(
                f"{key!r} of items {items[0].get('id')!r} and {item.get('id')!r} do not fit into "
                f"one tensor: {first.dtype} {tuple(first.shape)} and "
                f"{tensor.dtype} {tuple(tensor.shape)}"
                f"{'' if padded else f'; to have it padded, give {key}_lengths, too'}"
            )
    if not padded:
        out = allocate((len(tensors), *first.shape), first.dtype)
        torch.stack(tensors, out=out)
        return out
    out = allocate((len(tensors), max(map(len, tensors)), *first.shape[1:]), first.dtype)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
        row[len(tensor) :] = 0
    return out


def rows_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous tensor as one row of bytes for each element of axis 0."""
    # numpy has no bfloat16
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    rows = bits.view(len(bits), -1).numpy()
    return rows.view(np.uint8)
