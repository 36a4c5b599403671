"""A part that rows of others are copied into: their columns, from its opening to its seal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featcache.container_files import Extents
from featcache.errors import CorruptCacheError
from featcache.interface import Ints
from featcache.stats import FeatureStats
from featcache.store.format.annotation_columns import joined, stored_columns
from featcache.store.format.index import ContainerColumns, FeatureColumns, Hashes, Index
from featcache.store.format.index_writer import Columns
from featcache.store.format.journal_lines import Header
from featcache.store.format.part import SealedPart
from featcache.store.format.stamps import StampColumns
from featcache.store.format.strings import Strings, ends_of, joined_ends
from featcache.store.writing.annotated_rows import AnnotatedRows, widest_kinds
from featcache.store.writing.copied_arrays import StoredArrays
from featcache.store.writing.open_part import Declarations, OpenPart


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
        """Give the annotations of all rows as columns, in another order."""
        sources = [each.source for each in self._copied]
        kinds = widest_kinds(sources[0].cache, [each.annotated for each in sources], {})
        for name, kind in sorted(kinds.items()):
            columns = [
                each.source.annotated.of_kind(name, kind).take(each.rows) for each in self._copied
            ]
            yield from stored_columns(name, joined(columns, kind).take(order))

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
