"""Columns of values: annotations, ids and frames of rows, mapped, in memory or taken when needed.

In a file of columns, that of an index, the annotation <name> is::

    annotations/<name>/values    i8, f8 or u1 (bool): the numbers, or those of all lists
    annotations/<name>/ends      i8: list or text r is that from ends[r] to ends[r + 1]
    annotations/<name>/bytes     u1: UTF-8 of all texts
    annotations/<name>/codes     i4: if it is there, text r is that of the number codes[r]
    annotations/<name>/null      u1: 1 where there is none; absent where each row has one

Rows without a value have 0, an empty text or list, or code 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.errors import ConfigError, CorruptCacheError, RowError
from featcache.format.annotations import KINDS, Value
from featcache.format.columns import (
    Codes,
    ColumnFile,
    SharedArray,
    Strings,
    ends_of,
    few,
    joined_ends,
    joined_texts,
    take,
    used,
)
from featcache.format.files import digest, newer
from featcache.interface import Array, Bytes, Ints

PREFIX = "annotations/"
_KIND_DTYPES: Mapping[str, type[np.generic]] = {
    "int": np.int64,
    "float": np.float64,
    "bool": np.uint8,
    "ints": np.int64,
    "floats": np.float64,
    "str": np.uint8,
}
_DTYPES: Mapping[str, type[np.generic]] = {
    "ends": np.int64,
    "bytes": np.uint8,
    "codes": np.int32,
    "null": np.uint8,
}
_AT_ONCE = 65536
_NUMBERS = {"int": (int,), "float": (int, float), "bool": (bool,)}
Numbers = NDArray[Any]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lists:
    """List r is `data[ends[r]:ends[r + 1]]`."""

    ends: Ints
    data: Numbers

    def __len__(self) -> int:
        return len(self.ends) - 1


@dataclass(frozen=True, slots=True)
class Taken:
    """Values that are taken when they are asked for: of some rows, or of all (None)."""

    count: int
    of: Callable[[Ints | None], Column]
    has_missing: bool = False

    def __len__(self) -> int:
        return self.count


Stored = Numbers | Lists | Strings | Codes
Body = Stored | Taken
SharedColumns = Mapping[str, SharedArray[Any]]  # as `Column.arrays`, in files of memory


class Column(Sequence[Value | None]):
    """A value for each row, None where a row has none: an annotation, ids, frames of a feature.

    Its arrays are mapped or in memory, or are taken when they are asked for, of the rows that they
    are asked for alone: ten million texts cost no memory.

    Attributes:
        kind: "str", "int", "float", "bool", "ints" or "floats".
        name: that of the annotation, the feature, or "id"; "" where nobody is told.

    >>> annotation = featcache.open("features/train").annotation("speaker")  # doctest: +SKIP
    >>> annotation[0], annotation.kind                                       # doctest: +SKIP
    ('1089', 'str')
    """

    def __init__(
        self,
        kind: str,
        body: Body,
        null: Bytes | None = None,
        name: str = "",
        shared: SharedColumns | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self._body = body
        self._null = null  # 1 where a value is missing
        self._known_shared = shared

    @classmethod
    def of(cls, values: Sequence[Value | None], kind: str, name: str = "") -> Column:
        """Make a column of values, all of one kind."""
        null = np.fromiter((value is None for value in values), np.uint8, len(values))
        mask = null if null.any() else None
        if kind == "str":
            texts = ["" if value is None else cast(str, value) for value in values]
            return cls(kind, few(texts), mask, name)
        dtype = _KIND_DTYPES[kind]
        if kind in ("ints", "floats"):
            lists = [[] if value is None else cast(list[float], value) for value in values]
            joined = [number for each in lists for number in each]
            body = Lists(ends_of([*map(len, lists)]), np.array(joined, dtype))
            return cls(kind, body, mask, name)
        numbers = [0 if value is None else value for value in values]
        return cls(kind, np.array(numbers, dtype), mask, name)

    @classmethod
    def empty(cls, count: int, kind: str) -> Column:
        """Make a column of rows without a value."""

        def taken(rows: Ints | None) -> Column:
            number = count if rows is None else len(rows)
            return cls.of([], kind).gather(np.full(number, -1))

        return cls(kind, Taken(count, taken, count > 0))

    @classmethod
    def after(cls, columns: Sequence[Column], kind: str, name: str) -> Column:
        """Make one of columns one after the other; nothing is copied before it is asked for."""
        starts = ends_of([*map(len, columns)])

        def taken(rows: Ints | None) -> Column:
            if rows is None:
                return joined(columns, kind)
            numbers = np.searchsorted(starts, rows, side="right") - 1
            pieces = [
                column.gather(rows[numbers == number] - start)
                for number, (column, start) in enumerate(zip(columns, starts, strict=False))
            ]
            places = np.empty(len(rows), np.int64)
            places[np.argsort(numbers, kind="stable")] = np.arange(len(rows))
            return joined(pieces, kind).gather(places)

        if len(columns) == 1:
            return columns[0]
        has_missing = any(len(each) and each.has_missing for each in columns)
        return cls(kind, Taken(int(starts[-1]), taken, has_missing), None, name)

    @classmethod
    def of_arrays(
        cls,
        kind: str,
        arrays: Mapping[str, Numbers],
        name: str = "",
        shared: SharedColumns | None = None,
    ) -> Column:
        """Make a column of what `arrays` gave, and the files that they share, if there are any."""
        body: Stored
        if kind == "str":
            texts = Strings(arrays["ends"], arrays["bytes"])
            body = Codes(arrays["codes"], texts) if "codes" in arrays else texts
        elif kind in ("ints", "floats"):
            body = Lists(arrays["ends"], arrays["values"])
        else:
            body = arrays["values"]
        return cls(kind, body, arrays.get("null"), name, shared)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of all values, by what follows the name in a file of columns."""
        body, null = self.stored()
        found: dict[str, Numbers] = {} if null is None else {"null": null}
        if isinstance(body, Codes):
            found["codes"], body = body.codes, body.texts
        if isinstance(body, np.ndarray):
            return {**found, "values": body}
        what = "bytes" if isinstance(body, Strings) else "values"
        return {**found, "ends": body.ends, what: body.data}

    def stored(self) -> tuple[Stored, Bytes | None]:
        """Return the values of all rows in arrays, and 1 for those that are missing."""
        body = self._body
        return body.of(None).stored() if isinstance(body, Taken) else (body, self._null)

    def gather(self, rows: Ints) -> Column:
        """Return the column of some rows, in that order; -1 stands for one without a value."""
        if isinstance(self._body, Taken):
            return self._body.of(rows)
        there = rows >= 0
        null = (~there).astype(np.uint8)
        if self._null is not None:
            null[there] = self._null[rows[there]]
        mask = null if null.any() else None
        return Column(self.kind, _taken(self._body, rows, there), mask, self.name)

    def view(self, rows: Ints) -> Column:
        """Return the column of some rows, each of which is taken when it is asked for."""

        def taken(some: Ints | None) -> Column:
            return self.gather(rows if some is None else rows[some])

        return Column(self.kind, Taken(len(rows), taken, self.has_missing), None, self.name)

    def __len__(self) -> int:
        return len(self._body)

    @overload
    def __getitem__(self, row: int) -> Value | None: ...
    @overload
    def __getitem__(self, row: slice) -> list[Value | None]: ...
    def __getitem__(self, row: int | slice) -> Value | list[Value | None] | None:
        if isinstance(row, slice):
            begin, end, step = row.indices(len(self))
            if step == 1 and not isinstance(self._body, Taken):
                return self.values(begin, max(begin, end))
            return self.take(np.arange(begin, end, step))
        try:
            number = range(len(self))[operator.index(row)]
        except IndexError:
            raise RowError(f"no row {row}: there are {len(self)} utterances") from None
        except TypeError:
            raise RowError(
                f"annotation {self.name!r} is read by row number or slice, not by {row!r}; the "
                f"value of an id is table.annotation({self.name!r})[table.rows([id])[0]]"
            ) from None
        return self[number : number + 1][0]

    def __iter__(self) -> Iterator[Value | None]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self[start : start + _AT_ONCE]

    def __repr__(self) -> str:
        return f"<Column {self.name!r}: {self.kind} of {len(self)} utterances>"

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.kind, self._shared, self.name)

    @cached_property
    def _shared(self) -> SharedColumns:
        if self._known_shared is not None:
            return self._known_shared
        return {what: SharedArray(array) for what, array in self.arrays().items()}

    @cached_property
    def digest(self) -> str:
        """A digest of the values."""
        parts = [self.kind, *(what + array.digest for what, array in sorted(self._shared.items()))]
        return digest("".join(parts).encode())

    def take(self, rows: Ints) -> list[Value | None]:
        """Return the values of some rows, in their order; raises `RowError` for other numbers."""
        rows = np.asarray(rows, np.int64)
        if rows.min(initial=0) < 0 or rows.max(initial=-1) >= len(self):
            raise RowError(f"rows are from 0 to before {len(self)}")
        return self.gather(rows).values()

    def values(self, start: int = 0, stop: int | None = None) -> list[Value | None]:
        """Return the values of rows from `start` to before `stop`, None where there is none."""
        body, null = self.stored()
        rows = slice(start, len(self) if stop is None else stop)
        found = _values(body, rows, self.kind)
        if null is not None:
            for row in np.flatnonzero(null[rows]).tolist():
                found[row] = None
        return found

    @property
    def missing(self) -> Bools:
        """Whether each row is without a value."""
        null = self.stored()[1]
        return np.zeros(len(self), bool) if null is None else null != 0

    @property
    def has_missing(self) -> bool:
        """Whether a row of the caches has no value; quick, and the same for all views."""
        return self._body.has_missing if isinstance(self._body, Taken) else self._null is not None

    def to_numpy(self) -> Array:
        """Return the numbers of all rows: int64, float64 or bool.

        Where a value is missing, all are float64, NaN for that; `numbers` keeps integers beyond
        2**53 exact there, too. Raises `ConfigError` for annotations that are no numbers.
        """
        numbers, missing = self.numbers()
        return numbers if missing is None else np.where(missing, np.nan, numbers)

    def numbers(self) -> tuple[Numbers, Bools | None]:
        """Return the numbers of all rows, int64, float64 or bool, and which of them are missing.

        Those are 0; None where none is missing. Raises `ConfigError` for annotations that are no
        numbers.
        """
        if self.kind not in _NUMBERS:
            raise ConfigError(f"annotation {self.name!r} is {self.kind}, not a number")
        body, null = self.stored()
        numbers = cast(Numbers, body)
        return numbers > 0 if self.kind == "bool" else numbers, None if null is None else null != 0

    def is_in(self, values: Collection[Value | None]) -> Bools:
        """Return for each row whether its value is one of these; None stands for those without one.

        Raises `ConfigError` for values of another kind, and for annotations that are lists.
        """
        if isinstance(values, str) or not isinstance(values, Collection):
            raise ConfigError(
                f"annotation {self.name!r}: values are a list or a set of them, such as "
                f"[{values!r}], not {values!r}"
            )
        wanted = {self._checked(value) for value in values if value is not None}
        body, null = self.stored()
        if isinstance(body, Codes):
            found = _among(body.texts, wanted)[body.codes]
        elif isinstance(body, Strings):
            found = _among(body, wanted)
        else:
            numbers = cast(Numbers, body)
            found = np.isin(numbers, _held(wanted, numbers.dtype))
        if null is not None:
            found[null != 0] = None in values
        return found

    def codes(self) -> tuple[Ints, list[Value]]:
        """Return a number for each row, -1 without a value, and the sorted values that they count.

        Rows of one value have one number, and numbers are in the order of values. Raises
        `ConfigError` for annotations that are lists.
        """
        self._check_no_list()
        body, null = self.stored()
        there = np.arange(len(self)) if null is None else np.flatnonzero(null == 0)
        numbers = np.full(len(self), -1)
        if isinstance(body, np.ndarray):
            found, numbers[there] = np.unique(body[there], return_inverse=True)
            return numbers, (found > 0 if self.kind == "bool" else found).tolist()
        if isinstance(body, Strings):
            known: dict[str, int] = {}
            texts = (known.setdefault(text, len(known)) for text in body)
            codes, all_texts = np.fromiter(texts, np.int32, len(body)), list(known)
        else:
            coded = cast(Codes, body)
            codes, all_texts = coded.codes, list(coded.texts)
        used = np.flatnonzero(np.bincount(codes[there], minlength=len(all_texts)))
        in_order = sorted(used.tolist(), key=all_texts.__getitem__)
        places = np.full(len(all_texts), -1)
        places[in_order] = np.arange(len(in_order))
        numbers[there] = places[codes[there]]
        return numbers, [all_texts[number] for number in in_order]

    def _checked(self, value: object) -> object:
        self._check_no_list()
        if self.kind == "str":
            if isinstance(value, str):
                return value
        elif type(value) in _NUMBERS[self.kind]:
            return value
        raise ConfigError(f"annotation {self.name!r} is {self.kind}; it is never {value!r}")

    def _check_no_list(self) -> None:
        if self.kind in ("ints", "floats"):
            raise ConfigError(f"annotation {self.name!r} is a list of numbers, which has no order")


