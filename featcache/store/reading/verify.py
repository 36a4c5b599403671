"""Verification of a whole cache: all files are compared, then all damage is told at once."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ParamSpec

import numpy as np
import xxhash

from featcache.container_files import PAGE_BYTES, Pages, bytes_at
from featcache.errors import CacheError, CorruptCacheError
from featcache.interface import Ints
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.files import open_there, open_within, remedy
from featcache.store.format.index import ContainerColumns, FeatureColumns, Index, read_index
from featcache.store.format.manifest import (
    PARTS,
    Manifest,
    kept_manifests,
    manifest_file,
    read_manifest,
)
from featcache.store.format.manifest_entries import PartEntry
from featcache.store.format.pages import container_digest, pages_of
from featcache.store.format.part import COLUMNS, SEAL, read_part

P = ParamSpec("P")
MOST_TOLD = 20
WRONG_PAGES = "the checksums of its pages are not those that were written"
WHAT_TO_DO = (
    "of each of these files: put it back, as it was written; or remove the part that it lies in, "
    "or featcache.json if it lies in none, and write the cache again: all else that is sealed is "
    "kept"
)


def raise_damage(found: Iterable[str], what: str = "") -> None:
    """Raise `CorruptCacheError` with all sentences about damage, if there are any."""
    sentences = list(dict.fromkeys(found))  # generations share parts, and their damage
    if sentences:
        more = [f"... and {len(sentences) - MOST_TOLD} more"] if len(sentences) > MOST_TOLD else []
        raise CorruptCacheError(
            "\n".join(sentences[:MOST_TOLD] + more) + (f"\n{what}" if what else "")
        )


def container_damage(
    cache: Path, containers: ContainerColumns, numbers: Sequence[int] | None = None
) -> Iterator[str]:
    """Say what is wrong with containers, all or some.

    One is not there, or not in the size that was written.
    """
    for number in range(len(containers)) if numbers is None else numbers:
        path, expected = containers.path(number), int(containers.sizes[number])
        try:
            descriptor = open_within(cache, path)
        except FileNotFoundError:
            yield f"container {str(cache / path)!r} is missing; {remedy(cache, path)}"
            continue
        except CorruptCacheError as error:
            yield str(error)
            continue
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if size != expected:
            yield (
                f"container {str(cache / path)!r} has {size} bytes, not the {expected} that were "
                f"written; {remedy(cache, path)}"
            )


def _told(check: Callable[P, Iterable[str]]) -> Callable[P, Iterator[str]]:
    """Decorate a check that says what is damaged: an error that ends it is its last sentence."""

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Iterator[str]:
        try:
            yield from check(*args, **kwargs)
        except FileNotFoundError as error:
            yield f"{str(error.filename)!r} is missing"
        except CacheError as error:
            yield str(error)

    return checked


def all_damage(cache: Path, manifest: Manifest, index: Index, *, arrays: bool) -> Iterator[str]:
    """Compare all files of a cache with what their parents say of them.

    Args:
        cache: the cache directory.
        manifest: that of the current generation.
        index: that of the current generation.
        arrays: read the containers, too, not only their sizes.
    """
    kept = list(kept_manifests(cache))
    for name in filter(None, {manifest.name, manifest.previous, *manifest.tags.values()}):
        if name not in kept:
            yield f"{str(cache / manifest_file(name))!r} is missing"
    yield from _column_damage(cache, manifest.index, manifest.index_digest)
    yield from _generation_damage(cache, manifest, index, arrays)
    yield from _building_damage(cache, manifest)
    for name in kept:
        yield from _kept_damage(cache, name, manifest, arrays)


@_told
def _kept_damage(cache: Path, name: str, current: Manifest, arrays: bool) -> Iterator[str]:
    """Compare what must be whole of a generation whose manifest is kept."""
    manifest = read_manifest(cache, manifest_file(name))
    if manifest.name != name:
        path = str(cache / manifest_file(name))
        yield f"{path!r} is damaged: it is the manifest of {manifest.name!r}"
        return
    tagged = name in current.tags.values() and name != current.name
    if tagged or name == current.previous:
        yield from _column_damage(cache, manifest.index, manifest.index_digest)
    if tagged:
        with ColumnFile(cache, manifest.index, expected=manifest.index_digest) as file:
            index = read_index(file, list(manifest.features))
        yield from _generation_damage(cache, manifest, index, arrays)


@_told
def _building_damage(cache: Path, manifest: Manifest) -> Iterator[str]:
    """Compare what belongs to a build that is being written, unless its writer is at work on it."""
    files = (_file_damage(cache, *each) for each in manifest.building_files.items())
    parts = (_part_damage(cache, entry) for entry in manifest.building_parts)
    found = list(itertools.chain(*files, *parts))
    if found and read_manifest(cache).write_id == manifest.write_id:
        yield from found


def _generation_damage(
    cache: Path, manifest: Manifest, index: Index, arrays: bool
) -> Iterator[str]:
    for path, expected in manifest.files.items():
        yield from _file_damage(cache, path, expected)
    for entry in manifest.parts:
        yield from _part_damage(cache, entry)
    yield from container_damage(cache, index.containers)
    if arrays:
        known = ContainerPages(cache, manifest, index.containers)
        for container in range(len(index.containers)):
            yield from _page_damage(cache, index, container, known)


@_told
def _column_damage(cache: Path, path: str, expected: str) -> Iterator[str]:
    with ColumnFile(cache, path, mapped=False, expected=expected) as file:
        yield from file.damage()


@_told
def _file_damage(cache: Path, path: str, expected: str) -> Iterator[str]:
    state = xxhash.xxh3_64()
    with open(open_there(cache, path), "rb") as file:  # noqa: PTH123 (a descriptor)
        while piece := file.read(1 << 20):
            state.update(piece)
    if state.hexdigest() != expected:
        yield f"{str(cache / path)!r} is damaged: its checksum does not match"


@_told
def _part_damage(cache: Path, entry: PartEntry) -> Iterator[str]:
    directory = f"{PARTS}/{entry.name}"
    part = read_part(cache, entry.name)
    if part is None:
        yield f"{str(cache / directory / SEAL)!r} is missing"
        return
    if part.entry.digest != entry.digest:
        yield f"{str(cache / directory / SEAL)!r} is damaged: its checksum does not match"
    yield from _column_damage(cache, f"{directory}/{COLUMNS}", part.columns)
    for beside in (entry.tombstones, entry.stamps):
        if beside is not None:
            yield from _column_damage(cache, f"{directory}/{beside.file}", beside.digest)


class ContainerPages:
    """The checksums of the pages of a generation's containers, read when they are needed."""

    def __init__(self, cache: Path, manifest: Manifest, columns: ContainerColumns) -> None:
        self.columns = columns
        self._cache = cache
        self._parts = manifest.parts
        self._by_part: dict[int, list[Pages]] = {}
        # the first container of each part: those of a part follow each other
        self._first = np.searchsorted(columns.parts, np.arange(len(manifest.parts)))

    def file(self, container: int) -> str:
        """Return the path of a container."""
        return str(self._cache / self.columns.path(container))

    def of(self, container: int) -> Pages:
        """Return the checksums of a container's pages.

        Raises `CorruptCacheError` if they are lost, or are not those that were written.
        """
        number = int(self.columns.parts[container])
        if number not in self._by_part:
            named = 0 <= number < len(self._parts)
            part = read_part(self._cache, self._parts[number].name) if named else None
            if part is None:
                raise CorruptCacheError(
                    f"the part of {self.file(container)!r} is missing; put it back, or open the "
                    "cache again if it was overwritten meanwhile"
                )
            self._by_part[number] = part.pages(self._cache)
        known, place = self._by_part[number], container - int(self._first[number])
        pages = known[place] if 0 <= place < len(known) else np.empty(0, np.uint64)
        size = int(self.columns.sizes[container])
        if container_digest(pages, size) != self.columns.digest(container):
            raise CorruptCacheError(f"container {self.file(container)!r}: {WRONG_PAGES}")
        return pages


