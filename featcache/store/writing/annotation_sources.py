"""Sources of annotations: a mapping, a table of CSV, lines of JSON, or an Arrow table."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from featcache.errors import ConfigError, FeatureError
from featcache.store.format.ids import as_id, check_id

Entry = tuple[str, Mapping[str, object]]  # an id, and what is said of it by name
IDS = ("id", "ID")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
# numbers that have one spelling: "007" is none, but text, and so are digits that no int64 holds
_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")
_FLOAT = re.compile(r"-0|-?(0|[1-9][0-9]*)(\.[0-9]+([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)")
_NEEDED = (
    "annotations are read out of a mapping of ids to {name: value}, a .csv or .tsv file with a "
    "header, a .jsonl file, or an Arrow table"
)


class ArrowTable(Protocol):
    """An Arrow table, or what can give its rows in the same way."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""

    def to_batches(self) -> Iterable[Any]:
        """Return batches of rows, each with `to_pylist`."""


AnnotationSource = Mapping[str, Mapping[str, object]] | str | os.PathLike[str] | ArrowTable


def entries_of(source: AnnotationSource, kinds: Mapping[str, str]) -> Iterator[Entry]:
    """Give the ids of a source, and what it says of each, as it comes.

    Cells of CSV are text. They become numbers where all cells of their column are numbers, or where
    the cache has the annotation as such; an empty cell is a missing value.

    Args:
        source: see `Cache.annotate`.
        kinds: those of the annotations that the cache has.

    Raises `ConfigError` for what is no source, and `FeatureError`, with the line, for what cannot
    be read.
    """
    if isinstance(source, Mapping):
        return _of_mapping(source)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.suffix in DELIMITERS:
            return _of_table(path, kinds)
        if path.suffix == ".jsonl":
            return _of_lines(path)
        raise ConfigError(f"annotations in {str(path)!r}: {_NEEDED}")
    if hasattr(source, "to_batches") and hasattr(source, "column_names"):
        return _of_arrow(source)
    raise ConfigError(f"{_NEEDED}; not out of {type(source).__name__} {source!r:.80}")


def _of_mapping(source: Mapping[str, Mapping[str, object]]) -> Iterator[Entry]:
    for id, values in source.items():
        if not isinstance(values, Mapping):
            raise FeatureError(
                f"annotations of utterance {id!r}: a mapping of ids to mappings of names to values "
                f"is needed, as {{'utt-1': {{'speaker': 'anna'}}}}, not {values!r:.80}"
            )
        yield _checked(id), values


def _of_lines(path: Path) -> Iterator[Entry]:
    with _opened(path) as file:
        for number in itertools.count(1):
            with _about(path, number):
                line = file.readline()
            if not line:
                return
            if line.strip():
                with _about(path, number):
                    content = json.loads(line)
                    if not isinstance(content, dict):
                        raise FeatureError("each line is an object, {...}")
                    entry = _without_id(content)
                yield entry


def _of_arrow(table: Any) -> Iterator[Entry]:
    try:
        id_name = _id_name(table.column_names)
    except FeatureError as error:
        raise FeatureError(f"annotations in an Arrow table: {error}") from error
    for batch in table.to_batches():
        for row in batch.to_pylist():
            id = row.pop(id_name)
            yield _checked(id), row


def _of_table(path: Path, kinds: Mapping[str, str]) -> Iterator[Entry]:
    types = _types_of(path, kinds)
    for number, row in _rows(path):
        id, cells = _without_id(row)
        values: dict[str, object] = {}
        for name, cell in cells.items():
            try:
                values[name] = types[name](cast(str, cell)) if cell else None
            except ValueError as error:
                raise FeatureError(
                    f"{str(path)!r}, line {number}, utterance {id!r}: annotation {name!r} is "
                    f"{kinds[name]} in the cache, not {cell!r}"
                ) from error
        yield id, values


def _types_of(path: Path, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return for each column of a table what makes values of its cells."""
    known = {"str": str, "int": int, "float": float, "bool": _bool_of}
    known |= {"ints": _no_list, "floats": _no_list}
    types: dict[str, Any] = {}
    for _, row in _rows(path):
        for name, cell in row.items():
            if cell and types.get(name) is not str:
                wide = int if _INT.fullmatch(cell) else float if _FLOAT.fullmatch(cell) else str
                types[name] = (
                    wide if types.get(name, int) is int else float if wide is int else wide
                )
    return types | {name: known[kind] for name, kind in kinds.items()}


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Give the lines of a table, and their numbers."""
    with _opened(path) as file:
        delimiter = DELIMITERS[path.suffix]
        lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
        with _about(path, 1):
            header = next(lines, [])
            _id_name(header)
            if doubled := {name for name in header if header.count(name) > 1}:
                raise FeatureError(f"there are two columns {min(doubled)!r}")
        while True:
            with _about(path, lines.line_num + 1):
                cells = next(lines, None)
                if cells is None:
                    return
                if cells and len(cells) != len(header):
                    raise FeatureError(f"{len(cells)} cells below a header of {len(header)}")
            if cells:
                yield lines.line_num, dict(zip(header, cells, strict=True))


def _bool_of(cell: str) -> bool:
    try:
        return {"true": True, "false": False}[cell.lower()]
    except KeyError:
        raise ValueError(cell) from None


def _no_list(cell: str) -> object:
    raise ValueError(cell)


def _opened(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"annotations in {str(path)!r} cannot be read: {reason}") from error


@contextmanager
def _about(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, csv.Error, RecursionError) as error:
        raise FeatureError(f"{str(path)!r}, line {number}: {error}") from error


def _without_id(content: Mapping[str, object]) -> Entry:
    values = dict(content)
    return _checked(values.pop(_id_name(content))), values


def _checked(id: object) -> str:
    found = cast(str, as_id(id))
    check_id(found)
    return found


def _id_name(names: Iterable[str]) -> str:
    """Return which of some columns has the ids."""
    found = [name for name in names if name in IDS]
    if len(found) != 1:
        raise FeatureError(
            f"one column of ids is needed, 'id' or 'ID', among {', '.join(map(repr, names))}"
        )
    return found[0]
