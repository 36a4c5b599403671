"""`PagedFile`: what a format appends to, one array after the other or many, digested by page."""

from __future__ import annotations

import errno
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from featcache.container_files.system import (
    calls_of,
    named,
    read_at,
    start_writing,
    sync_directory,
    sync_file,
    sync_together,
    write_all,
    write_together,
)
from featcache.interface import ContainerWriter, EncodedArray, Extent, Ints, SupportsPages

# Many utterances at once: their arrays on the way to disk, and where they lie, as columns.

Piece = bytes | memoryview


def cut(pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[Piece]:
    """Cut bytes that lie in pieces, one behind the other, anew; what two pieces share is copied."""
    rest = iter(pieces)
    piece, begin = memoryview(b""), 0
    for size in sizes:
        before: list[Piece] = []
        end = begin + size
        while end > len(piece):
            before.append(piece[begin:])
            end -= len(piece)
            piece, begin = memoryview(next(rest)), 0
        last = piece[begin:end]
        begin = end
        yield b"".join([*before, last]) if any(map(len, before)) else last


@dataclass(frozen=True, slots=True)
class EncodedArrays:
    """Arrays of several utterances on their way to disk, in the order in which they are appended.

    `pieces` are the caller's again once they are.
    """

    rows: Ints  # of each array, as in `EncodedArray`
    blocks: Ints  # of each array: how many it has; without a codec 1, or 0 if it has no bytes
    nbytes: Ints  # of each block
    pieces: Sequence[Piece]  # all blocks, one behind the other: one or more of them a piece

    @classmethod
    def of(cls, arrays: Sequence[EncodedArray]) -> EncodedArrays:
        """Put arrays together, without a copy."""
        blocks = [block for array in arrays for block in array.blocks]
        return cls(
            rows=np.array([array.rows for array in arrays], np.int64),
            blocks=np.array([len(array.blocks) for array in arrays], np.int64),
            nbytes=np.array([*map(len, blocks)], np.int64),
            pieces=blocks,
        )

    def __iter__(self) -> Iterator[EncodedArray]:
        blocks = iter(self.each_block())
        for rows, count in zip(self.rows.tolist(), self.blocks.tolist(), strict=True):
            yield EncodedArray(rows, tuple(islice(blocks, count)))

    def each_block(self) -> Sequence[Piece]:
        """Return the blocks of all arrays."""
        if len(self.pieces) == len(self.nbytes):
            return self.pieces
        return [*cut(self.pieces, self.nbytes.tolist())]


@dataclass(frozen=True, slots=True)
class Extents:
    """Extents of several arrays, as columns."""

    counts: Ints  # of each array: how many extents it has
    containers: Sequence[str]  # as in `Extent`, each of them once
    container: Ints  # of each extent: the number of its container in these
    offset: Ints
    nbytes: Ints

    @classmethod
    def of(cls, arrays: Sequence[Sequence[Extent]]) -> Extents:
        """Put extents into columns, given those of each array."""
        numbers: dict[str, int] = {}
        every = [extent for extents in arrays for extent in extents]
        container = [numbers.setdefault(each.container, len(numbers)) for each in every]
        return cls(
            counts=np.array([*map(len, arrays)], np.int64),
            containers=tuple(numbers),
            container=np.array(container, np.int64),
            offset=np.array([each.offset for each in every], np.int64),
            nbytes=np.array([each.nbytes for each in every], np.int64),
        )

    def each(self) -> Iterator[tuple[Extent, ...]]:
        """Yield the extents of one array after the other."""
        paths = [self.containers[number] for number in self.container.tolist()]
        extents = map(Extent, paths, self.offset.tolist(), self.nbytes.tolist())
        return (tuple(islice(extents, count)) for count in self.counts.tolist())


@runtime_checkable
class AppendsMany(Protocol):
    """A `ContainerWriter` that appends many utterances at once faster than one by one."""

    def append_many(
        self, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
    ) -> Mapping[str, Extents]:
        """Write what `append` writes for each of the ids in turn; returns where that lies."""


def append_alone(
    container: AppendsMany, id: str, arrays: Mapping[str, EncodedArray]
) -> dict[str, tuple[Extent, ...]]:
    """Append one utterance to a container whose `append` is no other than its `append_many`."""
    many = {name: EncodedArrays.of([array]) for name, array in arrays.items()}
    placed = container.append_many([id], many)
    return {name: next(extents.each()) for name, extents in placed.items()}


def append_many(
    container: ContainerWriter, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
) -> Mapping[str, Extents]:
    """Append utterances at once where a format can, else one by one."""
    # most are known by their class: to look for a protocol costs more than all else here
    if isinstance(container, (FeatureFilesWriter, AppendsMany)):
        return container.append_many(ids, arrays)
    each = (dict(zip(arrays, of_one, strict=True)) for of_one in zip(*arrays.values(), strict=True))
    extents = [container.append(id, of_one) for id, of_one in zip(ids, each, strict=True)]
    return {name: Extents.of([placed[name] for placed in extents]) for name in arrays}


# Files that a format appends to: whole, durable, with the digest of each of their pages.

PAGE_BYTES = 1 << 16  # the unit of checksums; the last page of a file may be shorter

GATHERED_BYTES = 1 << 16  # of pieces smaller than this, written together: a system call costs more
AT_ONCE_BYTES = 1 << 23  # that are brought to the disk while others are still appended
Pages = NDArray[np.uint64]  # the xxh3-64 of each page of a file


class FeatureFile(SupportsPages, Protocol):
    """The file, or files, of one feature; the methods are those of a `ContainerWriter`."""

    def append(self, id: str, array: EncodedArray) -> tuple[Extent, ...]:
        """Write the array of one utterance behind that of the one before."""

    def write_out(self) -> None:
        """Show other processes all arrays; they need not be durable."""

    def flush(self) -> None:
        """Make all arrays durable."""

    def close(self) -> None:
        """Finish the file, durably."""

    def abort(self) -> None:
        """Release the file as it is; never raises."""


@runtime_checkable
class AppendsArrays(Protocol):
    """A `FeatureFile` that appends many arrays at once faster than one by one."""

    def append_many(self, ids: Sequence[str], arrays: EncodedArrays) -> Extents:
        """Write what `append` writes for each of the ids in turn; returns where that lies."""


class FeatureFilesWriter:
    """A `ContainerWriter` for formats in which each feature has files of its own."""

    def __init__(self, files: Mapping[str, FeatureFile]) -> None:
        self._files = files
        self._many = {name: file for name, file in files.items() if isinstance(file, AppendsArrays)}

    def append(self, id: str, arrays: Mapping[str, EncodedArray]) -> dict[str, tuple[Extent, ...]]:
        """Write the arrays of one utterance behind those of the one before."""
        return {name: self._files[name].append(id, array) for name, array in arrays.items()}

    def append_many(
        self, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
    ) -> dict[str, Extents]:
        """Write the arrays of many utterances behind those of the one before."""
        placed: dict[str, Extents] = {}
        for name, of_feature in arrays.items():
            if name in self._many:
                placed[name] = self._many[name].append_many(ids, of_feature)
            else:
                pairs = zip(ids, of_feature, strict=True)
                placed[name] = Extents.of([self._files[name].append(*each) for each in pairs])
        return placed

    def write_out(self) -> None:
        """Show other processes all arrays."""
        for file in self._files.values():
            file.write_out()

    def flush(self) -> None:
        """Make all arrays durable."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Finish all files, durably."""
        for file in self._files.values():
            file.close()

    def abort(self) -> None:
        """Release all files as they are."""
        for file in self._files.values():
            file.abort()

    def pages(self) -> dict[str, Pages]:
        """Return the digests of the pages of all files."""
        return {
            path: pages for file in self._files.values() for path, pages in file.pages().items()
        }


class PagedFile:
    """A new file to append to, which knows the digest of each of its pages.

    Its name is durable with its first bytes. After an error only `abort` may be called.

    Args:
        path: of the file, which must not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0  # bytes
        self._gathered = bytearray()  # the last of them, not yet written
        self._on_its_way = 0  # bytes that the system was asked to bring to the disk
        self._file: BinaryIO = path.open("x+b", buffering=0)
        self._unnamed: Path | None = path.parent  # where its name is not durable yet
        self._digests = array("Q")  # of the pages that are full
        self._last = xxh3_64()  # of the page that is not
        self._filled = 0  # bytes of that

    @property
    def pages(self) -> Pages:
        """The xxh3-64 of each page, the last one of what there is of it."""
        last = [self._last.intdigest()] if self.size % PAGE_BYTES else []
        return np.array([*self._digests, *last], np.uint64)

    def append(self, data: bytes | memoryview) -> int:
        """Add `data` at the end, in the file by the next `flush`; return its first byte's place."""
        return self._append([memoryview(data).cast("B")])

    def append_each(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Add pieces of bytes, as `append` one; return the place of the first byte of all."""
        return self._append([memoryview(piece).cast("B") for piece in pieces])

    def _append(self, pieces: list[memoryview]) -> int:
        nbytes, offset = sum(map(len, pieces)), self.size
        if len(self._gathered) + nbytes <= GATHERED_BYTES:
            if len(pieces) > 1:
                pieces = [memoryview(b"".join(pieces))]
            for piece in pieces:
                self._gathered += piece
                self._digest(piece)
        else:
            self._write_gathered(pieces)
        self.size += nbytes
        if self.size - self._on_its_way >= AT_ONCE_BYTES:
            self.write_out()
            start_writing(self._file, self._on_its_way, self.size - self._on_its_way)
            self._on_its_way = self.size
        return offset

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes that were written before; reads the pages again that these lie in.

        Raises `OSError` if such a page is not what was written.
        """
        if not 0 <= offset <= self.size - len(data):
            raise ValueError(f"bytes {offset} to {offset + len(data)} are not all written yet")
        self.write_out()
        for number in range(offset // PAGE_BYTES, -(-(offset + len(data)) // PAGE_BYTES)):
            start = number * PAGE_BYTES
            page = self._read_page(number)
            first, last = max(offset - start, 0), min(offset + len(data) - start, len(page))
            page[first:last] = data[start + first - offset : start + last - offset]
            if number < len(self._digests):
                self._digests[number] = xxh3_64_intdigest(page)
            else:
                self._last = xxh3_64(page)
        self._file.seek(offset)
        write_all(self._file, data)
        self._file.seek(self.size)

    def write_out(self) -> None:
        """Show other processes all that was added."""
        self._write_gathered()

    def flush(self) -> None:
        """Make all that was written durable."""
        self.write_out()
        if self._unnamed is None:
            sync_file(self._file)
        else:
            sync_together(partial(sync_file, self._file), partial(sync_directory, self._unnamed))
            self._unnamed = None

    def close(self) -> None:
        """Make the file durable and close it."""
        self.flush()
        self._file.close()

    def abort(self) -> None:
        """Close the file with all that was added, if the disk takes it; never raises."""
        with suppress(OSError):
            try:
                if not self._file.closed:
                    self.write_out()
            finally:
                self._file.close()

    def _write_gathered(self, pieces: Sequence[memoryview] = ()) -> None:
        """Write what was gathered, and pieces behind it, each while its digest has it in cache."""
        gathered, self._gathered = self._gathered, bytearray()
        digested = 1 if gathered else 0
        for some in calls_of([memoryview(gathered), *pieces] if gathered else pieces):
            for piece in some[digested:]:
                self._digest(piece)
            digested = 0
            write_together(self._file, some)

    def _digest(self, data: memoryview) -> None:
        """Digest `data`, behind what there is of the last page."""
        filled = self._filled
        self._filled = (filled + len(data)) % PAGE_BYTES
        if filled:
            head = data[: PAGE_BYTES - filled]
            self._last.update(head)
            if filled + len(head) < PAGE_BYTES:
                return
            self._digests.append(self._last.intdigest())
            self._last.reset()
            data = data[len(head) :]
        whole = len(data) - len(data) % PAGE_BYTES
        for start in range(0, whole, PAGE_BYTES):
            self._digests.append(xxh3_64_intdigest(data[start : start + PAGE_BYTES]))
        self._last.update(data[whole:])

    def _read_page(self, number: int) -> bytearray:
        start = number * PAGE_BYTES
        page = bytearray(min(PAGE_BYTES, self.size - start))
        full = number < len(self._digests)
        digest = self._digests[number] if full else self._last.intdigest()
        with named(self._file.name):
            read = read_at(self._file.fileno(), memoryview(page), start)
        if read != len(page) or xxh3_64_intdigest(page) != digest:
            raise OSError(errno.EIO, f"page {number} is not what was written", str(self._file.name))
        return page
