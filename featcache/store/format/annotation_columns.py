"""Annotations as columns: numbers, text, lists of numbers, and a mask of what is missing.

In a file of columns, that of an index, the annotation <name> is::

    annotations/<name>/values    i8, f8 or u1 (bool): the numbers, or those of all lists
    annotations/<name>/ends      i8: list or text r is that from ends[r] to ends[r + 1]
    annotations/<name>/bytes     u1: UTF-8 of all texts
    annotations/<name>/codes     i4: if it is there, text r is that of the number codes[r]
    annotations/<name>/null      u1: 1 where there is none; absent where each row has one

Rows without a value have 0, an empty text or list, or code 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.interface import Bytes, Ints
from featcache.store.format.annotations import KINDS, Value
from featcache.store.format.coded_strings import Codes, few, joined_texts, used
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.id_order import take
from featcache.store.format.strings import Strings, ends_of, joined_ends

PREFIX = "annotations/"
DTYPES: Mapping[str, type[np.generic]] = {
    "int": np.int64,
    "float": np.float64,
    "bool": np.uint8,
    "ints": np.int64,
    "floats": np.float64,
    "str": np.uint8,
}
_AT_ONCE = 65536
Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Lists:
    """List r is `values[ends[r]:ends[r + 1]]`."""

    ends: Ints
    values: Numbers

    def __len__(self) -> int:
        return len(self.ends) - 1


Body = Numbers | Lists | Strings | Codes


@dataclass(frozen=True, slots=True)
class Column:
    """One annotation of all rows."""

    kind: str
    body: Body
    null: Bytes | None = None  # 1 where it is missing

    def __len__(self) -> int:
        return len(self.body)

    @classmethod
    def of(cls, values: Sequence[Value | None], kind: str) -> Column:
        """Make a column of values, all of one kind."""
        null = np.fromiter((value is None for value in values), np.uint8, len(values))
        mask = null if null.any() else None
        if kind == "str":
            texts = ["" if value is None else cast(str, value) for value in values]
            return cls(kind, few(texts), mask)
        dtype = DTYPES[kind]
        if kind in ("ints", "floats"):
            lists = [[] if value is None else cast(list[float], value) for value in values]
            joined = [number for each in lists for number in each]
            return cls(kind, Lists(ends_of([*map(len, lists)]), np.array(joined, dtype)), mask)
        numbers = [0 if value is None else value for value in values]
        return cls(kind, np.array(numbers, dtype), mask)

    @classmethod
    def missing(cls, count: int, kind: str) -> Column:
        """Make a column of rows without a value."""
        return cls.of([None] * 0, kind).take(np.full(count, -1))

    def take(self, rows: Ints) -> Column:
        """Return the column of some rows, in that order; -1 stands for one without a value."""
        there = rows >= 0
        null = (~there).astype(np.uint8)
        if self.null is not None:
            null[there] = self.null[rows[there]]
        return Column(self.kind, _taken(self.body, rows, there), null if null.any() else None)

    def values(self, start: int = 0, stop: int | None = None) -> list[Value | None]:
        """Return the values of rows from `start` to before `stop`, None where there is none."""
        rows = slice(start, len(self) if stop is None else stop)
        found = self._values(rows)
        if self.null is not None:
            for row in np.flatnonzero(self.null[rows]).tolist():
                found[row] = None
        return found

    def __iter__(self) -> Iterator[Value | None]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.values(start, start + _AT_ONCE)

    def _values(self, rows: slice) -> list[Value | None]:
        body = self.body
        if isinstance(body, Codes):
            codes = body.codes[rows].tolist()
            texts = list(body.texts) if len(codes) > len(body.texts) else body.texts
            return [texts[code] for code in codes]
        if isinstance(body, np.ndarray):
            numbers = body[rows]
            return cast(
                list[Value | None], (numbers > 0 if self.kind == "bool" else numbers).tolist()
            )
        ends = body.ends[rows.start : rows.stop + 1]
        if isinstance(body, Strings):
            return [*Strings(ends - ends[0], body.data[ends[0] : ends[-1]])] if len(ends) else []
        return [body.values[begin:end].tolist() for begin, end in pairwise(ends.tolist())]


def joined(columns: Sequence[Column], kind: str) -> Column:
    """Put columns one after the other; those of int become float where `kind` is that."""
    if len(columns) == 1 and columns[0].kind == kind:
        return columns[0]
    null = [np.zeros(len(each), np.uint8) if each.null is None else each.null for each in columns]
    mask = np.concatenate([np.empty(0, np.uint8), *null])
    bodies = [each.body for each in columns]
    dtype = DTYPES[kind]
    body: Body
    if kind == "str":
        body = joined_texts(cast(list[Strings | Codes], bodies))
    elif kind in ("ints", "floats"):
        lists = cast(list[Lists], bodies)
        values = np.concatenate([np.empty(0, dtype), *(each.values for each in lists)])
        body = Lists(joined_ends(each.ends for each in lists), values.astype(dtype, copy=False))
    else:
        numbers = cast(list[Numbers], bodies)
        body = np.concatenate([np.empty(0, dtype), *numbers]).astype(dtype, copy=False)
    return Column(kind, body, mask if mask.any() else None)


def stored_columns(
    name: str, column: Column, *, always: bool = False
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Give the columns of a file that an annotation becomes; none if no row has a value.

    With `always`, some for an annotation without any value, too.
    """
    if column.null is not None and column.null.all():
        if not always:
            return
        column = Column.missing(len(column), column.kind)
    null, body = column.null, column.body
    if null is not None:
        yield f"{PREFIX}{name}/null", null
    if isinstance(body, Codes):
        body = used(body, null)
        yield f"{PREFIX}{name}/codes", body.codes
        body = body.texts
    if isinstance(body, np.ndarray):
        yield f"{PREFIX}{name}/values", body
        return
    yield f"{PREFIX}{name}/ends", body.ends
    if isinstance(body, Strings):
        yield f"{PREFIX}{name}/bytes", body.data
    else:
        yield f"{PREFIX}{name}/values", body.values


