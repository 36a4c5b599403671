"""Salvage of a damaged cache: what is lost and what is intact, part by part, as values.

Here everything is read and nothing written. `verify` finds the damage, and tells it in sentences.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.container_files import Pages
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheError
from featcache.format import (
    COLUMNS,
    FEATURE_COLUMNS,
    PARTS,
    PREFIX,
    SEAL,
    Column,
    ColumnFile,
    FileSize,
    Index,
    Manifest,
    PartEntry,
    Restamps,
    SealedPart,
    StampColumns,
    Tombstones,
    hash_of,
    kept_manifests,
    manifest_file,
    open_within,
    page_count,
    part_directories,
    read_index,
    read_manifest,
    read_part,
    read_stamps,
    read_whole_column,
    sealed_parts,
)
from featcache.interface import Ints
from featcache.reading.containers import Containers
from featcache.reading.roots import AdoptedFiles, Roots, roots_of
from featcache.reading.verify import (
    PageDamage,
    Tell,
    has_checksum,
    nobody,
    pages_under,
    rows_on_pages,
    unless_damaged,
    wrong_pages,
)
from featcache.registry import RAW

_NONE: Ints = np.empty(0, np.int64)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LostArray:
    """An array of which not all bytes are what was written, so that its utterance is lost.

    Attributes:
        id: the utterance.
        feature: the feature.
        container: the file within the cache, or of an adopted source; "" where nothing says which.
        pages: the damaged pages of that file on which the array lies, counted from 0.
    """

    id: str
    feature: str
    container: str
    pages: tuple[int, ...]


# The columns of an index, also where some of them are damaged: what they say of an array is right
# where its bytes have the checksum that they say, too.

IDS = {"id_ends", "id_bytes", "hashes", "hash_rows"}


@dataclass(frozen=True)
class IndexColumns:
    """An index as it can be read.

    Attributes:
        index: its columns.
        wrong: the names of those that are not what was written.
        pages: in the index of a part the checksums of the pages of each container, if they are.
        file: its path within the cache.
        digest: what vouches for it; None: nothing but its own footer.
    """

    index: Index
    wrong: frozenset[str]
    pages: list[Pages] | None
    file: str
    digest: str | None

    @property
    def annotations(self) -> dict[str, str]:
        """The kinds of the annotations whose columns are whole, by name."""
        lost = {each.removeprefix(PREFIX).rpartition("/")[0] for each in self.wrong}
        return {name: kind for name, kind in self.index.annotations.items() if name not in lost}

    @property
    def stamps(self) -> StampColumns | None:
        """The stamps of all rows; None where there are none, or they are damaged."""
        return None if self.wrong & {*StampColumns._fields} else self.index.stamps

    def annotation(self, cache: Path, name: str) -> Column:
        """Read an annotation of all rows."""
        with ColumnFile(cache, self.file, expected=self.digest) as file:
            return read_whole_column(file, name, self.index.annotations[name], len(self.index))

    def rows_of(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, -1 for all of them where damage hides them."""
        return np.full(len(ids), -1) if self.wrong & IDS else self.index.find_many(ids)


def columns_of(
    cache: Path,
    file: str,
    digest: str | None,
    features: Sequence[str],
    size: FileSize | None = None,
) -> IndexColumns | None:
    """Read a file of columns; None if it is not there, or not even its footer is right."""
    with unless_damaged(), ColumnFile(cache, file, expected=digest, size=size) as columns:
        wrong = frozenset(columns.damaged())
        index, pages = read_index(columns, features), None
        if "pages" in columns and not wrong & {"pages", "page_ends"}:
            ends = columns.column("page_ends", np.int64)
            pages = np.split(columns.column("pages", np.uint64), ends[1:-1])
        return IndexColumns(index, wrong, pages, file, digest)
    return None


