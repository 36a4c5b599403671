"""Arrays of the user as they are stored: checked, cast and copied."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Union

import numpy as np
from numpy.typing import NDArray

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import FeatureError, nearest
from featcache.interface import Array, storage_dtype
from featcache.store.format.bfloat16 import from_bfloat16

if TYPE_CHECKING:
    import torch

ArrayLike = Union[Array, np.generic, "torch.Tensor"]
Lengths = Union[Sequence[int], NDArray[np.integer[Any]], "torch.Tensor"]
MAX_RANK = 4
_MEND = "mend it, or declare a dtype that holds it"


def check_features(
    id: str, arrays: Mapping[str, ArrayLike], declared: Mapping[str, FeatureStorageConfig]
) -> None:
    """Raise `FeatureError` unless `arrays` has exactly the declared features."""
    if type(arrays) is not dict and not isinstance(arrays, Mapping):  # which takes longer
        raise FeatureError(
            f"utterance {id!r}: a dict of arrays by feature is needed, not {type(arrays).__name__}"
        )
    if arrays.keys() == declared.keys():
        return
    for name in arrays:
        if name not in declared:
            raise FeatureError(
                f"utterance {id!r}: feature {name!r} is not declared; {nearest(name, declared)}"
            )
    for name in declared:
        if name not in arrays:
            there = ", ".join(arrays) or "none"
            raise FeatureError(f"utterance {id!r}: feature {name!r} is missing; given: {there}")


def to_storage(
    id: str,
    value: ArrayLike,
    feature: FeatureStorageConfig,
) -> Array:
    """Return `value` as it is stored, maybe itself: shape (rows, *dims), C order, little-endian.

    Raises `FeatureError`, naming id, feature and value, for what the declared dtype cannot hold.
    """
    where = f"utterance {id!r}, feature {feature.name!r}"
    array, is_bfloat16 = as_numpy(value, where)
    least = 1 if feature.time_axis == 0 else 0
    if not least <= array.ndim <= MAX_RANK:
        rank = f"has rank {array.ndim}, but must have {least} to {MAX_RANK}"
        raise FeatureError(f"{where}: shape {array.shape} {rank}")
    stored = converted(array, is_bfloat16, feature, where)
    return stored if feature.time_axis == 0 else stored[np.newaxis]


def store_all(
    id: str,
    arrays: Mapping[str, ArrayLike],
    features: Mapping[str, FeatureStorageConfig],
) -> dict[str, Array]:
    """Return the features of an utterance as `to_storage` does."""
    check_features(id, arrays, features)
    return {name: to_storage(id, arrays[name], feature) for name, feature in features.items()}


def converted(
    array: Array,
    is_bfloat16: bool,
    feature: FeatureStorageConfig,
    where: str,
    *,
    check_finite: bool = True,
) -> Array:
    """Return an array in the declared dtype and C order, maybe itself.

    Raises `FeatureError` that begins with `where` for what the dtype cannot hold.
    """
    if array.dtype.kind not in "fiub":
        raise FeatureError(
            f"{where}: arrays of {array.dtype} cannot be stored; give floats, integers or bool"
        )
    numbers = from_bfloat16(array) if is_bfloat16 else array
    if check_finite and numbers.dtype.kind == "f":
        _check_finite(numbers, feature, where)
    if is_bfloat16 and feature.dtype == "bfloat16":
        return np.asarray(array, order="C")
    if feature.dtype == "bfloat16":
        return _to_bfloat16(numbers, where)
    dtype = storage_dtype(feature.dtype)
    if numbers.dtype != dtype:
        return _cast(numbers, dtype, where)
    return np.asarray(numbers, order="C")


def as_numpy(value: ArrayLike, where: str) -> tuple[Array, bool]:
    """Return a NumPy array over the value, and whether it holds the bits of bfloat16."""
    torch = sys.modules.get("torch")  # a tensor can only come from a loaded torch
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach()
        try:
            tensor = tensor.cpu().resolve_conj().resolve_neg()
            if tensor.dtype == torch.bfloat16:
                return tensor.contiguous().view(torch.uint16).numpy(), True
            return tensor.numpy(), False
        # sparse, quantised, without data, or of a dtype that numpy lacks
        except (TypeError, RuntimeError) as error:
            what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise FeatureError(f"{where}: a tensor of {what} cannot be stored: {error}") from error
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        return np.asarray(value), False
    raise FeatureError(
        f"{where}: a numpy array or a torch tensor is needed, not {type(value).__name__}"
    )


def _check_finite(array: Array, feature: FeatureStorageConfig, where: str) -> None:
    if feature.nonfinite == "raise":
        finite = np.isfinite(array)
        if not finite.all():
            hint = "mend it, or declare nonfinite: keep to store it as it is"
            _refuse(array, ~finite, f"is not finite; {hint}", where)


def _cast(array: Array, dtype: np.dtype[np.generic], where: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = np.array(array, dtype, order="C")  # casts and copies at once
    source, target = array.dtype.kind, dtype.kind
    if source == "f" and target != "f":
        raise FeatureError(
            f"{where}: {array.dtype} does not fit {dtype}; round and convert it before it is "
            "written"
        )
    if target == "f":
        _check_overflow(array, cast, dtype.name, where)
    elif not np.can_cast(array.dtype, dtype):
        # int64 and uint64 wrap into each other and compare equal through float64, so the sign must
        # agree too
        wrong = (cast.astype(array.dtype) != array) | (np.less(cast, 0) != np.less(array, 0))
        if wrong.any():
            _refuse(array, wrong, f"does not fit {dtype.name}; {_MEND}", where)
    return cast


def _to_bfloat16(array: Array, where: str) -> Array:
    import torch

    with np.errstate(over="ignore"):
        single = np.array(array, np.float32, order="C")
    stored = torch.from_numpy(single).to(torch.bfloat16).view(torch.uint16).numpy()
    _check_overflow(array, from_bfloat16(stored), "bfloat16", where)
    return stored


def _check_overflow(array: Array, stored: Array, dtype: str, where: str) -> None:
    infinite = np.isinf(stored)
    if infinite.any() and (overflowed := infinite & np.isfinite(array)).any():
        _refuse(array, overflowed, f"does not fit {dtype}; {_MEND}", where)


def _refuse(array: Array, wrong: Array, why: str, where: str) -> NoReturn:
    """Raise `FeatureError`, naming the first of the numbers that are wrong."""
    bad = tuple(map(int, np.argwhere(wrong)[0]))
    raise FeatureError(f"{where}: {array[bad]} at {bad} {why}")
