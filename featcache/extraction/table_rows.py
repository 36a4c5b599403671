"""`TableRows`: what a table holds of each row, to be stored again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache._checks import directory
from featcache.errors import ConfigError
from featcache.format.annotations import Values
from featcache.format.files import from_storage
from featcache.format.index import UNKNOWN, Stamps
from featcache.format.manifest import ADOPTED
from featcache.interface import Ints
from featcache.reading.generation import Generation
from featcache.reading.opening import CachePath, open_again, open_generation
from featcache.tables.blocks import Block, BlockMember, TableBlocks
from featcache.tables.selection import Selection
from featcache.tables.table import FeatureTable

AT_ONCE = 1024  # rows whose annotations and spans are looked up together


class TableRow(NamedTuple):
    """One row of a table."""

    id: str
    arrays: dict[str, NDArray[Any]]
    annotations: Values
    stamps: Stamps


@dataclass(frozen=True)
class TableRows:
    """Reads rows of a table; whatever is read is compared with its checksum, where it has one.

    Cheap to pickle.

    Args:
        table: the table.
        features: names of the features that are read.
    """

    table: FeatureTable
    features: tuple[str, ...]

    def read(self, rows: Ints) -> Iterator[TableRow]:
        """Read rows, in this order."""
        selection = self.table.selection
        for begin in range(0, len(rows), AT_ONCE):
            some = rows[begin : begin + AT_ONCE]
            spans = {name: selection.span(name, some) for name in self.features}
            values = {name: self.table.annotation(name).take(some) for name in self.annotations()}
            for place, row in enumerate(some.tolist()):
                yield TableRow(
                    selection.id(row),
                    {name: self._array(row, name, spans[name], place) for name in self.features},
                    {
                        name: value
                        for name, each in values.items()
                        if (value := each[place]) is not None
                    },
                    self._stamps(row),
                )

    def array(self, row: int, feature: str) -> NDArray[Any]:
        """Read one array; bfloat16 is the float32 of the same value."""
        span = self.table.selection.span(feature, np.array([row]))
        return self._array(row, feature, span, 0)

    def in_order_of_bytes(self, rows: Ints) -> Ints:
        """Sort rows by where their bytes lie, as far as one look tells."""
        keys = np.zeros((3, len(rows)), np.int64)
        for number, (block, places, inner) in enumerate(
            self.table.selection.blocks.split(self.table.selection.below(rows))
        ):
            member = block.features[self.features[0]]
            columns = member.opened.index.features[self.features[0]]
            first = columns.first[member.inner(inner)]
            keys[2, places] = number
            if len(columns.offset):
                first = np.minimum(first, len(columns.offset) - 1)  # arrays without bytes: anywhere
                keys[1, places], keys[0, places] = columns.container[first], columns.offset[first]
        return rows[np.lexsort(keys)]

    def nbytes(self, rows: Ints) -> Ints:
        """Return the bytes of the arrays of rows, before any codec."""
        total = np.zeros(len(rows), np.int64)
        for name in self.features:
            arrays = self.table.selection.blocks.of_feature(name)[0]
            frame = arrays.dtype.itemsize * int(np.prod(self.table.dims(name), dtype=np.int64))
            total += self.table.lengths(name)[rows] * frame
        return total

    def plain(self) -> Generation | None:
        """Return the generation whose bytes can be copied as they are.

        None where there are several, rows are segments, or containers are other tools' files.
        """
        selection = self.table.selection
        if selection.cuts is not None or len(selection.blocks.generations) != 1:
            return None
        opened = selection.blocks.generations[0]
        return None if opened.sets or is_adopted(opened) else opened

    def rows_below(self, rows: Ints) -> Ints:
        """Return the rows of the one cache below; only where `plain` is not None."""
        selection = self.table.selection
        return selection.blocks.blocks[0].members[0].inner(selection.below(rows))

    def annotations(self) -> list[str]:
        """Return the names of the annotations that rows have beside the features."""
        return [name for name in self.table.annotations if name not in self.features]

    def _array(
        self, row: int, feature: str, span: tuple[Ints, Ints] | None, place: int
    ) -> NDArray[Any]:
        block, inner = self.table.selection.place(row)
        member, arrays = block.features[feature], block.arrays(feature)
        inner = inner if member.rows is None else int(member.rows.below[inner])
        if span is None:
            found = arrays.read(inner)
        else:
            start, frames = int(span[0][place]), int(span[1][place])
            found = arrays.read(inner, start, start + frames)
        return from_storage(found, arrays.declared_dtype)

    def _stamps(self, row: int) -> Stamps:
        """Return the stamps of a whole utterance; those of a recording are no segment's."""
        if self.table.selection.cuts is not None:
            return UNKNOWN
        block, inner = self.table.selection.place(row)
        member = block.members[0]
        known = member.opened.index.stamps
        if known is None:
            return UNKNOWN
        inner = inner if member.rows is None else int(member.rows.below[inner])
        return Stamps(*(int(column[inner]) for column in known))


def table_of(source: FeatureTable | CachePath) -> FeatureTable:
    """Return the table of a source, which checks what it reads; nothing is expected of a cache.

    Raises `ConfigError` for what is no cache and no table.
    """
    if isinstance(source, FeatureTable):
        table = source.table
    else:
        path = directory(source, "a cache").absolute()
        table = FeatureTable(Selection.of(open_generation(path, None)))
    if not len(table):
        raise ConfigError(f"{table!r} holds no utterances, so there is nothing to read")
    blocks = [
        Block([_checking(member) for member in block.members])
        for block in table.selection.blocks.blocks
    ]
    return FeatureTable(
        Selection(TableBlocks(blocks), table.selection.row_map, table.selection.cuts)
    )


def is_adopted(opened: Generation) -> bool:
    """Whether any containers are other tools' files."""
    return any(ADOPTED in each.manifest.requires for each in (opened, *opened.sets.values()))


def _checking(member: BlockMember) -> BlockMember:
    """Return a member that compares what it reads with its checksums."""
    opened = member.opened
    if is_adopted(opened) or opened.settings.check_reads:
        return member
    return BlockMember(open_again(opened, check_reads=True), member.rows)
