"""Rows of a table that meet conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.tables.columns import Column, Columns, Mask, RowValues, Value

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

NUMBERS = ("int", "float")


def rows_that_meet(
    table: FeatureTable,
    conditions: Mapping[str, object],
    where: Callable[[Mapping[str, Value]], object] | None,
) -> Ints:
    """Return the rows that meet all conditions; `where` is asked of those that meet the others."""
    columns = Columns(table)
    mask = np.ones(len(table), np.bool_)
    for name, condition in conditions.items():
        mask &= _meets(name, columns[name], condition)
    rows = np.flatnonzero(mask)
    if where is not None:
        if not callable(where):
            raise ConfigError(f"where= is a function of an utterance's values, not {where!r}")
        kept = [_keeps(where, columns, row) for row in rows.tolist()]
        rows = rows[np.array(kept, np.bool_)]
    return rows


def _keeps(where: Callable[[Mapping[str, Value]], object], columns: Columns, row: int) -> bool:
    """Ask the user's function about a row; what it raises names the utterance."""
    values = RowValues(columns, row)
    try:
        return bool(where(values))
    except Exception as error:
        missing = ", ".join(repr(name) for name in values if values[name] is None)
        told = f", where None stands for what is missing: {missing}" if missing else ""
        error.add_note(f"in where= of filter, at utterance {values['id']!r}{told}")
        raise


def _meets(name: str, column: Column, condition: object) -> Mask:
    """Return the rows that meet one condition: a range, one of several values, or one value."""
    if isinstance(condition, tuple):
        return _in_range(name, column, condition)
    if hasattr(condition, "tolist"):
        condition = condition.tolist()
    if isinstance(condition, Mapping) or callable(condition):
        raise ConfigError(
            f"{name}={condition!r} is no condition; give a value, a set of values or a range "
            "(least, most), and a function as where="
        )
    several = isinstance(condition, Collection) and not isinstance(condition, str | bytes)
    given: list[Any] = list(cast(Collection[Any], condition)) if several else [condition]
    values = [each.item() if isinstance(each, np.generic) else each for each in given]
    for value in values:
        if value is not None and not _is_of(column.kind, value):
            raise ConfigError(f"{name}={condition!r}: {name!r} holds {column.kind}, not {value!r}")
    return column.is_in(values)


def _is_of(kind: str, value: object) -> bool:
    if kind in NUMBERS:
        return isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, {"bool": bool, "str": str}.get(kind, ()))


def _in_range(name: str, column: Column, ends: tuple[object, ...]) -> Mask:
    numbers = all(end is None or _is_of("float", end) for end in ends)
    if len(ends) != 2 or not numbers or column.kind not in NUMBERS:
        raise ConfigError(
            f"{name}={ends!r} is no range of numbers, (least, most), of {name!r}, which holds "
            f"{column.kind}; give several values as a set or a list"
        )
    values, missing = column.numbers()
    mask = np.ones(len(values), np.bool_) if missing is None else ~missing
    least, most = cast(tuple[float | None, float | None], ends)
    if least is not None:
        mask &= values >= _end(least, values.dtype, math.ceil, math.inf)
    if most is not None:
        mask &= values <= _end(most, values.dtype, math.floor, -math.inf)
    return mask


def _end(
    end: float, dtype: np.dtype[Any], inwards: Callable[[float], int], inner: float
) -> int | float:
    """Return the first number that a dtype can hold from the end of a range inwards.

    NumPy would round values or ends, to compare integers beyond 2**53 with floats.
    """
    try:
        if dtype.kind != "f":
            whole = inwards(end)
            held = -(1 << 63) <= whole < 1 << 63
            return whole if held else math.copysign(math.inf, float(whole))
        number = float(end)
    except ValueError:
        return math.nan
    except OverflowError:  # infinite, or beyond all floats
        return math.inf if end > 0 else -math.inf
    outside = number < end if inner > 0 else number > end
    return float(np.nextafter(number, inner)) if outside else number
