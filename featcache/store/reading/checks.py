"""Checks of bytes at the moment in which they are read.

Whole arrays are checked by their checksum, windows by their pages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from featcache.container_files import Pages
from featcache.errors import CorruptCacheError
from featcache.store.format.files import open_there
from featcache.store.format.index import ContainerColumns
from featcache.store.format.manifest import Manifest
from featcache.store.format.pages import container_digest
from featcache.store.format.part import read_part
from featcache.store.reading.containers import Containers, Piece
from featcache.store.reading.verify import check_pages


class Checks:
    """Compares bytes of a generation's containers with what was written.

    Safe to share between threads.
    """

    def __init__(
        self, cache: Path, manifest: Manifest, columns: ContainerColumns, containers: Containers
    ) -> None:
        self._cache = cache
        self._manifest = manifest
        self._columns = columns
        self._containers = containers
        self._pages: dict[int, list[Pages]] = {}  # by part
        # container of each part
        self._first = np.searchsorted(columns.parts, np.arange(len(manifest.parts)))

    def same_array(self, extents: Sequence[Piece], checksum: int) -> bool:
        """Tell whether the bytes of a whole array have its checksum."""
        state = xxhash.xxh3_64()
        for extent in extents:
            state.update(self._containers.view(*extent).data)
        return state.intdigest() == checksum

    def same_pages(self, container: int, offset: int, nbytes: int) -> None:
        """Raise `CorruptCacheError` unless the pages that hold some bytes are what was written."""
        self._containers.check(container, offset, nbytes)
        path = self._columns.path(container)
        pages = self._pages_of(container, path)
        descriptor = open_there(self._cache, path)
        try:
            check_pages(descriptor, self._cache / path, pages, offset, nbytes)
        finally:
            os.close(descriptor)

    def _pages_of(self, container: int, path: str) -> Pages:
        number = int(self._columns.parts[container])
        if number not in self._pages:
            part = read_part(self._cache, self._manifest.parts[number].name)
            if part is None:
                raise CorruptCacheError(
                    f"the part of {str(self._cache / path)!r} is missing; put it back, or open the "
                    "cache again if it was overwritten meanwhile"
                )
            self._pages[number] = part.pages(self._cache)
        inner = container - int(self._first[number])
        pages = (
            self._pages[number][inner]
            if inner < len(self._pages[number])
            else np.empty(0, np.uint64)
        )
        if container_digest(pages, int(self._columns.sizes[container])) != self._columns.digest(
            container
        ):
            raise CorruptCacheError(
                f"container {str(self._cache / path)!r}: the checksums of its pages are not those "
                "that were written"
            )
        return pages
