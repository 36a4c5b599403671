"""Sources that others wrote, as rows to convert: adopted for the while, or read by their library.

`opened_source` picks the way; `LibraryRows` are rows that a library reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.adoptable import Kind, Options, Readable, ReadsArrays, Value
from featcache.adoption.adopt import (
    SAID,
    as_cache,
    check_settings,
    foreign_source,
    kind_of,
    place_of,
    with_way,
)
from featcache.adoption.checks import check_shapes
from featcache.adoption.libraries.mapping import MAPPING, Arrays, arrays_in_memory
from featcache.adoption.libraries.payloads import LOAD_IT
from featcache.adoption.libraries.refused import way_out
from featcache.adoption.libraries.unpacked import unpacked
from featcache.declaration import DeclaredFeature, Features, FeatureStorageConfig
from featcache.errors import AdoptionError, ConfigError, FeatureError
from featcache.extraction.conversion_source import (
    ConversionSource,
    Declared,
    TableRow,
    TableRows,
    declarations_of,
    declared_as,
    table_of,
)
from featcache.format.annotation_columns import Column
from featcache.format.annotations import check_annotations, kinds_of
from featcache.format.index import UNKNOWN
from featcache.format.manifest import ADOPTED
from featcache.interface import Array, Ints
from featcache.reading.generation import Generation
from featcache.reading.opening import CachePath
from featcache.reading.roots import PathOrUrl
from featcache.remote import DEFAULT, RemoteOptions
from featcache.tables.table import FeatureTable

Source = FeatureTable | CachePath | Arrays
_OPTIONS = ("feature", "pattern", "time_axis")


class OpenedReadable(NamedTuple):
    """Arrays that a library reads, and the state of their files: a change tells of another one."""

    readable: Readable
    state: object


@dataclass
class LibraryRows:
    """Rows whose arrays a library reads; each process opens the source itself.

    Args:
        open: opens it; picklable.
        kind: of the source.
        declarations: of all features, by name.
        features: names of those that are read.

    Attributes:
        digest: of the ids, and of the files as they were.
    """

    open: Callable[[], AbstractContextManager[OpenedReadable]]
    kind_name: str
    declarations: Declared
    features: tuple[str, ...]
    digest: str = ""
    complete: bool = True
    _opened: Readable | None = field(default=None, repr=False)
    _closing: ExitStack = field(default_factory=ExitStack, repr=False)
    _numbers: dict[str, int] = field(default_factory=dict, repr=False)
    _last: tuple[int, Mapping[str, NDArray[Any]]] = field(default=(-1, {}), repr=False)

    @property
    def readable(self) -> Readable:
        """The source, opened in this process.

        Raises `AdoptionError` where it is another one than where the rows were made.
        """
        if self._opened is None:
            opened = self._closing.enter_context(self.open())
            digest = _digest(opened)
            if self.digest and digest != self.digest:
                raise AdoptionError("the source has changed since the conversion began; try again")
            self._opened, self.digest = opened.readable, digest
        return self._opened

    @property
    def ids(self) -> Sequence[str]:
        """Id of each row."""
        return self.readable.ids

    def only(self, features: tuple[str, ...]) -> LibraryRows:
        """Return the same rows, with some features."""
        return replace(self, features=features)

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids; -1 for those that are not there."""
        if not self._numbers:
            self._numbers.update((id, number) for number, id in enumerate(self.ids))
        return np.fromiter((self._numbers.get(id, -1) for id in ids), np.int64)

    def stored(self, feature: str) -> DeclaredFeature:
        """Return a declaration of the values of a feature."""
        return self.declarations[feature].to_json()

    def declaration(self, feature: str) -> FeatureStorageConfig:
        """Return a declaration that holds the values of a feature."""
        return self.declarations[feature]

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of a frame, or of an array without a time axis."""
        return self.readable.features[feature].dims

    def lengths(self, feature: str) -> Ints:
        """Return the frames of each row; 1 without a time axis."""
        return self.readable.features[feature].rows

    def read(self, rows: Ints) -> Iterator[TableRow]:
        """Read rows, in this order."""
        readable = self.readable
        for row in rows.tolist():
            values = {name: values[row] for name, values in readable.annotations.items()}
            known = {name: value for name, value in values.items() if value is not None}
            id = readable.ids[row]
            checked = check_annotations(id, known, self.declarations) if known else {}
            yield TableRow(id, dict(self._arrays(row)), checked, UNKNOWN)

    def array(self, row: int, feature: str) -> NDArray[Any]:
        """Read one array."""
        return self._arrays(row)[feature]

    def in_order_of_bytes(self, rows: Ints) -> Ints:
        """Return rows in the order of the source."""
        return np.sort(rows)

    def plain(self) -> Generation | None:
        """Return None: there are no bytes to copy."""
        return None

    def rows_below(self, rows: Ints) -> Ints:
        """Return the rows themselves."""
        return rows

    def annotations(self) -> list[str]:
        """Return the names of the annotations."""
        return list(self.readable.annotations)

    def values(self, annotation: str, rows: Ints) -> Sequence[Value]:
        """Return an annotation of some rows."""
        return self._column(annotation).take(rows)

    def kind(self, annotation: str) -> str:
        """Return the kind of an annotation's values."""
        return self._column(annotation).kind

    def fingerprint(self) -> dict[str, Any]:
        """Return the kind of the source, as of one that is adopted."""
        return {ADOPTED: self.kind_name}

    def made_by(self) -> tuple[dict[str, Any], list[str]]:
        """Return no record, and no generations."""
        return {}, []

    def failed(self) -> list[str]:
        """Return no ids."""
        return []

    def close(self) -> None:
        """Close the source."""
        self._opened = None
        self._closing.close()

    def _arrays(self, row: int) -> Mapping[str, Array]:
        if self._last[0] != row:
            found = self.readable.read(row)
            self._last = row, {name: found[name] for name in self.features}
        return self._last[1]

    def _column(self, name: str) -> Column:
        readable = self.readable
        values = [
            check_annotations(id, {} if value is None else {name: value}, self.declarations)
            for id, value in zip(readable.ids, readable.annotations[name], strict=True)
        ]
        kinds = kinds_of(zip(readable.ids, values, strict=True))
        return Column.of([each.get(name) for each in values], kinds[name])

    def __getstate__(self) -> dict[str, object]:
        closed: dict[str, object] = {
            "_opened": None,
            "_closing": None,
            "_numbers": {},
            "_last": (-1, {}),
        }
        return {**vars(self), **closed}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._closing = ExitStack()


