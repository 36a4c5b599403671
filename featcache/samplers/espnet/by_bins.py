"""Batches of about one size in frames (length) or in numbers (numel)."""

from __future__ import annotations

import numpy as np

from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.cut import (
    chain,
    ends_over_area,
    ends_over_sum,
    reversed_batches,
    spread_short_last,
    stable_order,
)
from featcache.samplers.espnet.shapes import Shapes


def frame_counts(shapes: list[Shapes]) -> Ints:
    """Return the frames of each utterance, over all features."""
    counts: Ints = np.sum([shape.lengths for shape in shapes], axis=0)
    return counts


def element_counts(shapes: list[Shapes], padding: bool) -> Ints:
    """Return the numbers of each utterance, over all features.

    To be padded, frames must have one shape.
    """
    for shape in shapes if padding else ():
        shape.require_one_frame_shape()
    counts: Ints = np.sum([shape.elements for shape in shapes], axis=0)
    return counts


def binned_batches(
    lengths: Ints,
    bins: Ints,
    most: int,
    min_batch_size: int,
    drop_last: bool,
    padding: bool,
    inside: str,
    order: str,
) -> Batches:
    """Cut rows by length: a batch ends with the utterance that makes it larger than `most`.

    `bins` are the frames or numbers of each utterance; padded, a batch has as many as its
    utterances times those of its last one, which is the longest in the first feature.
    """
    rows = stable_order(lengths)
    measure = ends_over_area if padding else ends_over_sum
    ends = chain(measure(bins[rows], most, min_batch_size))
    if ends[-1] < len(rows) and (not drop_last or len(ends) == 1):
        ends = np.append(ends, len(rows))
    ends = spread_short_last(ends, min_batch_size, skip=0)
    return reversed_batches(rows, ends, inside == "descending", order == "descending")
