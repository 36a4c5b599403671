"""Batches of a number of utterances: unsorted, sorted by length, or fewer where they are long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.cut import (
    Descending,
    by_appearance,
    even_ends,
    grouped,
    joined,
    reversed_batches,
    spread_short_last,
    stable_order,
)
from featcache.samplers.espnet.numbered_utterances import NumberedUtterances


@dataclass(frozen=True)
class Unsorted:
    """Rows as they come; with categories each category by itself, in the order of first rows."""

    batch_size: int
    drop_last: bool
    shaped: ClassVar[int | None] = 0  # shape files that are parsed: see `utterances_of`

    def batches(self, found: NumberedUtterances, categories: Ints | None = None) -> Batches:
        """Cut the rows."""
        parts = _by_category(np.arange(found.count), categories)
        return joined(
            [
                reversed_batches(part, even_ends(len(part), self.batch_size, self.drop_last))
                for part in parts
            ]
        )


@dataclass(frozen=True)
class Sorted:
    """Rows by length: batches come in the order of their utterances, or the other way round."""

    batch_size: int
    drop_last: bool
    descending: Descending
    shaped: ClassVar[int | None] = 1

    def batches(self, found: NumberedUtterances, categories: Ints | None = None) -> Batches:
        """Cut the rows, all categories together."""
        lengths = found.shapes[0].lengths
        in_batches, list_order = self.descending.in_batches, self.descending.batches
        rows = stable_order(lengths.max() - lengths if in_batches else lengths)
        ends = even_ends(len(rows), self.batch_size, self.drop_last)
        return reversed_batches(rows, ends, list_order=in_batches != list_order)


@dataclass(frozen=True)
class Folded:
    """Rows by length, batch_size / (1 + floor(length / fold)) a batch, by its shortest utterance.

    Of several features the one that leaves the fewest decides. A category has its own batches.
    """

    batch_size: int
    min_batch_size: int
    drop_last: bool
    fold_lengths: Sequence[float]
    descending: Descending
    shaped: ClassVar[int | None] = None

    def batches(self, found: NumberedUtterances, categories: Ints | None = None) -> Batches:
        """Cut the rows."""
        sizes = self._sizes(found)
        rows = stable_order(found.shapes[0].lengths)
        batches: list[Batches] = []
        for part in _by_category(rows, None if categories is None else categories[rows]):
            drop_short = self.drop_last and any(len(batch) for batch in batches)
            ends = _folded_ends(sizes[part], drop_short)
            ends = spread_short_last(ends, self.min_batch_size, skip=1)
            batches.append(
                reversed_batches(
                    part,
                    ends,
                    in_batches=self.descending.in_batches,
                    list_order=self.descending.batches,
                )
            )
        return joined(batches)

    def _sizes(self, found: NumberedUtterances) -> Ints:
        """Return for each row the utterances of a batch that begins with it."""
        folds = _checked_folds(self.fold_lengths, found)
        factors = np.max(
            [
                (shapes.lengths / fold).astype(np.int64)
                for shapes, fold in zip(found.shapes, folds, strict=True)
            ],
            axis=0,
        )
        sizes: Ints = (self.batch_size / (1 + factors)).astype(np.int64)
        return np.maximum(sizes, self.min_batch_size)


def _by_category(rows: Ints, categories: Ints | None) -> Iterator[Ints]:
    """Give the rows of each category (one for each of `rows`), in the order of first rows."""
    codes = np.zeros(len(rows), np.int64) if categories is None else by_appearance(categories)
    order, ends = grouped(codes)
    for start, end in pairwise(ends.tolist()):
        yield rows[order[start:end]]


def _checked_folds(fold_lengths: Sequence[float], found: NumberedUtterances) -> list[float]:
    if isinstance(fold_lengths, str) or not isinstance(fold_lengths, Sequence):
        raise ConfigError(
            f"fold_lengths is a list, a number for each shape file or feature, not {fold_lengths!r}"
        )
    folds = list(fold_lengths)
    if len(folds) != len(found.shapes):
        names = ", ".join(shapes.name for shapes in found.shapes)
        raise ConfigError(
            f"{len(folds)} fold_lengths for {len(found.shapes)} lengths: one is needed for each of "
            f"{names}"
        )
    if not min(folds) > 0:
        raise ConfigError(f"fold_lengths are greater than 0, not {folds!r}")
    return folds


def _folded_ends(sizes: Ints, drop_short: bool) -> Ints:
    count, ends = len(sizes), [0]
    while ends[-1] < count:
        end = ends[-1] + sizes.item(ends[-1])
        if end > count and drop_short:
            break
        ends.append(min(end, count))
    return np.array(ends)
