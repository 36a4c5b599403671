"""Checks that the bytes of a cache are the ones that were written.

All damage is found before it is told.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

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
    PartEntry,
    kept_manifests,
    manifest_file,
    read_manifest,
)
from featcache.store.format.pages import container_digest, pages_of
from featcache.store.format.part import SEAL, SealedPart, read_part

MOST_TOLD = 20


WHAT_TO_DO = (
    "of each of these files: put it back, as it was written; or remove the part that it lies in, "
    "or featcache.json if it lies in none, and write the cache again: all else that is sealed is "
    "kept"
)


def raise_damage(found: Iterable[str], what: str = "") -> None:
    """Raise `CorruptCacheError` with all sentences about damage, if there are any."""
    sentences = list(found)
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


def all_damage(cache: Path, manifest: Manifest, index: Index, *, arrays: bool) -> Iterator[str]:
    """Compare all files of a cache with what their parents say of them.

    Args:
        cache: the cache directory.
        manifest: that of the current generation.
        index: that of the current generation.
        arrays: read the containers, too, not only their sizes.
    """
    kept: dict[str, Manifest] = {}
    for name in kept_manifests(cache):
        try:
            kept[name] = read_manifest(cache, manifest_file(name))
        except CacheError as error:
            yield str(error)
        else:
            if kept[name].name != name:
                file, other = str(cache / manifest_file(name)), kept.pop(name).name
                yield f"{file!r} is damaged: it is the manifest of {other!r}"
    for name in filter(None, {manifest.name, manifest.previous, *manifest.tags.values()}):
        if not (cache / manifest_file(name)).exists():
            yield f"{str(cache / manifest_file(name))!r} is missing"
    yield from _generation_damage(cache, manifest, index, arrays)
    previous = kept.get(manifest.previous or "")
    if previous is not None:
        yield from _column_damage(cache, previous.index, previous.index_digest)
    for name in {*manifest.tags.values()} & kept.keys() - {manifest.name}:
        yield from _tagged_damage(cache, kept[name], arrays)


def _tagged_damage(cache: Path, manifest: Manifest, arrays: bool) -> Iterator[str]:
    try:
        with ColumnFile(cache, manifest.index, expected=manifest.index_digest) as file:
            index = read_index(file, list(manifest.features))
    except (CacheError, FileNotFoundError):
        yield from _column_damage(cache, manifest.index, manifest.index_digest)
    else:
        yield from _generation_damage(cache, manifest, index, arrays)


def _generation_damage(
    cache: Path, manifest: Manifest, index: Index, arrays: bool
) -> Iterator[str]:
    yield from _column_damage(cache, manifest.index, manifest.index_digest)
    for path, expected in manifest.files.items():
        yield from _file_damage(cache, path, expected)
    for entry in manifest.parts:
        yield from _part_damage(cache, entry)
    yield from container_damage(cache, index.containers)
    if arrays:
        yield from page_damage(cache, manifest, index)


def _file_damage(cache: Path, path: str, expected: str) -> Iterator[str]:
    state = xxhash.xxh3_64()
    try:
        with open(open_there(cache, path), "rb") as file:  # noqa: PTH123 (a descriptor)
            while piece := file.read(1 << 20):
                state.update(piece)
    except CacheError as error:
        yield str(error)
    else:
        if state.hexdigest() != expected:
            yield f"{str(cache / path)!r} is damaged: its checksum does not match"


def page_damage(cache: Path, manifest: Manifest, index: Index) -> Iterator[str]:
    """Read all containers and compare their pages, naming the utterances on those that differ.

    Where the checksums of the pages are themselves damaged, those of the arrays must do.
    """
    columns = index.containers
    for part_number, entry in enumerate(manifest.parts):
        pages = _pages_of(cache, entry)
        for place, container in enumerate(np.flatnonzero(columns.parts == part_number).tolist()):
            path, size = columns.path(container), int(columns.sizes[container])
            known = pages[place] if place < len(pages) else None
            if known is None or container_digest(known, size) != columns.digest(container):
                yield (
                    f"container {str(cache / path)!r}: the checksums of its pages are not those "
                    "that were written"
                )
                known = None
            with contextlib.suppress(CacheError, FileNotFoundError):  # told by `container_damage`
                yield from _container_damage(cache, path, index, container, known)


def _pages_of(cache: Path, entry: PartEntry) -> list[Pages]:
    try:
        part = read_part(cache, entry.name)
        return [] if part is None else part.pages(cache)
    except (CacheError, FileNotFoundError):  # told by `generation_damage`
        return []


def _container_damage(
    cache: Path, path: str, index: Index, container: int, pages: Pages | None
) -> Iterator[str]:
    descriptor = open_within(cache, path)
    try:
        if os.fstat(descriptor).st_size != index.containers.sizes[container]:
            return
        wrong = None if pages is None else np.flatnonzero(pages_of(descriptor) != pages)
        if wrong is not None and not len(wrong):
            return
        rows = _damaged_rows(descriptor, index, container, wrong)
    finally:
        os.close(descriptor)
    where = "" if wrong is None else f" on {len(wrong)} pages"
    if rows:
        ids = ", ".join(repr(index.id(row)) for row in rows[:5]) + ", ..." * (len(rows) > 5)
        yield (
            f"container {str(cache / path)!r} is damaged{where}: utterances that are not what was "
            f"written: {len(rows)}, {ids}"
        )
    elif wrong is not None:
        yield f"container {str(cache / path)!r} is damaged{where}, but in none of its arrays"


def check_pages(descriptor: int, path: Path, pages: Pages, offset: int, nbytes: int) -> None:
    """Raise `CorruptCacheError` if pages that hold some bytes of a container are damaged."""
    first = offset // PAGE_BYTES
    count = -(-(offset + nbytes) // PAGE_BYTES) - first
    if not np.array_equal(pages_of(descriptor, first, count), pages[first : first + count]):
        raise CorruptCacheError(
            f"container {str(path)!r} is damaged between bytes {first * PAGE_BYTES} and "
            f"{(first + count) * PAGE_BYTES}: the checksums of its pages do not match"
        )


def _column_damage(cache: Path, path: str, expected: str) -> list[str]:
    try:
        with ColumnFile(cache, path, mapped=False, expected=expected) as file:
            return file.damage()
    except FileNotFoundError:
        return [f"{str(cache / path)!r} is missing"]
    except CacheError as error:
        return [str(error)]


def _part_damage(cache: Path, entry: PartEntry) -> Iterator[str]:
    directory = f"{PARTS}/{entry.name}"
    try:
        part: SealedPart | None = read_part(cache, entry.name)
        if part is None:
            yield f"{str(cache / directory / SEAL)!r} is missing"
            return
    except CacheError as error:
        yield str(error)
        return
    if part.entry.digest != entry.digest:
        yield f"{str(cache / directory / SEAL)!r} is damaged: its checksum does not match"
    yield from _column_damage(cache, f"{directory}/index.columns", part.columns)
    if entry.tombstones is not None:
        yield from _column_damage(
            cache, f"{directory}/{entry.tombstones.file}", entry.tombstones.digest
        )


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
