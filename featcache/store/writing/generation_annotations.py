"""Annotations of a generation: joined from those of its parts, and from the generation before.

What was given to a whole generation, by `annotate`, is in no part: it is carried on, by id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.interface import Ints
from featcache.store.format.annotation_columns import (
    Column,
    joined,
    read_whole_column,
    stored_columns,
)
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.index import Hashes, Index, are_below, read_index
from featcache.store.format.index_writer import Rows, hashes_of
from featcache.store.format.manifest import Manifest
from featcache.store.format.manifest_entries import AnnotationEntry
from featcache.store.format.part import SealedPart
from featcache.store.format.strings import DAMAGED, Strings, are_equal
from featcache.store.reading.verify import raise_damage
from featcache.store.writing.annotated_rows import AnnotatedRows, widest_kinds

_AT_ONCE = 65536  # ids that are compared at once


class GenerationAnnotations:
    """Annotations of a generation that is being published.

    A row of a part that the generation before has keeps what it had there, where that was given to
    the generation. One of a new part has its own value or, where it has none, that of its id.

    Args:
        cache: the cache directory.
        before: the generation before.
        parts: those of the new one.
        indexes: theirs.
        rows: those of the joined index.

    Attributes:
        entries: by name, for the manifest; complete once all `columns` were taken.

    Raises `FeatureError` for an annotation of several kinds.
    """

    def __init__(
        self,
        cache: Path,
        before: Manifest,
        parts: Sequence[SealedPart],
        indexes: Sequence[Index],
        rows: Rows,
    ) -> None:
        self.entries: dict[str, AnnotationEntry] = {}
        self._cache = cache
        self._before = before
        self._parts = list(zip(parts, indexes, strict=True))
        self._rows = rows
        kinds = {name: each.kind for name, each in before.annotations.items() if each.carried}
        self._carried = {*kinds}
        self._annotated = [AnnotatedRows.of_part(cache, *each) for each in self._parts]
        self._kinds = dict(sorted(widest_kinds(cache, self._annotated, kinds).items()))

    def columns(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Give the columns of all annotations, one annotation at a time."""
        for name, kind in self._kinds.items():
            # taken away from all rows, it must not be forgotten: parts may have values of it
            told = name in self._carried and any(
                name in each.annotations for _, each in self._parts
            )
            for stored in stored_columns(name, self._joined(name, kind), always=told):
                self.entries[name] = AnnotationEntry(kind, name in self._carried)
                yield stored

    def _joined(self, name: str, kind: str) -> Column:
        column = joined([each.of_kind(name, kind) for each in self._annotated], kind)
        if name not in self._carried:
            return column.take(self._rows.order)
        earlier, its_rows = self._of_before(name), self._rows_before
        own = self._is_new & (True if column.null is None else column.null[self._rows.order] == 0)
        chosen = np.where(own | (its_rows < 0), self._rows.order, its_rows + len(column))
        return joined([column, earlier], kind).take(chosen)

    def _of_before(self, name: str) -> Column:
        with self._open_before() as file:
            kind = self._before.annotations[name].kind
            return read_whole_column(file, name, kind, self._before.rows)

    def _open_before(self) -> ColumnFile:
        digest = self._before.index_digest
        return ColumnFile(self._cache, self._before.index, expected=digest)

    @cached_property
    def _rows_before(self) -> Ints:
        """The rows of the ids in the generation before, -1 where there is none."""
        hashes = hashes_of([index for _, index in self._parts], self._rows.order)
        with self._open_before() as file:
            raise_damage(file.damage(["hashes", "hash_rows", "id_ends", "id_bytes"]))
            return rows_in(read_index(file, []), self._rows.ids, hashes)

    @cached_property
    def _is_new(self) -> NDArray[np.bool_]:
        """Tell of each row whether its part is not in the generation before.

        A part that others were rewritten into is as old as they are.
        """
        known = {entry.name for entry in self._before.parts}
        made_of = ((part.entry.name, *part.header.replaces) for part, _ in self._parts)
        new = [known.isdisjoint(names) for names in made_of]
        return np.repeat(np.array(new, bool), [len(each) for _, each in self._parts])[
            self._rows.order
        ]


def rows_in(index: Index, ids: Strings, hashes: Hashes) -> Ints:
    """Return the rows of ids in an index, -1 where there is none.

    Args:
        index: the index.
        ids: in any order; those of an index are quicker in that of its rows.
        hashes: theirs.
    """
    if not len(index) or not len(ids):
        return np.full(len(ids), -1)
    order = np.argsort(hashes, kind="stable")
    places = np.empty(len(ids), np.int64)  # in the order of the hashes, they are all close by
    places[order] = index.hashes.searchsorted(hashes[order])
    np.minimum(places, len(index) - 1, out=places)
    rows = index.hash_rows[places]
    if not are_below(rows, len(index)):
        raise CorruptCacheError(f"{DAMAGED}: it names rows that are not there")
    rows[index.hashes[places] != hashes] = -1
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        for at in np.flatnonzero((some >= 0) & ~_are_ids(index.ids, some, ids, start)).tolist():
            some[at] = index.find(ids[start + at])  # several ids have that hash
    return rows


def _are_ids(known: Strings, rows: Ints, ids: Strings, first: int) -> NDArray[np.bool_]:
    """Tell of each id from the `first` on whether a row has it; row -1 has none."""
    same = rows >= 0
    places = np.flatnonzero(same)
    same[places] = are_equal(ids.take(places + first), known.take(rows[places]))
    return same
