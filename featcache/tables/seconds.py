"""`Seconds`: a part of one item, in seconds, as `slice` is one in frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.tables.recording_times import Alignment, RecordingTimes, require_times

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable


@dataclass(frozen=True, slots=True)
class Seconds:
    """The part of an utterance from `start_s` to before `stop_s`; to its end if that is None.

    Each feature is cut at the frames that its `frame_s` and `offset_s` give. All end where the
    first of them ends; as much as two of the longest frames may lack.

    >>> dataset["utt-7", featcache.Seconds(1.0, 2.5)]  # doctest: +SKIP
    """

    start_s: float = 0.0
    stop_s: float | None = None

    def __post_init__(self) -> None:
        stop_s = math.inf if self.stop_s is None else self.stop_s
        numbers = all(isinstance(each, Real) for each in (self.start_s, stop_s))
        infinite = self.stop_s is not None and stop_s == math.inf
        if not numbers or not 0 <= self.start_s < stop_s or infinite:
            raise ConfigError(
                f"{self!r}: numbers are needed, 0 <= start_s < stop_s, or None for the end"
            )


def frames_of(
    table: FeatureTable,
    rows: Ints,
    keys: Sequence[object],
    cuts: Sequence[Seconds],
    features: Sequence[str],
) -> list[dict[str, slice]]:
    """Return the frames of each row by feature.

    Raises `ConfigError` for a feature that does not say how long its frames are, `WindowError` for
    a part beyond the end of a row, which `keys` name.
    """
    if not cuts:
        return []
    for feature in features:
        require_times(table.selection.blocks, feature)
    times = RecordingTimes(table, rows, Alignment())
    wanted = [
        max(end, cut.start_s) if cut.stop_s is None else cut.stop_s  # or it begins beyond the end
        for cut, end in zip(cuts, times.ends_s, strict=True)
    ]
    stop_s = times.stops_s(
        slice(None), np.array(wanted), lambda n: f"{cuts[n]} of utterance {keys[n]!r}"
    )
    spans = times.spans(slice(None), np.array([cut.start_s for cut in cuts]), stop_s)
    columns = {
        feature: [slice(begin, begin + count) for begin, count in zip(*span, strict=True)]
        for feature, span in spans.items()
    }
    return [
        {feature: each[place] for feature, each in columns.items()} for place in range(len(cuts))
    ]
