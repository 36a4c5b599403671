"""A sealed part: what one writer wrote, whole on disk, in a directory of its own; and its index.

Here, too, are the ids that writers have committed, in parts that are sealed, open, or left by dead
writers.
"""

from __future__ import annotations

import errno
import itertools
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.container_files import PAGE_BYTES, EncodedArrays, Pages, sync_directory
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CorruptCacheError, FormatVersionError
from featcache.format.annotations import Values, kinds_of
from featcache.format.columns import ColumnFile, Number, Strings, argsort_ids, ends_of, size_of
from featcache.format.files import (
    NOT_AS_WRITTEN,
    digest,
    entries,
    read_as,
    read_within,
    remedy,
    unpack_json,
)
from featcache.format.index import (
    FEATURE_COLUMNS,
    MAYBE_ABSENT,
    OF_EXTENTS,
    ContainerColumns,
    Hashes,
    Index,
    StampColumns,
    are_below,
    is_sound,
    read_index,
    read_stamps,
)
from featcache.format.journal import JOURNAL, Header, Journal, read_journal
from featcache.format.manifest import PARTS, Manifest, PartEntry, read_manifest
from featcache.format.value_columns import Column, read_whole_column, stored_columns
from featcache.interface import Array, Ints
from featcache.stats import FeatureStats

# Writing an index: utterances in any order are put into the canonical one, a column at a time.

Columns = Iterator[tuple[str, Array]]


class RowIds(NamedTuple):
    """Rows of several indexes, numbered through, in the canonical order, and their ids."""

    order: Ints
    ids: Strings


def rows_of(indexes: Sequence[Index], left_out: Sequence[Ints]) -> RowIds:
    """Put the rows of indexes, but for those that are left out of each, into the canonical order.

    Of equal ids, the one in the earliest index comes first.
    """
    id_bytes = _joined([*(index.ids.data for index in indexes), np.zeros(8, np.uint8)], np.uint8)
    id_ends = ends_of(_joined([np.diff(index.ids.ends) for index in indexes], np.int64))
    order = argsort_ids(id_bytes, id_ends)
    starts = ends_of([len(index) for index in indexes])
    out = _joined([rows + start for rows, start in zip(left_out, starts, strict=False)], np.int64)
    if len(out):
        stays = np.ones(len(order), bool)
        stays[out] = False
        order = order[stays[order]]
    return RowIds(order, Strings(id_ends, id_bytes).take(order))


def hashes_of(indexes: Sequence[Index], order: Ints) -> Hashes:
    """Return the hashes of the ids of rows of several indexes, numbered through."""
    return _joined([index.hashes_of_rows() for index in indexes], np.uint64)[order]


def doubled_rows(indexes: Sequence[Index], rows: RowIds) -> list[Ints]:
    """Return, for each of the indexes, the rows whose id an earlier one has, too, ascending."""
    hashes = hashes_of(indexes, rows.order)
    candidates = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
    doubled = [row for row in candidates.tolist() if rows.ids[row] == rows.ids[row - 1]]
    numbers = np.sort(rows.order[doubled])
    starts = ends_of([len(index) for index in indexes])
    cuts = numbers.searchsorted(starts)
    return [numbers[cuts[i] : cuts[i + 1]] - starts[i] for i in range(len(indexes))]


def index_columns(
    indexes: Sequence[Index], rows: RowIds, names: Sequence[str], stats: Mapping[str, FeatureStats]
) -> Columns:
    """Join indexes into one, and give its columns one by one: together they may be gigabytes.

    Args:
        indexes: of parts, whose containers are numbered on from those of the one before.
        rows: those of the joined index, as `rows_of` gives them.
        names: of the features.
        stats: of all frames, by feature.
    """
    yield from string_columns("id", rows.ids)
    yield from _hash_columns(hashes_of(indexes, rows.order))
    if any(index.stamps for index in indexes):
        for number, name in enumerate(StampColumns._fields):
            stamps = (each.stamps or StampColumns.unknown(len(each)) for each in indexes)
            yield name, _joined([each[number] for each in stamps], np.uint64)[rows.order]
    for name in names:
        yield from _feature_columns(indexes, rows.order, name)
    for name, value in stats.items():
        yield from stats_columns(name, value)


def _hash_columns(hashes: Hashes) -> Columns:
    rows = np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
    yield "hashes", hashes[rows]
    yield "hash_rows", rows


