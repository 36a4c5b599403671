"""`unpad`: one dict of arrays per utterance of a padded batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Union

import numpy as np
from numpy.typing import NDArray

from featcache._tensors import Lengths as Lengths
from featcache._tensors import is_tensor
from featcache.errors import FeatureError, nearest
from featcache.writing.arrays import integers

if TYPE_CHECKING:
    import torch

Padded = Union[NDArray[np.generic], "torch.Tensor"]


def unpad(
    ids: Sequence[str],
    lengths: Lengths | Mapping[str, Lengths | None] | None,
    features: Mapping[str, Padded],
) -> list[dict[str, object]]:
    """Cut a padded batch into one dict per utterance, as `compute_features` returns it.

    Each feature is copied from its device once for the whole batch and detached; what comes back
    are views of that.

    Args:
        ids: the utterance ids, in the order of the batch.
        lengths: the number of frames of each utterance, integers; or one such list per feature, for
            features of different frame rates, where None says that a feature has no time axis.
            None: no feature has one.
        features: by name a padded tensor or array of shape (batch, frames, ...), without a time
            axis (batch, ...).

    Raises `FeatureError` for what cannot be cut. Relative lengths are refused: rounded on the
    feature axis they are off by one frame for many utterances, and the last frame of each would
    depend on the batch it was computed in.

    >>> unpad(["a", "b"], [2, 1], {"fbank": np.arange(4).reshape(2, 2)})
    [{'id': 'a', 'fbank': array([0, 1])}, {'id': 'b', 'fbank': array([2])}]
    """
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        one = "the one string " if isinstance(ids, str) else ""
        raise FeatureError(f"ids are a list of strings, not {one}{ids!r}")
    if not isinstance(features, Mapping):
        raise FeatureError(
            "features are padded tensors or arrays by name, such as {'fbank': fbank}, not "
            f"{type(features).__name__!r}"
        )
    ids = list(ids)
    if len(set(ids)) < len(ids):
        twice = next(id for id in ids if ids.count(id) > 1)
        raise FeatureError(f"utterance {twice!r} is in the batch twice")
    per_feature = lengths if isinstance(lengths, Mapping) else dict.fromkeys(features, lengths)
    for name in per_feature:
        if name not in features:
            known = nearest(name, features)
            raise FeatureError(
                f"lengths are given for {name!r}, which is not in the batch; {known}"
            )
    cut = [_cut(ids, name, value, per_feature) for name, value in features.items()]
    return [dict(zip(["id", *features], row, strict=True)) for row in zip(ids, *cut, strict=True)]


def _cut(
    ids: Sequence[str], name: str, value: Padded, lengths: Mapping[str, Lengths | None]
) -> list[Padded]:
    """Return the arrays of one feature, one for each id."""
    if name == "id":
        raise FeatureError("a feature cannot be called 'id': that is the key of the utterance id")
    feature = f"feature {name!r}"
    if name not in lengths:
        raise FeatureError(f"{feature} has no lengths; give them, or None if it has no time axis")
    array = _on_host(feature, value)
    shape, of_feature = tuple(array.shape), lengths[name]
    if not shape or shape[0] != len(ids):
        raise FeatureError(
            f"{feature} of shape {shape} does not have a row for each of {len(ids)} ids"
        )
    if of_feature is None:
        return list(array)
    if len(shape) == 1:
        raise FeatureError(
            f"{feature} of shape {shape} has no time axis; give None for its lengths"
        )
    frames = integers(feature, of_feature)
    if len(frames) != len(ids):
        raise FeatureError(f"{feature}: {len(frames)} lengths do not fit {len(ids)} ids")
    for id, length in zip(ids, frames, strict=True):
        if not 0 <= length <= shape[1]:
            raise FeatureError(
                f"utterance {id!r}, {feature}: length {length} is not within 0 to {shape[1]}"
            )
    return [row[:length] for row, length in zip(array, frames, strict=True)]


def _on_host(feature: str, value: Padded) -> Padded:
    if is_tensor(value):
        return value.detach().cpu()
    if isinstance(value, np.ndarray):
        return value
    kind = type(value).__name__
    raise FeatureError(f"{feature}: a padded torch tensor or numpy array is needed, not {kind}")
