"""A batch of a feature as it is stored: checked, cast and copied once, not once an utterance."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import ConfigError, FeatureError, nearest
from featcache.interface import Array
from featcache.stats import FeatureStats
from featcache.store.format.bfloat16 import from_storage
from featcache.store.writing.casts import MAX_RANK, ArrayLike, Lengths, as_numpy, converted
from featcache.store.writing.copy_memory import CopyMemory

LengthsByFeature = Lengths | Mapping[str, Lengths | None] | None
BatchLayout = Literal["padded", "packed"]
_LAYOUTS = ("padded", "packed")
PIECE_ROWS = 4096  # utterances that are handed over together


class Packed(NamedTuple):
    """The arrays of a feature, (rows, *dims), one behind the other, C order, storage dtype."""

    array: Array
    lengths: list[int]  # rows of each utterance
    ends: list[int]  # one more than there are utterances, beginning with 0
    stats: list[FeatureStats]  # of `PIECE_ROWS` utterances each; none where they are not collected

    def rows(self, start: int, stop: int) -> Array:
        """Return the rows of some utterances."""
        return self.array[self.ends[start] : self.ends[stop]]

    def arrays(self, start: int, stop: int) -> list[Array]:
        """Return the array of each of some utterances."""
        ends = self.ends[start : stop + 1]
        return [self.array[begin:end] for begin, end in itertools.pairwise(ends)]


def lengths_of(
    ids: Sequence[str],
    lengths: LengthsByFeature,
    features: Mapping[str, FeatureStorageConfig],
) -> dict[str, list[int]]:
    """Return the rows of each utterance, by feature; 1 for features without a time axis.

    Raises `FeatureError` for what are no lengths of these utterances.
    """
    given = lengths if isinstance(lengths, Mapping) else dict.fromkeys(features, lengths)
    for name in given:
        if name not in features:
            known = nearest(name, features)
            raise FeatureError(f"lengths are given for {name!r}, which is not declared; {known}")
    found = {}
    for name, feature in features.items():
        of_feature = given.get(name)
        if feature.time_axis is None:
            found[name] = [1] * len(ids)
            continue
        if of_feature is None:
            raise FeatureError(
                f"feature {name!r} has no lengths; give the frames of each utterance"
            )
        found[name] = integers(f"feature {name!r}", of_feature)
        if len(found[name]) != len(ids):
            raise FeatureError(
                f"feature {name!r}: {len(found[name])} lengths do not fit {len(ids)} ids"
            )
    return found


def integers(feature: str, lengths: Lengths) -> list[int]:
    """Return lengths as integers; raises `FeatureError` for what are none."""
    listed = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise FeatureError(
            f"{feature}: lengths are one number of frames for each utterance, such as [5, 3], not "
            f"{listed!r}"
        )
    try:
        return [operator.index(length) for length in listed]
    except TypeError:
        raise FeatureError(
            f"{feature}: lengths must be frames, integers, not {listed!r}; relative lengths do not "
            "carry over from one axis to another (round(length * frames) is often off by one)"
        ) from None


def pack(
    ids: Sequence[str],
    value: ArrayLike,
    lengths: list[int],
    layout: BatchLayout,
    feature: FeatureStorageConfig,
    memory: CopyMemory,
) -> Packed:
    """Return a copy of a padded or packed batch as it is stored.

    Raises `FeatureError`, naming the utterance where it can, for what cannot be stored as declared.
    """
    if layout not in _LAYOUTS:
        raise ConfigError(f"layout is 'padded' or 'packed', not {layout!r}")
    array, is_bfloat16 = as_numpy(value, f"a batch of feature {feature.name!r}")
    if feature.time_axis is None:
        layout = "packed"  # of a row each
    _check_shape(ids, array.shape, lengths, layout, feature)
    rows = array if layout == "packed" else _without_padding(array, lengths)
    packed = Packed(rows, lengths, [0, *np.cumsum(lengths, dtype=np.int64).tolist()], [])
    try:
        # the statistics tell whether all numbers are finite
        where = f"feature {feature.name!r}"
        stored = converted(rows, is_bfloat16, feature, where, check_finite=not feature.stats)
    except FeatureError:
        _refuse(ids, packed, is_bfloat16, feature)
        raise
    stats = _stats_of(packed._replace(array=stored), feature)
    if not all(each.is_finite for each in stats):
        _refuse(ids, packed, is_bfloat16, feature)
    copy = memory.copy(stored) if np.may_share_memory(stored, array) else stored
    return packed._replace(array=copy, stats=stats)


def _check_shape(
    ids: Sequence[str],
    shape: tuple[int, ...],
    lengths: list[int],
    layout: BatchLayout,
    feature: FeatureStorageConfig,
) -> None:
    where = f"a batch of feature {feature.name!r}, shape {shape}"
    axes = len(shape) - (layout == "padded")
    if not 1 <= axes <= MAX_RANK + (feature.time_axis is None):
        raise FeatureError(f"{where}, has {len(shape)} axes, which is no {layout} batch")
    if layout == "packed":
        if min(lengths, default=0) < 0 or sum(lengths) != shape[0]:
            raise FeatureError(f"{where}: has {shape[0]} rows, but lengths of {sum(lengths)}")
        return
    if shape[0] != len(ids):
        raise FeatureError(f"{where}, does not have a row for each of {len(ids)} ids")
    for id, length in zip(ids, lengths, strict=True):
        if not 0 <= length <= shape[1]:
            raise FeatureError(
                f"utterance {id!r}, feature {feature.name!r}: length {length} is not within 0 to "
                f"{shape[1]}"
            )


def _without_padding(array: Array, lengths: list[int]) -> Array:
    """Return the frames that count: a view where all do, else a copy, which has no base."""
    if min(lengths, default=0) == array.shape[1]:
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    pieces = [row[:length] for row, length in zip(array, lengths, strict=True)]
    return np.concatenate(pieces) if pieces else array[:, :0].reshape(0, *array.shape[2:])


def _stats_of(packed: Packed, feature: FeatureStorageConfig) -> list[FeatureStats]:
    if not feature.stats:
        return []
    starts = range(0, len(packed.lengths), PIECE_ROWS)
    stops = [min(start + PIECE_ROWS, len(packed.lengths)) for start in starts]
    pieces = (packed.rows(start, stop) for start, stop in zip(starts, stops, strict=True))
    return [FeatureStats.of(from_storage(piece, feature.dtype)) for piece in pieces]


def _refuse(
    ids: Sequence[str], packed: Packed, is_bfloat16: bool, feature: FeatureStorageConfig
) -> None:
    """Raise the error of the first utterance that cannot be stored."""
    for id, array in zip(ids, packed.arrays(0, len(ids)), strict=True):
        where = f"utterance {id!r}, feature {feature.name!r}"
        converted(array if feature.time_axis == 0 else array[0], is_bfloat16, feature, where)