def _page_damage(cache: Path, index: Index, container: int, known: ContainerPages) -> Iterator[str]:
    """Read a container and compare its pages, naming the utterances on those that differ.

    Where the checksums of the pages are themselves damaged, those of the arrays must do.
    """
    pages: Pages | None = None
    try:
        pages = known.of(container)
    except CacheError:
        yield f"container {known.file(container)!r}: {WRONG_PAGES}"
    with contextlib.suppress(CacheError, FileNotFoundError):  # told by `container_damage`
        yield from _array_damage(cache, index, container, pages)


def _array_damage(cache: Path, index: Index, container: int, pages: Pages | None) -> Iterator[str]:
    path = index.containers.path(container)
    with os.fdopen(open_within(cache, path), "rb") as file:
        descriptor = file.fileno()
        if os.fstat(descriptor).st_size != index.containers.sizes[container]:
            return
        wrong = None if pages is None else np.flatnonzero(pages_of(descriptor) != pages)
        if wrong is not None and not len(wrong):
            return
        rows = _damaged_rows(descriptor, index, container, wrong)
    where = "" if wrong is None else f" on {len(wrong)} pages"
    if rows:
        ids = ", ".join(repr(index.id(row)) for row in rows[:5]) + ", ..." * (len(rows) > 5)
        yield (
            f"container {str(cache / path)!r} is damaged{where}: utterances that are not what was "
            f"written: {len(rows)}, {ids}"
        )
    elif wrong is not None:
        yield f"container {str(cache / path)!r} is damaged{where}, but in none of its arrays"


def _damaged_rows(descriptor: int, index: Index, container: int, pages: Ints | None) -> list[int]:
    """Return the rows of damaged arrays in a container, on some pages of it.

    They do not have their checksum.
    """
    damaged: set[int] = set()
    for columns in index.features.values():
        extents = np.flatnonzero(columns.container == container)
        if pages is not None:
            first = columns.offset[extents] // PAGE_BYTES
            last = (columns.offset[extents] + columns.nbytes[extents] - 1) // PAGE_BYTES
            extents = extents[pages.searchsorted(first) < pages.searchsorted(last, side="right")]
        rows = np.unique(columns.first.searchsorted(extents, side="right") - 1)
        damaged.update(
            row for row in rows.tolist() if not _is_whole(descriptor, columns, row, container)
        )
    return sorted(damaged)


def _is_whole(descriptor: int, columns: FeatureColumns, row: int, container: int) -> bool:
    """Tell whether an array has its checksum; not, if other containers hold some of it."""
    state = xxhash.xxh3_64()
    for extent in range(int(columns.first[row]), int(columns.first[row + 1])):
        if columns.container[extent] != container:
            return False
        state.update(bytes_at(descriptor, int(columns.nbytes[extent]), int(columns.offset[extent])))
    return state.intdigest() == int(columns.checksum[row])