def _unpickled(kind: str, shared: SharedColumns, name: str) -> Column:
    arrays = {what: each.values for what, each in shared.items()}
    return Column.of_arrays(kind, arrays, name, shared)


def _values(body: Stored, rows: slice, kind: str) -> list[Value | None]:
    if isinstance(body, Codes):
        codes = body.codes[rows].tolist()
        texts = list(body.texts) if len(codes) > len(body.texts) else body.texts
        return [texts[code] for code in codes]
    if isinstance(body, np.ndarray):
        numbers = body[rows]
        return cast(list[Value | None], (numbers > 0 if kind == "bool" else numbers).tolist())
    ends = body.ends[rows.start : rows.stop + 1]
    if isinstance(body, Strings):
        return [*Strings(ends - ends[0], body.data[ends[0] : ends[-1]])] if len(ends) else []
    return [body.data[begin:end].tolist() for begin, end in pairwise(ends.tolist())]


def _held(wanted: Collection[Any], dtype: np.dtype[np.generic]) -> Array:
    """Return those numbers that a dtype can hold exactly: no row has another."""
    held = []
    for number in sorted(wanted):
        with suppress(OverflowError):
            value = dtype.type(number)
            if value.item() == number:
                held.append(value)
    return np.array(held, dtype)


def _among(texts: Strings, wanted: Collection[object]) -> Bools:
    return np.fromiter((text in wanted for text in texts), bool, len(texts))


