"""Arrays of an index, many at a time, read as they are stored and compared with their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.container_files import EncodedArrays, Piece, cut
from featcache.errors import CorruptCacheError
from featcache.interface import Ints
from featcache.registry import RAW
from featcache.store.format.files import remedy
from featcache.store.format.index import FeatureColumns, Index, hash_of
from featcache.store.format.manifest import PARTS
from featcache.store.format.strings import ends_of
from featcache.store.reading.containers import Containers
from featcache.store.writing.open_part import Declarations

BATCH_BYTES = 1 << 23  # looked at together: few enough to be near when they are written
BATCH_ROWS = 8192


class Batch(NamedTuple):
    """Some rows of an index, with all their features."""

    rows: Ints
    arrays: Mapping[str, EncodedArrays]  # views of the mapped files


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
        self._containers = Containers.of(cache / directory, index.containers)

    def in_order_of_bytes(self, rows: Ints) -> Ints:
        """Sort rows by where the bytes of their first feature lie."""
        columns = self._index.features[next(iter(self._coded))]
        if not len(columns.offset):
            return rows
        # of arrays without bytes, any place will do
        first = np.minimum(columns.first[rows], len(columns.offset) - 1)
        return rows[np.lexsort((columns.offset[first], columns.container[first]))]

    def batches(self, rows: Ints) -> Iterator[Batch]:
        """Give the arrays of rows, in their order; another thread looks at the next ones meanwhile.

        Raises `CorruptCacheError` for an array that is not what was written.
        """
        return _one_ahead(self._batches(rows))

    def _batches(self, rows: Ints) -> Iterator[Batch]:
        placed = None
        for following in self._places(rows):
            if placed is not None:
                yield self._batch(*placed)
            placed = following
        if placed is not None:
            yield self._batch(*placed)

    def _places(self, rows: Ints) -> Iterator[tuple[Ints, dict[str, _Placed]]]:
        """Cut rows into batches, and have the system start to read them."""
        nbytes = np.zeros(len(rows), np.int64)
        for name in self._coded:
            nbytes += self._sizes(self._index.features[name])[rows]
        ends = ends_of(nbytes)
        start = 0
        while start < len(rows):
            full = int(ends.searchsorted(ends[start] + BATCH_BYTES, "right")) - 1
            stop = min(max(full, start + 1), start + BATCH_ROWS)
            some = rows[start:stop]
            placed = {name: _Placed.of(self._index.features[name], some) for name in self._coded}
            self._containers.prefetch([run for each in placed.values() for run in each.runs])
            yield some, placed
            start = stop

    def _batch(self, rows: Ints, placed: Mapping[str, _Placed]) -> Batch:
        return Batch(rows, {name: self._read(name, rows, each) for name, each in placed.items()})

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

    def _read(self, name: str, rows: Ints, placed: _Placed) -> EncodedArrays:
        columns = self._index.features[name]
        pieces: list[Piece] = [self._containers.view(*run).data for run in placed.runs]
        arrays = [*cut(pieces, placed.sizes.tolist())]
        found = np.array([*map(hash_of, arrays)], np.uint64)
        wrong = np.flatnonzero(found != columns.checksum[rows])
        if len(wrong):
            raise CorruptCacheError(
                f"utterance {self._index.id(int(rows[wrong[0]]))!r}, feature {name!r}, in "
                f"{str(self._cache / self._directory)!r} is not what was written; "
                f"{remedy(self._cache, self._directory or PARTS)}"
            )
        if self._coded[name]:
            return EncodedArrays(columns.rows[rows], placed.blocks, placed.nbytes, pieces)
        has_bytes = placed.sizes > 0
        if (placed.blocks > has_bytes).any():  # cut by shards, or told of without bytes
            pieces = [array for array in arrays if len(array)]
        nbytes = placed.sizes[has_bytes]
        return EncodedArrays(columns.rows[rows], has_bytes.astype(np.int64), nbytes, pieces)


class _Placed(NamedTuple):
    """Where some arrays of a feature lie."""

    blocks: Ints  # of each array: how many it has
    nbytes: Ints  # of each block
    sizes: Ints  # of each array, in bytes
    runs: list[tuple[int, int, int]]  # container, offset, bytes of blocks that lie side by side

    @classmethod
    def of(cls, columns: FeatureColumns, rows: Ints) -> _Placed:
        """Find the arrays of rows."""
        first = columns.first[rows]
        blocks = columns.first[rows + 1] - first
        ends = ends_of(blocks)
        extents = np.repeat(first - ends[:-1], blocks) + np.arange(ends[-1])
        nbytes = columns.nbytes[extents]
        sizes = np.diff(ends_of(nbytes)[ends])
        if not len(extents):
            return cls(blocks, nbytes, sizes, [])
        container, offset = columns.container[extents], columns.offset[extents]
        apart = (container[1:] != container[:-1]) | (np.diff(offset) != nbytes[:-1])
        begins = np.flatnonzero(np.append(True, apart))
        places = container[begins], offset[begins], np.add.reduceat(nbytes, begins)
        runs = [*zip(*(column.tolist() for column in places), strict=True)]
        return cls(blocks, nbytes, sizes, runs)


def _one_ahead(items: Iterator[Batch]) -> Iterator[Batch]:
    """Give items while another thread makes the next one."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