def stored_kinds(file: ColumnFile) -> dict[str, str]:
    """Return the kind of each annotation in a file of columns, by name."""
    kinds = {}
    for column, dtype in file.dtypes.items():
        if column.startswith(PREFIX):
            name, _, what = column.removeprefix(PREFIX).rpartition("/")
            if what == "bytes":
                kinds[name] = "str"
            elif what == "values":
                kind = {"<i8": "int", "<f8": "float", "|u1": "bool"}.get(dtype, "")
                kind += "s" * (f"{PREFIX}{name}/ends" in file)
                if kind in KINDS:
                    kinds[name] = kind
    return kinds


def read_column(file: ColumnFile, name: str, kind: str, rows: int) -> Column:
    """Take an annotation out of a file of columns; raises `CorruptCacheError` if it does not fit.

    Args:
        file: that of an index.
        name: the annotation.
        kind: its kind.
        rows: those of the index.
    """
    begin = f"{PREFIX}{name}/"
    null = file.column(f"{begin}null", np.uint8) if f"{begin}null" in file else None
    body: Body
    if kind == "str":
        texts = Strings(
            file.column(f"{begin}ends", np.int64), file.column(f"{begin}bytes", np.uint8)
        )
        coded = f"{begin}codes" in file
        body = Codes(file.column(f"{begin}codes", np.int32), texts) if coded else texts
    else:
        values: Numbers = file.column(f"{begin}values", DTYPES[kind])
        lists = kind in ("ints", "floats")
        body = Lists(file.column(f"{begin}ends", np.int64), values) if lists else values
    if (null is not None and len(null) != rows) or len(body) != rows or not _fits(body):
        raise CorruptCacheError(
            f"{str(file.path)!r} is damaged: the columns of annotation {name!r} do not fit the "
            "index, or each other"
        )
    return Column(kind, body, null)


def read_whole_column(file: ColumnFile, name: str, kind: str, rows: int) -> Column:
    """Take an annotation out of a file as `read_column` does, once its checksums are compared."""
    columns = (f"{PREFIX}{name}/{what}" for what in ("values", "ends", "bytes", "codes", "null"))
    if damage := file.damage(filter(file.__contains__, columns)):
        raise CorruptCacheError("\n".join(damage))
    return read_column(file, name, kind, rows)


def _fits(body: Body) -> bool:
    """Tell whether the numbers of a column can be: what is later taken by them is there."""
    if isinstance(body, Codes):
        codes, count = body.codes, len(body.texts)
        in_range = codes.min(initial=0) >= 0 and codes.max(initial=0) < max(count, 1)
        return bool(in_range) and (count > 0 or not len(codes)) and _fits(body.texts)
    if isinstance(body, np.ndarray):
        return True
    ends, values = body.ends, body.data if isinstance(body, Strings) else body.values
    fits = len(ends) > 0 and ends[0] == 0 and ends[-1] == len(values)
    return bool(fits and (ends[1:] >= ends[:-1]).all())


def _taken(body: Body, rows: Ints, there: NDArray[np.bool_]) -> Body:
    if isinstance(body, Codes):
        return Codes(cast(NDArray[np.int32], _taken(body.codes, rows, there)), body.texts)
    if isinstance(body, np.ndarray):
        numbers = np.zeros(len(rows), body.dtype)
        numbers[there] = body[rows[there]]
        return numbers
    values = body.data if isinstance(body, Strings) else body.values
    taken, their_ends = take(values, body.ends, rows[there])
    counts = np.zeros(len(rows), np.int64)
    counts[there] = np.diff(their_ends)
    if isinstance(body, Strings):
        return Strings(ends_of(counts), taken)
    return Lists(ends_of(counts), taken)
