"""Indices of items: a row or an id, and the frames or seconds of it where not all is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from featcache.errors import ConfigError, WindowError
from featcache.interface import Ints
from featcache.tables.seconds import Seconds, frames_of
from featcache.tables.table import FeatureTable

Key = int | str
Part = slice | Seconds
Index = Key | tuple[Key, Part]


def key_and_part(index: Index) -> tuple[Key, Part | None]:
    """Return the row or id of an index, and the part of it that is wanted; None for all."""
    if not isinstance(index, tuple):
        return index, None
    if len(index) == 2 and isinstance(index[1], slice | Seconds):
        return index
    raise ConfigError(
        "an index is a row number, an id, or one of them with frames, [id, 100:200], or with "
        f"seconds, [id, featcache.Seconds(1.0, 2.5)], not {index!r}"
    )


def cuts_by_feature(
    table: FeatureTable,
    features: Sequence[str],
    rows: Ints,
    keys: Sequence[Key],
    parts: Sequence[Part | None],
) -> Mapping[str, list[tuple[int, slice]]]:
    """Return, for each feature, the frames of those rows of which a part is wanted, by place."""
    cuts = [(place, part) for place, part in enumerate(parts) if isinstance(part, slice)]
    by_feature = {name: cuts.copy() for name in features}
    timed = [(place, part) for place, part in enumerate(parts) if isinstance(part, Seconds)]
    if timed:
        places, seconds = zip(*timed, strict=True)
        named = [keys[place] for place in places]
        for place, frames in zip(
            places, frames_of(table, rows[[*places]], named, seconds, features), strict=True
        ):
            for name, cut in frames.items():
                by_feature.setdefault(name, []).append((place, cut))
    return by_feature


def span_of(feature: str, key: Key, length: int, cut: slice) -> tuple[int, int]:
    """Return the first frame and the number of frames of a cut through `length` frames."""
    start = 0 if cut.start is None else cut.start
    stop = length if cut.stop is None else cut.stop
    whole = isinstance(start, int | np.integer) and isinstance(stop, int | np.integer)
    if cut.step is not None or not whole or not 0 <= start <= stop <= length:
        steps = "" if cut.step is None else f" in steps of {cut.step}"
        hint = "" if whole else ", in whole numbers; seconds are featcache.Seconds(start_s, stop_s)"
        raise WindowError(
            f"utterance {key!r}, feature {feature!r}: frames {start} to {stop}{steps} are not "
            f"within 0 to {length}{hint}"
        )
    return start, stop - start
