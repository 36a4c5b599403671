"""Arrays of an index, many at a time, read as they are stored and compared with their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from featcache.container_files import EncodedArrays
from featcache.errors import CorruptCacheError
from featcache.interface import Bytes, Ints
from featcache.registry import RAW
from featcache.store.format.files import remedy
from featcache.store.format.index import FeatureColumns, Index, hash_of
from featcache.store.format.manifest import PARTS
from featcache.store.format.strings import ends_of
from featcache.store.reading.containers import Containers
from featcache.store.writing.open_part import Declarations

BATCH_BYTES = 1 << 21  # read, and written, at once: as much as the processor keeps near
BATCH_ROWS = 8192
T = TypeVar("T")


class Batch(NamedTuple):
    """Some rows of an index, with all their features."""

    rows: Ints
    arrays: Mapping[str, EncodedArrays]  # until the next batch but one is taken


class StoredArrays:
    """The arrays of an index.

    Args:
        cache: the cache directory.
        directory: that of the part, relative to it; "": the index is that of a generation.
        index: the index.
        features: the declarations, by name.
    """

    def __init__(self, cache: Path, directory: str, index: Index, features: Declarations) -> None:
        self._cache = cache
        self._directory = directory
        self._index = index
        self._coded = {name: feature.codec != RAW for name, feature in features.items()}
        # not mapped: reading into memory that is there costs no fault a page
        self._containers = Containers.of(cache / directory, index.containers, mapped=False)

    def in_order_of_bytes(self, rows: Ints) -> Ints:
        """Sort rows by where the bytes of their first feature lie."""
        columns = self._index.features[next(iter(self._coded))]
        if not len(columns.offset):
            return rows
        # of arrays without bytes, any place will do
        first = np.minimum(columns.first[rows], len(columns.offset) - 1)
        return rows[np.lexsort((columns.offset[first], columns.container[first]))]

    def batches(self, rows: Ints) -> Iterator[Batch]:
        """Give the arrays of rows, in their order; another thread reads ahead.

        Raises `CorruptCacheError` for an array that is not what was written.
        """
        return _one_ahead(self._batches(rows))

    def _batches(self, rows: Ints) -> Iterator[Batch]:
        nbytes = np.zeros(len(rows), np.int64)
        for name in self._coded:
            nbytes += self._sizes(self._index.features[name])[rows]
        ends = ends_of(nbytes)
        room = cycle([_Room(), _Room()])  # of one batch while the other one is written
        start = 0
        while start < len(rows):
            full = int(ends.searchsorted(ends[start] + BATCH_BYTES, "right")) - 1
            stop = min(max(full, start + 1), start + BATCH_ROWS)
            out = next(room).take(int(ends[stop] - ends[start]))
            yield self._read(rows[start:stop], out)
            start = stop

    def _sizes(self, columns: FeatureColumns) -> Ints:
        """Return the bytes of each array; refuses extents that no file has."""
        sizes = self._index.containers.sizes[columns.container]
        fits = (columns.nbytes >= 0) & (columns.offset >= 0)
        fits &= columns.offset <= sizes - columns.nbytes
        for at in np.flatnonzero(~fits)[:1].tolist():
            place = (columns.container[at], columns.offset[at], columns.nbytes[at])
            self._containers.check(*map(int, place))
        ends = ends_of(columns.nbytes)[columns.first]
        return np.diff(ends)

    def _read(self, rows: Ints, out: Bytes) -> Batch:
        arrays, begin = {}, 0
        for name in self._coded:
            arrays[name] = self._read_feature(name, self._index.features[name], rows, out[begin:])
            begin += int(arrays[name].nbytes.sum())
        return Batch(rows, arrays)

    def _read_feature(
        self, name: str, columns: FeatureColumns, rows: Ints, out: Bytes
    ) -> EncodedArrays:
        first = columns.first[rows]
        blocks = columns.first[rows + 1] - first
        block_ends = ends_of(blocks)
        extents = np.repeat(first - block_ends[:-1], blocks) + np.arange(block_ends[-1])
        nbytes = columns.nbytes[extents]
        ends = ends_of(nbytes)
        data = out[: ends[-1]]
        self._fill(columns.container[extents], columns.offset[extents], ends, data)
        array_ends = ends[block_ends]
        self._compare(name, columns, rows, array_ends, data.data)
        if not self._coded[name]:  # however a shard cut them then
            nbytes = np.diff(array_ends)
            blocks = (nbytes > 0).astype(np.int64)
            nbytes = nbytes[nbytes > 0]
        return EncodedArrays(columns.rows[rows], blocks, nbytes, [data.data])

    def _fill(self, container: Ints, offset: Ints, ends: Ints, out: Bytes) -> None:
        """Read extents, those that lie side by side at once."""
        apart = (container[1:] != container[:-1]) | (np.diff(offset) != np.diff(ends)[:-1])
        begins = [0, *(np.flatnonzero(apart) + 1).tolist()] if len(offset) else []
        for begin, end in pairwise([*begins, len(offset)]):
            place = int(container[begin]), int(offset[begin])
            self._containers.read_into(*place, out[ends[begin] : ends[end]])

    def _compare(
        self, name: str, columns: FeatureColumns, rows: Ints, ends: Ints, data: memoryview
    ) -> None:
        found = [hash_of(data[begin:end]) for begin, end in pairwise(ends.tolist())]
        wrong = np.flatnonzero(np.array(found, np.uint64) != columns.checksum[rows])
        if len(wrong):
            raise CorruptCacheError(
                f"utterance {self._index.id(int(rows[wrong[0]]))!r}, feature {name!r}, in "
                f"{str(self._cache / self._directory)!r} is not what was written; "
                f"{remedy(self._cache, self._directory or PARTS)}"
            )


class _Room:
    """Memory that is used again: new memory costs more than reading into it."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        if nbytes > len(self._bytes):
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes]


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Give items while another thread makes the next one."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
