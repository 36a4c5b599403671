"""Shapes of utterances: from shape files, arrays of lengths or caches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.espnet.key_table import PackedStrings, Table, read_table

_LARGEST = 2**62  # sums of two stay within int64


@dataclass(frozen=True)
class Shapes:
    """Lengths of utterances, int64, and the shapes of their frames."""

    name: str
    lengths: Ints
    dims: Ints  # (n, dims) or, where all are alike, (1, dims); -1 where an utterance has fewer

    @cached_property
    def elements(self) -> Ints:
        """Elements of each utterance: length times the shape of a frame."""
        factors = np.where(self.dims < 0, 1, self.dims)
        if (
            self.lengths.max(initial=0)
            * factors.prod(1, dtype=np.float64).max(initial=1)
            * len(self.lengths)
            > _LARGEST
        ):
            raise ConfigError(f"the elements of {self.name} are too many to count in 64 bits")
        counts: Ints = self.lengths * factors.prod(1)
        return counts

    def require_one_frame_shape(self) -> None:
        """Raise `ConfigError` where frames differ in shape: they cannot be padded to one array."""
        differing = np.flatnonzero((self.dims != self.dims[:1]).any(1))
        if len(differing):
            raise ConfigError(
                f"with padding=True all frames must have one shape: {self.name} has "
                f"{self._frame(0)} for the first utterance and {self._frame(int(differing[0]))} "
                f"for number {int(differing[0]) + 1}; try padding=False"
            )

    def _frame(self, row: int) -> tuple[int, ...]:
        return tuple(self.dims[row][self.dims[row] >= 0].tolist())

    def take(self, rows: Ints) -> Shapes:
        """Return the shapes of these rows."""
        return Shapes(
            self.name, self.lengths[rows], self.dims if len(self.dims) == 1 else self.dims[rows]
        )


def shapes_of(name: str, array: Ints) -> Shapes:
    """Check an integer array of lengths, shape (n,), or of shapes, (n, dims + 1)."""
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu" or array.shape[-1:] == (0,):
        raise ConfigError(
            f"{name} must be integers of shape (utterances,) or (utterances, dims), not "
            f"{array.dtype} {array.shape}"
        )
    whole = array.astype(np.int64, copy=False).reshape(len(array), -1)
    if whole.min() < 0:
        row = int(whole.min(1).argmin())
        raise ConfigError(f"{name}: row {row} is negative: {array[row].tolist()!r}")
    dims = whole[:, 1:]
    return Shapes(
        name, np.ascontiguousarray(whole[:, 0]), dims[:1] if (dims == dims[:1]).all() else dims
    )


def read_shapes(path: str | Path, separator: str = ",") -> tuple[PackedStrings, Shapes]:
    """Read a file of an utterance and its length, or shape, on each line ("utt-1 575,80").

    Args:
        path: the file, UTF-8.
        separator: what stands between the numbers: a comma, or a space, as category samplers read
            them.

    Raises `ConfigError` with file and line for a duplicate, a blank line, a key without numbers, a
    number that is no integer or negative.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = Path(file.name).write_text("utt-1 575,80\\nutt-2 31,80\\n")
    ...     keys, shapes = read_shapes(file.name)
    >>> list(keys), shapes.lengths.tolist(), shapes.dims.tolist()
    (['utt-1', 'utt-2'], [575, 31], [[80]])
    """
    table = read_table(path)
    name = f"shape file {table.path!r}"
    numbers = _plain_numbers(table, separator)
    if numbers is not None:
        return table.keys, shapes_of(name, numbers)
    numbers = _numbers_by_line(table, separator)
    return table.keys, Shapes(name, np.ascontiguousarray(numbers[:, 0]), numbers[:, 1:])


def _plain_numbers(table: Table, separator: str) -> Ints | None:
    """Parse lines of one value of equally many numbers of at most 8 digits.

    None where a line is of another kind.
    """
    if not (table.widths == 2).all():
        return None
    starts, stops = table.starts[1::2], table.stops[1::2]
    commas = (
        np.flatnonzero(np.frombuffer(table.data, np.uint8) == 44)
        if separator == ","
        else np.zeros(0, np.int64)
    )
    if len(commas) % len(table):
        return None
    between = commas.reshape(len(table), -1)
    if not ((between > starts[:, None]) & (between < stops[:, None])).all():
        return None
    bounds = [starts - 1, *between.T, stops]
    numbers = np.empty((len(table), len(bounds) - 1), np.int64)
    for place in range(len(bounds) - 1):
        column = _digits(table.data, bounds[place] + 1, bounds[place + 1])
        if column is None:
            return None
        numbers[:, place] = column
    return numbers


def _digits(data: bytes, starts: Ints, stops: Ints) -> Ints | None:
    """Parse decimal numbers that end before `stops`; None where one is not of 1 to 8 digits."""
    widths = stops - starts
    if widths.min() < 1 or widths.max() > 8:
        return None
    until: NDArray[np.uint64] = np.ndarray(len(data) - 7, "<u8", data, strides=(1,))[stops - 8]
    blank = (8 * (8 - widths)).astype(np.uint64)
    # one digit a byte, zeros before the first
    number = ((until ^ np.uint64(0x3030303030303030)) >> blank) << blank
    if ((number | (number + np.uint64(0x0606060606060606))) & np.uint64(0xF0F0F0F0F0F0F0F0)).any():
        return None  # a byte that is none of 0 to 9
    # neighbours join to pairs, fours, eights of digits: Lemire, "Quickly parsing eight digits",
    # lemire.me, 2018
    number = (number * np.uint64(10) + (number >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    number = (number * np.uint64(100) + (number >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    number = (number * np.uint64(10000) + (number >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return number.astype(np.int64)


def _numbers_by_line(table: Table, separator: str) -> Ints:
    """Parse lines of any numbers, one after the other; -1 fills lines of fewer numbers."""
    rows = [_numbers(table, line, separator) for line in range(len(table))]
    numbers = np.full((len(rows), max(map(len, rows))), -1, np.int64)
    for line, row in enumerate(rows):
        numbers[line, : len(row)] = row
    return numbers


def _numbers(table: Table, line: int, separator: str) -> list[int]:
    value = table.value(line)
    try:
        numbers = [int(number) for number in value.split(separator)]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        kind = (
            "lengths and shapes are"
            if separator == ","
            else "this sampler needs one length for each utterance,"
        )
        raise ConfigError(
            f"shape file {table.path!r}, line {line + 1}: {value!r} after {table.keys[line]!r}; "
            f"{kind} integers from 0 on, as in {'575 or 575,80' if separator == ',' else '575'}"
        )
    return numbers
