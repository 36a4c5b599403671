"""Copying of stored arrays, as they lie, from parts into another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.container_files import EncodedArrays, Extents, Piece, cut
from featcache.errors import CorruptCacheError
from featcache.format.annotation_columns import joined, stored_columns
from featcache.format.columns import Strings, ends_of, joined_ends
from featcache.format.files import remedy
from featcache.format.index import (
    ContainerColumns,
    FeatureColumns,
    Hashes,
    Index,
    StampColumns,
    hash_of,
)
from featcache.format.journal import Header
from featcache.format.manifest import PARTS
from featcache.format.part import Columns, SealedPart
from featcache.interface import Ints
from featcache.reading.containers import Containers
from featcache.registry import RAW
from featcache.stats import FeatureStats
from featcache.writing.open_part import Declarations, OpenPart
from featcache.writing.publish import AnnotatedRows, widest_kinds

# Arrays of an index, many at a time, read as they are stored and compared with their checksums.

BATCH_BYTES = 1 << 23  # looked at together: few enough to be near when they are written
BATCH_ROWS = 8192


class CopiedRows(NamedTuple):
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

    def batches(self, rows: Ints) -> Iterator[CopiedRows]:
        """Yield the arrays of rows, in their order; a thread looks at the next ones meanwhile.

        Raises `CorruptCacheError` for an array that is not what was written.
        """
        return _one_ahead(self._batches(rows))

    def _batches(self, rows: Ints) -> Iterator[CopiedRows]:
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

    def _batch(self, rows: Ints, placed: Mapping[str, _Placed]) -> CopiedRows:
        return CopiedRows(
            rows, {name: self._read(name, rows, each) for name, each in placed.items()}
        )

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


def _one_ahead(items: Iterator[CopiedRows]) -> Iterator[CopiedRows]:
    """Yield items while another thread makes the next one."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


# A part that rows of others are copied into: their columns, from its opening to its seal.


@dataclass(frozen=True, slots=True)
class CopySource:
    """Source of rows that are copied: a sealed part, or a generation.

    Args:
        cache: the cache directory.
        directory: that of the part, relative to it; "" for a generation.
        name: for messages.
        index: its index, with the stamps that count now.
        kinds: of its annotations, by name.
        column: returns an annotation of all its rows.
    """

    cache: Path
    directory: str
    index: Index
    annotated: AnnotatedRows

    @classmethod
    def of_part(cls, cache: Path, part: SealedPart, names: list[str]) -> CopySource:
        """Copy from a sealed part."""
        index = part.stamped_index(cache, names)
        return cls(cache, part.directory, index, AnnotatedRows.of_part(cache, part, index))


@dataclass(frozen=True, slots=True)
class _Copied:
    """Rows that were copied."""

    source: CopySource
    rows: Ints  # in the order of copying


class CopiedPart:
    """An open part that stored rows are copied into; counts for nothing without its seal.

    Args:
        cache: the cache directory.
        features: the declarations, by name.
        header: of the new part; names the parts that it replaces.
    """

    def __init__(self, cache: Path, features: Declarations, header: Header) -> None:
        self._cache = cache
        self._features = features
        self._copied: list[_Copied] = []
        self._placed: dict[str, list[Extents]] = {name: [] for name in features}
        self._part = OpenPart(cache, features, header)

    def copy(
        self,
        source: CopySource,
        rows: Ints,
        tell: Callable[[int, int], object] = lambda utterances, nbytes: None,
        *,
        count: bool = False,
    ) -> None:
        """Copy rows, their blocks as they are, in the order in which their bytes lie.

        `tell` is called with numbers of utterances and bytes; `count` takes the arrays into the
        statistics. Raises `CorruptCacheError` for an array that is not what was written.
        """
        arrays = StoredArrays(source.cache, source.directory, source.index, self._features)
        rows = arrays.in_order_of_bytes(rows)
        for batch in arrays.batches(rows):
            ids = [*source.index.ids.take(batch.rows)]
            for name, extents in self._part.append_many(ids, batch.arrays).items():
                self._placed[name].append(extents)
            if count:
                self._part.count_many(batch.arrays)
            tell(len(ids), sum(int(each.nbytes.sum()) for each in batch.arrays.values()))
        self._copied.append(_Copied(source, rows))

    def seal(self, stats: Mapping[str, FeatureStats] | None = None) -> SealedPart:
        """Finish the part; from then on it counts, in the place of those that it replaces.

        `stats` are those of all that was copied, where they were not counted.
        """
        if stats is not None:
            self._part.stats = {name: stats[name] for name in self._part.stats}
        sealed = self._part.seal(_Content(self._copied, self._placed))
        if sealed is None:
            raise CorruptCacheError(f"nothing was copied to {str(self._cache)!r}")
        return sealed

    @property
    def hashed(self) -> set[str]:
        """Paths of the files whose pages were hashed while they were written, once it is sealed."""
        return self._part.hashed

    def discard(self) -> None:
        """Remove the part."""
        self._part.discard()