def joined(columns: Sequence[Column], kind: str, name: str = "") -> Column:
    """Put columns one after the other; those of int become float where `kind` is that."""
    if len(columns) == 1 and columns[0].kind == kind:
        return columns[0]
    stored = [each.stored() for each in columns]
    null = [np.zeros(len(body), np.uint8) if mask is None else mask for body, mask in stored]
    mask = np.concatenate([np.empty(0, np.uint8), *null])
    bodies = [body for body, _ in stored]
    dtype = _KIND_DTYPES[kind]
    body: Stored
    if kind == "str":
        body = joined_texts(cast(list[Strings | Codes], bodies))
    elif kind in ("ints", "floats"):
        lists = cast(list[Lists], bodies)
        values = np.concatenate([np.empty(0, dtype), *(each.data for each in lists)])
        body = Lists(joined_ends(each.ends for each in lists), values.astype(dtype, copy=False))
    else:
        numbers = cast(list[Numbers], bodies)
        body = np.concatenate([np.empty(0, dtype), *numbers]).astype(dtype, copy=False)
    return Column(kind, body, mask if mask.any() else None, name)


def stored_columns(
    name: str, column: Column, *, always: bool = False
) -> Iterator[tuple[str, Array]]:
    """Yield the columns of a file that an annotation becomes; none if no row has a value.

    With `always`, some for an annotation without any value, too.
    """
    body, null = column.stored()
    if null is not None and null.all():
        if not always:
            return
        column = Column.empty(len(column), column.kind)
    elif isinstance(body, Codes):
        column = Column(column.kind, used(body, null), null)
    for what, array in column.arrays().items():
        yield f"{PREFIX}{name}/{what}", array


