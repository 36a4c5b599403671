"""Categories and data sets of utterances, by files as ESPnet reads them or by labels."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import counted, ends_of
from featcache.samplers.espnet.arguments import require_either
from featcache.samplers.espnet.cut import by_appearance, grouped
from featcache.samplers.espnet.key_table import PackedStrings, read_table
from featcache.samplers.espnet.numbered_utterances import Labels, NumberedUtterances, codes_of
from featcache.samplers.espnet.python_shuffle import swap_partners


@dataclass(frozen=True)
class Members:
    """The rows of each category, one after another: category c has rows[ends[c] : ends[c + 1]]."""

    rows: Ints
    ends: Ints

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def sizes(self) -> Ints:
        """Rows of each category."""
        return np.diff(self.ends)

    @property
    def codes(self) -> Ints:
        """The category of each of the rows."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def take(self, order: Ints) -> Members:
        """Return the categories that `order` numbers, in that order."""
        sizes = self.sizes[order]
        return Members(
            self.rows[np.repeat(self.ends[order], sizes) + counted(sizes)], ends_of(sizes)
        )

    def renumbered(self, rows: Ints) -> Members:
        """Return the same categories with `rows` in place of these; -1 leaves a row out."""
        kept = rows >= 0
        return Members(rows[kept], ends_of(kept.view(np.int8))[self.ends])

    def swap_partners(self, generator: random.Random) -> Ints:
        """Draw swaps that shuffle each category by itself: for each place the one to swap with."""
        partners = [swap_partners(generator, size) for size in self.sizes.tolist()]
        return np.concatenate(partners) + np.repeat(self.ends[:-1], self.sizes)

    def sums(self, values: Ints) -> Ints:
        """Return the sum of the values of each category's rows, where each has some."""
        return np.add.reduceat(values[self.rows], self.ends[:-1])


def read_members(path: str) -> tuple[PackedStrings, Members]:
    """Read a file of a category and its utterances on each line, in the order of the file.

    Rows count the utterances of the file.
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
    ends = ends_of(counts)
    return table.tokens(np.flatnonzero(member)), Members(np.arange(ends[-1]), ends)


def labelled_members(labels: Labels, count: int, argument: str) -> Members:
    """Group rows by their labels, in the order that the labels come in."""
    return Members(*grouped(by_appearance(codes_of(labels, count, argument))))


def categorized(
    utterances: NumberedUtterances | None, category2utt_file: str | None, labels: Labels | None
) -> tuple[NumberedUtterances, Members]:
    """Return utterances with their categories, by a file or by the labels of all rows.

    None: the utterances of the file, or one for each label.
    """
    require_either("category2utt_file", category2utt_file, "categories", labels)
    if labels is not None:
        found = utterances or NumberedUtterances("categories", len(labels), [], None)
        return found, labelled_members(labels, found.count, "categories")
    name = f"category file {str(category2utt_file)!r}"
    ids, members = read_members(str(category2utt_file))
    if utterances is None:
        return NumberedUtterances(name, len(ids), [], ids), members
    return utterances, Members(utterances.rows(ids, members.codes, name), members.ends)


def dataset_members(
    utterances: NumberedUtterances, folder: str | None, labels: Labels | None
) -> Members:
    """Return the data sets of `folder`/dataset2utt, or of the labels of all rows.

    Utterances of the file that are not there are passed over, as in ESPnet.
    """
    require_either("dataset2utt_parent_dir", folder, "datasets", labels)
    if labels is not None:
        return labelled_members(labels, utterances.count, "datasets")
    path = str(Path(str(folder), "dataset2utt"))
    ids, members = read_members(path)
    return members.renumbered(utterances.find(ids, f"data set file {path!r}"))
