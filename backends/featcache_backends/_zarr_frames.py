"""Frames of a feature in the shards of a Zarr v3 group (layout: `featcache_backends.zarr`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from featcache.container_files import (
    PagedFile,
    Pages,
    end_file,
    misplaced,
    open_left,
    remove_left,
    sync_directory,
)
from featcache.interface import EncodedArray, Extent
from featcache_backends._zarr_group import Group

MISSING = 2**64 - 1  # offset and size of an inner chunk that a shard does not have


class GroupWriter:
    """Appends frames to a group; `crc32c` returns the checksum of bytes."""

    def __init__(self, group: Group, crc32c: Callable[[bytes], int]) -> None:
        self._group = group
        self._crc32c = crc32c
        self._shards = 0
        self._file: PagedFile | None = None  # of the shard that is not full
        self._container = ""  # its path
        self._shard = _Shard(group)
        (group.path / group.name).mkdir(parents=True)
        sync_directory(group.path)
        sync_directory(group.path.parent)

    def append(self, id: str, encoded: EncodedArray) -> tuple[Extent, ...]:
        """Write the frames of one utterance behind those of the one before."""
        extents = self._write(encoded.blocks) if self._group.feature.row_bytes else ()
        self._group.add(id, encoded.rows, len(encoded.blocks))
        return extents

    def flush(self) -> None:
        """Make all frames durable; full shards are."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Finish the last shard, then write what makes the files a group."""
        if self._file is not None:
            self._finish_shard(self._file)
        self._group.finish()

    def abort(self) -> None:
        """Close the shard without an index."""
        if self._file is not None:
            self._file.abort()

    def pages(self) -> dict[str, Pages]:
        """Return the digests of the pages of all files."""
        return self._group.pages

    def _write(self, blocks: Sequence[bytes | memoryview]) -> tuple[Extent, ...]:
        extents = []
        for block in blocks:
            rest = memoryview(block)
            while rest:
                file = self._file or self._open_shard()
                taken = self._shard.take(len(rest))
                offset = file.append(rest[:taken])
                extents.append(Extent(self._container, offset, taken))
                rest = rest[taken:]
                if self._shard.is_full():
                    self._finish_shard(file)
        return tuple(extents)

    def _open_shard(self) -> PagedFile:
        self._container = self._group.shard(self._shards)
        file = PagedFile(self._group.path.parent / self._container)
        self._file, self._shard = file, _Shard(self._group)
        self._shards += 1
        return file

    def _finish_shard(self, file: PagedFile) -> None:
        file.append(self._shard.tail(self._crc32c))
        file.close()
        self._group.pages[self._container] = file.pages
        self._file = None


def finish_group(
    group: Group,
    crc32c: Callable[[bytes], int],
    written: Iterable[tuple[str, int, tuple[Extent, ...]]],
) -> None:
    """Finish a group whose writer died after some utterances: ids, rows, and extents of frames."""
    directory = group.path.parent
    shards = [_Shard(group)]
    for id, rows, extents in written:
        for extent in extents:
            if shards[-1].is_full():
                shards.append(_Shard(group))
            path, offset = group.shard(len(shards) - 1), shards[-1].size
            if extent != Extent(path, offset, shards[-1].take(extent.nbytes)):
                raise misplaced(id)
        if not _fits(group, rows, extents):
            raise misplaced(id)
        group.add(id, rows, len(extents))
    if not shards[0].size:
        del shards[0]
    kept = {group.shard(number).rpartition("/")[2] for number in range(len(shards))}
    remove_left(directory, group.frames, lambda name: name not in kept)
    remove_left(directory, group.path.name, lambda name: name != group.name)
    for number, shard in enumerate(shards):
        with open_left(directory, group.shard(number), shard.size) as file:
            end_file(file, shard.size, shard.tail(crc32c))
    group.finish()


def _fits(group: Group, rows: int, extents: Sequence[Extent]) -> bool:
    if group.codec is None:
        return sum(extent.nbytes for extent in extents) == rows * group.feature.row_bytes
    return len(extents) == -(-rows // group.grid.chunk_rows)


class _Shard:
    """The inner chunks of one shard, back to back, and behind them their index."""

    def __init__(self, group: Group) -> None:
        self.size = 0  # bytes of the chunks so far
        self._slots = group.grid.shard_chunks
        # with a codec, every chunk has its own size
        self._chunk_bytes = group.grid.chunk_bytes if group.codec is None else None
        self._ends = array("q")  # of the chunks that a codec made

    def take(self, nbytes: int) -> int:
        """Take what there is room for: all of an encoded chunk, else as many bytes as fit."""
        if self._chunk_bytes is not None:
            nbytes = min(nbytes, self._slots * self._chunk_bytes - self.size)
        self.size += nbytes
        if self._chunk_bytes is None:
            self._ends.append(self.size)
        return nbytes

    def is_full(self) -> bool:
        if self._chunk_bytes is None:
            return len(self._ends) == self._slots
        return self.size == self._slots * self._chunk_bytes

    def tail(self, crc32c: Callable[[bytes], int]) -> bytes:
        """Return what fills up the last chunk, and the index."""
        ends = np.array(self._ends, np.int64)
        filling = b""
        if self._chunk_bytes is not None:
            chunks = -(-self.size // self._chunk_bytes)
            filling = bytes(chunks * self._chunk_bytes - self.size)
            ends = np.arange(1, chunks + 1) * self._chunk_bytes
        sizes = np.diff(ends, prepend=0)
        index = np.full((self._slots, 2), MISSING, "<u8")
        index[: len(ends), 0] = ends - sizes
        index[: len(ends), 1] = sizes
        data = index.tobytes()
        return filling + data + crc32c(data).to_bytes(4, "little")
