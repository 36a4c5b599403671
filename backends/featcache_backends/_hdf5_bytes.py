"""Arrays that are written into an HDF5 file beside HDF5, which tells where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from featcache.container_files import (
    AT_ONCE_BYTES,
    Pages,
    start_writing,
    sync_file,
    write_each,
)
from featcache_backends._hdf5_pages import PagePieces

Placed = tuple[int, memoryview]  # an offset in the file, and the bytes from there on


class PlacedBytes:
    """The same file once more, for the bytes of arrays.

    HDF5 never touches these, so they are hashed while they are in hand.

    Args:
        path: of the file, which HDF5 has open.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b", buffering=0)
        self._on_its_way = 0  # bytes that the system was asked to bring to the disk
        self._pieces = PagePieces()

    def write(self, blocks: Sequence[Placed]) -> None:
        """Write blocks, with one call where they follow each other."""
        for offset, run in _runs(blocks):
            self._file.seek(offset)
            write_each(self._file, run)
            end = offset + sum(map(len, run))
            if end - self._on_its_way >= AT_ONCE_BYTES:
                start_writing(self._file, self._on_its_way, end - self._on_its_way)
                self._on_its_way = end
        for block in blocks:
            self._pieces.add(*block)

    def take(self, offset: int, block: memoryview) -> None:
        """Take note of bytes of an array that HDF5 wrote itself."""
        self._pieces.add(offset, block)

    def pages(self) -> Pages:
        """Return the digests of the file's pages, once HDF5 has closed it.

        Raises `OSError` for an array that is not what was written.
        """
        return self._pieces.pages_of(self._file)

    def flush(self) -> None:
        """Make the file durable, whoever wrote its bytes."""
        sync_file(self._file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _runs(blocks: Sequence[Placed]) -> Iterator[tuple[int, list[memoryview]]]:
    """Put together blocks that follow each other in the file."""
    begin, end, run = 0, 0, list[memoryview]()
    for offset, block in blocks:
        if run and offset != end:
            yield begin, run
            run = []
        if not run:
            begin = offset
        run.append(block)
        end = offset + len(block)
    if run:
        yield begin, run
