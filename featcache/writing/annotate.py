"""Annotations from mappings, tables and files, and how they come into a cache."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, cast

import numpy as np

from featcache.errors import ConfigError, DuplicateIdError, FeatureError, KeyNotFoundError
from featcache.format.annotations import (
    MOST_OF_ONE,
    Value,
    check_annotations,
    check_name,
    kind_of_plain,
    kinds_of,
    most_bytes,
    wider_kind,
    with_kinds,
)
from featcache.format.columns import ColumnFile, save_columns
from featcache.format.files import as_id, check_id, explained
from featcache.format.index import Index, read_index
from featcache.format.journal import read_journal
from featcache.format.manifest import (
    ANNOTATIONS,
    PARTS,
    AnnotationEntry,
    Manifest,
    index_file,
    new_generation_name,
)
from featcache.format.part import Columns, SealedPart
from featcache.format.value_columns import (
    PREFIX,
    Column,
    joined,
    read_column,
    stored_columns,
    stored_kinds,
)
from featcache.interface import Ints
from featcache.reading.verify import raise_damage
from featcache.writing.held import HeldCache, held_to_edit
from featcache.writing.publish import ExpectedIds, next_generation, publish, with_needed
from featcache.writing.sets import write_together

# Sources of annotations: a mapping, a table of CSV, lines of JSON, or an Arrow table.

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

    def to_batches(self) -> Iterable[object]:
        """Return batches of rows, each with `to_pylist`."""


AnnotationSource = Mapping[str, Mapping[str, object]] | str | os.PathLike[str] | ArrowTable


def entries_of(source: AnnotationSource, kinds: Mapping[str, str]) -> Iterator[Entry]:
    """Yield the ids of a source, and what it says of each, as it comes.

    Cells of CSV are text. They become numbers where all cells of their column are numbers, or where
    the cache has the annotation as such; an empty cell is a missing value, and so is "nan" among
    numbers.

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
        for name, cell in cast(Mapping[str, str], cells).items():
            try:
                missing = not cell or (types[name] in (int, float) and _is_nan(cell))
                values[name] = None if missing else types[name](cell)
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
    seen: set[str] = set()
    for _, row in _rows(path):
        for name, cell in row.items():
            if not cell or types.get(name) is str:
                continue
            seen.add(name)
            if not _is_nan(cell):
                wide = int if _INT.fullmatch(cell) else float if _FLOAT.fullmatch(cell) else str
                types[name] = (
                    wide if types.get(name, int) is int else float if wide is int else wide
                )
    # of cells that are all "nan" nothing says that they stand for numbers
    return dict.fromkeys(seen, str) | types | {name: known[kind] for name, kind in kinds.items()}


