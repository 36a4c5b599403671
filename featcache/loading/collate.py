"""`CommonCollateFn`: utterances to one padded batch, as ESPnet's models expect it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import ConfigError, FeatureError

ArrayOrTensor = NDArray[Any] | torch.Tensor
EspnetItem = tuple[str, Mapping[str, ArrayOrTensor]]
PaddedBatch = tuple[list[str], dict[str, torch.Tensor]]
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


class CommonCollateFn:
    """Pad utterances to the longest of the batch.

    This is ESPnet's collate function, for tensors as well as numpy arrays.

    Args:
        float_pad_value: what fills the end of arrays, but of those of signed integers.
        int_pad_value: what fills the end of arrays of signed integers.
        not_sequence: names without a time axis, which get no lengths.

    >>> collate = CommonCollateFn(int_pad_value=-1)
    >>> first, second = {"text": np.array([1, 2, 3])}, {"text": np.array([4, 5])}
    >>> ids, batch = collate([("u1", first), ("u2", second)])
    >>> batch["text"].tolist(), batch["text_lengths"].tolist()
    ([[1, 2, 3], [4, 5, -1]], [3, 2])
    """

    def __init__(
        self,
        float_pad_value: float = 0.0,
        int_pad_value: int = -32768,
        not_sequence: Collection[str] = (),
    ) -> None:
        self.float_pad_value = float_pad_value
        self.int_pad_value = int_pad_value
        self.not_sequence = frozenset(
            [not_sequence] if isinstance(not_sequence, str) else not_sequence
        )

    def __repr__(self) -> str:
        return (
            f"CommonCollateFn(float_pad_value={self.float_pad_value!r}, "
            f"int_pad_value={self.int_pad_value!r}, not_sequence={sorted(self.not_sequence)!r})"
        )

    def __call__(self, data: Sequence[EspnetItem] | Mapping[str, object]) -> PaddedBatch:
        """Return the ids and, per name, a padded tensor followed by its `<name>_lengths`, int64.

        `data` are pairs of an id and a dict of arrays of shape (frames, ...), equal in all but the
        frames; or a batch that a `FeatureDataset` has padded. A tensor has shape (batch, longest,
        ...), the dtype of the first utterance's array, names in the first one's order, and memory
        of its own; each array is copied once.

        Raises `FeatureError` naming the utterance and the name that do not fit, `ConfigError` for a
        padding value that the dtype cannot hold.
        """
        if isinstance(data, Mapping):
            return self._repaint(data)
        ids, arrays = _pairs(data)
        batch = {}
        for name in arrays[0]:
            batch[name] = self._padded(name, ids, [utterance[name] for utterance in arrays])
            if name not in self.not_sequence:
                batch[f"{name}_lengths"] = torch.tensor(
                    [len(utterance[name]) for utterance in arrays]
                )
        return ids, batch

    def _padded(
        self, name: str, ids: Sequence[str], arrays: Sequence[ArrayOrTensor]
    ) -> torch.Tensor:
        for id, array in zip(ids, arrays, strict=True):
            _check(name, id, array, arrays[0], ids[0])
        first = arrays[0]
        try:
            dtype = first.dtype if isinstance(first, torch.Tensor) else _tensor(first[:0]).dtype
        except (TypeError, ValueError):
            raise FeatureError(
                f"utterance {ids[0]!r}, {name!r}: torch has no dtype {str(first.dtype)!r}"
            ) from None
        pad = self._pad_value(name, dtype)
        device = first.device if isinstance(first, torch.Tensor) else None
        padded = torch.empty(
            (len(arrays), max(map(len, arrays)), *first.shape[1:]), dtype=dtype, device=device
        )
        on_host = padded.numpy() if isinstance(first, np.ndarray) else None
        for row, array in enumerate(arrays):
            # torch.from_numpy warns of read-only arrays (mapped files) and refuses others; numpy
            # copies them all
            if on_host is not None and isinstance(array, np.ndarray) and array.dtype == first.dtype:
                on_host[row, : len(array)] = array
            else:
                padded[row, : len(array)] = _tensor(array)
            padded[row, len(array) :] = pad
        return padded

    def _pad_value(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        signed = dtype in SIGNED
        value = self.int_pad_value if signed else self.float_pad_value
        try:
            # a single number takes too large a value as inf
            return torch.empty(2, dtype=dtype).fill_(value)[0]
        except RuntimeError:
            argument = "int_pad_value" if signed else "float_pad_value"
            raise ConfigError(
                f"{argument} {value!r} of the collate function does not fit {name!r}, which is "
                f"{str(dtype).removeprefix('torch.')}; give one that does"
            ) from None

    def _repaint(self, padded: Mapping[str, object]) -> PaddedBatch:
        """Fill the padding of a batch that is padded with zeros, in place."""
        batch: dict[str, Any] = {}
        for name, value in padded.items():
            if name == "id" or (
                name.endswith("_lengths") and name.removesuffix("_lengths") in padded
            ):
                continue
            batch[name] = value
            lengths = padded.get(f"{name}_lengths")
            if not isinstance(value, torch.Tensor) or not isinstance(lengths, torch.Tensor):
                continue
            pad = self._pad_value(name, value.dtype)
            if pad:
                for row, length in enumerate(lengths.tolist()):
                    value[row, length:] = pad
            if name not in self.not_sequence:
                batch[f"{name}_lengths"] = lengths
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
    names = list(arrays[0])
    for id, utterance in zip(ids, arrays, strict=True):
        if set(utterance) != set(names):
            differing = sorted(set(utterance) ^ set(names))
            raise FeatureError(
                f"utterances {ids[0]!r} and {id!r} of one batch differ in what they have: "
                f"{differing!r} is only in one"
            )
    for name in names:
        if name.endswith("_lengths"):
            raise FeatureError(
                f"utterance {ids[0]!r}: {name!r} is reserved for the lengths, use another name"
            )
    return ids, arrays


def _check(name: str, id: str, array: ArrayOrTensor, first: ArrayOrTensor, first_id: str) -> None:
    if not isinstance(array, np.ndarray | torch.Tensor):
        raise FeatureError(
            f"utterance {id!r}, {name!r}: an array or tensor is needed, not {type(array).__name__}"
        )
    if array.ndim == 0:
        raise FeatureError(
            f"utterance {id!r}, {name!r}: a single number has no time axis; give an array of shape "
            "(1,)"
        )
    if array.shape[1:] != first.shape[1:]:
        raise FeatureError(
            f"utterance {id!r}, {name!r}: shape {tuple(array.shape)} does not fit "
            f"{tuple(first.shape)} of {first_id!r}; only the first axis may differ"
        )


def _tensor(array: ArrayOrTensor) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.detach()
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