def stored_kinds(file: ColumnFile) -> dict[str, str]:
    """Return the kind of each annotation in a file of columns, by name.

    Raises `FormatVersionError` for columns of a kind that is none of these.
    """
    kinds = {}
    for column, dtype in file.dtypes.items():
        if not column.startswith(PREFIX):
            continue
        name, _, what = column.removeprefix(PREFIX).rpartition("/")
        if what == "bytes":
            kinds[name] = "str"
        elif what == "values":
            kinds[name] = {"<i8": "int", "<f8": "float", "|u1": "bool"}.get(dtype, "")
            kinds[name] += "s" * (f"{PREFIX}{name}/ends" in file)
        if what not in ("values", *_DTYPES) or kinds.get(name, KINDS[0]) not in KINDS:
            raise newer(f"annotation {name!r} in {str(file.path)!r}", f"the column {column!r}")
    return kinds


def read_column(file: ColumnFile, name: str, kind: str, rows: int) -> Column:
    """Take an annotation out of a file of columns; raises `CorruptCacheError` if it does not fit.

    Args:
        file: that of an index.
        name: the annotation.
        kind: its kind.
        rows: those of the index.
    """
    dtypes = {**_DTYPES, "values": _KIND_DTYPES[kind]}
    needed = {"str": ["ends", "bytes"], "ints": ["ends", "values"], "floats": ["ends", "values"]}
    some = [what for what in ("null", "codes") if f"{PREFIX}{name}/{what}" in file]
    column = Column.of_arrays(
        kind,
        {
            what: file.column(f"{PREFIX}{name}/{what}", dtypes[what])
            for what in [*some, *needed.get(kind, ["values"])]
        },
        name,
    )
    body, null = column.stored()
    if (null is not None and len(null) != rows) or len(body) != rows or not _fits(body):
        raise CorruptCacheError(
            f"{str(file.path)!r} is damaged: the columns of annotation {name!r} do not fit the "
            "index, or each other"
        )
    return column