def _feature_columns(indexes: Sequence[Index], order: Ints, name: str) -> Columns:
    parts = [index.features[name] for index in indexes]
    shifts = ends_of([len(index.containers) for index in indexes])
    first, source = _extents_of([part.first for part in parts], order)
    for what, dtype in FEATURE_COLUMNS.items():
        if what == "first":
            yield f"{name}.first", first
            continue
        columns = [getattr(part, what) for part in parts]
        if what == "container":
            columns = [each + shift for each, shift in zip(columns, shifts, strict=False)]
        # 0 for the rows of parts without it
        if what not in MAYBE_ABSENT or any(each is not None for each in columns):
            filled = (np.zeros(len(index), dtype) if each is None else each
                      for index, each in zip(indexes, columns, strict=True))  # fmt: skip
            yield f"{name}.{what}", _joined(filled, dtype)[source if what in OF_EXTENTS else order]


def columns_of_annotations(
    ids: Sequence[str], annotations: Sequence[Values], order: Ints
) -> Columns:
    """Yield the annotations of utterances as columns, in the order of the rows that they become."""
    kinds = kinds_of(zip(ids, annotations, strict=True))
    for name, kind in sorted(kinds.items()):
        values = [annotations[row].get(name) for row in order.tolist()]
        yield from stored_columns(name, Column.of(values, kind))


def container_columns(
    prefixes: Sequence[str], containers: Sequence[ContainerColumns]
) -> dict[str, NDArray[Any]]:
    """Return the columns of all parts' containers; `prefixes` lead from the cache to the parts."""
    pairs = zip(prefixes, containers, strict=True)
    paths = [prefix + path for prefix, each in pairs for path in each.paths]
    columns = dict(string_columns("container_path", Strings.of(paths)))
    columns["container_size"] = _joined([each.sizes for each in containers], np.int64)
    columns["container_digest"] = _joined([each.digests for each in containers], np.uint8)
    numbers = np.arange(len(containers), dtype=np.int32)
    columns["container_part"] = np.repeat(numbers, [len(each) for each in containers])
    if any(each.mtimes is not None for each in containers):
        columns["container_mtime"] = _joined([_mtimes_of(each) for each in containers], np.int64)
    return columns


def string_columns(name: str, strings: Strings) -> Columns:
    """Return a column of strings as the two that are stored."""
    return iter([(f"{name}_ends", strings.ends), (f"{name}_bytes", strings.data)])


def stats_columns(feature: str, stats: FeatureStats) -> Columns:
    """Yield the statistics of a feature as columns."""
    yield f"{feature}.count", np.array([stats.count], np.int64)
    yield f"{feature}.dims", np.array(stats.mean.shape, np.int64)
    yield f"{feature}.mean", stats.mean.reshape(-1)
    yield f"{feature}.m2", stats.m2.reshape(-1)


def _extents_of(firsts: Sequence[Ints], order: Ints) -> tuple[Ints, Ints]:
    """Return where the extents of each row begin, and where each comes from, in their order."""
    counts = _joined(map(np.diff, firsts), np.int64)
    first = ends_of(counts[order])
    source = ends_of(counts)[order]
    source -= first[:-1]
    source = np.repeat(source, counts[order])
    source += np.arange(first[-1])
    return first, source


def _mtimes_of(containers: ContainerColumns) -> Ints:
    return np.zeros(len(containers), np.int64) if containers.mtimes is None else containers.mtimes


