"""`CommonCollateFn`: utterances to one padded batch, as ESPnet's models expect it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import ConfigError, FeatureError

ArrayOrTensor = NDArray[Any] | torch.Tensor
EspnetItem = tuple[str, Mapping[str, ArrayOrTensor]]
PaddedBatch = tuple[list[str], dict[str, torch.Tensor]]
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(eq=False)
class CommonCollateFn:
    """ESPnet's collate function: pads utterances to the longest one; takes tensors, too.

    Args:
        float_pad_value: fills the end of all arrays but those of signed integers.
        int_pad_value: fills the end of arrays of signed integers.
        not_sequence: names without a time axis, which get no lengths.

    >>> collate = CommonCollateFn(int_pad_value=-1)
    >>> first, second = {"text": np.array([1, 2, 3])}, {"text": np.array([4, 5])}
    >>> ids, batch = collate([("u1", first), ("u2", second)])
    >>> batch["text"].tolist(), batch["text_lengths"].tolist()
    ([[1, 2, 3], [4, 5, -1]], [3, 2])
    """

    float_pad_value: float = 0.0
    int_pad_value: int = -32768
    not_sequence: Collection[str] = ()

    def __post_init__(self) -> None:
        names = self.not_sequence
        self.not_sequence = (names,) if isinstance(names, str) else tuple(sorted(names))

    def __call__(self, data: Sequence[EspnetItem] | Mapping[str, object]) -> PaddedBatch:
        """Return the ids and, per name, a padded tensor followed by its `<name>_lengths`, int64.

        `data` are pairs of an id and a dict of arrays of shape (frames, ...), equal in all but the
        frames; or a batch of a `FeatureDataset`, whose padding is filled anew, and whose packed or
        nested features stay as they are. A tensor has shape (batch, longest, ...), the dtype of the
        first utterance's array, names in the first one's order, and memory of its own; each array
        is copied once.

        Raises `FeatureError` naming the utterance and the name that do not fit, `ConfigError` for a
        padding value that the dtype cannot hold.
        """
        if isinstance(data, Mapping):
            return self._repaint(data)
        ids, arrays = _pairs(data)
        batch = {}
        for name in arrays[0]:
            column = [utterance[name] for utterance in arrays]
            batch[name] = self._padded(name, ids, column)
            if name not in self.not_sequence:
                batch[f"{name}_lengths"] = torch.tensor(list(map(len, column)))
        return ids, batch

    def _padded(
        self, name: str, ids: Sequence[str], arrays: Sequence[ArrayOrTensor]
    ) -> torch.Tensor:
        first = arrays[0]
        for id, array in zip(ids, arrays, strict=True):
            if misfit := _misfit(array, first, ids[0]):
                raise FeatureError(f"utterance {id!r}, {name!r}: {misfit}")
        try:
            empty = _tensor(first[:0])
        except (TypeError, ValueError):
            raise FeatureError(
                f"utterance {ids[0]!r}, {name!r}: torch has no dtype {str(first.dtype)!r}"
            ) from None
        pad = self._pad_value(name, empty.dtype)
        padded = empty.new_empty((len(arrays), max(map(len, arrays)), *first.shape[1:]))
        # numpy copies read-only arrays (mapped files), which torch warns of or copies twice
        if all(isinstance(array, np.ndarray) and array.dtype == first.dtype for array in arrays):
            _fill(padded.numpy(), arrays, pad)
        else:
            _fill(padded, [_tensor(array) for array in arrays], pad)
        return padded

    def _pad_value(self, name: str, dtype: torch.dtype) -> float:
        setting = "int_pad_value" if dtype in SIGNED else "float_pad_value"
        value: float = getattr(self, setting)
        try:
            # a single number takes too large a value as inf
            return torch.empty(2, dtype=dtype).fill_(value)[0].item()
        except RuntimeError:
            raise ConfigError(
                f"{setting} {value!r} of the collate function does not fit {name!r}, which is "
                f"{str(dtype).removeprefix('torch.')}; give one that does"
            ) from None

    def _repaint(self, padded: Mapping[str, object]) -> PaddedBatch:
        """Fill the padding of a batch where it is padded with zeros, in place."""
        batch: dict[str, Any] = {name: value for name, value in padded.items() if name != "id"}
        for name, value in padded.items():
            lengths = padded.get(f"{name}_lengths")
            if isinstance(value, torch.Tensor) and isinstance(lengths, torch.Tensor):
                packed = value.is_nested or f"{name}_cu_seqlens" in padded
                if not packed and (pad := self._pad_value(name, value.dtype)):
                    for row, length in zip(value, lengths.tolist(), strict=True):
                        row[length:] = pad
                if name in self.not_sequence:
                    del batch[f"{name}_lengths"]
        return list(cast("Sequence[str]", padded["id"])), batch


def _pairs(data: Sequence[EspnetItem]) -> tuple[list[str], list[Mapping[str, ArrayOrTensor]]]:
    """Split into ids and dicts, all with the names of the first."""
    for item in data:
        if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Mapping)):
            raise FeatureError(
                f"a batch to pad is a list of (id, {{name: array}}), not of {type(item).__name__}"
            )
    if not data:
        raise FeatureError("a batch to pad has no utterances")
    ids, arrays = [id for id, _ in data], [utterance for _, utterance in data]
    for id, utterance in zip(ids, arrays, strict=True):
        if differing := sorted(utterance.keys() ^ arrays[0].keys()):
            raise FeatureError(
                f"utterances {ids[0]!r} and {id!r} of one batch differ in what they have: "
                f"{differing!r} is only in one"
            )
    for name in arrays[0]:
        if name.endswith("_lengths"):
            raise FeatureError(
                f"utterance {ids[0]!r}: {name!r} is reserved for the lengths, use another name"
            )
    return ids, arrays


def _misfit(array: ArrayOrTensor, first: ArrayOrTensor, first_id: str) -> str:
    """Return why an array cannot be padded together with the first one; "" if it can."""
    if not isinstance(array, np.ndarray | torch.Tensor):
        return f"an array or tensor is needed, not {type(array).__name__}"
    if array.ndim == 0:
        return "a single number has no time axis; give an array of shape (1,)"
    shape, first_shape = tuple(array.shape), tuple(first.shape)
    if shape[1:] != first_shape[1:]:
        return f"shape {shape} does not fit {first_shape} of {first_id!r}; only axis 0 may differ"
    return ""


def _fill(out: Any, arrays: Sequence[ArrayOrTensor], pad: float) -> None:
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
        row[len(array) :] = pad


def _tensor(array: ArrayOrTensor) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.detach()
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
