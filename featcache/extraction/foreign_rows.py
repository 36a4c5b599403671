"""Sources that others wrote, as rows to convert: adopted for the while, or read by their library.

`opened_source` picks the way; `LibraryRows` are rows that a library reads, or arrays in memory.
Compressed files, such as `.ark.gz` and `.tar.gz`, are unpacked for the while of one call.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import xxhash

from featcache.adoptable import (
    Kind,
    Options,
    Readable,
    ReadsArrays,
    Value,
    data_files,
    frames_first,
)
from featcache.adoptable.names import EACH
from featcache.adoption.adopt import (
    NAME,
    SAID,
    as_cache,
    check_settings,
    foreign_source,
    kind_of,
    place_of,
    with_way,
)
from featcache.adoption.checks import check_shapes
from featcache.adoption.libraries.named_arrays import Arranged, Content
from featcache.adoption.libraries.payloads import LOAD_IT, LoadedArrays
from featcache.adoption.libraries.refused import way_out
from featcache.container_files import sync_directory, sync_file
from featcache.declaration import DeclaredFeature, Features, FeatureStorageConfig
from featcache.errors import AdoptionError, ConfigError, FeatureError, describe
from featcache.extraction.conversion_source import (
    ConversionSource,
    Declared,
    TableRow,
    TableRows,
    declarations_of,
    declared_as,
    table_of,
)
from featcache.format import ADOPTED, UNKNOWN, Column, as_id, check_annotations, kinds_of
from featcache.interface import Array, Ints
from featcache.reading import CachePath, Generation, PathOrUrl
from featcache.remote import DEFAULT, RemoteOptions
from featcache.tables import FeatureTable

MAPPING = "mapping"
Arrays = Mapping[str, object]  # of an id: an array or a tensor, or such by feature
Source = FeatureTable | CachePath | Arrays | Iterable[tuple[str, object]]
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
    _last: tuple[int, Mapping[str, Array]] = field(default=(-1, {}), repr=False)

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

    def array(self, row: int, feature: str) -> Array:
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

    def fingerprint(self) -> dict[str, object]:
        """Return the kind of the source, as of one that is adopted."""
        return {ADOPTED: self.kind_name}

    def made_by(self) -> tuple[dict[str, object], list[str]]:
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
    if isinstance(source, list | tuple | Iterator):
        source = _by_id(source)
    if isinstance(source, Mapping) and not isinstance(source, FeatureTable):
        opening = partial(_in_memory, source, _options(settings))
        with _library_rows(opening, MAPPING, settings, by_pattern=True) as rows:
            yield rows
        return
    remote = _remote(settings)
    given = cast("FeatureTable | CachePath", source)
    foreign = foreign_source(given, remote)
    if foreign is None:
        yield table_of(given, remote)
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


def _by_id(pairs: Iterable[object]) -> dict[str, object]:
    """Return the mapping of pairs of an id and its arrays."""
    found: dict[str, object] = {}
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(
                f"a source is a path, a table, a mapping of ids, or pairs of an id and its arrays; "
                f"number {number} is {type(pair).__name__}"
            )
        id, arrays = pair
        if id in found:
            of_id = [*found].index(id)
            raise AdoptionError(
                f"the pairs have utterance {id!r} twice: as number {of_id} and as number {number}; "
                "take one away"
            )
        found[id] = arrays
    return found


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


# Compressed files, unpacked for the while of one call.

AT_ONCE = 1 << 20  # bytes
_BROKEN = (OSError, EOFError, lzma.LZMAError, ValueError)
# by suffix: what is left of the name, and what opens it
_OPENS: dict[str, tuple[str, Callable[[Path], IO[bytes]]]] = {
    ".tgz": (".tar", gzip.open),  # type: ignore[dict-item]
    ".gz": ("", gzip.open),  # type: ignore[dict-item]
    ".bz2": ("", bz2.open),
    ".xz": ("", lzma.open),
}


@contextmanager
def unpacked(source: Path, beside: Path) -> Iterator[Path]:
    """Unpack the files of a source into a folder in `beside`; others stay as they are.

    A file that was unpacked by a call that was killed is not unpacked again. Everything is removed
    at the end, unless anything is raised: the same call goes on with it.

    Raises `AdoptionError` where only some files are compressed, one is damaged, or two unpack
    to one name.
    """
    packed = _packed(source)
    if not packed:
        yield source
        return
    is_new, done = not beside.exists(), False
    root = source if source.is_dir() else source.parent
    folder = beside / f"{NAME}-{_state(root, packed)}"
    try:
        for path in packed:
            _unpack(root / path, folder / _name(path))
        yield folder / _name(packed[0]) if source.is_file() else folder
        done = True
    except AdoptionError as error:
        raise AdoptionError(str(error).replace(str(folder), str(root))) from error
    finally:
        if done or not any(folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
            if is_new:
                with suppress(OSError):  # where anything was written
                    beside.rmdir()


def _packed(source: Path) -> list[str]:
    """Return the compressed files of a source that no kind takes as they are."""
    place, what = place_of(source)
    try:
        first = [what] if what else data_files(place, 1)
        if not first or not first[0].lower().endswith(tuple(_OPENS)):
            return []
        kind_of(place, what, None)
    except AdoptionError:
        paths = [what] if what else data_files(place, 1 << 62)
        plain = [path for path in paths if not path.lower().endswith(tuple(_OPENS))]
        if plain:
            raise AdoptionError(
                f"{place.name!r} holds compressed files and others, such as {plain[0]!r}; name "
                "those of one kind by a pattern with '*'"
            ) from None
        _check_names(place.name, paths)
        return paths
    return []  # such as cuts.jsonl.gz


def _check_names(source: str, packed: Sequence[str]) -> None:
    by_name: dict[str, str] = {}
    for path in packed:
        first = by_name.setdefault(_name(path), path)
        if first != path:
            raise AdoptionError(
                f"{first!r} and {path!r} of {source!r} both unpack to {_name(path)!r}; remove one, "
                "or name the others by a pattern with '*'"
            )


def _name(path: str) -> str:
    suffix = next(end for end in _OPENS if path.lower().endswith(end))
    return path[: -len(suffix)] + _OPENS[suffix][0]


def _state(root: Path, paths: Sequence[str]) -> str:
    """Return a digest of files as they are now."""
    each = ((path, (root / path).stat()) for path in paths)
    state = [(path, status.st_size, status.st_mtime_ns) for path, status in each]
    return xxhash.xxh3_64_hexdigest(repr(state).encode())


def _unpack(path: Path, into: Path) -> None:
    """Unpack a file, unless that was done; what has its name is durable and whole."""
    if into.exists():
        return
    into.parent.mkdir(parents=True, exist_ok=True)
    partly = into.with_name(f".{into.name}.{os.getpid()}")  # hidden: no data if this is killed
    try:
        with _OPENS[path.suffix.lower()][1](path) as packed, partly.open("wb") as plain:
            shutil.copyfileobj(packed, plain, AT_ONCE)
            plain.flush()
            sync_file(plain)
    except _BROKEN as error:
        partly.unlink(missing_ok=True)
        raise AdoptionError(f"{str(path)!r} cannot be unpacked: {describe(error)}") from error
    sync_directory(into.parent)
    partly.replace(into)
    sync_directory(into.parent)


# Arrays in memory, or loaded when they are asked for: a mapping of ids.


def arrays_in_memory(arrays: Arrays, options: Options) -> Readable:
    """Return the arrays of a mapping by id, or by id and feature; a pattern says it otherwise.

    Each value is looked up once for its shape, and again when it is stored.
    """
    if not arrays:
        raise AdoptionError("the mapping holds no utterance")
    keys = [*arrays]
    contents = []
    for key in keys:
        if not isinstance(id := as_id(key), str):
            raise AdoptionError(f"the mapping has key {key!r}; ids are text")
        held = LoadedArrays(arrays[key], _where(key))
        contents.append(Content(id, id, held.arrays(), held.values()))
    named = replace(options, pattern=options.pattern or EACH)
    arranged = Arranged.of("the mapping", contents, named, one=False)

    def read(number: int) -> dict[str, Array]:
        found = {}
        for name, places in arranged.features.items():
            each = places[number]
            key = keys[each.file]
            array = LoadedArrays(arrays[key], _where(key)).read(each.key)
            found[name] = array.transpose(frames_first(array.shape, options.time_axis))
        return found

    return Readable([], arranged.ids, arranged.stored(options), read, arranged.annotations)


def _where(key: object) -> str:
    return f"the mapping's {key!r}"
