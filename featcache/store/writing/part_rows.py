"""`PartRows`: utterances that an open part has taken, as columns: objects of millions cost memory.

Not how they are put in order and stored: that is `seal`'s.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from featcache.interface import Ints
from featcache.stats import FeatureStats
from featcache.store.format.annotations import Values
from featcache.store.format.index import ContainerColumns, FeatureColumns, Index, hash_of
from featcache.store.format.index_writer import Columns, annotation_columns
from featcache.store.format.journal_lines import PlacedArrays
from featcache.store.format.stamps import StampColumns, Stamps
from featcache.store.format.strings import Strings, ends_of


class PartRows:
    """The `Content` of a part that grows, in the order of writing.

    Args:
        names: of the features.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.ids: list[str] = []
        self._stamps: list[Stamps] = []
        self._annotations: list[Values] = []
        self._arrays = {name: _Arrays() for name in names}

    def __len__(self) -> int:
        return len(self.ids)

    def add(
        self,
        ids: Sequence[str],
        placed: Mapping[str, PlacedArrays],
        stamps: Sequence[Stamps],
        annotations: Sequence[Values],
    ) -> None:
        """Take utterances that were stored."""
        self.ids += ids
        self._stamps += stamps
        self._annotations += annotations
        for name, arrays in placed.items():
            self._arrays[name].add(arrays)

    def paths(self) -> set[str]:
        """Return the containers that their arrays lie in."""
        return {path for arrays in self._arrays.values() for path in arrays.numbers}

    def index(
        self,
        containers: ContainerColumns,
        stats: Mapping[str, FeatureStats],
        names: Sequence[str],
    ) -> Index:
        """Return their index."""
        keys = [id.encode() for id in self.ids]
        numbers = {path: number for number, path in enumerate(containers.paths)}
        return Index(
            hashes=np.fromiter(map(hash_of, keys), np.uint64, len(keys)),
            hash_rows=np.arange(len(keys)),
            ids=Strings.of_bytes(keys),
            features={name: self._arrays[name].columns(numbers) for name in names},
            containers=containers,
            stats=stats,
            stamps=StampColumns.of(self._stamps),
        )

    def annotations(self, order: Ints) -> Columns:
        """Give their annotations as columns."""
        return annotation_columns(self.ids, self._annotations, order)


class _Arrays:
    """Columns of a feature."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}  # of containers, by path
        self._rows, self._checksums = array("q"), array("Q")
        self._counts, self._containers = array("q"), array("i")
        self._offsets, self._sizes = array("q"), array("q")

    def add(self, arrays: PlacedArrays) -> None:
        self._rows.extend(arrays.rows)
        self._checksums.extend(arrays.checksums)
        extents = arrays.extents
        numbers = [self.numbers.setdefault(p, len(self.numbers)) for p in extents.containers]
        containers = np.array(numbers, np.int32)[extents.container]
        self._counts.frombytes(_int64(extents.counts))
        self._containers.frombytes(containers.tobytes())
        self._offsets.frombytes(_int64(extents.offset))
        self._sizes.frombytes(_int64(extents.nbytes))

    def columns(self, numbers: Mapping[str, int]) -> FeatureColumns:
        """Return the columns of an index that numbers containers in another way."""
        renumbered = np.array([numbers[path] for path in self.numbers], np.int32)
        return FeatureColumns(
            rows=np.array(self._rows, np.int64),
            checksum=np.array(self._checksums, np.uint64),
            first=ends_of(np.array(self._counts, np.int64)),
            container=renumbered[np.array(self._containers, np.int32)],
            offset=np.array(self._offsets, np.int64),
            nbytes=np.array(self._sizes, np.int64),
        )


def _int64(values: Ints) -> bytes:
    return values.astype(np.int64, copy=False).tobytes()
