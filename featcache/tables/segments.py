"""Segments of long recordings: pieces of rows, from a list or cut regularly, as rows of a view."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from featcache._cached import cached_property
from featcache.declaration import Seconds64
from featcache.errors import ConfigError, DuplicateIdError, FeatureError, WindowError
from featcache.format import (
    KEEP,
    NONE,
    Column,
    Hashes,
    Strings,
    Values,
    are_equal,
    check_annotations,
    check_id,
    digest,
    ends_of,
    hash_of,
    kinds_of,
)
from featcache.interface import Ints
from featcache.tables.blocks import RowMap
from featcache.tables.times import Alignment, RecordingTimes, Spans

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable


# `IdLookup`: finds ids among millions, which NumPy hashes all at once.

_IDS_AT_ONCE = 65536
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: Knuth, TAOCP 3, 6.4
_SHIFT = np.uint64(32)


class IdLookup:
    """Finds the rows of ids.

    Args:
        ids: those of all rows.
    """

    def __init__(self, ids: Strings) -> None:
        self._ids = ids
        hashes = _hashes(ids)
        self._rows = np.argsort(hashes)
        self._hashes = hashes[self._rows]

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, -1 where there is none."""
        wanted = Strings.of_bytes([id.encode("utf-8", "surrogatepass") for id in ids])
        hashes = _hashes(wanted)
        rows = np.full(len(ids), -1, np.int64)
        left, places = np.arange(len(ids)), self._hashes.searchsorted(hashes)
        while len(left):
            alike = places < len(self._hashes)
            alike[alike] = self._hashes[places[alike]] == hashes[left[alike]]
            left, places = left[alike], places[alike]
            found = self._rows[places]
            same = are_equal(self._ids.take(found), wanted.take(left))
            rows[left[same]] = found[same]
            left, places = left[~same], places[~same] + 1  # the next id of that hash
        return rows


def _hashes(ids: Strings) -> Hashes:
    """Return hashes that are good for looking up alone: quick, and of no other program."""
    hashes = np.empty(len(ids), np.uint64)
    for start in range(0, len(ids), _IDS_AT_ONCE):
        ends = ids.ends[start : start + _IDS_AT_ONCE + 1]
        data = np.append(ids.data[ends[0] : ends[-1]], np.zeros(8, np.uint8))
        words = np.ndarray(len(data) - 7, ">u8", data, strides=(1,))
        begins, sizes = ends[:-1] - ends[0], np.diff(ends)
        some = sizes.astype(np.uint64) * _MULTIPLIER
        for at in range(0, int(sizes.max(initial=0)), 8):
            longer = np.flatnonzero(sizes > at)
            word = words[begins[longer] + at] & KEEP[np.minimum(sizes[longer] - at, 8)]
            mixed = (some[longer] ^ word) * _MULTIPLIER
            some[longer] = mixed ^ (mixed >> _SHIFT)
        hashes[start : start + len(some)] = some
    return hashes


# `Cuts`: rows of a view that have ids of their own, and some frames of each feature.

_AT_ONCE = 65536


