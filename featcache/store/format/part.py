"""A sealed part: what one writer wrote, whole on disk, in a directory of its own."""

from __future__ import annotations

import itertools
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from featcache.container_files import PAGE_BYTES, EncodedArrays, Pages, sync_directory
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import CorruptCacheError, FormatVersionError
from featcache.interface import Ints
from featcache.store.format import journal
from featcache.store.format.annotation_columns import Column, read_whole_column
from featcache.store.format.checked import NOT_AS_WRITTEN, read_as
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.files import digest, read_within, remedy
from featcache.store.format.index import Index, are_below, is_sound, read_index
from featcache.store.format.journal_lines import Header
from featcache.store.format.manifest import PARTS, Manifest
from featcache.store.format.manifest_entries import PartEntry
from featcache.store.format.sealed_json import unpack_json
from featcache.store.format.stamps import read_stamps

SEAL = "part.json"
COLUMNS = "index.columns"
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
    """Give sealed parts the tombstones and the stamps that a manifest says they have."""
    known = {entry.name: entry for entry in manifest.parts}
    deleted = {entry.name: entry.tombstones for entry in manifest.building_parts}

    def entry_of(entry: PartEntry) -> PartEntry:
        alone = replace(entry, tombstones=deleted.get(entry.name))
        return known.get(entry.name, alone)

    return [replace(part, entry=entry_of(part.entry)) for part in parts]


def that_count(parts: Iterable[SealedPart], manifest: Manifest) -> list[SealedPart]:
    """Leave out of all sealed parts of a build those that others have taken the place of."""
    listed = list(parts)
    replaced = {*manifest.replaced}.union(*(part.header.replaces for part in listed))
    return [part for part in listed if part.entry.name not in replaced]


def list_parts(cache: Path) -> Iterator[tuple[str, SealedPart | None]]:
    """Iterate over the parts on disk by name, in that order, None for those that are not sealed."""
    directory = cache / PARTS
    for path in sorted(directory.iterdir()) if directory.exists() else []:
        # anything else is not ours; what a link leads to is not, either
        if PART_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path.name, read_part(cache, path.name)


def remove_part(directory: Path) -> None:
    """Remove a part; wherever this ends, what is left of it counts as nothing written."""
    for name in (SEAL, journal.NAME):
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)
    shutil.rmtree(directory)


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
