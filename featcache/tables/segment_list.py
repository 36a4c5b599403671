"""`SegmentList`: segments of recordings, in seconds, as a CSV file or a dict lists them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from featcache.declaration.frame_times import Seconds64
from featcache.errors import ConfigError, DuplicateIdError, FeatureError
from featcache.store.format.ids import check_id

# by id: recording, start_s, stop_s; or the path of a CSV file with these columns
ListSource = Mapping[str, tuple[str, float, float]] | str | PathLike[str]
_COLUMNS = ("recording", "start_s", "stop_s")
_Line = tuple[str, object, str, object, object]  # where it stands, id, recording, start_s, stop_s


@dataclass(frozen=True)
class SegmentList:
    """Segments in the order of their source.

    Attributes:
        ids: their ids, each once.
        recordings: the id of the recording that each is cut from.
        start_s, stop_s: times of each in its recording, 0 <= start_s < stop_s.
    """

    ids: list[str]
    recordings: list[str]
    start_s: Seconds64
    stop_s: Seconds64

    @classmethod
    def of(cls, source: ListSource) -> SegmentList:
        """Read and check a list of segments.

        Raises `ConfigError` for a source or a segment that cannot be used, `DuplicateIdError` for
        an id that comes twice; either names the place and the segment.
        """
        if isinstance(source, Mapping):
            return cls._checked(_of_mapping(source))
        if isinstance(source, str | PathLike):
            with _opened(Path(source)) as lines:
                return cls._checked(lines)
        raise ConfigError(
            "segments are a dict, {id: (recording, start_s, stop_s)}, the path of a CSV file with "
            f"the columns id, {', '.join(_COLUMNS)}, or Windows(10.0, hop_s=5.0), not "
            f"{source!r:.100}"
        )

    @classmethod
    def _checked(cls, lines: Iterable[_Line]) -> SegmentList:
        ids: dict[str, None] = {}
        recordings, starts, stops = [], [], []
        for where, id, recording, start_s, stop_s in lines:
            times = _seconds(start_s), _seconds(stop_s)
            if not 0 <= times[0] < times[1] < math.inf:
                raise ConfigError(
                    f"{where}, segment {id!r}: {start_s!r} to {stop_s!r} are not seconds, "
                    "0 <= start_s < stop_s"
                )
            if id in ids:
                raise DuplicateIdError(f"{where}: segment {id!r} is listed twice")
            ids[_id(where, id)] = None
            recordings.append(recording)
            starts.append(times[0])
            stops.append(times[1])
        return cls(list(ids), recordings, np.array(starts, float), np.array(stops, float))


def _id(where: str, id: object) -> str:
    try:
        check_id(id)  # type: ignore[arg-type]  # it is what tells
    except FeatureError as error:
        raise ConfigError(f"{where}: {error}") from error
    return str(id)


def _seconds(value: object) -> float:
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # text of a file, or any kind of number
    except (TypeError, ValueError):
        return math.nan


def _of_mapping(source: Mapping[str, tuple[str, float, float]]) -> Iterator[_Line]:
    for id, segment in source.items():
        if isinstance(segment, str) or not isinstance(segment, Iterable):
            segment = ()
        fields = tuple(segment)
        if len(fields) != len(_COLUMNS) or not isinstance(fields[0], str):
            raise ConfigError(
                f"segments, segment {id!r}: (recording, start_s, stop_s) is needed, not "
                f"{source[id]!r}"
            )
        yield "segments", id, str(fields[0]), fields[1], fields[2]


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[_Line]]:
    try:
        with path.expanduser().open(newline="", encoding="utf-8-sig") as file:
            yield _of_csv(str(path), csv.DictReader(file, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"segments {str(path)!r} are not a CSV file in UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"segments {str(path)!r} cannot be read: {error.strerror}") from error


def _of_csv(path: str, reader: csv.DictReader[str]) -> Iterator[_Line]:
    header = list(reader.fieldnames or ())
    id = "ID" if "id" not in header and "ID" in header else "id"
    lacking = [name for name in (id, *_COLUMNS) if name not in header]
    if lacking:
        raise ConfigError(
            f"segments {path!r} lack the column {lacking[0]!r}: a header names id (or ID), "
            f"{', '.join(_COLUMNS)}, with times in seconds; it names {', '.join(header) or 'none'}"
        )
    for line in reader:
        where = f"{path!r}, line {reader.line_num}"
        if None in line or None in line.values():
            raise ConfigError(f"{where}: the header has {len(header)} columns, the line has not")
        yield where, line[id], line["recording"], line["start_s"], line["stop_s"]
