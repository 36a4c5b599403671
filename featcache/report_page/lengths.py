"""Lengths of utterances as counts: histograms, padding of batches, borders of buckets.

All of it is exact however many utterances there are, and knows no caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Ints

MOST_COUNTED = 1 << 24  # frames up to which lengths are counted one by one, without sorting
BATCH = 32  # utterances, for which padding is told
BUCKETS = (1, 2, 4, 8, 16, 32)
LENGTH_BINS = 64
LONG_TAIL = 3  # times the 98th percentile, where a histogram of lengths ends at 1.5 times that


@dataclass(frozen=True)
class LengthCounts:
    """Number of utterances of each length that comes, ascending."""

    lengths: Ints
    counts: Ints

    @classmethod
    def of(cls, lengths: Ints) -> LengthCounts:
        """Count the lengths of all utterances."""
        if not len(lengths) or int(lengths.max()) > MOST_COUNTED:
            return cls(*np.unique(lengths, return_counts=True))
        counts = np.bincount(lengths)
        there = np.flatnonzero(counts)
        return cls(there, counts[there])

    @property
    def utterances(self) -> int:
        """Number of utterances."""
        return int(self.counts.sum())

    @property
    def frames(self) -> int:
        """Number of frames."""
        return int((self.lengths * self.counts).sum())

    def quantile(self, share: float) -> int:
        """Return the length that at least such a share of the utterances does not exceed."""
        reached = np.cumsum(self.counts) >= share * self.utterances
        return int(self.lengths[int(reached.argmax())]) if len(self.lengths) else 0

    def between(self, least: int, most: int) -> LengthCounts:
        """Return those of utterances of `least` to `most` frames, both included."""
        some = (self.lengths >= least) & (self.lengths <= most)
        return LengthCounts(self.lengths[some], self.counts[some])

    def borders(self, buckets: int) -> list[int]:
        """Return the longest length of each bucket, of about as many frames each, ascending.

        Fewer, where a length has more than a bucket's frames.
        """
        sums = np.cumsum(self.lengths * self.counts)
        if not len(sums):
            return []
        wanted = sums[-1] * (np.arange(buckets) + 1) / buckets
        places = np.minimum(np.searchsorted(sums, wanted), len(sums) - 1)
        return [int(each) for each in self.lengths[np.unique([*places, len(sums) - 1])]]

    def padding(self, buckets: int, batch: int = BATCH) -> float:
        """Return the share of padding in batches of utterances at random, within each bucket.

        Expected: the longest of `batch` draws, with replacement, has at most l frames with
        probability F(l) ** batch, where F is the share of utterances of at most l frames.
        """
        stored = held = 0.0
        begin = 0
        for border in self.borders(buckets):
            end = int(np.searchsorted(self.lengths, border, side="right"))
            lengths, counts = self.lengths[begin:end], self.counts[begin:end]
            begin = end
            if not len(counts):
                continue
            total = float(counts.sum())
            longest = np.diff((np.cumsum(counts) / total) ** batch, prepend=0.0)
            held += total * float((lengths * longest).sum())
            stored += float((lengths * counts).sum())
        return 1 - stored / held if held else 0.0

    def binned(self, most: int) -> tuple[Ints, Ints, Ints]:
        """Return longest length, utterances and frames of bins, so many at most; ascending."""
        frames = self.lengths * self.counts
        if len(self.lengths) <= most:
            return self.lengths, self.counts, frames
        width = -(-(int(self.lengths[-1]) - int(self.lengths[0]) + 1) // most)
        bins = (self.lengths - self.lengths[0]) // width
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        ends = np.append(starts[1:], len(bins)) - 1
        sums = (np.add.reduceat(each, starts) for each in (self.counts, frames))
        return self.lengths[ends], *sums


@dataclass(frozen=True)
class Histogram:
    """Numbers of values in bins of one width; the last one ends with its edge."""

    edges: NDArray[np.float64]
    counts: Ints

    @property
    def tallest(self) -> int:
        """The largest number."""
        return int(self.counts.max(initial=0))


def nice_edges(least: float, most: float, bins: int, *, whole: bool) -> NDArray[np.float64]:
    """Return edges of at most so many bins, at multiples of 1, 2 or 5 of a power of ten.

    >>> nice_edges(3, 18, 4, whole=True).tolist()
    [0.0, 5.0, 10.0, 15.0, 20.0]
    >>> nice_edges(0, 2, 4, whole=True).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    size = max(abs(least), abs(most))
    span = max(most / 2 - least / 2, 0.5 if whole else (1e-9 * size or 0.5)) * 2  # never infinite
    if not math.isfinite(span):
        return np.array([least, most])
    power = 10.0 ** math.floor(math.log10(span / bins))
    if whole:
        power = max(power, 1.0)
    for step in (power * each for each in (1, 2, 5, 10, 20, 50)):
        first, last = math.floor(least / step), math.floor(most / step) + 1
        if last - first <= bins:
            return np.arange(first, last + 1, dtype=np.float64) * step
    return np.array([least, most])


def length_edges(caches: Sequence[LengthCounts]) -> NDArray[np.float64]:
    """Return the edges of bins for the lengths of all; a few that are far longer have none."""
    some = [each for each in caches if len(each.lengths)]
    if not some:
        return np.array([0.0, 1.0])
    least = min(int(each.lengths[0]) for each in some)
    most = max(int(each.lengths[-1]) for each in some)
    usual = max(each.quantile(0.98) for each in some)
    most = most if most <= LONG_TAIL * usual else 3 * usual // 2
    return nice_edges(least, most, LENGTH_BINS, whole=True)


def histogram(
    values: NDArray[np.generic], weights: Ints | None, edges: NDArray[np.float64]
) -> Histogram:
    """Count values, or sum their weights, in bins [edge, next edge)."""
    places = np.searchsorted(edges, values, side="right") - 1
    kept = (places >= 0) & (places < len(edges) - 1)
    weights = np.ones(len(values), np.int64) if weights is None else weights
    counts = np.zeros(len(edges) - 1, np.int64)
    np.add.at(counts, places[kept], weights[kept])
    return Histogram(edges, counts)
