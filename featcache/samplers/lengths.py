"""Lengths of the utterances to batch: of arrays, or of the features of a cache."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.reading.cache import Cache, CachePath
from featcache.tables.table import FeatureTable, HasTable

Frames = NDArray[np.integer[Any]] | Sequence[int]
LengthsLike = Frames | Sequence[Frames] | Cache | CachePath | FeatureTable | HasTable


def columns_of(lengths: LengthsLike) -> tuple[list[Ints], list[int], FeatureTable | None]:
    """Return the lengths of each feature, the numbers of a frame, and their table, if any."""
    if isinstance(lengths, Cache | str | os.PathLike):
        lengths = FeatureTable.of(lengths)
    table = lengths if isinstance(lengths, FeatureTable) else getattr(lengths, "table", None)
    if isinstance(table, FeatureTable):
        source = cast(FeatureTable | HasTable, lengths)
        names = [name for name in source.features if table.has_frames(name)]
        if not names:
            raise ConfigError(f"no feature of {source!r} has a time axis; give lengths of your own")
        frame_elements = [math.prod(table.dims(name)) for name in names]
        return [_checked(table.lengths(name)) for name in names], frame_elements, table
    several = isinstance(lengths, list | tuple) and len(lengths) > 0 and np.ndim(lengths[0]) == 1
    columns = [
        _checked(column) for column in (cast(list[object], lengths) if several else [lengths])
    ]
    if len(set(map(len, columns))) > 1:
        raise ConfigError(
            f"the features have lengths for {[*map(len, columns)]} utterances, not for the same "
            "ones"
        )
    return columns, [1] * len(columns), None


def _checked(lengths: object) -> Ints:
    array = np.asarray(lengths)
    if array.ndim == 1 and len(array) == 0:
        raise ConfigError("there are no utterances to sample: lengths is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        what = f"{array.dtype} of shape {array.shape}"
        if array.dtype.kind == "O" and array.ndim == 0:
            what = (
                f"a {type(lengths).__name__}; if Lightning puts it there to share batches out, "
                "which the sampler does itself, set Trainer(use_distributed_sampler=False)"
            )
        raise ConfigError(f"lengths are frames of each utterance, integers, not {what}")
    frames = array.astype(np.int64, copy=False)
    if frames.min() < 0:
        row = int(frames.argmin())
        raise ConfigError(f"lengths cannot be negative: row {row} has {array[row]}")
    return frames
