"""`Cuts`: rows of a view that have ids of their own, and some frames of each feature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from featcache.interface import Ints
from featcache.store.format.annotation_columns import Column
from featcache.store.format.files import digest
from featcache.store.format.index import Hashes, hash_of
from featcache.store.format.strings import Strings
from featcache.store.reading.annotation import Annotation, BlockRows
from featcache.tables.id_lookup import IdLookup
from featcache.tables.row_map import RowMap
from featcache.tables.shared_array import SharedArray
from featcache.tables.shared_column import SharedColumn

_AT_ONCE = 65536


@dataclass(frozen=True)
class Cuts:
    """Ids and frames of the rows of a segment view.

    Those of a view of it are the same columns and other rows.

    Attributes:
        ends, data: ids, as in `Strings`.
        spans: per feature that is cut, first frames and numbers of frames; all others are whole.
        own: annotations that are not those of the recordings, by name.
        rows: the row in these columns of each row; None: all in their order.
    """

    ends: SharedArray[np.int64]
    data: SharedArray[np.uint8]
    spans: Mapping[str, tuple[SharedArray[np.int64], SharedArray[np.int64]]]
    own: Mapping[str, SharedColumn]
    rows: RowMap | None = None

    @classmethod
    def of(
        cls, ids: Strings, spans: Mapping[str, tuple[Ints, Ints]], own: Mapping[str, Column]
    ) -> Cuts:
        """Take the ids of rows, per feature their frames, and their own annotations."""
        return cls(
            SharedArray(ids.ends),
            SharedArray(ids.data),
            {
                name: (SharedArray(starts), SharedArray(lengths))
                for name, (starts, lengths) in spans.items()
            },
            {name: SharedColumn.of(column) for name, column in own.items()},
        )

    @cached_property
    def _ids(self) -> Strings:
        return Strings(self.ends.values, self.data.values)

    @cached_property
    def _lookup(self) -> IdLookup:
        return IdLookup(self._ids)

    @cached_property
    def _hashes(self) -> Hashes:
        """The hash of the id of each row of the columns."""
        hashes, data = np.empty(len(self._ids), np.uint64), self.data.values.data
        for begin in range(0, len(hashes), _AT_ONCE):
            ends = pairwise(self.ends.values[begin : begin + _AT_ONCE + 1].tolist())
            some = [hash_of(data[first:last]) for first, last in ends]
            hashes[begin : begin + len(some)] = some
        return hashes

    def id(self, row: int) -> str:
        """Return the id of a row."""
        return self._ids[row if self.rows is None else int(self.rows.below[row])]

    def packed_ids(self, rows: Ints) -> Strings:
        """Return the ids of some rows, without an object of each."""
        return self._ids.take(self._below(rows))

    def hashes(self) -> Hashes:
        """Return the hash of each row's id, in the order of the rows."""
        return self._hashes if self.rows is None else self._hashes[self.rows.below]

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, -1 where there is none."""
        found = self._lookup.find(ids)
        return found if self.rows is None else self.rows.find(found)

    def lengths(self, feature: str) -> Ints:
        """Return the numbers of frames of all rows, read-only, of a feature that is cut."""
        column = self.spans[feature][1].values
        lengths = column if self.rows is None else column[self.rows.below]
        lengths.flags.writeable = False
        return lengths

    def annotation(self, name: str) -> Annotation:
        """Return one of their own annotations, of all rows."""
        column = BlockRows(self.own[name].column, None, len(self._ids))
        rows = None if self.rows is None else self.rows.below
        return Annotation(name, self.own[name].kind, [column], rows)

    def span(self, feature: str, rows: Ints) -> tuple[Ints, Ints]:
        """Return first frames and numbers of frames of rows, of a feature that is cut."""
        starts, lengths = self.spans[feature]
        rows = self._below(rows)
        return starts.values[rows], lengths.values[rows]

    def take(self, rows: Ints) -> Cuts:
        """Return the cuts of these rows, of which none comes twice."""
        return replace(self, rows=RowMap(self._below(rows)))

    def _below(self, rows: Ints) -> Ints:
        return rows if self.rows is None else self.rows.below[rows]

    @cached_property
    def digest(self) -> str:
        """A digest of the ids, of all frames that are cut, and of the annotations."""
        return digest("".join(self._digests()).encode())

    def _digests(self) -> Iterable[str]:
        yield self.ends.digest
        yield self.data.digest
        yield (RowMap(np.arange(len(self._ids))) if self.rows is None else self.rows).digest
        for name, span in sorted(self.spans.items()):
            yield digest(name.encode())
            yield from (numbers.digest for numbers in span)
        for name, column in sorted(self.own.items()):
            yield digest(name.encode())
            yield column.digest

    def __reduce__(self) -> tuple[object, ...]:
        return Cuts, (self.ends, self.data, self.spans, self.own, self.rows)
