"""Times of recordings: durations, offsets and cuts in seconds, as frames of each feature."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal

import numpy as np

from featcache.declaration import FEW_FRAMES, FrameTimes, Seconds64, first_contradiction
from featcache.errors import ConfigError, UnknownNameError, WindowError, nearest
from featcache.interface import Ints

if TYPE_CHECKING:
    from featcache.tables.blocks import TableBlocks
    from featcache.tables.table import FeatureTable


# `RecordingTimes`: from seconds of recordings to frames of all their features, at the ends, too.
#
# One rule turns a time into a frame, that of `featcache.declaration`. Here lies what is done at
# the ends of recordings, where features have a frame more or less.

Align = Literal["trim", "error"]
Spans = Mapping[str, tuple[Ints, Ints]]  # by feature: first frame and number of frames of each row


@dataclass(frozen=True, slots=True)
class Alignment:
    """The choice of what is done where features of a recording do not end together.

    Attributes:
        align: "trim" ends all features of a recording where the first of them ends; "error" refuses
            a segment of which any feature lacks a frame.
        tolerance_frames: most frames that "trim" may leave out of what is asked for, in frames of
            the feature with the longest; more are refused.
    """

    align: Align = "trim"
    tolerance_frames: int = FEW_FRAMES

    def __post_init__(self) -> None:
        if self.align not in ("trim", "error"):
            raise UnknownNameError(
                f"align is 'trim' or 'error', not {self.align!r}; "
                f"{nearest(self.align, ('trim', 'error'))}"
            )
        try:
            negative = operator.index(self.tolerance_frames) < 0
        except TypeError:
            negative = True
        if negative:
            raise ConfigError(
                f"tolerance_frames is a number of frames from 0 on, not {self.tolerance_frames!r}"
            )


class RecordingTimes:
    """The times of some rows of a table, and the frames at these times.

    Args:
        table: the recordings.
        rows: the rows that are cut; `places` below are places in this list.
        alignment: what is done where their features do not end together.

    Raises `ConfigError` unless there is a feature whose declaration has `frame_s`, and where the
    times of two cannot both be right.

    Attributes:
        longest_s: seconds of the longest frame of any feature.
        ends_s: the time at which each row ends: that of its feature that ends last.
    """

    def __init__(self, table: FeatureTable, rows: Ints, alignment: Alignment) -> None:
        self._times = _times_of(table)
        self._alignment = alignment
        self._lengths = {name: table.lengths(name, rows=rows) for name in self._times}
        found = first_contradiction(self._times, self._lengths, alignment.tolerance_frames)
        if found is not None:
            raise ConfigError(
                f"utterance {table.id(int(rows[found[0]]))!r}: {found[1]}, so they cannot be cut "
                "in seconds together; declare the right frame_s and offset_s (featcache.convert "
                "stores the cache with others), or cut segments with as many tolerance_frames"
            )
        self._ends = {
            name: times.ends_s(self._lengths[name]) for name, times in self._times.items()
        }
        self.longest_s = max(times.frame_s for times in self._times.values())
        self.ends_s: Seconds64 = np.max([*self._ends.values()], axis=0)

    def frame_s(self, feature: str) -> float:
        """Return the seconds of a frame of a feature."""
        return self._times[feature].frame_s

    def stops_s(
        self, places: Ints | slice, stop_s: Seconds64, name: Callable[[int], str]
    ) -> Seconds64:
        """Return the times at which segments stop, none of them beyond the end of a feature.

        Args:
            places: the place in the rows that each segment is cut from.
            stop_s: the times at which the segments should stop.
            name: says which segment number so-and-so is, for the error.

        Raises `WindowError`, by name, for one that is further beyond than the alignment allows.
        """
        ends = {feature: each[places] for feature, each in self._ends.items()}
        if self._alignment.align == "error":
            for feature, times in self._times.items():
                wrong = times.boundaries(stop_s) > self._lengths[feature][places]
                self._refuse(wrong, feature, ends, stop_s, name)
            return stop_s
        first = np.min([*ends.values()], axis=0)
        allowed = self._alignment.tolerance_frames * self.longest_s
        wrong = stop_s - first > allowed + 1e-6 * self.longest_s
        for feature in ends:
            self._refuse(wrong & (ends[feature] == first), feature, ends, stop_s, name)
        shorter: Seconds64 = np.minimum(stop_s, first)
        return shorter

    def _refuse(
        self,
        wrong: np.ndarray[tuple[int], np.dtype[np.bool_]],
        feature: str,
        ends: Mapping[str, Seconds64],
        stop_s: Seconds64,
        name: Callable[[int], str],
    ) -> None:
        count = int(np.count_nonzero(wrong))
        if not count:
            return
        number, frames = int(wrong.argmax()), self._alignment.tolerance_frames
        more = f" ({count - 1} more like it)" if count > 1 else ""
        limit = (
            "align='error' lets no frame lack"
            if self._alignment.align == "error"
            else f"at most {frames} frames, {frames * self.longest_s:.6g} s, may lack "
            "(tolerance_frames)"
        )
        raise WindowError(
            f"{name(number)} stops at {stop_s[number]:.9g} s, but feature {feature!r} ends at "
            f"{ends[feature][number]:.9g} s{more}; {limit}; select_features leaves a feature out"
        )

    def spans(self, places: Ints | slice, start_s: Seconds64, stop_s: Seconds64) -> Spans:
        """Return the frames of segments by feature, of stops that `stops_s` gave."""
        start_s = np.minimum(start_s, stop_s)
        found = {}
        for feature, times in self._times.items():
            stops = np.minimum(times.boundaries(stop_s), self._lengths[feature][places])
            starts = np.minimum(times.boundaries(start_s), stops)
            found[feature] = starts, stops - starts
        return found


def require_times(blocks: TableBlocks, feature: str) -> None:
    """Raise `ConfigError` for a feature with frames of which nothing says when they are."""
    if blocks.has_frames(feature) and blocks.frame_times(feature) is None:
        raise ConfigError(
            f"feature {feature!r} cannot be cut in seconds, as its declaration does not say how "
            "many a frame takes; declare frame_s, or read other features: features=[...]"
        )


def _times_of(table: FeatureTable) -> dict[str, FrameTimes]:
    if table.selection.cuts is not None:
        raise ConfigError(f"{table!r} has segments already; cut the table of their recordings")
    declared = {name: table.selection.blocks.frame_times(name) for name in table.features}
    timed = {name: times for name, times in declared.items() if times is not None}
    if not timed:
        raise ConfigError(
            f"no feature of {table!r} says in its declaration how many seconds a frame takes, so "
            f"it cannot be cut in seconds; declare frame_s: {', '.join(table.features)}"
        )
    return timed


# `Seconds`: a part of one item, in seconds, as `slice` is one in frames.


@dataclass(frozen=True, slots=True)
class Seconds:
    """The part of an utterance from `start_s` to before `stop_s`; to its end if that is None.

    Each feature is cut at the frames that its `frame_s` and `offset_s` give. All features of the
    table end where the first of them ends, also where that one is not read (`select_features`
    leaves it out); as much as two of the longest frames may lack.

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


class PartByRule(ABC):
    """A part of an utterance by the rule of another toolkit: frames of their own by feature."""

    @abstractmethod
    def frames(self, feature: str, frame_s: float | None, length: int) -> slice:
        """Return the frames of a feature that has `length` of them, of `frame_s` if it says so.

        Raises `ConfigError` where it would have to say so.
        """


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
