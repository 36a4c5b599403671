"""Segments of recordings: rows of a table, cut at seconds, with ids of their own.

Here a list of segments, or windows over whole recordings, become rows and frames. Reading them is
the table's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from featcache.declaration.frame_times import Seconds64
from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.format.annotation_columns import Column
from featcache.store.format.strings import Strings, ends_of
from featcache.tables.recording_times import Alignment, RecordingTimes, Spans
from featcache.tables.segment_list import ListSource, SegmentList

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

_AT_ONCE = 16384


class Segments(NamedTuple):
    """Segments, to be made a view.

    Attributes:
        rows: the row of the recording of each.
        ids: their ids.
        spans: the frames of each feature that has a time axis and says how long its frames are.
        annotations: those of the segments themselves, by name.
    """

    rows: Ints
    ids: Strings
    spans: Spans
    annotations: Mapping[str, Column]


@dataclass(frozen=True)
class Windows:
    """Windows over whole recordings, with the ids `<id>:<start_s>-<stop_s>`.

    They begin every `hop_s` seconds, `length_s` if that is None, until one reaches the end of the
    recording. The last one may be shorter, but has a frame of each feature; `filter` leaves short
    ones out.

    >>> view = table.segments(featcache.Windows(10.0, hop_s=5.0))  # doctest: +SKIP
    """

    length_s: float
    hop_s: float | None = None

    def __post_init__(self) -> None:
        _check_seconds("length_s", self.length_s)
        if self.hop_s is not None:
            _check_seconds("hop_s", self.hop_s)


SegmentSource = ListSource | Windows


def segments_of(table: FeatureTable, source: SegmentSource, alignment: Alignment) -> Segments:
    """Cut recordings at the times of a list, in its order, or into windows."""
    if isinstance(source, Windows):
        return _windows(table, source, alignment)
    return _listed(table, source, alignment)


def _listed(table: FeatureTable, source: ListSource, alignment: Alignment) -> Segments:
    found = SegmentList.of(source, table.features, table.selection.blocks.annotation_kinds())

    def name(number: int) -> str:
        return f"segment {found.ids[number]!r} of recording {found.recordings[number]!r}"

    rows = table.rows(found.recordings)
    times = RecordingTimes(table, rows, alignment)
    stop_s = times.stops_s(slice(None), found.stop_s, name)
    spans = times.spans(slice(None), found.start_s, stop_s)
    return Segments(rows, Strings.of(found.ids), spans, found.annotations)


def _windows(table: FeatureTable, wanted: Windows, alignment: Alignment) -> Segments:
    length_s = wanted.length_s
    hop_s = length_s if wanted.hop_s is None else wanted.hop_s
    times = RecordingTimes(table, np.arange(len(table)), alignment)
    if length_s < times.longest_s * (1 - 1e-6):
        raise ConfigError(
            f"windows of {length_s=} are too short: a frame takes up to {times.longest_s:.6g} s"
        )
    ends_s = times.stops_s(slice(None), times.ends_s, lambda row: f"recording {table.id(row)!r}")
    counts = _count(ends_s, length_s, hop_s, times.longest_s)
    places = np.repeat(np.arange(len(table)), counts)
    numbers = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    # to a nanosecond, so that the end of one is exactly the beginning of another
    start_s: Seconds64 = np.round(numbers * hop_s, 9)
    full_s: Seconds64 = np.round(numbers * hop_s + length_s, 9)
    stop_s = np.minimum(full_s, ends_s[places])
    ids = _ids(table, counts, start_s, stop_s)
    return Segments(places, ids, times.spans(places, start_s, stop_s), {})


def _count(ends_s: Seconds64, length_s: float, hop_s: float, frame_s: float) -> Ints:
    """Return how many windows it takes to reach the end of each recording.

    As lhotse's `compute_num_windows`, but for an end of less than half a frame of some feature,
    which has no window of its own.
    """
    ends_s = ends_s - frame_s / 2 + 1e-6 * frame_s  # at half a frame, the later boundary is next
    needed = np.ceil((ends_s - length_s) / hop_s) + 1
    begun = np.ceil(ends_s / hop_s)  # those that begin before the end, should hops be long
    counts: Ints = np.clip(np.maximum(needed, 1), 0, np.maximum(begun, 0)).astype(np.int64)
    return counts


def _ids(table: FeatureTable, counts: Ints, start_s: Seconds64, stop_s: Seconds64) -> Strings:
    """Return `<recording>:<start_s>-<stop_s>` for each window."""
    texts: dict[float, bytes] = {}
    sizes, data = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
    begins = ends_of(counts)
    for rows in _pieces(counts):
        some = slice(begins[rows.start], begins[rows.stop])
        # many windows have the same times: what is after the recording's id is written once
        spans, which = np.unique(start_s[some] + 1j * stop_s[some], return_inverse=True)
        starts, stops = spans.real.tolist(), spans.imag.tolist()
        for time in {*starts, *stops} - texts.keys():
            texts[time] = np.format_float_positional(round(time, 9), trim="-").encode()
        names = [id.encode() for id in table.selection.packed_ids(np.arange(rows.start, rows.stop))]
        times = [
            b":%b-%b" % (texts[start], texts[stop])
            for start, stop in zip(starts, stops, strict=True)
        ]
        halves = np.empty(2 * len(which), np.int64)
        halves[::2] = np.repeat(np.arange(len(names)), counts[rows])
        halves[1::2] = len(names) + which
        made = Strings.of_bytes([*names, *times]).take(halves)
        sizes.append(np.diff(made.ends[::2]))
        data.append(made.data)
    return Strings(ends_of(np.concatenate(sizes)), np.concatenate(data))


def _pieces(counts: Ints) -> Iterator[slice]:
    """Cut recordings into pieces of about `_AT_ONCE` windows."""
    ends = np.cumsum(counts)
    stops = np.unique(np.searchsorted(ends, np.arange(_AT_ONCE, ends[-1:].sum(), _AT_ONCE)) + 1)
    bounds = [0, *stops.tolist(), len(counts)]
    yield from (slice(first, last) for first, last in pairwise(bounds) if first < last)


def _check_seconds(name: str, value: float) -> None:
    number = float(value) if isinstance(value, int | float | np.number) else math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise ConfigError(f"{name} is a number of seconds, more than 0, not {value!r}")
