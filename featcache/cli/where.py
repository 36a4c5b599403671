"""`--where`: one comparison of a column, `fbank>60`, `speaker=anna|ben`, `text~hello`, `snr=`.

COLUMN OP VALUE, OP one of `= != < <= > >= ~`; `~` is "contains", `|` separates several values, and
no value is a missing one. COLUMN is `id`, a feature (its frames), `seconds`, or an annotation.
Nothing is evaluated: what is compared are columns.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import click
import numpy as np

from featcache.errors import ConfigError
from featcache.format import Codes, Column, Strings
from featcache.tables import NUMBERS, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from featcache.tables import FeatureTable

_COMPARISON = re.compile(r"([^=!<>~]+)(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SECONDS = "seconds"
_BOOLS = {"true": True, "false": False}


class TableColumns:
    """The columns of a table by name, as a shell has them: those of filters, and `seconds`."""

    def __init__(self, table: FeatureTable) -> None:
        self._table = table
        self._columns = Columns(table)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of those that are stored, the ids left out."""
        return (name for name in self._columns if name != "id")

    def __getitem__(self, name: str) -> Column:
        feature = self.feature_of(name)
        if feature == name:
            return self._columns[name]
        seconds = self._table.lengths(feature) * self._frame_s(feature)
        return Column("float", seconds, name=name)

    def feature_of(self, name: str) -> str:
        """Return the feature that `seconds` are those of: the first one whose frames have a time.

        Other names stay as they are.
        """
        if name != _SECONDS or name in self._columns:
            return name
        timed = (each for each in self._table.features if self._frame_s(each))
        if (feature := next(timed, None)) is None:
            raise ConfigError(
                "no feature has frame_s, so nothing is known of seconds; declare it, or name a "
                "feature, whose frames are compared"
            )
        return feature

    def _frame_s(self, feature: str) -> float:
        manifest = self._table.selection.blocks.generations[0].manifest
        return manifest.features[feature].get("frame_s") or 0.0

    def is_in(self, name: str, values: list[str | float | None]) -> NDArray[np.bool_]:
        """Return which rows have one of these values; None stands for a missing one."""
        if self.feature_of(name) != name:
            return self[name].is_in(values)
        return self._columns.is_in(name, values)


def matching(table: FeatureTable, comparisons: Iterable[str]) -> FeatureTable:
    """Return the view of the utterances of which all comparisons hold."""
    mask = np.ones(len(table), np.bool_)
    columns = TableColumns(table)
    comparisons = list(comparisons)
    for text in comparisons:
        mask &= _holds(columns, text)
    return table.select(np.flatnonzero(mask)) if comparisons else table


def _holds(columns: TableColumns, text: str) -> NDArray[np.bool_]:
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise click.UsageError(
            f"--where takes one comparison, such as 'fbank>60' or 'speaker=anna|ben', not {text!r}"
        )
    name, comparison, value = found[1].strip(), found[2], found[3].strip()
    column = columns[name]
    if comparison in _ORDERS:
        if column.kind not in NUMBERS:
            raise click.UsageError(f"--where {text!r}: {name!r} holds {column.kind}, no numbers")
        numbers, missing = column.numbers()
        mask: NDArray[np.bool_] = _ORDERS[comparison](
            numbers, cast(float, _value(text, "float", value))
        )
        return mask if missing is None else mask & ~missing
    if comparison == "~":
        if column.kind != "str":
            raise click.UsageError(f"--where {text!r}: {name!r} holds {column.kind}, no text")
        texts, null = column.stored()
        if isinstance(texts, Codes):
            mask = _containing(texts.texts, value)[texts.codes]
        else:
            mask = _containing(cast(Strings, texts), value)
        return mask if null is None else mask & (null == 0)
    wanted = [_value(text, column.kind, each) if each else None for each in value.split("|")]
    mask = columns.is_in(name, wanted)
    return mask if comparison == "=" else ~mask


def _value(text: str, kind: str, value: str) -> str | float | bool:
    try:
        if kind == "bool":
            return _BOOLS[value.lower()]
        if kind == "int" and value.lstrip("+-").isdigit():
            return int(value)
        return float(value) if kind in NUMBERS else value
    except (ValueError, LookupError):
        raise click.UsageError(f"--where {text!r}: {value!r} is no {kind}") from None


def _containing(texts: Strings, part: str) -> NDArray[np.bool_]:
    """Return which texts contain another one, by one search through the bytes of all of them."""
    mask = np.zeros(len(texts), np.bool_)
    if not part:
        return ~mask
    sought = part.encode()
    pattern, data = re.compile(re.escape(sought)), texts.data.data
    base = int(texts.ends[0])
    starts = np.fromiter((each.start() for each in pattern.finditer(data)), np.int64)
    rows = texts.ends.searchsorted(starts, side="right") - 1
    ends = texts.ends[np.minimum(rows + 1, len(texts))]
    inside = (starts >= base) & (rows < len(texts)) & (starts + len(sought) <= ends)
    mask[rows[inside]] = True
    for start, end in zip(starts[~inside].tolist(), ends[~inside].tolist(), strict=True):
        # one that lies over the end of a text may hide one that begins behind that end
        hidden = pattern.search(data, end, end + 2 * len(sought))
        while hidden is not None and hidden.start() < start + len(sought):
            row = int(texts.ends.searchsorted(hidden.start(), side="right")) - 1
            if row < len(texts) and hidden.end() <= texts.ends[row + 1]:
                mask[row] = True
                break
            hidden = pattern.search(data, hidden.start() + 1, end + 2 * len(sought))
    return mask
