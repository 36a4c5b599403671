"""`Generation`: a published generation of a cache, open for reading: manifest, index, bytes.

`FeatureReader` (torch), `FeatureTable` and `Cache` (NumPy), and `PartWriter` stand on it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, overload

from numpy.typing import NDArray

from featcache._checks import listed_ids, not_an_id
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    KeyNotFoundError,
    RowError,
    StaleCacheError,
    nearest,
)
from featcache.format.annotation_columns import Column, read_column
from featcache.format.columns import ColumnFile, Strings
from featcache.format.feature_sets import stored_sets
from featcache.format.index import Index, StampColumns, read_index, read_strings
from featcache.format.lock import at_work
from featcache.format.manifest import Manifest, manifest_file, read_kept, read_manifest
from featcache.interface import Ints
from featcache.reading.containers import NO_ROOTS, AdoptedFiles, Containers, Roots
from featcache.reading.feature_arrays import Checks, FeatureArrays, arrays_of
from featcache.reading.verify import raise_damage
from featcache.stats import FeatureStats

# Manifest and columns of a generation, read while others may publish.


def _manifest_of(path: Path, name: str | None, current: Manifest | None = None) -> Manifest:
    """Read the manifest of a generation; that of the current one is what counts of it."""
    current = current or read_manifest(path)
    if name is None or name == current.name:
        return current
    return read_manifest(path, manifest_file(name))


def opened_columns(
    path: Path, mapped: bool, checked: bool, name: str | None, current: Manifest | None
) -> tuple[Manifest, Index, Strings, ColumnFile | None]:
    """Read manifest, index and failed ids, while others may publish.

    The file of columns comes, too: those of annotations are taken out of it when they are needed.
    With `checked`, all of the index is compared with its checksums. None where nothing was
    published yet.
    """
    manifest = _manifest_of(path, name, current)
    if not (manifest.index or manifest.rows or manifest.annotations):
        return manifest, Index.empty(manifest.features), Strings.of([]), None
    while True:
        try:
            file = ColumnFile(path, manifest.index, mapped=mapped, expected=manifest.index_digest)
            break
        except FileNotFoundError as error:
            # others may have published since: the columns of the generation before go then
            newer = _manifest_of(path, name)
            if newer.write_id == manifest.write_id:
                raise CacheError(
                    f"cache {str(path)!r} lacks {error.filename!r}; put it back, or remove "
                    "featcache.json and write the cache again: what is sealed is kept"
                ) from error
            manifest = newer
    with file.until_read(later=bool(manifest.annotations)):
        if checked:
            raise_damage(file.damage())
        index, failed = read_index(file, list(manifest.features)), read_strings(file, "failed")
    for wrong in _misfits(manifest, index):
        raise CorruptCacheError(f"cache {str(path)!r} is damaged: {wrong}")
    return manifest, index, failed, file


def _misfits(manifest: Manifest, index: Index) -> Iterator[str]:
    """Return where an index is not what its manifest says."""
    if len(index) != manifest.rows:
        yield f"{len(index)} of {manifest.rows} rows"
    parts = index.containers.parts
    if len(parts) and not 0 <= int(parts.min()) <= int(parts.max()) < len(manifest.parts):
        yield "its containers are in parts that are not there"
    for name, feature in manifest.features.items():
        if feature["stats"] and manifest.is_collected and name not in index.stats:
            yield f"it has no statistics of {name!r}"


# `Ids`: the utterance ids of numbered rows as a sequence, which holds none of them itself.


class HasIds(Protocol):
    """Rows that have ids, as those of an index or of a table."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, id: object) -> bool: ...
    def id(self, row: int) -> str:
        """Return the id of a row, counted from 0."""
        ...


class Ids(Sequence[str]):
    """The ids of a cache or a table in the order of its rows.

    Taken out of the index when they are asked for: ten million ids cost no memory. Equal to any
    sequence of the same ids; pickled as a list.
    """

    def __init__(self, rows: HasIds) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self._rows.id(each) for each in range(len(self))[row]]
        try:
            return self._rows.id(range(len(self))[row])
        except IndexError:
            raise RowError(f"no row {row}: there are {len(self)} utterances") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        some = ", ".join(map(repr, self[:3]))
        return f"<{len(self)} ids: {some}{', ...' * (len(self) > 3)}>"

    def __reduce__(self) -> tuple[object, ...]:
        return list, (list(self),)


@dataclass(frozen=True)
class Contents:
    """The rows of a generation: of one, or those that all feature sets of a cache have."""

    manifest: Manifest
    index: Index  # of feature sets without containers, which are theirs
    failed: Strings
    features: Mapping[str, FeatureArrays]
    # of each set, those of the rows; None: all
    set_rows: Mapping[str, Ints | None] = field(default_factory=dict)


