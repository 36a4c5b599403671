"""`Cuts`: rows of a view that have ids of their own, and some frames of each feature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from featcache.interface import Ints
from featcache.store.format.files import digest
from featcache.store.format.index import ContainerColumns, Index, hash_of
from featcache.store.format.strings import Strings
from featcache.tables.shared_array import SharedArray

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Cuts:
    """Ids and frames of the rows of a segment view.

    Attributes:
        ends, data: the ids, as in `Strings`.
        spans: per feature that is cut, the first frame and the number of frames of each row; all
            other features are given whole.
    """

    ends: SharedArray[np.int64]
    data: SharedArray[np.uint8]
    spans: Mapping[str, tuple[SharedArray[np.int64], SharedArray[np.int64]]]

    @classmethod
    def of(cls, ids: Strings, spans: Mapping[str, tuple[Ints, Ints]]) -> Cuts:
        """Take the ids of rows and, per feature, their first frames and numbers of frames."""
        return cls(
            SharedArray(ids.ends),
            SharedArray(ids.data),
            {
                name: (SharedArray(starts), SharedArray(lengths))
                for name, (starts, lengths) in spans.items()
            },
        )

    @cached_property
    def ids(self) -> Strings:
        """The ids in the order of the rows."""
        return Strings(self.ends.values, self.data.values)

    @cached_property
    def index(self) -> Index:
        """The ids, to be looked up."""
        hashes = np.fromiter((hash_of(id.encode()) for id in self.ids), np.uint64, len(self.ids))
        order = np.argsort(hashes, kind="stable")
        nothing = ContainerColumns(
            Strings.of([]), _NONE, np.zeros(0, np.uint8), np.zeros(0, np.int32)
        )
        return Index(hashes[order], order, self.ids, {}, nothing, {})

    def span(self, feature: str, rows: Ints) -> tuple[Ints, Ints] | None:
        """Return first frames and numbers of frames of rows; None for a feature that is whole."""
        if feature not in self.spans:
            return None
        starts, lengths = self.spans[feature]
        return starts.values[rows], lengths.values[rows]

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, -1 where there is none."""
        return self.index.find_many(ids)

    def take(self, rows: Ints) -> Cuts:
        """Return the cuts of these rows."""
        spans = {
            name: (starts.values[rows], lengths.values[rows])
            for name, (starts, lengths) in self.spans.items()
        }
        return Cuts.of(self.ids.take(rows), spans)

    @cached_property
    def digest(self) -> str:
        """A digest of the ids and of all frames that are cut."""
        return digest("".join(self._digests()).encode())

    def _digests(self) -> Iterable[str]:
        yield self.ends.digest
        yield self.data.digest
        for name, span in sorted(self.spans.items()):
            yield digest(name.encode())
            yield from (numbers.digest for numbers in span)

    def __reduce__(self) -> tuple[object, ...]:
        return Cuts, (self.ends, self.data, self.spans)