@dataclass(frozen=True)
class Told:
    """The rows of a part that count, as an index tells of them: its own, or a generation's.

    Attributes:
        cache: the cache directory.
        columns: the index, whose containers have the sizes that they have now.
        rows: the rows of the index that count, ascending.
        directory: within the cache, the one that paths of containers are relative to; "": itself.
        adopted: those of the containers that lie elsewhere.
    """

    cache: Path
    columns: IndexColumns
    rows: Ints
    directory: str
    adopted: AdoptedFiles | None

    @classmethod
    def of(
        cls,
        cache: Path,
        columns: IndexColumns,
        rows: Ints,
        directory: str,
        parts: Sequence[PartEntry],
        roots: Roots,
    ) -> Told:
        """Look at the containers of an index, which belong to `parts`."""
        containers = columns.index.containers
        adopted = AdoptedFiles.of(cache, parts, containers, roots)
        told = cls(cache, columns, rows, directory, adopted)
        sizes = containers.sizes.copy()
        for number in range(len(sizes)):
            if adopted is None or number not in adopted:
                descriptor = told.open(number)
                sizes[number] = 0 if descriptor is None else os.fstat(descriptor).st_size
                if descriptor is not None:
                    os.close(descriptor)
        index = replace(columns.index, containers=replace(containers, sizes=sizes))
        return replace(told, columns=replace(columns, index=index))

    @property
    def index(self) -> Index:
        """The index."""
        return self.columns.index

    @property
    def is_own(self) -> bool:
        """Whether the index is that of the part itself."""
        return self.directory != ""

    def containers(self) -> Containers:
        """Return the bytes of its containers, not mapped: the disk may not give them all."""
        root = self.cache / self.directory
        return Containers(root, self.index.containers, mapped=False, adopted=self.adopted)

    def open(self, container: int) -> int | None:
        """Open a container, and return its descriptor; None if it is not there, or another one."""
        with unless_damaged():
            if self.adopted is not None and container in self.adopted:
                return self.adopted.open(container)[0]
            path = self.columns.index.containers.path(container)
            return open_within(self.cache / self.directory, path)
        return None

    def file(self, container: int) -> str:
        """Return the path of a container within the cache, or that of an adopted one."""
        if self.adopted is not None and container in self.adopted:
            return self.adopted.path(container)
        path = self.index.containers.path(container)
        return f"{self.directory}/{path}" if self.is_own else path

    def is_suspect(self, feature: str) -> bool:
        """Whether a column is damaged that says which bytes are an array of a feature."""
        named = {"id_ends", "id_bytes", *(f"{feature}.{what}" for what in FEATURE_COLUMNS)}
        return any(each in named or each.startswith("container_") for each in self.columns.wrong)

    def named_rows(self) -> Ints:
        """Return the rows that count whose ids have a hash that the index has."""
        if not self.columns.wrong & {"id_ends", "id_bytes"}:
            return self.rows
        hashes = {*self.index.hashes.tolist()}
        ends, data = self.index.ids.ends, self.index.ids.data
        good = [hash_of(data[ends[row] : ends[row + 1]].tobytes()) in hashes for row in self.rows]
        named: Ints = self.rows[np.array(good, bool)]
        return named


# A part of a generation: its files compared, and its rows that are intact.


@dataclass(frozen=True)
class PartDamage:
    """A part as a generation has it, compared with what was written.

    Attributes:
        entry: that of the generation's manifest.
        sealed: the part; None where its seal cannot be read.
        files: paths of its damaged files of columns, and of its seal.
        saved: the rows that are intact, by the index that tells of them.
        lost: the arrays that are damaged.
        elsewhere: damaged pages without any of these.
    """

    entry: PartEntry
    sealed: SealedPart | None
    files: list[str]
    saved: list[tuple[Told, Ints]]
    lost: list[LostArray]
    elsewhere: list[PageDamage]

    @property
    def is_whole(self) -> bool:
        """Whether all of it is what was written."""
        return not (self.files or self.lost or self.elsewhere)

    @property
    def count(self) -> int:
        """Number of utterances that are saved."""
        return sum(len(rows) for _, rows in self.saved)

    @property
    def ids(self) -> Iterator[str]:
        """The ids of the utterances that are saved."""
        return _ids(self.saved)


