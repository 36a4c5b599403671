"""Batches of about one size in frames (length) or in numbers (numel)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.cut import (
    Descending,
    chain,
    ends_over_area,
    ends_over_sum,
    reversed_batches,
    spread_short_last,
    stable_order,
)
from featcache.samplers.espnet.numbered_utterances import NumberedUtterances
from featcache.samplers.espnet.shapes import Shapes


@dataclass(frozen=True)
class Binned:
    """Rows by length: a batch ends with the utterance that makes it larger than `bins`.

    An utterance counts its frames over all features, with `elements` its numbers. Padded, a batch
    has its utterances times those of its last one, which is the longest in the first feature.
    """

    bins: int
    min_batch_size: int
    drop_last: bool
    padding: bool
    elements: bool
    descending: Descending
    shaped: ClassVar[int | None] = None  # shape files that are parsed: see `utterances_of`

    def batches(self, found: NumberedUtterances, categories: Ints | None = None) -> Batches:
        """Cut the rows, all categories together."""
        counts = _elements(found.shapes, self.padding) if self.elements else _frames(found.shapes)
        rows = stable_order(found.shapes[0].lengths)
        measure = ends_over_area if self.padding else ends_over_sum
        ends = chain(measure(counts[rows], self.bins, self.min_batch_size))
        if ends[-1] < len(rows) and (not self.drop_last or len(ends) == 1):
            ends = np.append(ends, len(rows))
        return reversed_batches(
            rows,
            spread_short_last(ends, self.min_batch_size, skip=0),
            in_batches=self.descending.in_batches,
            list_order=self.descending.batches,
        )


def _frames(shapes: list[Shapes]) -> Ints:
    counts: Ints = np.sum([shape.lengths for shape in shapes], axis=0)
    return counts


def _elements(shapes: list[Shapes], padding: bool) -> Ints:
    for shape in shapes if padding else ():
        shape.require_one_frame_shape()
    counts: Ints = np.sum([shape.elements for shape in shapes], axis=0)
    return counts
