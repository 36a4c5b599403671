"""Shapes of utterances as ESPnet's shape files have them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.espnet.key_table import PackedStrings, Table, read_table
from featcache.samplers.lengths import Shapes

_LARGEST = 2**62  # sums of two stay within int64


def elements(shapes: Shapes) -> Ints:
    """Return the numbers that each utterance holds: its length times the shape of a frame."""
    factors = np.where(shapes.dims < 0, 1, shapes.dims)
    most = shapes.lengths.max(initial=0) * factors.prod(1, dtype=np.float64).max(initial=1)
    if most * len(shapes.lengths) > _LARGEST:
        raise ConfigError(f"the elements of {shapes.name} are too many to count in 64 bits")
    counts: Ints = shapes.lengths * factors.prod(1)
    return counts


def require_one_frame_shape(shapes: Shapes) -> None:
    """Raise `ConfigError` where frames differ in shape: they cannot be padded to one array."""
    differing = np.flatnonzero((shapes.dims != shapes.dims[:1]).any(1))
    if len(differing):
        row = int(differing[0])
        one, other = (tuple(dims[dims >= 0].tolist()) for dims in shapes.dims[[0, row]])
        raise ConfigError(
            f"with padding=True all frames must have one shape: {shapes.name} has {one} for the "
            f"first utterance and {other} for number {row + 1}; try padding=False"
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
    numbers = _plain_numbers(table, separator)
    if numbers is None:
        numbers = _numbers_by_line(table, separator)
    return table.keys, Shapes.of(f"shape file {table.path!r}", numbers)


def _plain_numbers(table: Table, separator: str) -> Ints | None:
    """Parse lines of one value of equally many numbers of at most 8 digits.

    None where a line is of another kind.
    """
    if not (table.widths == 2).all():
        return None
    starts, stops = table.starts[1::2], table.stops[1::2]
    commas = np.flatnonzero((np.frombuffer(table.data, np.uint8) == 44) & (separator == ","))
    if len(commas) % len(table):
        return None
    between = commas.reshape(len(table), -1)
    if not ((between > starts[:, None]) & (between < stops[:, None])).all():
        return None
    bounds = [starts - 1, *between.T, stops]
    columns = [_digits(table.data, begin + 1, end) for begin, end in pairwise(bounds)]
    parsed = [column for column in columns if column is not None]
    return np.column_stack(parsed) if len(parsed) == len(columns) else None


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
    rows: list[list[int]] = []
    for line in range(len(table)):
        value = table.value(line)
        try:
            rows.append([int(number) for number in value.split(separator)])
        except ValueError:
            rows.append([-1])
        if not 0 <= min(rows[-1]) <= max(rows[-1]) <= _LARGEST:
            one = separator == " "
            kind = (
                "this sampler needs one length for each utterance,"
                if one
                else "lengths and shapes are"
            )
            raise ConfigError(
                f"shape file {table.path!r}, line {line + 1}: {value!r} after "
                f"{table.keys[line]!r}; {kind} integers from 0 on, as in "
                f"{'575' if one else '575 or 575,80'}"
            )
    width = max(map(len, rows))
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int64)