class PartReader:
    """Compares the parts of a generation with what was written.

    Args:
        cache: the cache directory.
        manifest: that of the generation.
        columns: those of its index; None where these cannot be read.
        roots: places of adopted sources that count in place of those that the cache knows.
        tell: called with the bytes of containers that were read, again and again.
    """

    def __init__(
        self,
        cache: Path,
        manifest: Manifest,
        columns: IndexColumns | None,
        roots: Roots,
        tell: Tell = nobody,
    ) -> None:
        self._cache = cache
        self._manifest = manifest
        self._columns = columns
        self._roots = roots
        self._tell = tell
        self._features: Mapping[str, FeatureStorageConfig] = manifest.declared

    def read(self, entry: PartEntry) -> PartDamage:
        """Compare a part, which the generation's manifest names, or only its seal."""
        self._check_source(entry)
        sealed, own, files = self._own(entry)
        sure = own is not None and not any(map(own.is_suspect, self._features))
        told = [own] if own is not None else []
        if not sure and self._columns is not None and entry in self._manifest.parts:
            told.append(self._of_generation(self._columns, entry))
        saved: list[tuple[Told, Ints]] = []
        damaged: dict[tuple[str, str], LostArray] = {}
        elsewhere: list[PageDamage] = []
        for each in told:
            rows = each.named_rows()
            wrong = self._wrong_pages(each, entry)
            by_feature = {name: self._damaged(each, name, rows, wrong) for name in self._features}
            good = np.setdiff1d(rows, np.concatenate([_NONE, *by_feature.values()]))
            if saved:
                seen = {*_ids(saved)}
                good = good[np.array([id not in seen for id in each.index.ids.take(good)], bool)]
            saved.append((each, good))
            for name, some in by_feature.items():
                for id, row in zip(each.index.ids.take(some), some.tolist(), strict=True):
                    damaged.setdefault((id, name), self._lost(each, id, name, row, wrong))
            elsewhere += _elsewhere(each, by_feature, wrong)
        intact = {*_ids(saved)} if damaged else set()
        lost = [each for (id, _), each in damaged.items() if id not in intact]
        return PartDamage(entry, sealed, files, saved, lost, elsewhere)

    def _check_source(self, entry: PartEntry) -> None:
        """Refuse a part whose source is not there at all: it may only be mounted elsewhere."""
        for root in filter(None, roots_of(self._cache, [entry], self._roots)):
            if isinstance(root.path, str):
                raise CacheError(
                    f"cache {str(self._cache)!r}: the adopted source {root.key!r} lies behind a "
                    f"URL, {root.path}, and is not repaired, since a store that is not reached "
                    "looks like one whose objects are gone: delete the utterances that verify "
                    "names, or adopt it again (overwrite=True)"
                )
            if root.path is None or not root.path.is_dir():
                raise CacheError(
                    f"cache {str(self._cache)!r}: the adopted source {root.key!r} is not there"
                    f"{'' if root.path is None else f', at {str(root.path)!r}'}: mount it, or open "
                    f"the cache with roots={{{root.key!r}: <its directory>}}, and repair it then"
                )

    def _own(self, entry: PartEntry) -> tuple[SealedPart | None, Told | None, list[str]]:
        """Return a part's seal, what its columns say of its rows, and which of these are damaged.

        What they say is None if it cannot tell which rows count.
        """
        directory, files = f"{PARTS}/{entry.name}", list[str]()
        sealed = None
        with unless_damaged():
            sealed = read_part(self._cache, entry.name)
        if sealed is not None and sealed.entry.digest == entry.digest:
            sealed = replace(sealed, entry=entry)
        else:
            sealed = None
            files.append(f"{directory}/{SEAL}")
        digest = None if sealed is None else sealed.columns
        columns = columns_of(self._cache, f"{directory}/{COLUMNS}", digest, [*self._features])
        if columns is None or columns.wrong:
            files.append(f"{directory}/{COLUMNS}")
        stones, stamps = entry.tombstones, None if columns is None else columns.stamps
        left_out, wrong = self._beside(entry, stones, lambda file: file.column("rows", np.int64))
        files += wrong
        if entry.stamps:
            stamps, wrong = self._beside(entry, entry.stamps, read_stamps)
            files += wrong
        if columns is None or len(columns.index) != entry.rows or (stones and left_out is None):
            return sealed, None, files
        index = replace(columns.index, stamps=stamps)
        columns = replace(columns, index=index, wrong=columns.wrong - {*StampColumns._fields})
        rows = np.setdiff1d(np.arange(entry.rows), _NONE if left_out is None else left_out)
        told = Told.of(self._cache, columns, rows, directory, [entry], self._roots)
        return sealed, told, files

    def _beside(
        self,
        entry: PartEntry,
        beside: Tombstones | Restamps | None,
        read: Callable[[ColumnFile], Value | None],
    ) -> tuple[Value | None, list[str]]:
        """Read a file beside the index; None, and its path, if it is not what was written."""
        if beside is None:
            return None, []
        path = f"{PARTS}/{entry.name}/{beside.file}"
        with unless_damaged(), ColumnFile(self._cache, path, expected=beside.digest) as file:
            if not file.damaged():
                return read(file), []
        return None, [path]

    def _of_generation(self, columns: IndexColumns, entry: PartEntry) -> Told:
        """Return what the index of the generation says of a part's rows.

        Rows without any bytes are those of any part: here of one that needs them, if the others do
        not name them.
        """
        index, parts = columns.index, self._manifest.parts
        mine = np.flatnonzero(index.containers.parts == parts.index(entry))
        counts, empty = np.zeros(len(index), bool), np.ones(len(index), bool)
        for each in index.features.values():
            first, last = each.first[:-1], each.first[1:]
            rows = np.flatnonzero((first >= 0) & (last > first) & (last <= len(each.container)))
            empty[rows] = False
            counts[rows] |= np.isin(each.container[first[rows]], mine)
        if empty.any():
            others = [self._ids_of(part) for part in parts if part is not entry]
            known = set[str]().union(*others)
            rows = np.flatnonzero(empty)
            counts[rows] = [id not in known for id in index.ids.take(rows)]
        rows = np.flatnonzero(counts)
        return Told.of(self._cache, columns, rows, "", parts, self._roots)

    def _ids_of(self, entry: PartEntry) -> set[str]:
        columns = columns_of(self._cache, f"{PARTS}/{entry.name}/{COLUMNS}", None, [])
        return {*columns.index.ids} if columns and not columns.wrong & IDS else set()

    def _wrong_pages(self, told: Told, entry: PartEntry) -> dict[int, Ints] | None:
        """Return the damaged pages of containers by number; None where these cannot be told."""
        known, collected = told.columns.pages, entry.is_collected
        if known is None or not told.is_own:
            return None
        wrong: dict[int, Ints] = {}
        for number in range(len(told.index.containers)):
            pages = known[number] if number < len(known) else np.empty(0, np.uint64)
            if len(some := self._wrong_of(told, number, pages, collected)):
                wrong[number] = some
        return wrong

    def _wrong_of(self, told: Told, number: int, pages: Pages, collected: bool) -> Ints:
        descriptor = told.open(number)
        if descriptor is None:  # none of it counts, be it empty
            size = int(told.index.containers.sizes[number])
            return np.arange(max(len(pages), page_count(size), 1))
        with os.fdopen(descriptor, "rb") as file:
            if not collected:
                return _NONE
            more = np.arange(len(pages), page_count(os.fstat(descriptor).st_size))
            return np.append(wrong_pages(file.fileno(), pages, self._tell), more)

    def _damaged(self, told: Told, name: str, rows: Ints, wrong: Mapping[int, Ints] | None) -> Ints:
        """Return those of some rows of which a feature's array is damaged, ascending."""
        columns, containers = told.index.features[name], told.containers()
        if wrong is not None and not told.is_suspect(name):
            on = [rows_on_pages(columns, number, pages) for number, pages in wrong.items()]
            rows = np.intersect1d(rows, np.concatenate([_NONE, *on]))
        fits = self._fits(told, name, rows)
        held = (has_checksum(containers, columns, row) for row in rows.tolist())
        return rows[[not each for each in (fits & np.fromiter(held, bool, len(rows)))]]

    def _fits(self, told: Told, name: str, rows: Ints) -> NDArray[np.bool_]:
        """Whether the lengths of some rows can be right, where the column of lengths is damaged."""
        columns, feature = told.index.features[name], self._features[name]
        if not told.columns.wrong & {f"{name}.{what}" for what in ("rows", "block_rows", "skip")}:
            return np.ones(len(rows), bool)
        if feature.codec != RAW:  # the number of bytes does not tell it
            return np.zeros(len(rows), bool)
        ends = np.append(0, np.cumsum(columns.nbytes))
        first = np.clip(columns.first, 0, len(columns.nbytes))
        row_bytes = feature.spec(self._manifest.dims[name]).row_bytes
        fits: NDArray[np.bool_] = (
            ends[first[rows + 1]] - ends[first[rows]] == columns.rows[rows] * row_bytes
        )
        return fits

    def _lost(
        self, told: Told, id: str, name: str, row: int, wrong: Mapping[int, Ints] | None
    ) -> LostArray:
        """Return where a damaged array lies, as far as that can be told: in the first such file."""
        if not told.is_suspect(name):
            columns = told.index.features[name]
            extents = slice(int(columns.first[row]), int(columns.first[row + 1]))
            for container in dict.fromkeys(columns.container[extents].tolist()):
                pages = pages_under(columns, row, container)
                if wrong is not None:
                    pages = np.intersect1d(pages, wrong.get(container, _NONE))
                if len(pages):
                    return LostArray(id, name, told.file(container), tuple(pages.tolist()))
        return LostArray(id, name, "", ())


