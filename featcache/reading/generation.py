"""`Generation`: a published generation of a cache, open for reading: manifest, index, bytes.

`FeatureReader` (torch), `FeatureTable` and `Cache` (NumPy), and `PartWriter` stand on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

from featcache._checks import listed_ids, not_an_id
from featcache.container_files.lock import at_work
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    KeyNotFoundError,
    StaleCacheError,
    nearest,
)
from featcache.format import (
    Column,
    ColumnFile,
    Index,
    Manifest,
    Strings,
    manifest_file,
    read_column,
    read_index,
    read_kept,
    read_manifest,
    remedy,
    stored_sets,
)
from featcache.interface import Ints
from featcache.reading.containers import Containers
from featcache.reading.feature_arrays import Checks, FeatureArrays, arrays_of
from featcache.reading.roots import NO_ROOTS, AdoptedFiles, Roots
from featcache.reading.shell import RemoteCache
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
            expected, size = manifest.index_digest, manifest.sizes.get(manifest.index)
            file = ColumnFile(path, manifest.index, mapped=mapped, expected=expected, size=size)
            break
        except FileNotFoundError as error:
            # others may have published since: the columns of the generation before go then
            newer = _manifest_of(path, name)
            if newer.write_id == manifest.write_id:
                raise CacheError(
                    f"cache {str(path)!r} lacks {error.filename!r}; {remedy(path, manifest.index)}"
                ) from error
            manifest = newer
    with file.until_read(later=bool(manifest.annotations)):
        if checked:
            raise_damage(file.damage())
        index, failed = read_index(file, list(manifest.features)), file.strings("failed")
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


@dataclass(frozen=True)
class Contents:
    """The rows of a generation: of one, or those that all feature sets of a cache have."""

    manifest: Manifest
    index: Index  # of feature sets without containers, which are theirs
    failed: Strings
    features: Mapping[str, FeatureArrays]
    # of each set, those of the rows; None: all
    set_rows: Mapping[str, Ints | None] = field(default_factory=dict)


class OpenSettings(NamedTuple):
    """Settings of an opened cache, with which a copy opens it again."""

    mapped: bool = True
    check_reads: bool = False
    features: tuple[str, ...] | None = None  # of the sets that are wanted; None: all that are named
    version: str | None = None  # a tag; None: the current generation
    names: tuple[str, ...] = ()  # generations that were open before, where they are still there
    roots: Roots = NO_ROOTS  # places of adopted sources, by key
    remote: RemoteCache | None = None  # where it lies, if not here: the path is that of its shell

    @classmethod
    def of(cls, opened: Generation) -> OpenSettings:
        """Return the settings with which the same features of the same generation are opened."""
        features, names = tuple(opened.manifest.features), opened.names
        return opened.settings._replace(features=features, names=names)


ALL = OpenSettings()


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
        settings: with which it is opened.
        sets: the generations of the feature sets that it is made of, by name; empty for a plain
            cache.
        refused: the errors of features that were made from something else than is expected.
        cache_path: the cache directory, where that is not `path`.

    Attributes:
        set_rows: the rows of each set that are its rows; None where they are all.
    """

    def __init__(
        self,
        path: Path,
        contents: Contents,
        containers: Containers,
        file: ColumnFile | None,
        settings: OpenSettings,
        *,
        sets: Mapping[str, Generation] | None = None,
        refused: Mapping[str, StaleCacheError] | None = None,
        cache_path: Path | None = None,
    ) -> None:
        self.path, self.cache_path, self.settings = path, cache_path or path, settings
        self.manifest, self.index = contents.manifest, contents.index
        self.failed, self.features = contents.failed, contents.features
        self.set_rows = contents.set_rows
        self.containers = containers
        self.sets, self.refused = sets or {}, refused or {}
        self._file = file
        self._annotations: dict[str, Column] = {}

    @classmethod
    def at(
        cls,
        path: Path,
        settings: OpenSettings = ALL,
        *,
        name: str | None = None,
        cache_path: Path | None = None,
        current: Manifest | None = None,
    ) -> Generation:
        """Open the current generation of a cache, or of a feature set, or that of a `name`.

        With `check_reads` the index is compared with its checksums now. `current` is the manifest,
        where it was read a moment ago.
        """
        mapped, check_reads = settings.mapped, settings.check_reads
        manifest, index, failed, file = opened_columns(path, mapped, check_reads, name, current)
        columns = index.containers
        adopted = AdoptedFiles.of(path, manifest.parts, columns, settings.roots)
        if adopted is not None:
            settings = settings._replace(roots=replace(settings.roots, remote=adopted.options))
        files = None if settings.remote is None else settings.remote.files(path, columns)
        containers = Containers(path, columns, mapped, adopted, check_reads, files)
        if check_reads:
            _require_collected(path, [manifest], "check_reads")
        remote = settings.remote
        checks = Checks(path, manifest, columns, containers, remote) if check_reads else None
        features = arrays_of(manifest, index, containers, checks)
        contents = Contents(manifest, index, failed, features)
        return cls(path, contents, containers, file, settings, cache_path=cache_path)

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
            path, contents, first.containers, None, first.settings, sets=sets, refused=refused
        )

    @property
    def place(self) -> str:
        """Where the cache lies: its directory, or its URL in an object store."""
        remote = self.settings.remote
        return str(self.cache_path) if remote is None else remote.place.url

    @property
    def container_bytes(self) -> int:
        """Bytes of all its containers, those of all sets together."""
        opened = self.sets.values() or (self,)
        return sum(int(each.index.containers.sizes.sum()) for each in opened)

    def being_read(self, thread: int) -> str | None:
        """Name the file and the bytes that a thread reads for a batch; None for nothing."""
        opened = self.sets.values() or (self,)
        return next(filter(None, (each.containers.being_read(thread) for each in opened)), None)

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
        """Return the end of a message where a newer generation is there than the one opened."""
        with suppress(CacheError, OSError):
            sets = [found for _, found in stored_sets(self.path)] if self.sets else []
            stored = sets or [read_manifest(self.path)]
            now = {found.name for found in stored}
            tagged = {name for found in stored for name in found.tags.values()}
            if now.difference(self.names) and not tagged.issuperset(self.names):
                return f"; the cache was written on since it was opened: {advice}"
        return ""


def _require_collected(path: Path, manifests: Iterable[Manifest], needs: str) -> None:
    if not all(manifest.is_collected for manifest in manifests):
        raise CacheError(
            f"cache {str(path)!r} is adopted, and nothing has read all of its bytes yet, as "
            f"{needs} needs: call collect() of the cache once, opened without that"
        )