@contextmanager
def opened_source(
    source: Source, beside: Path, settings: Mapping[str, object]
) -> Iterator[FeatureTable | LibraryRows]:
    """Open a cache or a table, or what others wrote, as rows to convert.

    Args:
        source: as `featcache.convert` takes it.
        beside: a directory in which a source may be adopted for the while.
        settings: those of `featcache.adopt`.

    Raises `AdoptionError` for a source that neither can be adopted nor read.
    """
    check_settings(settings)
    if isinstance(source, Mapping) and not isinstance(source, FeatureTable):
        given = _options(settings)
        opening = partial(_in_memory, source, given)
        with _library_rows(opening, MAPPING, settings, by_pattern=True) as rows:
            yield rows
        return
    remote = _remote(settings)
    foreign = foreign_source(source, remote)
    if foreign is None:
        yield table_of(source, remote)
        return
    with ExitStack() as stack:
        packed = foreign
        if isinstance(foreign, Path):
            foreign = stack.enter_context(unpacked(foreign, beside))
        try:
            opened: FeatureTable | LibraryRows = table_of(
                stack.enter_context(as_cache(foreign, beside, settings))
            )
        except AdoptionError as error:
            by_library = _by_library(foreign, packed, settings, error)
            opened = stack.enter_context(by_library)
        yield opened


