"""Columns: a value per row of a table, by which views filter, split and sort."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError, KeyNotFoundError, nearest
from featcache.interface import Ints
from featcache.store.format.annotations import Value as StoredValue
from featcache.store.reading.annotation import Annotation

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

Mask = NDArray[np.bool_]
Value = StoredValue | None


class Column(Protocol):
    """Values of all rows of a table.

    Attributes:
        kind: "int", "float", "bool", "str", "ints" or "floats".
    """

    @property
    def kind(self) -> str:
        """The kind of the values."""
        ...

    def __getitem__(self, row: int, /) -> Value: ...

    def __iter__(self) -> Iterator[Value]: ...

    def numbers(self) -> tuple[NDArray[Any], Mask | None]:
        """Return the numbers of all rows, and which are missing; None: none is."""
        ...

    def is_in(self, values: Collection[Value]) -> Mask:
        """Return which rows have one of these values; None stands for a missing one."""
        ...

    def codes(self) -> tuple[Ints, Sequence[Value]]:
        """Return a number for the value of each row, -1 where it is missing, and the values."""
        ...


class Lengths:
    """Frames of a feature as a column."""

    kind = "int"

    def __init__(self, lengths: Ints) -> None:
        self._lengths = lengths

    def __getitem__(self, row: int) -> int:
        return int(self._lengths[row])

    def __iter__(self) -> Iterator[int]:
        return iter(self._lengths.tolist())

    def numbers(self) -> tuple[NDArray[Any], None]:
        """Return the frames."""
        return self._lengths, None

    def is_in(self, values: Collection[Value]) -> Mask:
        """Return which rows have one of these numbers of frames."""
        return np.isin(self._lengths, np.array(list(values), np.float64))

    def codes(self) -> tuple[Ints, Sequence[Value]]:
        """Return a number for the frames of each row, and the frames that there are."""
        distinct, codes = np.unique(self._lengths, return_inverse=True)
        return codes, cast(Sequence[Value], distinct.tolist())


class IdColumn:
    """Ids of a table as a column."""

    kind = "str"

    def __init__(self, table: FeatureTable) -> None:
        self._table = table

    def __getitem__(self, row: int) -> str:
        return self._table.id(row)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def numbers(self) -> tuple[NDArray[Any], None]:
        """Raise `ConfigError`: ids are no numbers."""
        raise ConfigError("ids are no numbers; give a set of ids")

    def is_in(self, values: Collection[Value]) -> Mask:
        """Return which rows have one of these ids."""
        found = self._table.find([value for value in values if isinstance(value, str)])
        mask = np.zeros(len(self._table), np.bool_)
        mask[found[found >= 0]] = True
        return mask

    def codes(self) -> tuple[Ints, Sequence[Value]]:
        """Return the row of each id, and the ids."""
        return np.arange(len(self._table)), self._table.ids


class AnnotationColumn:
    """An annotation as a column."""

    def __init__(self, annotation: Annotation) -> None:
        self._annotation = annotation
        self.kind = annotation.kind

    def __getitem__(self, row: int) -> Value:
        return self._annotation[row]

    def __iter__(self) -> Iterator[Value]:
        return iter(self._annotation)

    def numbers(self) -> tuple[NDArray[Any], Mask | None]:
        """Return the numbers, and which are missing."""
        return self._annotation.numbers()

    def is_in(self, values: Collection[Value]) -> Mask:
        """Return which rows have one of these values."""
        return self._annotation.is_in(values)

    def codes(self) -> tuple[Ints, Sequence[Value]]:
        """Return a number for each value, and the values."""
        return self._annotation.codes()


class RowValues(Mapping[str, Value]):
    """The id, frames and annotations of one row, looked up as they are asked for."""

    def __init__(self, columns: Columns, row: int) -> None:
        self._columns = columns
        self._row = row

    def __getitem__(self, name: str) -> Value:
        return self._columns[name][self._row]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return repr(dict(self))


class Columns(Mapping[str, Column]):
    """The columns of a table by name: "id", features with a time axis, annotations."""

    def __init__(self, table: FeatureTable) -> None:
        self._table = table
        self._features = [name for name in table.features if table.has_frames(name)]
        self._made: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Column:
        if name == "id":
            return IdColumn(self._table)
        if name in self._features:
            return Lengths(self._table.lengths(name))
        if name in self._table.features:
            raise ConfigError(f"feature {name!r} has no time axis, so there are no frames to count")
        if name in self._table.annotations:
            return AnnotationColumn(self._table.annotation(name))
        self._table.selection.blocks.refuse_stale(name)
        raise KeyNotFoundError(f"no column {name!r}; {nearest(name, list(self))}")

    def __iter__(self) -> Iterator[str]:
        return iter(["id", *self._features, *self._table.annotations])

    def __len__(self) -> int:
        return 1 + len(self._features) + len(self._table.annotations)
