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
from featcache.loading.device import to_device
from featcache.stats import FeatureStats
from featcache.store.format.ids import check_id

StatsByKey = dict[str, FeatureStats]
ShapesByKey = dict[str, dict[str, tuple[int, ...]]]  # by key and id
ArraysByKey = dict[str, dict[str, Array]]  # by key and id
LENGTHS = "_lengths"


def collect_stats_batch(
    indices: Iterable[int],
    *,
    dataset: Any,
    model: Any,
    collate_fn: Callable[[list[Any]], Any],
    device: torch.device | str | None = None,
    collect_stats_kwargs: Mapping[str, Any] | None = None,
) -> tuple[StatsByKey, ShapesByKey, ArraysByKey]:
    """Compute the features of some utterances, and take statistics and shapes.

    Statistics are taken in float64, utterance by utterance.

    Returns by key the statistics, then by key and id the shapes and the arrays without their
    padding. A key without `<key>_lengths` beside it is one frame an utterance. Integer inputs with
    lengths, as tokens are, get shapes, too.

    Raises `ConfigError` for a model or collate function of another kind, `FeatureError` for what
    they return.
    """
    ids, batch = _collated([dataset[index] for index in indices], collate_fn)
    if device is not None:
        batch = to_device(batch, device)
    feats = _computed(model, batch, collect_stats_kwargs or {})
    arrays = _arrays(ids, feats)
    shapes: ShapesByKey = {
        key: {id: array.shape for id, array in of_key.items()} for key, of_key in arrays.items()
    }
    inputs = {key: value for key, value in batch.items() if key not in feats}
    shapes |= _shapes_of_inputs(ids, inputs, batch)
    return {key: _stats(key, of_key) for key, of_key in arrays.items()}, shapes, arrays


def _collated(
    items: list[Any], collate_fn: Callable[[list[Any]], Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return the ids and the inputs of a batch."""
    collated = collate_fn(items)
    if (
        not isinstance(collated, tuple | list)
        or len(collated) != 2
        or not isinstance(collated[1], Mapping)
    ):
        raise ConfigError(
            f"collate_fn returns (ids, batch), not {type(collated).__name__!r}; see CommonCollateFn"
        )
    return _checked_ids(collated[0], len(items)), dict(collated[1])


def _computed(model: Any, batch: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _arrays(ids: list[str], feats: Mapping[str, Any]) -> ArraysByKey:
    """Return the arrays of each key, without their padding."""
    arrays: ArraysByKey = {
        key: dict(_unpadded(ids, feats, key)) for key in feats if not key.endswith(LENGTHS)
    }
    if not arrays:
        raise FeatureError(
            "collect_feats returned no features, only "
            f"{', '.join(map(repr, feats)) or 'an empty dict'}"
        )
    return arrays


def _shapes_of_inputs(
    ids: list[str], inputs: Mapping[str, Any], batch: Mapping[str, Any]
) -> ShapesByKey:
    """Return the lengths of those inputs that are integers and have lengths in the batch."""
    shapes: ShapesByKey = {}
    for key, value in inputs.items():
        lengths = batch.get(f"{key}{LENGTHS}")
        if lengths is not None and isinstance(value, torch.Tensor) and _is_whole(value):
            shapes[key] = {id: (int(length),) for id, length in zip(ids, lengths, strict=True)}
    return shapes


def _is_whole(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def _checked_ids(given: Iterable[str], size: int) -> list[str]:
    ids = list(given)
    for id in ids:
        check_id(id)
        if id.split() != [id]:
            raise FeatureError(
                f"utterance id {id!r} is not usable: shape files need one without white space"
            )
    id, number = Counter(ids).most_common(1)[0] if ids else ("", 0)
    if number > 1:
        raise DuplicateIdError(f"{number} utterances of a batch have the id {id!r}")
    if len(ids) != size:
        raise FeatureError(f"collate_fn made a batch of {len(ids)} utterances out of {size}")
    return ids


def _unpadded(ids: list[str], feats: Mapping[str, Any], key: str) -> Iterator[tuple[str, Array]]:
    """Iterate over the arrays of a key, (frames, *dims) each."""
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


def _stats(key: str, arrays: Mapping[str, Array]) -> FeatureStats:
    found = []
    for id, array in arrays.items():
        found.append(FeatureStats.of(array))
        if not (np.isfinite(found[-1].mean).all() and np.isfinite(found[-1].m2).all()):
            raise FeatureError(f"utterance {id!r}: {key!r} holds NaN or infinity")
    return reduce(FeatureStats.merge, found)
