"""Copying of stored arrays, as they lie: parts into another one, and those of another cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache._closing import pool_of
from featcache._progress import Interval
from featcache.container_files import EncodedArrays, Piece, cut
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.format.annotations import NONE, Values
from featcache.format.columns import ends_of
from featcache.format.files import remedy
from featcache.format.index import UNKNOWN, FeatureColumns, Index, Stamps, hash_of
from featcache.format.journal import Header
from featcache.format.manifest import PARTS
from featcache.format.part import Columns, SealedPart, as_known, header_for, read_part
from featcache.format.value_columns import joined, stored_columns
from featcache.interface import Ints
from featcache.reading.containers import Containers
from featcache.reading.generation import Generation
from featcache.registry import RAW
from featcache.stats import FeatureStats
from featcache.writing import part_writer, queue
from featcache.writing.known_ids import find_stored
from featcache.writing.open_part import Declarations, OpenPart
from featcache.writing.publish import AnnotatedRows, merged_stats, widest_kinds

# Arrays of an index, many at a time, read as they are stored and compared with their checksums.

BATCH_BYTES = 1 << 23  # looked at together: few enough to be near when they are written
BATCH_ARRAYS = 8192  # HDF5 stores as many in half a second


class CopiedRows(NamedTuple):
    """Some rows of an index, with all their features."""

    rows: Ints
    arrays: Mapping[str, EncodedArrays]  # views of the mapped files


class StoredArrays:
    """The arrays of an index.

    Args:
        cache: the cache directory.
        directory: that of the part, relative to it; "": the index is that of a generation.
        index: the index, with the stamps that count now.
        features: the declarations, by name.
        containers: of the index, where they are open already.
    """

    def __init__(
        self,
        cache: Path,
        directory: str,
        index: Index,
        features: Declarations,
        containers: Containers | None = None,
    ) -> None:
        self._cache = cache
        self._directory = directory
        self.index = index
        self._coded = {name: feature.codec != RAW for name, feature in features.items()}
        self._containers = containers or Containers(cache / directory, index.containers)

    def places(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return container and offset of the first bytes of rows; container -1 without bytes."""
        containers, offsets = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
        for name in self._coded:
            columns = self.index.features[name]
            first = columns.first[rows]
            found = np.flatnonzero((containers < 0) & (columns.first[rows + 1] > first))
            containers[found] = columns.container[first[found]]
            offsets[found] = columns.offset[first[found]]
        return containers, offsets

    def in_order_of_bytes(self, rows: Ints) -> Ints:
        """Sort rows by where their first bytes lie."""
        return rows[np.lexsort(self.places(rows)[::-1])]

    def check(self, rows: Ints) -> None:
        """Raise `CorruptCacheError` for an array of rows that is not what was written."""
        for _ in self.batches(rows):
            pass  # what is read is compared with the checksums

    def let_go(self) -> None:
        """Close the files until they are needed again: not all systems remove open ones."""
        self._containers.let_go()

    def batches(self, rows: Ints) -> Iterator[CopiedRows]:
        """Yield the arrays of rows, in their order; a thread looks at the next ones meanwhile.

        Raises `CorruptCacheError` for an array that is not what was written.
        """
        return _one_ahead(self._batches(rows))

    def _batches(self, rows: Ints) -> Iterator[CopiedRows]:
        places = self._places(rows)
        following = next(places, None)
        while following is not None:
            (some, placed), following = following, next(places, None)
            arrays = {name: self._read(name, some, each) for name, each in placed.items()}
            yield CopiedRows(some, arrays)

    def _places(self, rows: Ints) -> Iterator[tuple[Ints, dict[str, _Placed]]]:
        """Cut rows into batches, and have the system start to read them."""
        nbytes = np.zeros(len(rows), np.int64)
        for name in self._coded:
            nbytes += self._sizes(self.index.features[name])[rows]
        ends = ends_of(nbytes)
        start, most = 0, max(BATCH_ARRAYS // len(self._coded), 1)
        while start < len(rows):
            full = int(ends.searchsorted(ends[start] + BATCH_BYTES, "right")) - 1
            stop = min(max(full, start + 1), start + most)
            some = rows[start:stop]
            placed = {name: _Placed.of(self.index.features[name], some) for name in self._coded}
            self._containers.prefetch([run for each in placed.values() for run in each.runs])
            yield some, placed
            start = stop

    def _sizes(self, columns: FeatureColumns) -> Ints:
        """Return the bytes of each array; refuses extents that no file has."""
        sizes = self.index.containers.sizes[columns.container]
        fits = (columns.nbytes >= 0) & (columns.offset >= 0)
        fits &= columns.offset <= sizes - columns.nbytes
        for at in np.flatnonzero(~fits)[:1].tolist():
            place = (columns.container[at], columns.offset[at], columns.nbytes[at])
            self._containers.check(*map(int, place))
        return columns.sizes()

    def _read(self, name: str, rows: Ints, placed: _Placed) -> EncodedArrays:
        columns = self.index.features[name]
        pieces: list[Piece] = [self._containers.view(*run).data for run in placed.runs]
        arrays = [*cut(pieces, placed.sizes.tolist())]
        found = np.array([*map(hash_of, arrays)], np.uint64)
        wrong = np.flatnonzero(found != columns.checksum[rows])
        if len(wrong):
            raise CorruptCacheError(
                f"utterance {self.index.id(int(rows[wrong[0]]))!r}, feature {name!r}, in "
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
    with pool_of(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


# The one copier: rows of parts, of a generation, or of what a dead writer left, become a part.


class CopySource(NamedTuple):
    """Rows that are to be copied."""

    arrays: StoredArrays
    annotated: AnnotatedRows
    rows: Ints


def copy_rows(
    cache: Path,
    features: Declarations,
    header: Header,
    sources: Iterable[CopySource],
    stats: Mapping[str, FeatureStats] | None,
    *,
    name: str | None = None,
    tell: Callable[[int, int], object] = lambda utterances, nbytes: None,
) -> tuple[SealedPart, set[str]]:
    """Copy rows into a new part, their blocks as they are, in the order of bytes, and seal that.

    From its seal on the part counts, in the place of those that its header says it replaces; until
    then it counts for nothing. Also returns the paths of its files whose pages were hashed while
    they were written.

    Args:
        cache: the cache directory.
        features: the declarations, by name.
        header: of the new part.
        sources: the rows.
        stats: of all of them, by feature; None: they are computed.
        name: of the new part; None: a new one.
        tell: called with numbers of utterances and bytes.

    Raises `CorruptCacheError` for an array that is not what was written; then nothing is left.
    """
    part = OpenPart(cache, features, header, name)
    copied: list[tuple[AnnotatedRows, Ints]] = []
    try:
        for arrays, annotated, rows in sources:
            in_order = arrays.in_order_of_bytes(rows)
            for batch in arrays.batches(in_order):
                part.append_copies(*_stored(arrays.index, batch))
                if stats is None:
                    part.count(batch.arrays)
                nbytes = sum(int(each.nbytes.sum()) for each in batch.arrays.values())
                tell(len(batch.rows), nbytes)
            arrays.let_go()
            copied.append((annotated, in_order))
        sealed = part.seal(partial(_annotations, cache, copied), stats)
        if sealed is None:
            raise CorruptCacheError(f"nothing was copied to {str(cache)!r}")
        return sealed, part.hashed
    except BaseException:
        part.discard()
        raise


_Stored = tuple[
    list[str], Mapping[str, EncodedArrays], dict[str, list[int]], list[Stamps]
]  # as `OpenPart.append_copies` takes them


def _stored(index: Index, batch: CopiedRows) -> _Stored:
    rows = batch.rows
    checksums = {name: index.features[name].checksum[rows].tolist() for name in batch.arrays}
    stamps = [UNKNOWN] * len(rows)
    if index.stamps is not None:
        pairs = zip(*(column[rows].tolist() for column in index.stamps), strict=True)
        stamps = [Stamps(*each) for each in pairs]
    return [*index.ids.take(rows)], batch.arrays, checksums, stamps


def _annotations(cache: Path, copied: Sequence[tuple[AnnotatedRows, Ints]], order: Ints) -> Columns:
    kinds = widest_kinds(cache, [annotated for annotated, _ in copied], {})
    for name, kind in sorted(kinds.items()):
        columns = [annotated.of_kind(name, kind).gather(rows) for annotated, rows in copied]
        yield from stored_columns(name, joined(columns, kind).gather(order))


# Utterances of another cache, for declarations that change nothing of what is stored.
#
# Where whole parts are copied, their statistics are those of the copies, too.

FANOUT = 8
LARGE = 1 / FANOUT  # a part of this fullness is not small


def fullness(rows: int, nbytes: int) -> float:
    """Return the share of rows and bytes of the most that a part holds."""
    return max(nbytes / part_writer.PART_BYTES, rows / part_writer.PART_ROWS)


def keeps_its_bytes(source: Generation, feature: FeatureStorageConfig) -> bool:
    """Whether an array of a generation, stored as `feature` declares, has the same bytes."""
    manifest, name = source.manifest, feature.name
    was = FeatureStorageConfig.from_json(manifest.features[name])
    dims = manifest.dims.get(name, ())
    stricter = (feature.stats and not was.stats) or (was.nonfinite, feature.nonfinite) == (
        "keep",
        "raise",
    )
    fits = feature.dims in (None, dims) and feature.time_axis == was.time_axis
    if stricter or not fits or (was.dtype, was.codec) != (feature.dtype, feature.codec):
        return False
    if feature.codec == RAW:
        return True
    cut = feature.blocks(dims)
    rows = {part.block_rows[name] for part in manifest.parts}
    same = (was.make_codec(), was.blocks(dims)) == (feature.make_codec(), cut)
    return same and rows <= {0 if cut is None else cut.rows or 0}


@dataclass(frozen=True)
class PartCopies:
    """Copies rows of a plain generation into new parts of another cache.

    Only the holder of that cache's lock may use this.

    Args:
        source: the generation that is copied.
        cache: the directory of the cache that takes the copies.
        features: the declarations there; none changes the bytes of the source.
        fingerprint: digest of what that cache is made from.
    """

    source: Generation
    cache: Path
    features: Declarations
    fingerprint: str

    def groups(self, rows: Ints) -> Iterator[Ints]:
        """Cut rows into those of one new part each, in the order of their bytes.

        Rows of one old part stay together. Parts are as small as they may be: some that are killed
        are copied once more.
        """
        if not len(rows):
            return
        containers, offsets = self._arrays().places(rows)
        order = np.lexsort((offsets, containers))
        numbers = self.source.index.containers.parts
        # an array without bytes may be copied with any part
        parts = np.where(containers < 0, -1, numbers[containers] if len(numbers) else -1)[order]
        starts = np.flatnonzero(np.append(True, parts[1:] != parts[:-1]))
        sizes = np.add.reduceat(self.nbytes(rows)[order], starts).tolist()
        counts = np.diff(np.append(starts, len(rows))).tolist()
        begin = end = held = 0
        for size, count in zip(sizes, counts, strict=True):
            if (
                fullness(end - begin, held) >= LARGE
                or fullness(end - begin + count, held + size) > 1
            ):
                if end > begin:
                    yield rows[order[begin:end]]
                begin, held = end, 0
            end, held = end + count, held + size
        if end > begin:
            yield rows[order[begin:end]]

    def _arrays(self) -> StoredArrays:
        opened = self.source
        there = opened.containers if opened.containers.is_remote else None
        return StoredArrays(opened.path, "", opened.index, self.features, there)

    def nbytes(self, rows: Ints) -> Ints:
        """Return the stored bytes of rows, all features together."""
        columns = self.source.index.features
        return sum((columns[name].sizes()[rows] for name in self.features), np.zeros_like(rows))

    def copy(
        self, rows: Ints, tell: Callable[[int, int], object] = lambda utterances, nbytes: None
    ) -> tuple[SealedPart, set[str]]:
        """Copy rows into a new part and seal that; `tell` is called with utterances and bytes.

        Also returns the paths of its files whose pages were hashed on their way to the disk. What
        was copied is committed every two seconds, and sealed if reading fails, or an interrupt
        (Ctrl-C) ends it.

        Raises `CorruptCacheError` for an array that is not what was written.
        """
        build = find_stored(self.cache, self.fingerprint).build
        dims = {name: self.source.manifest.dims[name] for name in self.features}
        header = header_for(self.features, dims, build, self.fingerprint)
        part = OpenPart(self.cache, self.features, header)
        source = CopySource(self._arrays(), _annotated(self.source), rows)
        return _CommittedCopy(part, source, self._whole_stats(rows)).copy(self.cache, tell)

    def _whole_stats(self, rows: Ints) -> Mapping[str, FeatureStats] | None:
        """Return the statistics of the parts that rows are all of; None if they are not all."""
        opened, manifest = self.source, self.source.manifest
        containers, _ = self._arrays().places(rows)
        numbers = np.unique(opened.index.containers.parts[containers[containers >= 0]]).tolist()
        names = [manifest.parts[number].name for number in numbers]
        found = [part for name in names if (part := read_part(opened.path, name)) is not None]
        if not found or len(found) < len(names):
            return None
        stats = merged_stats(opened.path, as_known(found, manifest), manifest)
        frames = {name: int(opened.index.features[name].rows[rows].sum()) for name in self.features}
        counted = (name for name, each in self.features.items() if each.stats)
        # rows are some of those that the parts' statistics are of: as many frames are all of them
        return stats if all(stats[name].count == frames[name] for name in counted) else None


class _CommittedCopy:
    """A copy of rows into an open part, of which nothing is lost that is two seconds old.

    Another thread stores and seals, which no interrupt (Ctrl-C) reaches in the middle of that.

    Args:
        part: takes the rows.
        source: the rows.
        stats: of all of them, by feature; None: they are computed.
    """

    def __init__(
        self, part: OpenPart, source: CopySource, stats: Mapping[str, FeatureStats] | None
    ) -> None:
        self._part, self._stats = part, stats
        self._arrays, self._annotated, rows = source
        self._rows = self._arrays.in_order_of_bytes(rows)
        self._commits = Interval(queue.COMMIT_INTERVAL_S)
        self._is_torn = False  # after an error within a batch

    def copy(self, cache: Path, tell: Callable[[int, int], object]) -> tuple[SealedPart, set[str]]:
        """Copy the rows, and seal the part, as `PartCopies.copy` says."""
        try:
            with ThreadPoolExecutor(1) as thread:
                try:
                    for batch in self._arrays.batches(self._rows):
                        thread.submit(self._store, batch).result()
                        nbytes = sum(int(each.nbytes.sum()) for each in batch.arrays.values())
                        tell(len(batch.rows), nbytes)
                finally:
                    sealing = thread.submit(self._seal, cache)
                sealed = sealing.result()
        finally:
            self._part.release()  # what is committed stays, whatever failed
            self._arrays.let_go()
        if sealed is None:
            raise CorruptCacheError(f"nothing was copied to {str(cache)!r}")
        return sealed, self._part.hashed

    def _store(self, batch: CopiedRows) -> None:
        self._is_torn = True
        annotations = self._values(batch.rows)
        self._part.append_copies(*_stored(self._arrays.index, batch), annotations)
        if self._stats is None:
            self._part.count(batch.arrays)
        if self._commits.due():
            self._part.commit()
        self._is_torn = False

    def _values(self, rows: Ints) -> list[Values]:
        """Return the annotations of rows, as the journal tells of them."""
        columns = {name: self._annotated.column(name).take(rows) for name in self._annotated.kinds}
        if not columns:
            return [NONE] * len(rows)
        return [
            {name: each for name, each in zip(columns, values, strict=True) if each is not None}
            for values in zip(*columns.values(), strict=True)
        ]

    def _seal(self, cache: Path) -> SealedPart | None:
        """Seal what was stored, which may be some of the rows."""
        part, stats, rows = self._part, self._stats, self._rows[: len(self._part.ids())]
        if self._is_torn:
            return None
        if stats is not None and len(rows) < len(self._rows):
            stats = None
            for batch in self._arrays.batches(rows):
                part.count(batch.arrays)
        return part.seal(partial(_annotations, cache, [(self._annotated, rows)]), stats)


def _annotated(opened: Generation) -> AnnotatedRows:
    kinds = {name: entry.kind for name, entry in opened.manifest.annotations.items()}
    return AnnotatedRows(
        opened.manifest.name,
        len(opened.index),
        kinds,
        opened.annotation,
        lambda: np.empty(0, np.int64),
    )
