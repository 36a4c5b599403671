"""Damage of containers, page by page, and of the arrays on damaged pages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from featcache.container_files import PAGE_BYTES, Pages, bytes_at
from featcache.errors import CacheError, CorruptCacheError
from featcache.interface import Ints
from featcache.store.format.files import open_within
from featcache.store.format.index import ContainerColumns, FeatureColumns, Index
from featcache.store.format.manifest import Manifest
from featcache.store.format.pages import container_digest, pages_of
from featcache.store.format.part import read_part
from featcache.store.reading.adopted_files import AdoptedFiles

WRONG_PAGES = "the checksums of its pages are not those that were written"


class ContainerPages:
    """The checksums of the pages of a generation's containers, read when they are needed."""

    def __init__(
        self,
        cache: Path,
        manifest: Manifest,
        columns: ContainerColumns,
        adopted: AdoptedFiles | None,
    ) -> None:
        self.columns = columns
        self._adopted = adopted
        self._cache = cache
        self._parts = manifest.parts
        self._by_part: dict[int, list[Pages]] = {}
        # the first container of each part: those of a part follow each other
        self._first = np.searchsorted(columns.parts, np.arange(len(manifest.parts)))

    def file(self, container: int) -> str:
        """Return the path of a container."""
        if self._adopted is not None and container in self._adopted:
            return self._adopted.path(container)
        return str(self._cache / self.columns.path(container))

    def open(self, container: int) -> int:
        """Open a container for reading, and return its descriptor."""
        if self._adopted is not None and container in self._adopted:
            return self._adopted.open(container)
        return open_within(self._cache, self.columns.path(container))

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


def page_damage(index: Index, container: int, known: ContainerPages) -> Iterator[str]:
    """Read a container and compare its pages, naming the utterances on those that differ.

    Where the checksums of the pages are themselves damaged, those of the arrays must do.
    """
    pages: Pages | None = None
    try:
        pages = known.of(container)
    except CacheError:
        yield f"container {known.file(container)!r}: {WRONG_PAGES}"
    with contextlib.suppress(CacheError, FileNotFoundError):  # told by `container_damage`
        yield from _array_damage(known, index, container, pages)


def _array_damage(
    known: ContainerPages, index: Index, container: int, pages: Pages | None
) -> Iterator[str]:
    path = known.file(container)
    with os.fdopen(known.open(container), "rb") as file:
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
            f"container {path!r} is damaged{where}: utterances that are not what was "
            f"written: {len(rows)}, {ids}"
        )
    elif wrong is not None:
        yield f"container {path!r} is damaged{where}, but in none of its arrays"


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