def _ids(saved: Iterable[tuple[Told, Ints]]) -> Iterator[str]:
    for told, rows in saved:
        yield from told.index.ids.take(rows)


def _elsewhere(
    told: Told, by_feature: Mapping[str, Ints], wrong: Mapping[int, Ints] | None
) -> Iterator[PageDamage]:
    """Yield the damaged pages on which none of the arrays lies."""
    features = told.index.features
    arrays = [(features[name], row) for name, rows in by_feature.items() for row in rows.tolist()]
    for number, pages in (wrong or {}).items():
        hit = [pages_under(columns, row, number) for columns, row in arrays]
        if len(rest := np.setdiff1d(pages, np.concatenate([_NONE, *hit]))):
            yield PageDamage(told.file(number), tuple(rest.tolist()), ())


# A cache, or one feature set of it: its current generation, and those that have tags.


@dataclass
class GenerationDamage:
    """A generation of a cache, or of a feature set, compared with what was written.

    Attributes:
        manifest: its manifest.
        columns: its index; None where it cannot be read.
        parts: all its parts; of the current generation also those that are sealed since.
        files: paths of other files that are damaged: of roles.
    """

    manifest: Manifest
    columns: IndexColumns | None
    parts: list[PartDamage]
    files: list[str]

    @classmethod
    def of(
        cls,
        cache: Path,
        manifest: Manifest,
        parts: Sequence[PartEntry],
        roots: Roots,
        tell: Tell = nobody,
    ) -> GenerationDamage:
        """Compare a generation of some parts."""
        columns = None
        if manifest.index:
            names = list(manifest.features)
            size = manifest.sizes.get(manifest.index)
            columns = columns_of(cache, manifest.index, manifest.index_digest, names, size)
        reader = PartReader(cache, manifest, columns, roots, tell)
        files = {**manifest.files, **manifest.building_files}
        wrong = [path for path, digest in files.items() if not _has_digest(cache, path, digest)]
        return cls(manifest, columns, [*map(reader.read, parts)], wrong)

    @property
    def has_index(self) -> bool:
        """Whether its index is what was written."""
        return not self.manifest.index or (self.columns is not None and not self.columns.wrong)

    @property
    def damaged(self) -> list[PartDamage]:
        """The parts that are damaged."""
        return [part for part in self.parts if not part.is_whole]

    @property
    def is_whole(self) -> bool:
        """Whether all of it is what was written."""
        return self.has_index and not self.files and not self.damaged


