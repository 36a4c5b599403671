"""Categories and data sets of utterances, by files as ESPnet reads them or by labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.arguments import require_either
from featcache.samplers.espnet.cut import by_appearance, grouped
from featcache.samplers.espnet.key_table import PackedStrings, read_table
from featcache.samplers.espnet.numbered_utterances import Labels, NumberedUtterances, codes_of


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
        """Return the same categories with `rows` in place of these; -1 leaves a row out."""
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


@dataclass(frozen=True)
class Categorized:
    """Utterances with their categories and, for some samplers, data sets.

    `utterances` is None where nothing but categories is known; rows are then numbers, or the lines
    of `keys`.
    """

    categories: Members
    utterances: NumberedUtterances | None = None
    keys: PackedStrings | None = None
    datasets: Members | None = None

    @classmethod
    def of(
        cls, utterances: NumberedUtterances, category2utt_file: str | None, labels: Labels | None
    ) -> Categorized:
        """Return utterances with the categories of a file, or of the labels of all rows."""
        require_either("category2utt_file", category2utt_file, "categories", labels)
        if labels is not None:
            return cls(labelled_members(labels, utterances.count, "categories"), utterances)
        path = str(category2utt_file)
        ids, members = read_members(path)
        rows = utterances.rows(ids, members.codes, f"category file {path!r}")
        return cls(Members(rows, members.ends), utterances)

    @classmethod
    def alone(cls, category2utt_file: str | None, labels: Labels | None) -> Categorized:
        """Return the utterances of a file of categories, or one for each label."""
        require_either("category2utt_file", category2utt_file, "categories", labels)
        if labels is not None:
            return cls(labelled_members(labels, len(labels), "categories"))
        keys, members = read_members(str(category2utt_file))
        return cls(members, keys=keys)

    def with_datasets(self, folder: str | None, labels: Labels | None) -> Categorized:
        """Add the data sets of `folder`/dataset2utt, or of the labels of all rows.

        Utterances of the file that are not there are passed over, as in ESPnet.
        """
        require_either("dataset2utt_parent_dir", folder, "datasets", labels)
        utterances = self._known
        if labels is not None:
            members = labelled_members(labels, utterances.count, "datasets")
            return replace(self, datasets=members)
        path = str(Path(str(folder), "dataset2utt"))
        ids, members = read_members(path)
        rows = utterances.find(ids, f"data set file {path!r}")
        return replace(self, datasets=members.renumbered(rows))

    @property
    def lengths(self) -> Ints:
        """Frames of each row."""
        return self._known.shapes[0].lengths

    @property
    def _known(self) -> NumberedUtterances:
        assert self.utterances is not None
        return self.utterances

    def named(self, batches: Batches) -> Batches:
        """Return batches of rows by what they name utterances by."""
        if self.utterances is None:
            return Batches(batches.items, batches.ends, self.keys)
        return self.utterances.batches(batches)
