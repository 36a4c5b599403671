"""Statistics and shapes of one batch: collate it, compute its features, measure them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch

from featcache.errors import ConfigError, DuplicateIdError, FeatureError
from featcache.interface import Array
from featcache.stats import FeatureStats
from featcache.store.format.ids import check_id

ShapesByKey = dict[str, dict[str, tuple[int, ...]]]  # by key and id
ArraysByKey = dict[str, dict[str, Array]]  # by key and id
LENGTHS = "_lengths"


def collated(
    items: list[Any], collate_fn: Callable[[list[Any]], Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return the ids and the inputs of a batch; raises errors for what cannot be right."""
    match collate_fn(items):
        case (ids, Mapping() as inputs):
            return _checked_ids(ids, len(items)), dict(inputs)
        case other:
            raise ConfigError(
                f"collate_fn returns (ids, batch), not {type(other).__name__!r}; "
                "see CommonCollateFn"
            )


def _checked_ids(given: Iterable[str], size: int) -> list[str]:
    ids = list(given)
    for id in ids:
        check_id(id)
        if id.split() != [id]:
            raise FeatureError(
                f"utterance id {id!r} is not usable: shape files need one without white space"
            )
    for id, times in Counter(ids).items():
        if times > 1:
            raise DuplicateIdError(f"{times} utterances of a batch have the id {id!r}")
    if len(ids) != size:
        raise FeatureError(f"collate_fn made a batch of {len(ids)} utterances out of {size}")
    return ids


def computed(model: Any, batch: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the model makes of a batch, by key."""
    if not callable(getattr(model, "collect_feats", None)):
        raise ConfigError(
            f"the model needs a method collect_feats, which {type(model).__name__!r} does not have"
        )
    if getattr(model, "training", False):
        model.eval()
    with torch.no_grad():
        feats = model.collect_feats(**batch, **kwargs)
    if not isinstance(feats, Mapping):
        raise FeatureError(
            f"collect_feats returns a dict of arrays by key, not {type(feats).__name__!r}"
        )
    return feats


def unpadded(ids: list[str], feats: Mapping[str, Any]) -> ArraysByKey:
    """Return the arrays of all keys and ids, (frames, *dims) each, without their padding."""
    arrays = {key: dict(_arrays(ids, feats, key)) for key in feats if not key.endswith(LENGTHS)}
    if not arrays:
        raise FeatureError(
            "collect_feats returned no features, only "
            f"{', '.join(map(repr, feats)) or 'an empty dict'}"
        )
    return arrays


def lengths_of_inputs(
    ids: list[str], batch: Mapping[str, Any], feats: Mapping[str, Any]
) -> ShapesByKey:
    """Return the shapes `(length,)` of those inputs that are integers and have lengths.

    Inputs that are features, too, are left out.
    """
    return {
        key: {id: (int(length),) for id, length in zip(ids, batch[f"{key}{LENGTHS}"], strict=True)}
        for key, value in batch.items()
        if key not in feats and batch.get(f"{key}{LENGTHS}") is not None and _is_whole(value)
    }


def _is_whole(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def stats_of(key: str, arrays: Mapping[str, Array]) -> FeatureStats:
    """Return the statistics of a key's arrays by id; raises `FeatureError` for NaN or infinity."""
    of_each = {id: FeatureStats.of(array) for id, array in arrays.items()}
    for id, stats in of_each.items():
        if not (np.isfinite(stats.mean).all() and np.isfinite(stats.m2).all()):
            raise FeatureError(f"utterance {id!r}: {key!r} holds NaN or infinity")
    return reduce(FeatureStats.merge, of_each.values())


def _arrays(ids: list[str], feats: Mapping[str, Any], key: str) -> Iterator[tuple[str, Array]]:
    """Iterate over the ids and arrays of a key."""
    value, lengths = _as_array(feats[key]), feats.get(f"{key}{LENGTHS}")
    if value.ndim == 0 or len(value) != len(ids):
        raise FeatureError(
            f"collect_feats returned {key!r} of shape {value.shape} for {len(ids)} utterances"
        )
    if value.dtype.kind not in "biuf":
        raise FeatureError(
            f"collect_feats returned {key!r} of {value.dtype}; statistics need real numbers"
        )
    if lengths is None:
        yield from zip(ids, value[:, np.newaxis], strict=True)
        return
    ends = _as_array(lengths)
    if ends.shape != (len(ids),) or ends.dtype.kind not in "iu":
        raise FeatureError(
            f"'{key}{LENGTHS}' are {len(ids)} whole numbers, not {ends.dtype} of shape {ends.shape}"
        )
    for id, array, end in zip(ids, value, ends.tolist(), strict=True):
        if array.ndim == 0 or not 0 <= end <= len(array):
            raise FeatureError(
                f"utterance {id!r}: {key!r} of shape {array.shape} has no {end} frames"
            )
        yield id, array[:end]


def _as_array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(value)
