"""A part that replaces others: columns of what is copied into it, from its opening to its seal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featcache.container_files import Extents
from featcache.interface import Ints
from featcache.stats import FeatureStats
from featcache.store.format.annotation_columns import joined, stored_columns
from featcache.store.format.index import ContainerColumns, FeatureColumns, Hashes, Index
from featcache.store.format.index_writer import Columns
from featcache.store.format.journal_lines import Header
from featcache.store.format.part import SealedPart
from featcache.store.format.stamps import StampColumns
from featcache.store.format.strings import Strings, ends_of, joined_ends
from featcache.store.writing.copied_arrays import PartArrays
from featcache.store.writing.generation_annotations import annotation_of, widest_kinds
from featcache.store.writing.open_part import Declarations, OpenPart


@dataclass(frozen=True, slots=True)
class _Copied:
    """Rows of a part that were copied."""

    part: SealedPart
    index: Index
    rows: Ints  # in the order of copying


class CopiedPart:
    """An open part that rows of sealed ones are copied into; counts for nothing without its seal.

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

    def copy(self, part: SealedPart, rows: Ints) -> None:
        """Copy rows of a part, its blocks as they are, in the order in which their bytes lie.

        Raises `CorruptCacheError` for an array that is not what was written.
        """
        index = part.stamped_index(self._cache, list(self._features))
        rows = rows[_in_order_of_bytes(next(iter(index.features.values())), rows)]
        for batch in PartArrays(self._cache, part, index, self._features).batches(rows):
            ids = [*index.ids.take(batch.rows)]
            for name, extents in self._part.append_many(ids, batch.arrays).items():
                self._placed[name].append(extents)
        self._copied.append(_Copied(part, index, rows))

    def seal(self, stats: Mapping[str, FeatureStats]) -> None:
        """Finish the part; from then on it counts in the place of those that it replaces."""
        self._part.stats = dict(stats)
        self._part.seal(_Content(self._cache, self._copied, self._placed))

    def discard(self) -> None:
        """Remove the part."""
        self._part.discard()


class _Content:
    """The rows that were copied, as they are sealed."""

    def __init__(
        self, cache: Path, copied: Sequence[_Copied], placed: Mapping[str, Sequence[Extents]]
    ) -> None:
        self._cache = cache
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
        ids = [each.index.ids.take(each.rows) for each in self._copied]
        hashes: Hashes = np.concatenate(
            [each.index.hashes_of_rows()[each.rows] for each in self._copied]
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
        parts = [(each.part, each.index) for each in self._copied]
        for name, kind in sorted(widest_kinds(self._cache, parts, {}).items()):
            columns = [
                annotation_of(self._cache, each.part, each.index, name, kind).take(each.rows)
                for each in self._copied
            ]
            yield from stored_columns(name, joined(columns, kind).take(order))

    def _columns(self, name: str, numbers: Mapping[str, int]) -> FeatureColumns:
        sources = [(each.index.features[name], each.rows) for each in self._copied]
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
            if each.index.stamps is None
            else StampColumns(*(column[each.rows] for column in each.index.stamps))
            for each in self._copied
        ]
        joined = StampColumns(*(np.concatenate(columns) for columns in zip(*known, strict=True)))
        return joined if any(column.any() for column in joined) else None


def _in_order_of_bytes(columns: FeatureColumns, rows: Ints) -> Ints:
    first = columns.first[rows]
    if not len(columns.offset):
        return np.arange(len(rows))
    first = np.minimum(first, len(columns.offset) - 1)  # of arrays without bytes, any place will do
    return np.lexsort((columns.offset[first], columns.container[first]))
