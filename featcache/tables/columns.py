"""Columns of a table: annotations, ids, lengths; filters, orders, splits and samples by them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import permutations
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.errors import ConfigError, KeyNotFoundError, MissingDependencyError, nearest
from featcache.format import Column, Hashes, Taken, hash_of
from featcache.format import Value as StoredValue
from featcache.interface import Ints

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from featcache.tables.table import FeatureTable


# Columns: a value per row of a table, by which views filter, split and sort.

Mask = NDArray[np.bool_]
Value = StoredValue | None


class RowValues(Mapping[str, Value]):
    """The id, frames and annotations of one row, looked up as they are asked for."""

    def __init__(self, columns: Columns, row: int) -> None:
        self._columns = columns
        self._row = row

    def __getitem__(self, name: str) -> Value:
        return self._columns.value(name, self._row)

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
            return Column("str", Taken(len(self._table), self._ids), name="id")
        if name in self._features:
            return Column("int", self._table.lengths(name), name=name)
        if name in self._table.features:
            raise ConfigError(f"feature {name!r} has no time axis, so there are no frames to count")
        if name in self._table.annotations:
            return self._table.annotation(name)
        self._table.selection.blocks.refuse_stale(name)
        since = self._table.selection.blocks.written_since()
        raise KeyNotFoundError(f"no column {name!r}; {nearest(name, list(self))}{since}")

    def _ids(self, rows: Ints | None) -> Column:
        selection = self._table.selection
        rows = np.arange(len(selection)) if rows is None else rows
        return Column("str", selection.packed_ids(rows), name="id")

    def value(self, name: str, row: int) -> Value:
        """Return the value of a row."""
        return self._table.id(row) if name == "id" else self[name][row]

    def is_in(self, name: str, values: Collection[Value]) -> Mask:
        """Return which rows have one of these values; None stands for a missing one."""
        if name != "id":
            return self[name].is_in(values)
        found = self._table.find([value for value in values if isinstance(value, str)])
        mask = np.zeros(len(self._table), np.bool_)
        mask[found[found >= 0]] = True
        return mask

    def __iter__(self) -> Iterator[str]:
        return iter(["id", *self._features, *self._table.annotations])

    def __len__(self) -> int:
        return 1 + len(self._features) + len(self._table.annotations)


# Rows of a table that meet conditions.

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
        mask &= _meets(columns, name, condition)
    rows = np.flatnonzero(mask)
    if where is not None:
        if not callable(where):
            raise ConfigError(f"where= is a function of an utterance's values, not {where!r}")
        kept = [_keeps(where, columns, row) for row in rows.tolist()]
        rows = rows[np.array(kept, np.bool_)]
    return rows


def what_keeps_nothing(conditions: Mapping[str, object]) -> str:
    """Return what may be wrong with a filter that keeps no row."""
    for name, condition in conditions.items():
        if isinstance(condition, tuple) and len(condition) == 2 and None not in condition:
            least, most = cast(tuple[float, float], condition)
            if least > most:
                return f"a range is (least, most): did you mean {name}=({most!r}, {least!r})?"
    return "see whether the values are those of the table, and whether where= returns something"


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


def _meets(columns: Columns, name: str, condition: object) -> Mask:
    """Return the rows that meet one condition: a range, one of several values, or one value."""
    column = columns[name]
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
    if column.kind == "int":  # 100.0 is a number of frames
        values = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    for value in values:
        if value is not None and not _is_of(column.kind, value):
            raise ConfigError(f"{name}={condition!r}: {name!r} holds {column.kind}, not {value!r}")
    return columns.is_in(name, values)


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


# Orders of rows: by a value, and at random; the same on every machine.


def stable_order(values: Ints) -> Ints:
    """Return the rows by value, rows of one value in order; values are from 0 on."""
    bits, most = len(values).bit_length(), int(values.max(initial=0))
    if most < 2**16:
        return np.argsort(values.astype(np.uint16), kind="stable")  # by counting
    if most.bit_length() + bits > 63:
        return np.argsort(values, kind="stable")
    # numbers are sorted several times faster than rows by number
    order: Ints = (values << bits) | np.arange(len(values))
    order.sort()
    order &= (1 << bits) - 1
    return order


def order_by(column: Column, name: str, *, descending: bool) -> Ints:
    """Return the rows by value, those of one value in order, those without one last.

    Texts are in the order of their UTF-8 bytes.
    """
    if column.kind in ("int", "float", "bool"):
        values, missing = column.numbers()
    elif column.kind == "str":
        codes, distinct = column.codes()
        texts = [str(text).encode("utf-8", "surrogatepass") for text in distinct]
        ranks = np.empty(len(texts), np.int64)
        ranks[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
        missing = codes < 0
        values = ranks[codes] if len(texts) else codes
    else:
        raise ConfigError(f"{name!r} holds {column.kind}, by which nothing is sorted")
    if values.dtype.kind == "f":
        nowhere = np.isnan(values)
        missing = nowhere if missing is None else missing | nowhere
    if missing is None:
        return _stable(values, descending=descending)
    rows = np.flatnonzero(~missing)
    return np.concatenate(
        [rows[_stable(values[rows], descending=descending)], np.flatnonzero(missing)]
    )


def _stable(values: NDArray[Any], *, descending: bool) -> Ints:
    if descending:
        return (len(values) - 1 - _stable(values[::-1], descending=False))[::-1]
    if values.dtype == np.int64 and values.min(initial=0) >= 0:
        return stable_order(values)
    order = np.argsort(values)  # not stable, and many times faster than what is
    ordered = values[order]
    ranks = np.zeros(len(values), np.int64)  # rows of one value have one rank
    np.cumsum(ordered[1:] != ordered[:-1], out=ranks[1:])
    bits = len(values).bit_length()
    ranks <<= bits
    ranks |= order
    ranks.sort()
    ranks &= (1 << bits) - 1
    return ranks


def drawn_parts(hashes: Hashes, seed: int, sizes: Sequence[int] | Ints) -> list[Ints]:
    """Draw rows for parts of these sizes, ascending in each; what is over is in none.

    A draw depends on the hashes of the ids and the seed alone: an utterance that comes or goes
    moves no others but at the ends of parts.
    """
    keys, ends = mixed(hashes, seed), np.cumsum(sizes)
    inner = ends[ends < len(keys)]
    bounds = np.partition(keys, inner)[inner] if len(inner) else keys[:0]
    part_of = bounds.searchsorted(keys, side="right")
    parts = [np.flatnonzero(part_of == part) for part in range(len(sizes))]
    if [*map(len, parts)] == [*map(int, sizes)]:
        return parts
    part_of[np.argsort(keys, kind="stable")] = inner.searchsorted(
        np.arange(len(keys)), side="right"
    )  # two ids have one hash, at a bound
    return [np.flatnonzero(part_of == part) for part in range(len(sizes))]


def mixed(hashes: Hashes, seed: int | Hashes) -> Hashes:
    """Return numbers drawn for hashes, by one seed or one of each."""
    # the mixing of splitmix64: Steele, Lea & Flood, OOPSLA 2014
    seeds = np.array([seed % 2**64], np.uint64) if isinstance(seed, int) else seed
    drawn: Hashes = hashes + (seeds + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    drawn = (drawn ^ (drawn >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return drawn ^ (drawn >> np.uint64(31))


# Rows of a table shared out: a sample of them, or several parts that have nothing in common.

Sizes = NDArray[np.float64]
_ROUNDING = 1e-6  # that shares may be away from 1 together
MOST_EXCHANGES = 1000
FAR = 0.05  # of all rows, by which a part may be larger or smaller than asked for
_log = logging.getLogger("featcache")


def sampled_rows(table: FeatureTable, amount: float, seed: int) -> Ints:
    """Return some rows at random, in their order: a share of them (float), or a number (int)."""
    whole = isinstance(amount, Integral)
    if isinstance(amount, bool) or not isinstance(amount, Real):
        raise ConfigError(f"a sample is a share, 0.1, or a number of utterances, not {amount!r}")
    count = int(amount) if whole else round(float(amount) * len(table)) if 0 <= amount <= 1 else -1
    if not 0 <= count <= len(table):
        raise ConfigError(
            f"a sample of {amount!r} cannot be drawn from {len(table)} utterances; give a share "
            "from 0.0 to 1.0, or a number of them"
        )
    seed = whole_number("seed", seed, 0)
    return drawn_parts(table.selection.hashes(), seed, [count])[0]


def split_rows(
    table: FeatureTable, shares: Mapping[str, float], by: str | None, seed: int
) -> dict[str, Ints]:
    """Return the rows of each part, in their order; no value of the column `by` is in two parts."""
    seed = whole_number("seed", seed, 0)
    _check_shares(shares)
    wanted = np.array(list(shares.values()), float) * len(table) / sum(shares.values())
    if by is None:
        parts = drawn_parts(table.selection.hashes(), seed, _whole_sizes(wanted))
        return dict(zip(shares, parts, strict=True))
    codes, distinct = Columns(table)[by].codes()
    if codes.min(initial=0) < 0:
        raise ConfigError(
            f"utterance {table.id(int(codes.argmin()))!r} has no {by!r}, so nothing tells which "
            "part it belongs to; leave such utterances out with filter"
        )
    sizes = np.bincount(codes, minlength=len(distinct))
    used = np.flatnonzero(sizes)
    if len(used) < len(shares):
        raise ConfigError(f"there are {len(used)} values of {by!r} for {len(shares)} parts")
    names = [repr(distinct[code]).encode("utf-8", "surrogatepass") for code in used.tolist()]
    hashes = np.fromiter(map(hash_of, names), np.uint64, len(names))
    part_of_code = np.zeros(len(sizes), np.int8 if len(shares) < 128 else np.int64)
    part_of_code[used] = _assigned(sizes[used], np.argsort(mixed(hashes, seed)), wanted)
    part_of = part_of_code[codes]
    _tell_far(shares, np.bincount(part_of, minlength=len(shares)), wanted, by)
    return {name: np.flatnonzero(part_of == part) for part, name in enumerate(shares)}


def _tell_far(shares: Mapping[str, float], sizes: Ints, wanted: Sizes, by: str) -> None:
    """Log where parts are far from the shares that were asked for, as a value has many rows."""
    apart, count = np.abs(sizes - wanted), max(int(sizes.sum()), 1)
    far = (apart > FAR * count) | ((apart > wanted / 2) & (apart >= 2))
    if far.any():
        told = ", ".join(
            f"{name!r} {size / count:.3g} instead of {asked / count:.3g}"
            for name, size, asked in zip(shares, sizes.tolist(), wanted.tolist(), strict=True)
        )
        _log.warning(
            "a split by %r is far from the shares that were asked for: %s, since all of a value go "
            "together; take another annotation, fewer parts, or other shares", by, told,
        )  # fmt: skip


def _check_shares(shares: Mapping[str, float]) -> None:
    if not isinstance(shares, Mapping) or not shares:
        raise ConfigError(f"a split is a mapping of names to shares, not {shares!r}")
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, Real) or not share > 0:
            raise ConfigError(f"the share of {name!r} is a number above 0, not {share!r}")
    if abs(sum(shares.values()) - 1) > _ROUNDING:
        raise ConfigError(
            f"shares of a split add up to 1, not to {sum(shares.values()):g}: {dict(shares)!r}"
        )


def _whole_sizes(wanted: Sizes) -> Ints:
    """Round sizes so that their sum stays: the largest remainders are rounded up."""
    sizes = np.floor(wanted + _ROUNDING).astype(np.int64)
    lacking = round(float(wanted.sum())) - int(sizes.sum())
    sizes[np.argsort(sizes - wanted, kind="stable")[:lacking]] += 1
    return sizes


def _assigned(sizes: Ints, order: Ints, wanted: Sizes) -> Ints:
    """Return the part of each group: in a drawn order, then exchanged until sizes fit best."""
    middles = np.cumsum(sizes[order]) - sizes[order] / 2
    part_of = np.empty(len(sizes), np.int64)
    part_of[order] = np.minimum(np.cumsum(wanted).searchsorted(middles), len(wanted) - 1)
    for part in range(len(wanted)):
        if not (part_of == part).any():  # a part without anything is no part
            many = np.bincount(part_of, minlength=len(wanted)).argmax()
            groups = np.flatnonzero(part_of == many)
            part_of[groups[sizes[groups].argmin()]] = part
    for _ in range(MOST_EXCHANGES):
        if not _exchanged(part_of, sizes, wanted):
            break
    return part_of


def _exchanged(part_of: Ints, sizes: Ints, wanted: Sizes) -> bool:
    """Move one group to another part, or exchange two, if sizes are nearer then."""
    over = np.bincount(part_of, sizes, minlength=len(wanted)) - wanted
    pairs = permutations(range(len(wanted)), 2)
    for here, there in sorted(pairs, key=lambda pair: over[pair[1]] - over[pair[0]]):
        difference = over[here] - over[there]
        if difference <= 0:
            return False
        mine, others = np.flatnonzero(part_of == here), np.flatnonzero(part_of == there)
        change, group, other = _nearest(sizes, mine, others, difference / 2)
        after = abs(over[here] - change) + abs(over[there] + change)
        if after < abs(over[here]) + abs(over[there]) - _ROUNDING:
            part_of[group] = there
            if other >= 0:
                part_of[other] = here
            return True
    return False


def _nearest(sizes: Ints, mine: Ints, others: Ints, wanted: float) -> tuple[int, int, int]:
    """Return the change of size nearest to the wanted one, and the groups: one of each part.

    The other is -1 where one group alone moves; none is the last one of its part.
    """
    others = others[np.argsort(sizes[others], kind="stable")]
    alone = [-1] if len(mine) > 1 else []
    others = np.concatenate([np.array(alone, np.int64), others])
    back = np.where(others < 0, 0, sizes[others])
    places = np.clip(back.searchsorted(sizes[mine] - wanted), 1, len(back))
    candidates = np.minimum(np.stack([places - 1, places]), len(back) - 1)
    change = sizes[mine] - back[candidates]
    side, which = np.unravel_index(np.abs(change - wanted).argmin(), change.shape)
    return int(change[side, which]), int(mine[which]), int(others[candidates[side, which]])


# Tables for other libraries: ids, frames and annotations as Arrow and pandas hold them.

_ARROW = {
    "str": "large_string",
    "int": "int64",
    "float": "float64",
    "bool": "bool_",
    "ints": "int64",
    "floats": "float64",
}


def arrow_table(table: FeatureTable) -> pyarrow.Table:
    """Return ids, frames and annotations of all rows."""
    arrow: Any = _imported("pyarrow", "to_arrow")
    packed = table.selection.packed_ids(np.arange(len(table)))
    buffers = map(arrow.py_buffer, (packed.ends, packed.data))
    made = {"id": arrow.LargeStringArray.from_buffers(len(packed), *buffers)}
    for name, column in _without_ids(table).items():
        kind = getattr(arrow, _ARROW[column.kind])()
        kind = arrow.list_(kind) if column.kind in ("ints", "floats") else kind
        made[name] = arrow.array(_values(column), kind)
    return arrow.table(made)


def data_frame(table: FeatureTable) -> pandas.DataFrame:
    """Return ids, frames and annotations of all rows."""
    pandas: Any = _imported("pandas", "to_pandas")
    made: dict[str, Any] = {"id": list(table)}
    for name, column in _without_ids(table).items():
        values = _values(column)
        kind = {"int": "Int64", "float": "Float64", "bool": "boolean"}.get(column.kind)
        missing = kind is not None and isinstance(values, list)
        made[name] = pandas.array(values, dtype=kind) if missing else values
    return pandas.DataFrame(made)


def _without_ids(table: FeatureTable) -> dict[str, Column]:
    return {name: column for name, column in Columns(table).items() if name != "id"}


def _values(column: Column) -> object:
    """Return the numbers of a column where none is missing, else a list of its values."""
    if column.kind in ("int", "float", "bool"):
        numbers, missing = column.numbers()
        if missing is None:
            return numbers
    return list(column)


def _imported(library: str, method: str) -> object:
    try:
        return import_module(library)
    except ImportError as error:
        raise MissingDependencyError(
            f"{method} needs {library!r}; try: pip install {library}"
        ) from error
