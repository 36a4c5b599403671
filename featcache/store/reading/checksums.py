"""Checks of bytes when they are read: arrays by their checksum, windows of them by their pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from featcache.container_files import PAGE_BYTES
from featcache.errors import CorruptCacheError
from featcache.store.format.index import ContainerColumns
from featcache.store.format.manifest import Manifest
from featcache.store.reading.containers import Containers, Piece
from featcache.store.reading.page_damage import ContainerPages


class Checks:
    """Compares bytes of a generation's containers with what was written.

    Safe to share between threads.
    """

    def __init__(
        self, cache: Path, manifest: Manifest, columns: ContainerColumns, containers: Containers
    ) -> None:
        self._containers = containers
        self._pages = ContainerPages(cache, manifest, columns, containers.adopted)

    def same_array(self, extents: Sequence[Piece], checksum: int) -> bool:
        """Tell whether the bytes of a whole array have its checksum."""
        state = xxhash.xxh3_64()
        for extent in extents:
            state.update(self._containers.view(*extent).data)
        return state.intdigest() == checksum

    def check_pages(self, container: int, offset: int, nbytes: int) -> None:
        """Raise `CorruptCacheError` unless the pages that hold some bytes are what was written."""
        self._containers.check(container, offset, nbytes)
        first, last = offset // PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES)
        begin = first * PAGE_BYTES
        end = min(last * PAGE_BYTES, int(self._pages.columns.sizes[container]))
        data = self._containers.view(container, begin, end - begin).data
        pages = (data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES))
        found = list(map(xxhash.xxh3_64_intdigest, pages))
        if found != self._pages.of(container)[first:last].tolist():
            raise CorruptCacheError(
                f"container {self._pages.file(container)!r} is damaged between bytes {begin} and "
                f"{end}: the checksums of its pages do not match"
            )