class Generation:
    """A generation of a cache: the one that is current when it is opened, or an earlier one.

    Reads the manifest and maps the index; containers are opened when their bytes are first read.
    Safe to share between threads and to fork.

    Args:
        path: the directory of its files: the cache's, or that of a feature set.
        contents: its rows.
        containers: the bytes of their arrays.
        file: the columns of the index, where annotations are; None for feature sets, and where
            nothing was published yet.
        mapped: index and containers are mapped into memory.
        check_reads: arrays are compared with their checksums when they are read.
        roots: places of adopted sources by key, where they are not what the cache knows.
        sets: the generations of the feature sets that it is made of, by name; empty for a plain
            cache.
        refused: the errors of features that were made from something else than is expected.
        cache_path: the cache directory, where that is not `path`.
        version: the tag that it was opened by; None: none.

    Attributes:
        set_rows: the rows of each set that are its rows; None where they are all.
    """

    def __init__(
        self,
        path: Path,
        contents: Contents,
        containers: Containers,
        file: ColumnFile | None,
        *,
        mapped: bool = True,
        check_reads: bool = False,
        roots: Roots = NO_ROOTS,
        sets: Mapping[str, Generation] | None = None,
        refused: Mapping[str, StaleCacheError] | None = None,
        cache_path: Path | None = None,
        version: str | None = None,
    ) -> None:
        self.path, self.cache_path, self.version = path, cache_path or path, version
        self.manifest, self.index = contents.manifest, contents.index
        self.failed, self.features = contents.failed, contents.features
        self.set_rows = contents.set_rows
        self.containers = containers
        self.mapped, self.check_reads, self.roots = mapped, check_reads, roots
        self.sets, self.refused = sets or {}, refused or {}
        self._file = file
        self._annotations: dict[str, Column] = {}

    @classmethod
    def at(
        cls,
        path: Path,
        *,
        mapped: bool = True,
        check_reads: bool = False,
        name: str | None = None,
        roots: Roots = NO_ROOTS,
        cache_path: Path | None = None,
        version: str | None = None,
        current: Manifest | None = None,
    ) -> Generation:
        """Open the current generation of a cache, or of a feature set, or that of a `name`.

        With `check_reads` the index is compared with its checksums now. `current` is the manifest,
        where it was read a moment ago.
        """
        manifest, index, failed, file = opened_columns(path, mapped, check_reads, name, current)
        columns = index.containers
        adopted = AdoptedFiles.of(path, manifest.parts, columns, roots)
        containers = Containers.of(path, columns, mapped, adopted, check_reads)
        if check_reads:
            _require_collected(path, [manifest], "check_reads")
        checks = Checks(path, manifest, columns, containers) if check_reads else None
        features = arrays_of(manifest, index, containers, checks)
        contents = Contents(manifest, index, failed, features)
        return cls(
            path,
            contents,
            containers,
            file,
            mapped=mapped,
            check_reads=check_reads,
            roots=roots,
            cache_path=cache_path,
            version=version,
        )

    @classmethod
    def of_sets(
        cls,
        path: Path,
        sets: Mapping[str, Generation],
        contents: Contents,
        refused: Mapping[str, StaleCacheError],
    ) -> Generation:
        """Return feature sets that are open as the one generation of their cache."""
        first = next(iter(sets.values()))
        return cls(
            path,
            contents,
            first.containers,
            None,
            mapped=first.mapped,
            check_reads=first.check_reads,
            roots=first.roots,
            sets=sets,
            refused=refused,
            version=first.version,
        )

    def check_collected(self, needs: str) -> None:
        """Raise `CacheError` where checksums or statistics of adopted parts are not there yet."""
        manifests = [each.manifest for each in self.sets.values() or (self,)]
        _require_collected(self.path, manifests, needs)

    def of_feature(self, feature: str) -> Generation:
        """Return the generation of the set that has a feature; itself, if plain."""
        sets = self.sets.values()
        return next((each for each in sets if feature in each.features), self)

    def in_set(self, feature: str, rows: Ints) -> tuple[Generation, Ints]:
        """Return the generation of the set that has a feature, and rows of it for rows here."""
        for name, each in self.sets.items():
            if feature in each.features:
                of_set = self.set_rows[name]
                return each, rows if of_set is None else of_set[rows]
        return self, rows

    @property
    def stamps(self) -> StampColumns | None:
        """Stamps in row order, `input` and `entry`, 0 where unknown; None if there are none."""
        return self.index.stamps

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the generations that are open: one, or one of each set."""
        return tuple(each.manifest.name for each in self.sets.values() or (self,))

    def annotation(self, name: str) -> Column:
        """Return the column of an annotation: of the first set that has it.

        Raises `KeyNotFoundError` for an unknown one.
        """
        if not isinstance(name, str) or name not in self.manifest.annotations:
            raise KeyNotFoundError(
                f"no annotation {name!r} in cache {str(self.cache_path)!r}",
                hint=lambda: nearest(name, self.manifest.annotations) + self.written_since(),
            )
        for home, each in self.sets.items():
            if name in each.manifest.annotations:
                column, rows = each.annotation(name), self.set_rows[home]
                return column if rows is None else column.view(rows)
        if name not in self._annotations:
            kind = self.manifest.annotations[name].kind
            file = cast(ColumnFile, self._file)  # a set has the annotations of sets
            self._annotations[name] = read_column(file, name, kind, len(self.index))
        return self._annotations[name]

    def file(self, role: str) -> bytes | None:
        """Read the file of a role, "probe" or "made-from"; None if there is none.

        Raises `CorruptCacheError` if it is missing or is not what was written.
        """
        return read_kept(self.path, self.manifest.files, role)

    def arrays(self, feature: str) -> FeatureArrays:
        """Return the arrays of a feature; raises `KeyNotFoundError` for an unknown one."""
        try:
            return self.features[feature]
        except (KeyError, TypeError):  # a list, such as that of ids
            if isinstance(feature, str) and feature in self.refused:
                raise StaleCacheError(str(self.refused[feature])) from None
            raise KeyNotFoundError(
                f"no feature {feature!r} in cache {str(self.cache_path)!r}",
                hint=lambda: nearest(feature, self.features) + self.written_since("open it again"),
            ) from None

    def row(self, id: str) -> int:
        """Return the row of an id; raises `KeyNotFoundError` for an unknown one."""
        row = self.index.find(id) if isinstance(id, str) else -1
        if row < 0:
            raise self.not_found(id)
        return row

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, -1 where there is none.

        Raises `KeyNotFoundError` for what is no list of strings.
        """
        return self.index.find_many(listed_ids(ids))

    def rows(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids; raises `KeyNotFoundError` for an unknown one."""
        listed = listed_ids(ids)
        rows = self.index.find_many(listed)
        if len(rows) and rows.min() < 0:
            raise self.not_found(listed[int(rows.argmin())])
        return rows

    def lengths(self, feature: str, *, ids: Iterable[str] | None = None) -> Ints:
        """Return the frames of all utterances in row order, or of some."""
        arrays = self.arrays(feature)
        if ids is None:
            return arrays.all_lengths.copy()
        lengths = arrays.lengths[self.rows(ids)]
        arrays.check_lengths(lengths)
        return lengths

    def stats(self, feature: str) -> FeatureStats:
        """Return count, mean and variance over all frames of a feature.

        Of all utterances that have it: in a generation of feature sets these may be more than its
        rows. Raises `KeyNotFoundError` if none were collected.
        """
        self.arrays(feature)
        if feature not in self.index.stats:
            declared = self.manifest.features[feature]["stats"]
            what = "call collect() of it once" if declared else "declare it with stats: true"
            raise KeyNotFoundError(
                f"cache {str(self.cache_path)!r} has no statistics of feature {feature!r}; {what}"
            )
        return self.index.stats[feature]

    def close(self) -> None:
        """Release the container files: arrays cannot be read any more."""
        for each in self.sets.values() or (self,):
            each.containers.close()

    def not_found(self, id: str) -> KeyNotFoundError:
        """Return the error for an id that is not there."""
        if not isinstance(id, str):
            return KeyNotFoundError(not_an_id(id))

        def hint() -> str:
            found = self.index.nearest(id)
            if not self.manifest.complete:
                found += f"; it is incomplete, {at_work(self.path) or 'more may come'}"
            return found + self.written_since()

        return KeyNotFoundError(f"no utterance {id!r} in cache {str(self.cache_path)!r}", hint=hint)

    def written_since(self, advice: str = "refresh() it, or open it again") -> str:
        """Say, as the end of a message, that a newer generation is there than the one opened."""
        with suppress(CacheError, OSError):
            sets = [found for _, found in stored_sets(self.path)] if self.sets else []
            stored = sets or [read_manifest(self.path)]
            now = {found.name for found in stored}
            tagged = {name for found in stored for name in found.tags.values()}
            if now.difference(self.names) and not tagged.issuperset(self.names):
                return f"; the cache was written on since it was opened: {advice}"
        return ""


# Arrays of several utterances of a generation in one, padded at the end of the frame axis.


class PaddedFeatures(NamedTuple):
    """Arrays of several utterances in one, padded at the end of the frame axis.

    data: (utterances, longest, *dims), or (utterances, *dims) without a time axis.
    lengths: frames of each utterance, int64; ones without a time axis.
    """

    data: NDArray[Any]
    lengths: Ints


def _require_collected(path: Path, manifests: Iterable[Manifest], needs: str) -> None:
    if not all(manifest.is_collected for manifest in manifests):
        raise CacheError(
            f"cache {str(path)!r} is adopted, and nothing has read all of its bytes yet, as "
            f"{needs} needs: call collect() of the cache once, opened without that"
        )
