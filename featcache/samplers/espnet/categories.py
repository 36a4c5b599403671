"""Which utterances belong to a category or a data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.espnet.cut import by_appearance, grouped
from featcache.samplers.espnet.inputs import Labels, codes_of
from featcache.samplers.espnet.key_table import PackedStrings, read_table


@dataclass(frozen=True)
class Members:
    """The rows of each category, one after another: category c has rows[ends[c] : ends[c + 1]]."""

    rows: Ints
    ends: Ints

    @property
    def sizes(self) -> Ints:
        """Rows of each category."""
        return np.diff(self.ends)

    @property
    def codes(self) -> Ints:
        """The category of each of the rows."""
        return np.repeat(np.arange(len(self.ends) - 1), self.sizes)

    def renumbered(self, rows: Ints) -> Members:
        """Return the same categories of other rows, one for each of these.

        Without those that become -1.
        """
        kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows >= 0)])
        return Members(rows[rows >= 0], kept[self.ends])

    def sums(self, values: Ints) -> Ints:
        """Return the sum of the values of each category's rows, where each has some."""
        return np.add.reduceat(values[self.rows], self.ends[:-1])


def read_members(path: str) -> tuple[PackedStrings, Members]:
    """Read a file of a category and its utterances on each line, in the order of the file.

    Rows number what is read.
    """
    table = read_table(path)
    counts = table.widths - 1
    if counts.min() == 0:
        line = int(counts.argmin())
        raise ConfigError(
            f"{path!r}, line {line + 1}: {table.keys[line]!r} has no utterances; remove the line"
        )
    member = np.ones(len(table.starts), bool)
    member[table.heads[:-1]] = False
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return table.tokens(np.flatnonzero(member)), Members(np.arange(ends[-1]), ends)


def labelled_members(labels: Labels, count: int, argument: str) -> Members:
    """Group rows by their labels, in the order that the labels come in."""
    return Members(*grouped(by_appearance(codes_of(labels, count, argument))))