@dataclass
class CacheDamage:
    """A cache, or a feature set, compared with what was written.

    Attributes:
        path: its directory.
        current: the current generation.
        tagged: earlier ones that tags name, by their names.
        manifests: paths of damaged or missing manifests of generations.
        replaced: names of parts that others take the place of with the next generation.
        strays: names of parts that no manifest names, and whose seals are damaged.
        left: sentences about damage that only a person can mend.
    """

    path: Path
    current: GenerationDamage
    tagged: dict[str, GenerationDamage]
    manifests: list[str]
    replaced: set[str]
    strays: list[str]
    left: list[str]

    @classmethod
    def of(cls, cache: Path, manifest: Manifest, roots: Roots, tell: Tell = nobody) -> CacheDamage:
        """Compare all files of a cache with what was written."""
        sealed, strays = _sealed_now(cache, manifest)
        replaced = {*manifest.replaced}.union(*(part.header.replaces for part in sealed))
        known = {entry.name for entry in manifest.parts}
        new = [part.entry for part in sealed if part.entry.name not in known]
        tags = sorted({*manifest.tags.values()} - {manifest.name})
        kept = {*filter(None, (manifest.name, manifest.previous)), *kept_manifests(cache)} - {*tags}
        manifests = [
            manifest_file(name)
            for name in sorted(kept)
            if not _is_kept(cache, name, index=name == manifest.previous)
        ]
        tagged, left = {}, []
        for name in tags:
            try:
                of_tag = read_manifest(cache, manifest_file(name))
            except CacheError as error:
                named = ", ".join(repr(tag) for tag, each in manifest.tags.items() if each == name)
                left.append(f"the generation of tag {named} cannot be read: {error}; or untag it")
                continue
            tagged[name] = GenerationDamage.of(cache, of_tag, of_tag.parts, roots, tell)
            known.update(part.name for part in of_tag.parts)
        strays = [name for name in strays if name not in known]
        parts = [*manifest.parts, *new]
        current = GenerationDamage.of(cache, manifest, parts, roots, tell)
        return cls(cache, current, tagged, manifests, replaced, strays, left)

    @property
    def generations(self) -> list[GenerationDamage]:
        """The current generation, and those that have tags."""
        return [self.current, *self.tagged.values()]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged that can be mended."""
        generations = self.generations
        return not (self.manifests or self.strays) and all(each.is_whole for each in generations)

    @property
    def counting(self) -> list[PartDamage]:
        """The parts that count, without those that others take the place of."""
        return [part for part in self.current.parts if part.entry.name not in self.replaced]

    @property
    def damaged(self) -> dict[str, PartDamage]:
        """The damaged parts of all generations, by name; as the current one has them, if it has."""
        found = (part for each in reversed(self.generations) for part in each.damaged)
        return {part.entry.name: part for part in found}

    @property
    def files(self) -> list[str]:
        """Paths of damaged and missing files that are no containers."""
        generations = self.generations
        indexes = [each.manifest.index for each in generations if not each.has_index]
        roles = [path for each in generations for path in each.files]
        parts = [path for part in self.damaged.values() for path in part.files]
        strays = [f"{PARTS}/{name}/{SEAL}" for name in self.strays]
        return [*dict.fromkeys((*indexes, *self.manifests, *roles, *parts, *strays))]

    def aside(self) -> list[str]:
        """Return the paths of damaged parts, and of other damaged files, that are there."""
        parts = [f"{PARTS}/{name}" for name in (*self.damaged, *self.strays)]
        others = [path for path in self.files if not path.startswith(f"{PARTS}/")]
        return [path for path in (*parts, *others) if (self.path / path).exists()]

    def ids(self) -> Iterator[str]:
        """Iterate over the ids of the utterances that are saved."""
        for part in self.counting:
            yield from part.ids

    def lost(self) -> Iterator[LostArray]:
        """Iterate over the arrays that are lost, also those that only tags name."""
        damaged = [part for each in self.generations for part in each.damaged if part.lost]
        copied = {*self.ids()} if any(part.entry.name in self.replaced for part in damaged) else {}
        for part in damaged:
            yield from (each for each in part.lost if each.id not in copied)

    @property
    def unnamed(self) -> int:
        """Number of utterances of the current generation that are lost, their ids, too."""
        manifest = self.current.manifest
        parts = [part for part in self.current.parts if part.entry in manifest.parts]
        named = {each.id for part in parts for each in part.lost}
        return max(manifest.rows - sum(part.count for part in parts) - len(named), 0)


def _sealed_now(cache: Path, manifest: Manifest) -> tuple[list[SealedPart], list[str]]:
    """Return the parts that count, and the names of those whose seals cannot be read."""
    found: list[SealedPart] = []
    damaged: list[str] = []
    for directory in part_directories(cache):
        with unless_damaged():
            part = read_part(cache, directory.name)
            found += [] if part is None else [part]
            continue
        damaged.append(directory.name)
    return sealed_parts(found, manifest), damaged


def _is_kept(cache: Path, name: str, *, index: bool) -> bool:
    """Whether a generation's manifest is there, with the `index` that it names if that matters."""
    with unless_damaged():
        manifest = read_manifest(cache, manifest_file(name))
        if not index:
            return manifest.name == name
        with ColumnFile(cache, manifest.index, expected=manifest.index_digest) as file:
            return manifest.name == name and not file.damaged()
    return False


def _has_digest(cache: Path, path: str, digest: str) -> bool:
    with unless_damaged(), os.fdopen(open_within(cache, path), "rb") as file:
        state = xxhash.xxh3_64()
        while piece := file.read(1 << 20):
            state.update(piece)
        return state.hexdigest() == digest
    return False