class _Content:
    """The rows that were copied, as they are sealed."""

    def __init__(self, copied: Sequence[_Copied], placed: Mapping[str, Sequence[Extents]]) -> None:
        self._copied = copied
        self._placed = placed

    def __len__(self) -> int:
        return sum(len(each.rows) for each in self._copied)

    def paths(self) -> set[str]:
        """Return the containers that arrays were copied to."""
        return {
            path for placed in self._placed.values() for each in placed for path in each.containers
        }

    def index(
        self,
        containers: ContainerColumns,
        stats: Mapping[str, FeatureStats],
        names: Sequence[str],
    ) -> Index:
        """Return the index of all rows in the order of copying."""
        ids = [each.source.index.ids.take(each.rows) for each in self._copied]
        hashes: Hashes = np.concatenate(
            [each.source.index.hashes_of_rows()[each.rows] for each in self._copied]
        )
        numbers = {path: number for number, path in enumerate(containers.paths)}
        return Index(
            hashes=hashes,
            hash_rows=np.arange(len(hashes)),
            ids=Strings(
                joined_ends(each.ends for each in ids), np.concatenate([each.data for each in ids])
            ),
            features={name: self._columns(name, numbers) for name in names},
            containers=containers,
            stats=stats,
            stamps=self._stamps(),
        )

    def annotations(self, order: Ints) -> Columns:
        """Yield the annotations of all rows as columns, in another order."""
        sources = [each.source for each in self._copied]
        kinds = widest_kinds(sources[0].cache, [each.annotated for each in sources], {})
        for name, kind in sorted(kinds.items()):
            columns = [
                each.source.annotated.of_kind(name, kind).gather(each.rows) for each in self._copied
            ]
            yield from stored_columns(name, joined(columns, kind).gather(order))

    def _columns(self, name: str, numbers: Mapping[str, int]) -> FeatureColumns:
        sources = [(each.source.index.features[name], each.rows) for each in self._copied]
        placed = self._placed[name]
        container = [
            np.array([numbers[path] for path in each.containers], np.int32)[each.container]
            for each in placed
        ]
        return FeatureColumns(
            rows=np.concatenate([columns.rows[rows] for columns, rows in sources]),
            checksum=np.concatenate([columns.checksum[rows] for columns, rows in sources]),
            first=ends_of(np.concatenate([each.counts for each in placed])),
            container=np.concatenate(container),
            offset=np.concatenate([each.offset for each in placed]),
            nbytes=np.concatenate([each.nbytes for each in placed]),
        )

    def _stamps(self) -> StampColumns | None:
        known = [
            StampColumns.unknown(len(each.rows))
            if each.source.index.stamps is None
            else StampColumns(*(column[each.rows] for column in each.source.index.stamps))
            for each in self._copied
        ]
        joined = StampColumns(*(np.concatenate(columns) for columns in zip(*known, strict=True)))
        return joined if any(column.any() for column in joined) else None