def read_whole_column(file: ColumnFile, name: str, kind: str, rows: int) -> Column:
    """Take an annotation out of a file as `read_column` does, once its checksums are compared."""
    columns = (f"{PREFIX}{name}/{what}" for what in ("values", *_DTYPES))
    if damage := file.damage(filter(file.__contains__, columns)):
        raise CorruptCacheError("\n".join(damage))
    return read_column(file, name, kind, rows)


def _fits(body: Stored) -> bool:
    """Whether the numbers of a column can be: what is later taken by them is there."""
    if isinstance(body, Codes):
        codes, count = body.codes, len(body.texts)
        in_range = codes.min(initial=0) >= 0 and codes.max(initial=0) < max(count, 1)
        return bool(in_range) and (count > 0 or not len(codes)) and _fits(body.texts)
    if isinstance(body, np.ndarray):
        return True
    ends = body.ends
    fits = len(ends) > 0 and ends[0] == 0 and ends[-1] == len(body.data)
    return bool(fits and (ends[1:] >= ends[:-1]).all())


def _taken(body: Stored, rows: Ints, there: Bools) -> Stored:
    if isinstance(body, Codes):
        return Codes(cast(NDArray[np.int32], _taken(body.codes, rows, there)), body.texts)
    if isinstance(body, np.ndarray):
        numbers = np.zeros(len(rows), body.dtype)
        numbers[there] = body[rows[there]]
        return numbers
    data: Numbers = body.data
    taken, their_ends = take(data, body.ends, rows[there])
    counts = np.zeros(len(rows), np.int64)
    counts[there] = np.diff(their_ends)
    return type(body)(ends_of(counts), taken)