def _is_nan(cell: str) -> bool:
    return cell.lower() == "nan"


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the lines of a table, and their numbers."""
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


# Annotations that are given to rows of a cache, collected and checked many at a time.


@dataclass(frozen=True, slots=True)
class Given:
    """Values of one annotation, and the rows that they are given to; None takes one away."""

    rows: list[int] = field(default_factory=list)
    values: list[Value | None] = field(default_factory=list)


class GivenAnnotations:
    """Values that entries give to the rows of an index.

    Args:
        index: that the rows are of.
        kinds: of the annotations that the cache has, by name.
        features: names that no annotation may have.

    Attributes:
        given: by name.
        kinds: of all annotations, with those that are given.
        strangers: ids that the index does not have.
    """

    def __init__(self, index: Index, kinds: Mapping[str, str], features: Collection[str]) -> None:
        self.given: dict[str, Given] = {}
        self.kinds = dict(kinds)
        self.strangers: list[str] = []
        self._index = index
        self._features = features
        self._seen = np.zeros(len(index), bool)

    def add(self, entries: Sequence[Entry]) -> None:
        """Take entries.

        Raises `DuplicateIdError` for an utterance that had one before, `FeatureError` for what is
        no annotation.
        """
        rows = self._index.find_many([id for id, _ in entries])
        there = rows >= 0
        if not there.all():
            self.strangers += [entries[place][0] for place in np.flatnonzero(~there).tolist()]
            entries = [entries[place] for place in np.flatnonzero(there).tolist()]
            rows = rows[there]
        if not self._take_at_once(rows, entries):
            self._take_each(rows.tolist(), entries)  # which names what is wrong

    def _take_at_once(self, rows: Ints, entries: Sequence[Entry]) -> bool:
        """Take entries an annotation at a time; False, and nothing taken, unless all are plain."""
        if self._seen[rows].any() or len(np.unique(rows)) < len(rows):
            return False
        found = _by_name(rows.tolist(), entries)
        kinds = self._kinds_with(found)
        if kinds is None:
            return False
        self._seen[rows] = True
        self.kinds = kinds
        for name, each in found.items():
            known = self.given.setdefault(name, Given())
            known.rows.extend(each.rows)
            known.values.extend(each.values)
        return True

    def _kinds_with(self, found: Mapping[str, Given]) -> dict[str, str] | None:
        """Return the kinds with those of plain values; None for what must be looked at singly."""
        kinds = dict(self.kinds)
        if sum(most_bytes(name, each.values) for name, each in found.items()) > MOST_OF_ONE:
            return None
        for name, each in found.items():
            try:
                check_name(name, self._features)
            except FeatureError:
                return None
            kind = kind_of_plain(each.values)
            wider = wider_kind(kinds.get(name), kind or None)
            if kind is None or (kind and wider is None):
                return None
            if wider is not None:
                kinds[name] = wider
        return kinds

    def _take_each(self, rows: Sequence[int], entries: Sequence[Entry]) -> None:
        for row, (id, values) in zip(rows, entries, strict=True):
            if self._seen[row]:
                raise DuplicateIdError(f"utterance {id!r} is annotated twice in one source")
            self._seen[row] = True
            there = check_annotations(id, values, self._features)
            self.kinds = with_kinds(id, there, self.kinds)
            for name in values:
                each = self.given.setdefault(name, Given())
                each.rows.append(row)
                each.values.append(there.get(name))


def _by_name(rows: Sequence[int], entries: Sequence[Entry]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for row, (_, given) in zip(rows, entries, strict=True):
        values = cast(Mapping[str, Value], given)  # or what `_kinds_with` refuses
        for name, value in values.items():
            each = found.get(name)
            if each is None:
                each = found[name] = Given()
            each.rows.append(row)
            each.values.append(value)
    return found


# Annotations that are given to a cache when it is there, as a new generation of the same parts.

Unknown = Literal["raise", "skip"]
MOST_TOLD = 20
_AT_ONCE = 65536


def annotate(
    path: Path, caches: Sequence[Path], source: AnnotationSource, unknown: Unknown = "raise"
) -> None:
    """Annotate utterances of a cache annotations, as `Cache.annotate` does.

    Args:
        path: the cache.
        caches: the cache; or its feature sets. Each that has an annotation gets its values; the
            first one gets an annotation that none has.
        source: of the values.
        unknown: see `Cache.annotate`; of sets, ids that none of them has.
    """
    if unknown not in ("raise", "skip"):
        raise ConfigError(f"unknown is 'raise' or 'skip', not {unknown!r}")
    with ExitStack() as stack:
        places = [stack.enter_context(_locked(cache)) for cache in caches]
        kinds = [_kinds(held) for held, _ in places]
        known = {name: kind for each in kinds[::-1] for name, kind in each.items()}
        features = {name for held, _ in places for name in held.manifest.features}
        entries: Iterable[Entry] = entries_of(source, known)
        if len(places) == 1:
            after = {places[0][0]: _annotated(*places[0], entries, (known, features), unknown)}
        else:
            entries = list(entries)
            if unknown == "raise":
                _refuse_strangers(path, [file for _, file in places], entries)
            after = {}
            for number, (place, mine) in enumerate(zip(places, kinds, strict=True)):
                others = {*known}.difference(mine)
                some = _of_names(entries, others, mine if number else None)
                after[place[0]] = _annotated(*place, some, (mine, features), "skip")
        changed = {held: manifest for held, manifest in after.items() if manifest is not None}
        with explained(path, lambda: "the cache is as it was"):
            write_together(path, changed)


@contextmanager
def _locked(cache: Path) -> Iterator[tuple[HeldCache, ColumnFile]]:
    """Hold the lock of a cache, with the generation that is current."""
    with held_to_edit(cache) as held:
        if not held.manifest.index:
            publish(held, ExpectedIds(complete=False))
        index, digest = held.manifest.index, held.manifest.index_digest
        with ColumnFile(cache, index, expected=digest) as file:
            raise_damage(file.damage())
            yield held, file


def _kinds(held: HeldCache) -> dict[str, str]:
    """Return the kinds of annotations, also of those that are committed and not yet published."""
    cache, manifest = held.path, held.manifest
    kinds = {name: entry.kind for name, entry in manifest.annotations.items()}
    published = {entry.name for entry in manifest.parts}
    for name, sealed in held.list_parts():
        part = None if name in published else sealed or read_journal(cache, f"{PARTS}/{name}")
        if part is None or not manifest.is_building(part.header.build, part.header.fingerprint):
            continue
        if isinstance(part, SealedPart):
            with part.open_columns(cache) as file:
                found = stored_kinds(file)
        else:
            found = kinds_of((each.id, each.annotations) for each in part.utterances)
        for annotation, kind in found.items():
            kinds[annotation] = wider_kind(kinds.get(annotation), kind) or kind
    return kinds


def _of_names(
    entries: Iterable[Entry], others: Collection[str], names: Collection[str] | None
) -> Iterator[Entry]:
    """Yield what entries say of some names; None: of all but `others`."""
    for id, values in entries:
        yield (
            id,
            {
                name: value
                for name, value in values.items()
                if name not in others and (names is None or name in names)
            },
        )


def _refuse_strangers(cache: Path, files: Iterable[ColumnFile], entries: list[Entry]) -> None:
    ids = [id for id, _ in entries]
    there = np.zeros(len(ids), bool)
    for file in files:
        there |= read_index(file, []).find_many(ids) >= 0
    if not there.all():
        raise KeyNotFoundError(_not_there(cache, [ids[n] for n in np.flatnonzero(~there)]))


def _annotated(
    held: HeldCache,
    file: ColumnFile,
    entries: Iterable[Entry],
    known: tuple[Mapping[str, str], Collection[str]],
    unknown: Unknown,
) -> Manifest | None:
    """Return the manifest of a generation of the same parts, with what entries say of its rows.

    Its index is durable, and the manifest yet to be written. None: nothing is said. `known` are the
    kinds of annotations that are there, and the names of the features.
    """
    cache, before = held.path, held.manifest
    index = read_index(file, [])
    given, kinds = _given(cache, index, iter(entries), known, unknown)
    if not any(each.rows for each in given.values()):
        return None
    annotations: dict[str, AnnotationEntry] = {}

    def columns() -> Columns:
        for name, dtype in file.dtypes.items():
            if not name.startswith(PREFIX):
                yield name, file.column(name, np.dtype(dtype).type)
        for name, kind in sorted(kinds.items()):
            there = name in before.annotations
            carried = name in given or (there and before.annotations[name].carried)
            column = _changed(before, file, name, kind, given.get(name, Given()))
            # taken away from all rows, it must not be forgotten: parts may have values of it
            for stored in stored_columns(name, column, always=there):
                annotations[name] = AnnotationEntry(kind, carried)
                yield stored

    generation = next_generation(cache, before)
    name = index_file(new_generation_name(generation))
    digest = save_columns(cache / name, columns())
    return replace(
        before,
        generation=generation,
        previous=before.name,
        index=name,
        index_digest=digest,
        annotations=annotations,
        requires_to_write=with_needed(before.requires_to_write, {ANNOTATIONS: bool(annotations)}),
    )


def _changed(before: Manifest, file: ColumnFile, name: str, kind: str, given: Given) -> Column:
    """Return the column of an annotation, with the values that are given now."""
    if name in before.annotations:
        column = read_column(file, name, before.annotations[name].kind, before.rows)
    else:
        column = Column.empty(before.rows, kind)
    rows = np.arange(before.rows)
    rows[given.rows] = before.rows + np.arange(len(given.rows))
    return joined([column, Column.of(given.values, kind)], kind).gather(rows)


def _given(
    cache: Path,
    index: Index,
    entries: Iterator[Entry],
    known: tuple[Mapping[str, str], Collection[str]],
    unknown: Unknown,
) -> tuple[Mapping[str, Given], Mapping[str, str]]:
    """Collect what entries say of rows of an index, with the kinds of all annotations.

    Raises `KeyNotFoundError` for ids that are not there, all at once.
    """
    collected = GivenAnnotations(index, *known)
    while some := list(itertools.islice(entries, _AT_ONCE)):
        collected.add(some)
    if collected.strangers and unknown == "raise":
        raise KeyNotFoundError(_not_there(cache, collected.strangers))
    kinds = collected.kinds
    return {name: each for name, each in collected.given.items() if name in kinds}, kinds


def _not_there(cache: Path, ids: list[str]) -> str:
    told = ", ".join(map(repr, ids[:MOST_TOLD])) + ", ..." * (len(ids) > MOST_TOLD)
    return (
        f"{len(ids)} utterances of the annotations are not in cache {str(cache)!r}: {told}; none "
        "was annotated; leave them out, or pass unknown='skip'"
    )
