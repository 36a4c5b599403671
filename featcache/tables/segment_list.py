"""`SegmentList`: segments of recordings, in seconds, as a file or a dict lists them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from featcache.declaration.frame_times import Seconds64
from featcache.errors import ConfigError, DuplicateIdError, FeatureError
from featcache.store.format.annotation_columns import Column
from featcache.store.format.annotations import NONE, Values, check_annotations, kinds_of
from featcache.store.format.ids import check_id
from featcache.store.writing.annotation_sources import DELIMITERS, entries_of

# by id: recording, start_s, stop_s, and annotations if it has its own; or the path of a file
Segment = tuple[str, float, float] | tuple[str, float, float, Mapping[str, object]]
ListSource = Mapping[str, Segment] | str | PathLike[str]
_COLUMNS = ("recording", "start_s", "stop_s")
_SUFFIXES = (*DELIMITERS, ".jsonl")
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
            return _checked(f"segments {str(path)!r}", _of_file(path, kinds), features, kinds)
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
        name: Column.of([values.get(name) for values in told.values()], kinds[name])
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
