"""Stamps: two numbers an utterance, by which a later run sees whether its input has changed."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.store.format.column_file import ColumnFile

MOST = (1 << 64) - 1


class Stamps(NamedTuple):
    """Stamps of an utterance: digests of 64 bits, as natural numbers; 0: unknown.

    input: of what the features were computed from, as the data set delivered it.
    entry: of the utterance's entry in the data set, and of size and time of the files it names.
    """

    input: int = 0
    entry: int = 0


UNKNOWN = Stamps()


class StampColumns(NamedTuple):
    """Stamps of all rows of an index."""

    input: NDArray[np.uint64]
    entry: NDArray[np.uint64]

    @classmethod
    def of(cls, stamps: Sequence[Stamps]) -> StampColumns | None:
        """Return stamps as columns; None if none of them is known."""
        if all(each == UNKNOWN for each in stamps):
            return None
        return cls(*np.array(stamps, np.uint64).reshape(-1, 2).T)

    @classmethod
    def unknown(cls, count: int) -> StampColumns:
        """Return columns of that many rows without stamps."""
        return cls(np.zeros(count, np.uint64), np.zeros(count, np.uint64))

    def replaced(self, stamps: Mapping[int, Stamps]) -> StampColumns:
        """Return a copy in which some rows have others."""
        rows = list(stamps)
        changed = StampColumns(*(column.copy() for column in self))
        for column, numbers in zip(changed, zip(*stamps.values(), strict=True), strict=True):
            column[rows] = np.array(numbers, np.uint64)
        return changed


def check_stamps(id: str, stamps: Stamps) -> Stamps:
    """Return the stamps of an utterance; raises `ConfigError` for what are none."""
    try:
        input, entry = map(operator.index, stamps)
        checked = Stamps(input, entry)
    except (TypeError, ValueError):
        checked = Stamps(-1)
    if not all(0 <= number <= MOST for number in checked):
        raise ConfigError(
            f"the stamps of utterance {id!r} are two numbers from 0 to 2**64 - 1, not {stamps!r}"
        )
    return checked


def read_stamps(file: ColumnFile) -> StampColumns | None:
    """Take the stamps out of a file of columns; None if it has none."""
    if not any(name in file for name in StampColumns._fields):
        return None
    return StampColumns(*(file.column(name, np.uint64) for name in StampColumns._fields))
