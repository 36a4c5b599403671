"""Items and batches: what they hold, how they show themselves, and a batch made of items."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from featcache.declaration import dtype_name
from featcache.errors import FeatureError
from featcache.loading.layouts import Batch, Layout, Padded, ends_by
from featcache.loading.memory import Allocate, fresh
from featcache.tables.shown import MANY, boxed, grid

Item = dict[str, Any]
NUMERIC = "biufc"  # kinds of NumPy's dtypes that torch has, too
PADDED = Padded()


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
        numbers = torch.Tensor | np.ndarray
        if not (isinstance(lengths, numbers) and isinstance(padded, numbers)):
            return ""
        if getattr(padded, "is_nested", False):
            return "0%"
        packed = f"{name}_cu_seqlens" in self
        places = len(padded) if packed else int(np.prod(padded.shape[:2]))
        return f"{1 - int(lengths.sum()) / places:.0%}" if places else ""


def _cells(value: object) -> tuple[str, str]:
    if isinstance(value, np.ndarray):
        return str(value.shape), str(value.dtype)
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f", {value.device}"
        return str(tuple(value.shape)), str(value.dtype).removeprefix("torch.") + where
    if isinstance(value, list):
        return f"{len(value)}", "list"
    return "", type(value).__name__


def _said(value: object) -> str:
    shape, dtype = _cells(value)
    return f"{dtype} of {shape}" if isinstance(value, list) else f"{shape} {dtype}".strip()


def batch_of(
    items: Sequence[Item],
    layout: Layout = PADDED,
    allocate: Allocate = fresh,
    listed: Container[str] = (),
) -> Batch:
    """Make one batch of items.

    A tensor of shape (frames, ...) with "<name>_lengths" beside it is laid out along axis 0, and
    its lengths are counted again, int64. Other tensors, arrays and numbers are stacked along a new
    axis 0, all else is listed, and so are the keys that `listed` holds, unless they have lengths
    beside them. Gradients do not go through a batch.

    Raises `FeatureError` for items whose keys or shapes do not fit each other.

    >>> first = {"id": "a", "x": torch.ones(2), "x_lengths": 2}
    >>> dict(batch_of([first, {"id": "b", "x": torch.ones(1), "x_lengths": 1}]))
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
    columns = {key: [item[key] for item in items] for key in items[0]}
    arrays = {key for key, values in columns.items() if all(map(_has_axes, values))}
    batch: Batch = ShownBatch()
    for key, values in columns.items():
        name = key.removesuffix("_lengths")
        if name != key and name in arrays:
            continue  # comes with what it is of
        is_listed = key in listed and f"{key}_lengths" not in items[0]
        if is_listed or not all(map(_is_number, values)):
            batch[key] = values
            continue
        tensors = list(map(_as_tensor, values))
        if key in arrays and f"{key}_lengths" in items[0]:
            batch.update(_laid_out(key, items, tensors, layout, allocate))
        else:
            _require_like(key, items, tensors, 0)
            batch[key] = allocate((len(tensors), *tensors[0].shape), tensors[0].dtype)
            torch.stack(tensors, out=batch[key])
    return batch


def _is_number(value: object) -> bool:
    """Whether it is a number, or an array of some."""
    if isinstance(value, np.generic | np.ndarray):
        return value.dtype.kind in NUMERIC
    return isinstance(value, bool | int | float | torch.Tensor)


def _has_axes(value: object) -> bool:
    return _is_number(value) and getattr(value, "ndim", 0) > 0


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        native, flags = value.dtype.newbyteorder("="), value.flags
        if not (flags.c_contiguous and flags.writeable and value.dtype == native):
            value = np.array(value, native, order="C")  # not all others are for torch
    return torch.as_tensor(value).detach()


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return torch's dtype of that name, or the dtype itself; raises `UnknownNameError`."""
    found: torch.dtype = getattr(torch, dtype_name(dtype))
    return found


def _laid_out(
    key: str,
    items: Sequence[Item],
    tensors: list[torch.Tensor],
    layout: Layout,
    allocate: Allocate,
) -> Batch:
    _require_like(key, items, tensors, 1)
    lengths = np.array(list(map(len, tensors)))
    ends = ends_by(layout, key, lengths, lambda place: items[place].get("id"))
    dims = tuple(tensors[0].shape[1:])
    out = allocate(layout.shape(ends, dims), tensors[0].dtype)
    frames = out.view(-1, *dims) if out.numel() else out.new_empty((int(ends[-1]), *dims))
    for begin, end, tensor in zip(ends[:-1].tolist(), ends[1:].tolist(), tensors, strict=True):
        frames[begin : begin + len(tensor)] = tensor
        frames[begin + len(tensor) : end] = 0
    return layout.entries(key, out, lengths, allocate)


def _require_like(key: str, items: Sequence[Item], tensors: list[torch.Tensor], axis: int) -> None:
    """Raise `FeatureError` where dtypes differ, or shapes from an axis on."""
    first = tensors[0]
    kind = first.dtype, first.shape[axis:]
    for item, tensor in zip(items, tensors, strict=True):
        if (tensor.dtype, tensor.shape[axis:]) != kind or tensor.ndim < axis:
            raise FeatureError(
                f"{key!r} of items {items[0].get('id')!r} and {item.get('id')!r} do not fit into "
                f"one tensor: {first.dtype} {tuple(first.shape)} and "
                f"{tensor.dtype} {tuple(tensor.shape)}"
                f"{'' if axis else f'; to have it padded, give {key}_lengths, too'}"
            )