def declarations_in(source: FeatureTable | LibraryRows) -> Declared:
    """Return the declarations of all features of a source."""
    return source.declarations if isinstance(source, LibraryRows) else declarations_of(source)


def rows_of(
    source: FeatureTable | LibraryRows,
    features: Features | Iterable[str | FeatureStorageConfig] | None,
) -> tuple[ConversionSource, Declared]:
    """Return the rows of a source, and the declarations that they are to be stored by."""
    declared = declared_as(declarations_in(source), features)
    if isinstance(source, LibraryRows):
        return source.only(tuple(declared)), declared
    return TableRows(source, tuple(declared)), declared


def _by_library(
    source: PathOrUrl, packed: PathOrUrl, settings: Mapping[str, object], refused: AdoptionError
) -> AbstractContextManager[LibraryRows]:
    """Open what could not be adopted by its library; raises why it was not where none reads it."""
    try:
        place, what = place_of(source, _remote(settings))
        kind: Kind = kind_of(place, what, cast("str | None", settings.get("kind")))
    except AdoptionError:
        told = str(refused)
        if isinstance(source, Path) and isinstance(packed, Path) and source != packed:
            way = way_out(source, packed)
            told = f"{str(packed)!r} is not read: {way}" if way else told
        raise AdoptionError(f"{told} ({SAID})") from refused
    if not isinstance(kind, ReadsArrays):
        raise AdoptionError(f"{refused} ({SAID})") from refused
    opening = partial(_by_kind, source, kind, _options(settings), _remote(settings))
    by_pattern = getattr(kind, "takes_pattern", False)
    return _library_rows(opening, kind.name, settings, source, by_pattern=by_pattern)


@contextmanager
def _library_rows(
    opening: Callable[[], AbstractContextManager[OpenedReadable]],
    kind: str,
    settings: Mapping[str, object],
    source: PathOrUrl = "",
    *,
    by_pattern: bool,
) -> Iterator[LibraryRows]:
    rows, where = LibraryRows(opening, kind, {}, ()), str(source) or f"source of kind {kind!r}"
    try:
        features, ids = rows.readable.features, rows.readable.ids
        pattern = rows.readable.pattern if by_pattern else None
        check_shapes(where, ids, features, _options(settings), pattern)
        for name, stored in features.items():
            rows.declarations[name] = FeatureStorageConfig(
                name,
                stored.dtype,
                dims=stored.dims,
                time_axis=0 if stored.has_frames else None,
                nonfinite=cast(Any, settings.get("nonfinite", "raise")),
            )
    except (AdoptionError, FeatureError, ConfigError) as error:
        rows.close()
        if kind == MAPPING or isinstance(error, FeatureError):
            raise
        told = str(error) if isinstance(error, AdoptionError) else f"{where}: {error}; {LOAD_IT}"
        raise AdoptionError(f"{with_way(told, source)} ({SAID})") from error
    try:
        yield rows
    finally:
        rows.close()


def _options(settings: Mapping[str, object]) -> Options:
    return Options(**{key: settings[key] for key in _OPTIONS if key in settings})  # type: ignore[arg-type]


def _remote(settings: Mapping[str, object]) -> RemoteOptions:
    return cast(RemoteOptions, settings.get("remote", DEFAULT))


@contextmanager
def _by_kind(
    source: PathOrUrl, kind: ReadsArrays, options: Options, remote: RemoteOptions
) -> Iterator[OpenedReadable]:
    place, what = place_of(source, remote)
    with kind.readable(place, what, options) as readable:
        yield OpenedReadable(readable, [(path, *place.status(path)) for path in readable.files])


@contextmanager
def _in_memory(arrays: Arrays, options: Options) -> Iterator[OpenedReadable]:
    yield OpenedReadable(arrays_in_memory(arrays, options), None)


def _digest(opened: OpenedReadable) -> str:
    made = xxhash.xxh3_64(repr((opened.state, len(opened.readable.ids))).encode())
    for id in opened.readable.ids:
        made.update(id.encode("utf-8", "surrogatepass"))
    return made.hexdigest()
