"""`Annotation`: one value for each row of a cache or a table, which is no feature."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple, cast, overload

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError, RowError
from featcache.format.annotations import AnnotationValues, Value, joined
from featcache.format.columns import Codes, Strings
from featcache.interface import Ints

Bools = NDArray[np.bool_]
_AT_ONCE = 65536
_NUMBERS = {"int": (int,), "float": (int, float), "bool": (bool,)}


class BlockRows(NamedTuple):
    """Rows of one cache, in the order of a table."""

    column: AnnotationValues | None  # of all rows of the cache; None: it has not the annotation
    rows: Ints | None  # which of them; None: all in their order
    number: int  # how many they are


class Annotation(Sequence[Value | None]):
    """Values of one annotation in the order of rows, None where a row has none.

    Taken out of mapped columns when they are asked for: ten million texts cost no memory.

    Args:
        name: the name of the annotation.
        kind: "str", "int", "float", "bool", "ints" or "floats".
        blocks: rows of caches, one after the other.
        rows: which of the rows of all blocks; None: all of them.

    >>> annotation = featcache.open("features/train").annotation("speaker")  # doctest: +SKIP
    >>> annotation[0], annotation.kind                                       # doctest: +SKIP
    ('1089', 'str')
    """

    def __init__(
        self, name: str, kind: str, blocks: Sequence[BlockRows], rows: Ints | None = None
    ) -> None:
        self.name = name
        self.kind = kind
        self._blocks = blocks
        self._starts = [0, *accumulate(block.number for block in blocks)]
        self._rows = rows

    def __len__(self) -> int:
        return self._starts[-1] if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Value | None: ...
    @overload
    def __getitem__(self, row: slice) -> list[Value | None]: ...
    def __getitem__(self, row: int | slice) -> Value | list[Value | None] | None:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        try:
            number = range(len(self))[operator.index(row)]
        except IndexError:
            raise RowError(f"no row {row}: there are {len(self)} utterances") from None
        except TypeError:
            raise RowError(
                f"annotation {self.name!r} is read by row number or slice, not by {row!r}; the "
                f"value of an id is table.annotation({self.name!r})[table.rows([id])[0]]"
            ) from None
        return self.take(np.array([number]))[0]

    def __iter__(self) -> Iterator[Value | None]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self[start : start + _AT_ONCE]

    def __repr__(self) -> str:
        return f"<Annotation {self.name!r}: {self.kind} of {len(self)} utterances>"

    def take(self, rows: Ints) -> list[Value | None]:
        """Return the values of some rows, in their order; raises `RowError` for other numbers."""
        rows = np.asarray(rows, np.int64)
        if rows.min(initial=0) < 0 or rows.max(initial=-1) >= len(self):
            raise RowError(f"rows are from 0 to before {len(self)}")
        return self.column(rows).values()

    @property
    def missing(self) -> Bools:
        """True for the rows without a value."""
        null = self.column().null
        return np.zeros(len(self), bool) if null is None else null != 0

    @property
    def has_missing(self) -> bool:
        """Whether a row of the caches has no value; quick, and the same for all views."""
        return any(
            block.number > 0 and (block.column is None or block.column.null is not None)
            for block in self._blocks
        )

    def to_numpy(self) -> NDArray[Any]:
        """Return the numbers of all rows: int64, float64 or bool.

        Where a value is missing, all are float64, NaN for that; `numbers` keeps integers beyond
        2**53 exact there, too. Raises `ConfigError` for annotations that are no numbers.
        """
        numbers, missing = self.numbers()
        return numbers if missing is None else np.where(missing, np.nan, numbers)

    def numbers(self) -> tuple[NDArray[Any], Bools | None]:
        """Return the numbers of all rows, int64, float64 or bool, and which of them are missing.

        Those are 0; None where none is missing. Raises `ConfigError` for annotations that are no
        numbers.
        """
        if self.kind not in _NUMBERS:
            raise ConfigError(f"annotation {self.name!r} is {self.kind}, not a number")
        column = self.column()
        numbers = cast(NDArray[Any], column.body)
        missing = None if column.null is None else column.null != 0
        return numbers > 0 if self.kind == "bool" else numbers, missing

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
        column = self.column()
        body, null = column.body, column.null
        if isinstance(body, Codes):
            found = _among(body.texts, wanted)[body.codes]
        elif isinstance(body, Strings):
            found = _among(body, wanted)
        else:
            numbers = cast(NDArray[Any], body)
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
        column = self.column()
        there = np.flatnonzero(~self.missing)
        body = column.body
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

    def column(self, rows: Ints | None = None) -> AnnotationValues:
        """Return the column of some rows, or of all; nothing is copied for those of one cache."""
        if rows is None:
            rows = self._rows
        elif self._rows is not None:
            rows = self._rows[rows]
        if rows is None:
            return joined([_taken(block, self.kind, None) for block in self._blocks], self.kind)
        if len(self._blocks) == 1:
            return _taken(self._blocks[0], self.kind, rows)
        blocks = np.searchsorted(self._starts, rows, side="right") - 1
        columns = [
            _taken(block, self.kind, rows[blocks == number] - start)
            for number, (block, start) in enumerate(zip(self._blocks, self._starts, strict=False))
        ]
        places = np.empty(len(rows), np.int64)
        places[np.argsort(blocks, kind="stable")] = np.arange(len(rows))
        return joined(columns, self.kind).take(places)

    def _checked(self, value: object) -> Any:
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


def _taken(block: BlockRows, kind: str, rows: Ints | None) -> AnnotationValues:
    inner = block.rows if rows is None or block.rows is None else block.rows[rows]
    inner = rows if block.rows is None else inner
    if block.column is None:
        return AnnotationValues.missing(block.number if rows is None else len(rows), kind)
    return block.column if inner is None else block.column.take(inner)


def _held(wanted: Collection[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
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
