"""Frames of a feature in the shards of a Zarr v3 group (layout: `featcache_backends.zarr`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from featcache.container_files import (
    EncodedArrays,
    Extents,
    PagedFile,
    Pages,
    end_file,
    misplaced,
    open_left,
    remove_left,
    sync_directory,
)
from featcache.interface import EncodedArray, Extent, Written
from featcache_backends._zarr_group import Group

Crc32c = Callable[[bytes], int]
MISSING = 2**64 - 1  # offset and size of an inner chunk that a shard does not have


class GroupWriter:
    """Appends frames to a group; `crc32c` returns the checksum of bytes."""

    def __init__(self, group: Group, crc32c: Crc32c) -> None:
        self._group = group
        self._crc32c = crc32c
        self._shard = _Shard(group, 0)
        self._file: PagedFile | None = None  # of that shard, once it has frames
        (group.path / group.name).mkdir(parents=True)
        sync_directory(group.path)
        sync_directory(group.path.parent)

    def append(self, id: str, encoded: EncodedArray) -> tuple[Extent, ...]:
        """Write the frames of one utterance behind those of the one before."""
        extents = []
        for block in encoded.blocks:
            rest = memoryview(block)
            while rest:
                if self._file is None:
                    self._file = PagedFile(self._group.path.parent / self._shard.path)
                extent = self._shard.take(len(rest))
                self._file.append(rest[: extent.nbytes])
                extents.append(extent)
                rest = rest[extent.nbytes :]
                if self._shard.is_full():
                    self._finish_shard(self._file)
        self._group.add(id, encoded.rows, len(encoded.blocks))
        return tuple(extents)

    def write_out(self) -> None:
        """Show other processes all frames."""
        if self._file is not None:
            self._file.write_out()

    def append_many(self, ids: Sequence[str], arrays: EncodedArrays) -> Extents:
        """Write the frames of many utterances behind those of the one before."""
        total = int(arrays.nbytes.sum())
        if not self._shard.has_room(total) or not total:
            pairs = zip(ids, arrays, strict=True)
            return Extents.of([self.append(id, array) for id, array in pairs])
        if self._file is None:
            self._file = PagedFile(self._group.path.parent / self._shard.path)
        path, begin, _ = self._shard.take(total)
        self._file.append_each(arrays.pieces)
        if self._shard.is_full():
            self._finish_shard(self._file)
        columns = (ids, arrays.rows.tolist(), arrays.blocks.tolist())
        for id, rows, blocks in zip(*columns, strict=True):
            self._group.add(id, rows, blocks)
        return Extents(
            counts=arrays.blocks,
            containers=(path,),
            container=np.zeros(len(arrays.nbytes), np.int64),
            offset=begin + np.cumsum(arrays.nbytes) - arrays.nbytes,
            nbytes=arrays.nbytes,
        )

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

    def _finish_shard(self, file: PagedFile) -> None:
        file.append(self._shard.tail(self._crc32c))
        file.close()
        self._group.pages[self._shard.path] = file.pages
        self._file, self._shard = None, self._shard.next()


def finish_group(group: Group, crc32c: Crc32c, written: Written) -> None:
    """Finish a group whose writer died after these utterances."""
    directory = group.path.parent
    shards = [_Shard(group, 0)]
    for id, arrays in written:
        rows, extents = arrays[group.name]
        for extent in extents:
            if shards[-1].is_full():
                shards.append(shards[-1].next())
            if extent != shards[-1].take(extent.nbytes):
                raise misplaced(id)
        if not group.fits(rows, extents):
            raise misplaced(id)
        group.add(id, rows, len(extents))
    if not shards[0].size:
        del shards[0]
    kept = {shard.path.rpartition("/")[2] for shard in shards}
    remove_left(directory, group.frames, lambda name: name not in kept)
    remove_left(directory, group.path.name, lambda name: name != group.name)
    for shard in shards:
        with open_left(directory, shard.path, shard.size) as file:
            end_file(file, shard.size, shard.tail(crc32c))
    group.finish()


class _Shard:
    """The inner chunks of one shard, back to back, and behind them their index."""

    def __init__(self, group: Group, number: int) -> None:
        self.path = group.shard(number)
        self.size = 0  # bytes of the chunks so far
        self._group, self._number = group, number
        self._ends = array("q")  # of the chunks that a codec made, each of its own size

    def next(self) -> _Shard:
        """Return the empty shard behind this one."""
        return _Shard(self._group, self._number + 1)

    def take(self, nbytes: int) -> Extent:
        """Take what there is room for: all of an encoded chunk, else as many bytes as fit."""
        offset, grid = self.size, self._group.grid
        if self._group.codec is None:
            nbytes = min(nbytes, grid.shard_chunks * grid.chunk_bytes - offset)
        else:
            self._ends.append(offset + nbytes)
        self.size += nbytes
        return Extent(self.path, offset, nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether bytes of several utterances, without a codec, fit."""
        grid = self._group.grid
        room = grid.shard_chunks * grid.chunk_bytes - self.size
        return self._group.codec is None and nbytes <= room

    def is_full(self) -> bool:
        """Whether the next frames go to the next shard."""
        grid = self._group.grid
        if self._group.codec is None:
            return self.size == grid.shard_chunks * grid.chunk_bytes
        return len(self._ends) == grid.shard_chunks

    def tail(self, crc32c: Crc32c) -> bytes:
        """Return what fills up the last chunk, and the index."""
        ends = np.array(self._ends, np.int64)
        grid = self._group.grid
        if self._group.codec is None:
            chunks = -(-self.size // grid.chunk_bytes)
            ends = np.arange(1, chunks + 1) * grid.chunk_bytes
        filling = bytes(int(ends[-1]) - self.size)
        index = np.full((grid.shard_chunks, 2), MISSING, "<u8")
        index[: len(ends), 1] = np.diff(ends, prepend=0)
        index[: len(ends), 0] = ends - index[: len(ends), 1]
        data = index.tobytes()
        return filling + data + crc32c(data).to_bytes(4, "little")