@dataclass(frozen=True)
class Cuts:
    """Ids and frames of the rows of a segment view.

    Those of a view of it are the same columns and other rows.

    Attributes:
        ids: the id of each row.
        spans: per feature that is cut, first frames and numbers of frames; all others are whole.
        own: annotations that are not those of the recordings, by name.
        rows: the row in these columns of each row; None: all in their order.
    """

    ids: Column
    spans: Mapping[str, tuple[Column, Column]]
    own: Mapping[str, Column]
    rows: RowMap | None = None

    @classmethod
    def of(
        cls,
        ids: Strings,
        spans: Mapping[str, tuple[Ints, Ints]],
        own: Mapping[str, Column],
    ) -> Cuts:
        """Take the ids of rows, per feature their frames, and their own annotations."""
        columns = {
            name: (Column("int", starts), Column("int", lengths))
            for name, (starts, lengths) in spans.items()
        }
        return cls(Column("str", ids), columns, own)

    @property
    def _ids(self) -> Strings:
        return cast(Strings, self.ids.stored()[0])

    @cached_property
    def _lookup(self) -> IdLookup:
        return IdLookup(self._ids)

    @cached_property
    def _hashes(self) -> Hashes:
        """The hash of the id of each row of the columns."""
        ids = self._ids
        hashes, data = np.empty(len(ids), np.uint64), ids.data.data
        for begin in range(0, len(hashes), _AT_ONCE):
            ends = pairwise(ids.ends[begin : begin + _AT_ONCE + 1].tolist())
            some = [hash_of(data[first:last]) for first, last in ends]
            hashes[begin : begin + len(some)] = some
        return hashes

    def id(self, row: int) -> str:
        """Return the id of a row."""
        return self._ids[row if self.rows is None else int(self.rows.below[row])]

    def packed_ids(self, rows: Ints) -> Strings:
        """Return the ids of some rows, without an object of each."""
        return self._ids.take(self._below(rows))

    def hashes(self) -> Hashes:
        """Return the hash of each row's id, in the order of the rows."""
        return self._hashes if self.rows is None else self._hashes[self.rows.below]

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, -1 where there is none."""
        found = self._lookup.find(ids)
        return found if self.rows is None else self.rows.find(found)

    def lengths(self, feature: str) -> Ints:
        """Return the numbers of frames of all rows, read-only, of a feature that is cut."""
        column = self.spans[feature][1].numbers()[0]
        lengths = column if self.rows is None else column[self.rows.below]
        lengths.flags.writeable = False
        return lengths

    def annotation(self, name: str) -> Column:
        """Return one of their own annotations, of all rows."""
        column = self.own[name]
        return column if self.rows is None else column.view(self.rows.below)

    def span(self, feature: str, rows: Ints) -> tuple[Ints, Ints]:
        """Return first frames and numbers of frames of rows, of a feature that is cut."""
        rows = self._below(rows)
        starts, lengths = (each.numbers()[0][rows] for each in self.spans[feature])
        return starts, lengths

    def take(self, rows: Ints) -> Cuts:
        """Return the cuts of these rows, of which none comes twice."""
        return replace(self, rows=RowMap(self._below(rows)))

    def _below(self, rows: Ints) -> Ints:
        return rows if self.rows is None else self.rows.below[rows]

    @cached_property
    def digest(self) -> str:
        """A digest of the ids, of all frames that are cut, and of the annotations."""
        return digest("".join(self._digests()).encode())

    def _digests(self) -> Iterable[str]:
        yield self.ids.digest
        yield (RowMap(np.arange(len(self._ids))) if self.rows is None else self.rows).digest
        for name, span in sorted(self.spans.items()):
            yield digest(name.encode())
            yield from (numbers.digest for numbers in span)
        for name, column in sorted(self.own.items()):
            yield digest(name.encode())
            yield column.digest

    def __reduce__(self) -> tuple[object, ...]:
        return Cuts, (self.ids, self.spans, self.own, self.rows)


# `SegmentList`: segments of recordings, in seconds, as a file or a dict lists them.

# by id: recording, start_s, stop_s, and annotations if it has its own; or the path of a file
Segment = tuple[str, float, float] | tuple[str, float, float, Mapping[str, object]]
ListSource = Mapping[str, Segment] | str | PathLike[str]
_COLUMNS = ("recording", "start_s", "stop_s")
_SUFFIXES = (".csv", ".tsv", ".jsonl")
_Line = tuple[str, str, object, object, Mapping[str, object]]  # id and recording, times, all else


@dataclass(frozen=True)
class SegmentList:
    """Segments in the order of their source.

    Attributes:
        ids: their ids, each once.
        recordings: the id of the recording that each is cut from.
        start_s, stop_s: times of each in its recording, 0 <= start_s < stop_s.
        annotations: what else the source says of them, by name.
    """

    ids: list[str]
    recordings: list[str]
    start_s: Seconds64
    stop_s: Seconds64
    annotations: Mapping[str, Column]

    @classmethod
    def of(
        cls,
        source: ListSource,
        features: Container[str] = (),
        kinds: Mapping[str, str] = {},
    ) -> SegmentList:
        """Read and check a list of segments.

        Args:
            source: a dict, `{id: (recording, start_s, stop_s, {annotation: value})}`, the last of
                which may lack; or a file that `Cache.annotate` reads, with these columns.
            features: names that no annotation can have.
            kinds: those of the recordings' annotations: cells of a CSV file are read as such.

        Raises `ConfigError` for a source or a segment that cannot be used, `DuplicateIdError` for
        an id that comes twice; either names the source and the segment.
        """
        if isinstance(source, Mapping):
            return _checked("segments", _of_mapping(source), features, kinds)
        if isinstance(source, str | PathLike):
            path = Path(source).expanduser()
            if not path.is_file() or path.suffix not in _SUFFIXES:
                raise ConfigError(
                    f"segments {str(path)!r} cannot be read: there is no such file, or its name "
                    f"does not end in {', '.join(_SUFFIXES)}"
                )
            found = _checked(f"segments {str(path)!r}", _of_file(path, kinds), features, kinds)
            if not found.ids:
                raise ConfigError(
                    f"segments {str(path)!r}: the file lists none; see what writes it"
                )
            return found
        raise ConfigError(
            "segments are a dict, {id: (recording, start_s, stop_s)}, the path of a CSV file with "
            f"the columns id, {', '.join(_COLUMNS)}, or Windows(10.0, hop_s=5.0), not "
            f"{source!r:.100}"
        )


def _checked(
    where: str, lines: Iterable[_Line], features: Container[str], kinds: Mapping[str, str]
) -> SegmentList:
    told: dict[str, Values] = {}  # annotations by id
    names: dict[str, None] = {}  # also of those that no segment has a value of
    recordings, starts, stops = [], [], []
    try:
        for id, recording, start_s, stop_s, values in lines:
            check_id(id)
            times = _seconds(start_s), _seconds(stop_s)
            if not 0 <= times[0] < times[1] < math.inf:
                raise ConfigError(
                    f"{where}, segment {id!r}: {start_s!r} to {stop_s!r} are not seconds, "
                    "0 <= start_s < stop_s"
                )
            if id in told:
                raise DuplicateIdError(f"{where}: segment {id!r} is listed twice")
            told[id] = check_annotations(id, values, features) if values else NONE
            names |= dict.fromkeys(values)
            recordings.append(recording)
            starts.append(times[0])
            stops.append(times[1])
        kinds = {**kinds, **kinds_of(told.items())}
    except FeatureError as error:
        raise ConfigError(f"{where}: {error}") from error
    columns = {
        name: Column.of([values.get(name) for values in told.values()], kinds[name], name)
        for name in names
        if name in kinds
    }
    return SegmentList(
        [*told], recordings, np.array(starts, float), np.array(stops, float), columns
    )


def _seconds(value: object) -> float:
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # text of a file, or any kind of number
    except (TypeError, ValueError):
        return math.nan


def _of_mapping(source: Mapping[str, Segment]) -> Iterator[_Line]:
    for id, segment in source.items():
        if isinstance(segment, str | Mapping) or not isinstance(segment, Iterable):
            segment = ()
        fields: tuple[Any, ...] = (
            (*segment, NONE)[:4] if len(tuple(segment)) in (3, 4) else (0,) * 4
        )
        recording, start_s, stop_s, values = fields
        if not isinstance(recording, str) or not isinstance(values, Mapping):
            raise ConfigError(
                f"segments, segment {id!r}: (recording, start_s, stop_s) is needed, and a dict of "
                f"annotations if it has some, not {source[id]!r}"
            )
        yield id, recording, start_s, stop_s, values


def _of_file(path: Path, kinds: Mapping[str, str]) -> Iterator[_Line]:
    from featcache.writing.annotate import entries_of

    for id, entry in entries_of(path, {**kinds, **dict.fromkeys(_COLUMNS, "str")}):
        values = dict(entry)
        if lacking := [name for name in _COLUMNS if name not in values]:
            named = ", ".join(["id", *values])
            raise FeatureError(
                f"the column {lacking[0]!r} lacks: a header names id (or ID), "
                f"{', '.join(_COLUMNS)}, with times in seconds; it names {named}"
            )
        recording, start_s, stop_s = (values.pop(name) for name in _COLUMNS)
        if not isinstance(recording, str):
            raise FeatureError(f"segment {id!r}: its recording is {recording!r}, no id")
        yield id, recording, start_s, stop_s, values


# Segments of recordings: rows of a table, cut at seconds, with ids of their own.
#
# Here a list of segments, or windows over whole recordings, become rows and frames. Reading them
# is the table's.

_WINDOWS_AT_ONCE = 16384


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
    for feature, (_, counts) in spans.items():
        if not counts.all():
            number, others = int(counts.argmin()), int(np.count_nonzero(counts == 0)) - 1
            raise WindowError(
                f"{name(number)} has no frame of feature {feature!r}"
                f"{f' ({others} more like it)' if others else ''}: it lasts from "
                f"{found.start_s[number]:.9g} to {stop_s[number]:.9g} s, and a frame "
                f"{times.frame_s(feature):.6g} s; leave it out, or see whether its times and "
                "frame_s are in seconds"
            )
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
    """Cut recordings into pieces of about `_WINDOWS_AT_ONCE` windows."""
    ends = np.cumsum(counts)
    stops = np.unique(
        np.searchsorted(ends, np.arange(_WINDOWS_AT_ONCE, ends[-1:].sum(), _WINDOWS_AT_ONCE)) + 1
    )
    bounds = [0, *stops.tolist(), len(counts)]
    yield from (slice(first, last) for first, last in pairwise(bounds) if first < last)


def _check_seconds(name: str, value: float) -> None:
    number = float(value) if isinstance(value, int | float | np.number) else math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise ConfigError(f"{name} is a number of seconds, more than 0, not {value!r}")