def _joined(columns: Iterable[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    return np.concatenate([np.empty(0, dtype), *columns]).astype(dtype, copy=False)


# A sealed part: what one writer wrote, whole on disk, in a directory of its own.

SEAL = "part.json"
COLUMNS = "index.columns"
_TRIES = 10  # to remove a directory that others look into
PART_NAME = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}(-recovered)*")


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A part that is whole on disk."""

    entry: PartEntry
    header: Header
    columns: str  # digest of its columns

    @property
    def directory(self) -> str:
        """The part's directory, relative to the cache."""
        return f"{PARTS}/{self.entry.name}"

    def open_columns(self, cache: Path, *, mapped: bool = False) -> ColumnFile:
        """Open the part's columns."""
        return _open_columns(cache, f"{self.directory}/{COLUMNS}", self.columns, mapped)

    def open_stats(self, cache: Path) -> ColumnFile:
        """Open the columns that hold the statistics of the rows that count."""
        stones = self.entry.tombstones
        if stones is None:
            return self.open_columns(cache)
        return _open_columns(cache, f"{self.directory}/{stones.file}", stones.digest)

    def index(self, cache: Path, names: list[str], *, mapped: bool = False) -> Index:
        """Read or map the part's columns, those of ids and containers, and of some features."""
        with self.open_columns(cache, mapped=mapped) as file:
            index = read_index(file, names)
        fits = len(index) == self.entry.rows and {*names} <= self.header.dims.keys()
        if not (fits and is_sound(index)):
            raise CorruptCacheError(
                f"part {str(cache / self.directory)!r} is damaged: its index does not fit it; "
                "remove it to compute its utterances again"
            )
        return index

    def stamped_index(self, cache: Path, names: list[str]) -> Index:
        """Read the part's columns as `index` does, with the stamps that count now."""
        index, stamps = self.index(cache, names), self.entry.stamps
        if stamps is None:
            return index
        with _open_columns(cache, f"{self.directory}/{stamps.file}", stamps.digest) as file:
            columns = read_stamps(file)
        if columns is None or {*map(len, columns)} != {len(index)}:
            raise CorruptCacheError(f"{str(file.path)!r} is damaged: it has not a stamp each row")
        return replace(index, stamps=columns)

    def annotation(self, cache: Path, name: str, kind: str) -> Column:
        """Read an annotation of all rows; raises `CorruptCacheError` if it was changed."""
        with self.open_columns(cache) as file:
            return read_whole_column(file, name, kind, self.entry.rows)

    def ids(self, cache: Path) -> Iterable[str]:
        """Read the ids of the rows that count."""
        ids, left_out = self.index(cache, []).ids, self.tombstones(cache)
        if not len(left_out):
            return ids
        counts = np.ones(len(ids), bool)
        counts[left_out] = False
        return itertools.compress(ids, counts)

    def tombstones(self, cache: Path) -> Ints:
        """Read which rows count no more, ascending."""
        if self.entry.tombstones is None:
            return np.empty(0, np.int64)
        with self.open_stats(cache) as file:
            rows = file.column("rows", np.int64)
        if not are_below(rows, self.entry.rows):
            raise CorruptCacheError(
                f"{str(file.path)!r} is damaged: it names rows that are not there"
            )
        return rows

    def pages(self, cache: Path) -> list[Pages]:
        """Read the checksums of the pages of each container, in the order of the part's index."""
        with self.open_columns(cache) as file:
            pages, ends = file.column("pages", np.uint64), file.column("page_ends", np.int64)
        return np.split(pages, ends[1:-1])


def with_sizes(cache: Path, manifest: Manifest) -> Manifest:
    """Return a manifest with the sizes of the files that it leads to, but for containers.

    Those that it tells already stay: what it names never changes.
    """
    sizes = {}
    for path, _ in files_of(manifest):
        size = manifest.sizes.get(path) or size_of(cache, path)
        if size is not None:
            sizes[path] = size
    return replace(manifest, sizes=sizes)


def files_of(manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Give the files that the manifest of a generation leads to, but for containers.

    With each comes its digest, as a `ColumnFile` expects it of files of columns; None for the
    columns of a part, of which the seal tells it.
    """
    if manifest.index:
        yield manifest.index, manifest.index_digest
    yield from manifest.files.items()
    for part in manifest.parts:
        beside = ((each.file, each.digest) for each in part.beside)
        for file, expected in ((SEAL, part.digest), (COLUMNS, None), *beside):
            yield f"{PARTS}/{part.name}/{file}", expected


def _open_columns(cache: Path, path: str, digest: str, mapped: bool = False) -> ColumnFile:
    try:
        # there may be many parts, and each mapping keeps a file open
        return ColumnFile(cache, path, mapped=mapped, expected=digest)
    except FileNotFoundError as error:
        file = str(cache / path)
        raise CorruptCacheError(f"{file!r} is missing; {remedy(cache, path)}") from error


def read_part(cache: Path, name: str) -> SealedPart | None:
    """Read what a part says of itself; None if it is not sealed."""
    file = f"{PARTS}/{name}/{SEAL}"
    try:
        data = read_within(cache, file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return part_of(cache, name, data)


def part_of(cache: Path, name: str, data: bytes) -> SealedPart:
    """Return what a part says of itself in the bytes of its seal."""
    file = f"{PARTS}/{name}/{SEAL}"
    content = cast(dict[str, Any], unpack_json(data, repr(str(cache / file))))
    try:
        if content["page_bytes"] != PAGE_BYTES:
            raise FormatVersionError(
                f"part {str(cache / file)!r} has pages of {content['page_bytes']!r} bytes, which "
                "this featcache does not know; upgrade featcache"
            )
        ours = {"name": name, "digest": digest(data), "tombstones": None, "stamps": None}
        return read_as(SealedPart, content | {"entry": content | ours})
    except NOT_AS_WRITTEN as error:
        raise CorruptCacheError(
            f"{str(cache / file)!r} is damaged: {error!r}; {remedy(cache, file)}"
        ) from error


def as_known(parts: Iterable[SealedPart], manifest: Manifest) -> list[SealedPart]:
    """Return sealed parts with the tombstones and the stamps that a manifest says they have."""
    known = {entry.name: entry for entry in manifest.parts}
    deleted = {entry.name: entry.tombstones for entry in manifest.building_parts}
    found = []
    for part in parts:
        entry = known.get(part.entry.name)
        if entry is None and part.entry.name in deleted:
            entry = replace(part.entry, tombstones=deleted[part.entry.name])
        found.append(part if entry is None else replace(part, entry=entry))
    return found


def sealed_parts(parts: Iterable[SealedPart | None], manifest: Manifest) -> list[SealedPart]:
    """Return those of all parts that are sealed, of the build that is being written, and count.

    Others have taken the place of those that do not. With the tombstones and the stamps that the
    manifest says they have.
    """
    listed = [
        part
        for part in parts
        if part is not None and manifest.is_building(part.header.build, part.header.fingerprint)
    ]
    replaced = {*manifest.replaced}.union(*(part.header.replaces for part in listed))
    return as_known((part for part in listed if part.entry.name not in replaced), manifest)


def sealed_in(cache: Path, manifest: Manifest) -> list[SealedPart]:
    """Read the sealed parts of a cache, as `sealed_parts` has them."""
    return sealed_parts((part for _, part in list_parts(cache)), manifest)


def list_parts(cache: Path) -> Iterator[tuple[str, SealedPart | None]]:
    """Iterate over the parts on disk by name, in that order, None for those that are not sealed."""
    for directory in part_directories(cache):
        yield directory.name, read_part(cache, directory.name)


def part_directories(cache: Path) -> list[Path]:
    """List the directories of parts, by name; any may be gone before it is looked at.

    A part that is not sealed belongs to who writes it, who may remove it at any time.
    """
    parts = cache / PARTS
    return [
        parts / each.name
        for each in entries(parts)
        # anything else is not ours; what a link leads to is not, either
        if PART_NAME.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
    ]


def remove_part(directory: Path) -> None:
    """Remove a part; wherever this ends, what is left of it counts as nothing written."""
    for name in (SEAL, JOURNAL):
        (directory / name).unlink(missing_ok=True)
    if not directory.exists():  # an interrupt (Ctrl-C) came at the end of this before
        return
    sync_directory(directory)
    for _ in range(_TRIES):
        try:
            shutil.rmtree(directory)
            break
        except FileNotFoundError:  # somebody else removes it, too
            break
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise  # else whoever has looked at its lock meanwhile has made a file in it


def new_part_name() -> str:
    """Return a name that no other part has and that sorts by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


def header_for(
    features: Mapping[str, FeatureStorageConfig],
    dims: Mapping[str, tuple[int, ...]],
    build: int,
    fingerprint: str,
) -> Header:
    """Return the header of a new part whose frames have the shapes `dims`."""
    cut = {name: feature.blocks(dims[name]) for name, feature in features.items()}
    block_rows = {name: (blocks.rows or 0) if blocks else 0 for name, blocks in cut.items()}
    return Header(build, fingerprint, dict(dims), block_rows)


def checksums(arrays: EncodedArrays) -> list[int]:
    """Return the checksum of each of several arrays."""
    if (arrays.blocks == 1).all():
        return [*map(xxhash.xxh3_64_intdigest, arrays.each_block())]
    return [checksum(each.blocks) for each in arrays]


def checksum(blocks: tuple[bytes | memoryview, ...]) -> int:
    """Return the xxh3-64 of an array's stored bytes."""
    if len(blocks) == 1:
        return xxhash.xxh3_64_intdigest(blocks[0])
    state = xxhash.xxh3_64()
    for block in blocks:
        state.update(block)
    return state.intdigest()


# Ids that writers have committed, in parts that are sealed, open, or left by dead writers.


def committed_builds(cache: Path) -> dict[str, int]:
    """Return, by fingerprint, the latest build of which any part, sealed or not, has utterances."""
    builds: dict[str, int] = {}
    for name, sealed in list_parts(cache):
        found = sealed or read_journal(cache, f"{PARTS}/{name}")
        if isinstance(found, SealedPart) or (found is not None and found.utterances):
            header = found.header
            builds[header.fingerprint] = max(header.build, builds.get(header.fingerprint, 0))
    return builds


def committed(cache: Path, parts: Iterable[str] | None = None) -> Iterator[str]:
    """Iterate over the ids of the build that is being written, in all its parts or in some.

    Without those that are deleted.
    """
    manifest = read_manifest(cache)
    named = (
        list_parts(cache) if parts is None else ((name, read_part(cache, name)) for name in parts)
    )
    sealed: list[SealedPart] = []
    open_: list[Journal] = []
    for name, part in list(named):
        # its writer may seal it before its journal is read
        found = part or read_journal(cache, f"{PARTS}/{name}") or read_part(cache, name)
        if found is None or not manifest.is_building(found.header.build, found.header.fingerprint):
            continue
        if isinstance(found, SealedPart):
            sealed.append(found)
        elif not found.header.replaces:  # or a copy, which counts once it is sealed
            open_.append(found)
    for known in sealed_parts(sealed, manifest):
        yield from known.ids(cache)
    for left in open_:
        yield from (utterance.id for utterance in left.utterances)
