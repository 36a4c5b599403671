"""Lengths and annotations of utterances as counts: histograms, hours by speaker, texts and frames.

Exact however many utterances there are: padding of batches and borders of buckets, too. Nothing is
judged here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.format import Codes, Column, Strings
from featcache.interface import Ints
from featcache.tables import FeatureTable

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


# Annotations of utterances, summed up: hours by speaker, numbers in bins, texts against frames.


MOST_GROUPS = 20  # that are named
FEW_VALUES = 1000  # distinct whole numbers; more are quantities
SMALL = 100_000  # texts, of which distinct ones are looked for
BINS = 40
TEXT_BINS = (60, 40)  # of frames and of characters
TEXTS = ("text", "transcript", "transcription", "sentence", "words", "normalized_text")


@dataclass(frozen=True)
class Groups:
    """Utterances and frames by the value of an annotation, the largest first."""

    name: str
    values: list[str]
    utterances: Ints
    frames: Ints
    groups: int  # in all; more than are named
    missing: int  # utterances without a value


@dataclass(frozen=True)
class Quantity:
    """Numbers of an annotation, in bins."""

    name: str
    least: float
    median: float
    most: float
    mean: float
    missing: int
    bins: Histogram


@dataclass(frozen=True)
class TextLengths:
    """Characters of a text against frames."""

    name: str
    characters: Ints  # of each row; -1 without a text
    total: int
    missing: int
    bins: NDArray[np.int64]  # utterances, (characters, frames)
    frame_edges: NDArray[np.float64]
    character_edges: NDArray[np.float64]
    frames_a_character: float  # the median


@dataclass(frozen=True)
class Annotations:
    """All that is told of annotations."""

    groups: list[Groups]
    quantities: list[Quantity]
    texts: list[TextLengths]
    others: dict[str, str]  # kinds of those that are only named
    durations: tuple[str, NDArray[np.float64]] | None  # seconds of each row, NaN without


def annotations_of(table: FeatureTable, frames: Ints | None) -> Annotations:
    """Sum up the annotations of a table; `frames` of each row, None where no feature has any."""
    found = Annotations([], [], [], {}, None)
    weights = np.ones(len(table), np.int64) if frames is None else frames
    for name in table.annotations:
        column = table.annotation(name)
        if name.lower() in ("duration", "duration_s") and column.kind in ("int", "float"):
            seconds = np.asarray(column.to_numpy(), np.float64)
            found = Annotations(
                found.groups, found.quantities, found.texts, found.others, (name, seconds)
            )
        kind = _kind(column, name)
        if kind == "groups":
            found.groups.append(_groups(name, column, weights))
        elif kind == "quantity":
            found.quantities.extend(_quantity(name, column))
        elif kind == "text" and frames is not None:
            found.texts.append(_text(name, column, frames))
        else:
            found.others[name] = column.kind
    return found


def _kind(column: Column, name: str) -> str:
    if column.kind in ("ints", "floats"):
        return "list"
    if column.kind == "str":
        if name.lower() in TEXTS:
            return "text"
        body, _ = column.stored()
        if isinstance(body, Codes):
            return "groups"
        if len(column) <= SMALL and 2 * len(column.codes()[1]) <= len(column) + 1:
            return "groups"
        return "text" if isinstance(body, Strings) and _has_spaces(body) else "many texts"
    if column.kind == "float":
        return "quantity"
    values, _ = column.numbers()
    distinct = int(values.max(initial=0)) - int(values.min(initial=0)) + 1
    return "groups" if column.kind == "bool" or distinct <= FEW_VALUES else "quantity"


def _has_spaces(texts: Strings) -> bool:
    end = int(texts.ends[min(len(texts), 1000)])
    return bool((texts.data[:end] == ord(" ")).any())


def _groups(name: str, column: Column, frames: Ints) -> Groups:
    codes, values = column.codes()
    there = codes >= 0
    kept = codes if there.all() else codes[there]
    weights = frames if there.all() else frames[there]
    utterances = np.bincount(kept, minlength=len(values))
    sums = np.bincount(kept, weights, minlength=len(values)).astype(np.int64)
    order = np.lexsort((-utterances, -sums))
    order = order[utterances[order] > 0]
    first = order[:MOST_GROUPS]
    return Groups(
        name,
        [str(values[code]) for code in first.tolist()],
        utterances[first],
        sums[first],
        len(order),
        int((~there).sum()),
    )


def _quantity(name: str, column: Column) -> Iterator[Quantity]:
    values, missing = column.numbers()
    there = values if missing is None else values[~missing]
    numbers = np.asarray(there, np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return
    least, most = float(finite.min()), float(finite.max())
    edges = nice_edges(least, most, BINS, whole=column.kind == "int")
    bins = histogram(finite, None, edges)
    lost = len(column) - len(finite)
    with np.errstate(all="ignore"):  # of numbers that are as large as they can be
        median, mean = float(np.median(finite)), float((finite / len(finite)).sum())
    yield Quantity(name, least, median, most, mean, lost, bins)


def _text(name: str, column: Column, frames: Ints) -> TextLengths:
    characters = _characters(column)
    there = characters >= 0
    if there.all():
        some, lengths = characters, frames
    else:
        some, lengths = characters[there], frames[there]
    across, up = TEXT_BINS
    frame_edges = nice_edges(0, int(lengths.max(initial=1)), across, whole=True)
    edges = nice_edges(0, int(some.max(initial=1)), up, whole=True)
    # whole numbers and `bincount`: `histogram2d` takes thirty times as long
    columns = len(frame_edges) - 1
    places = (some // _width(edges)) * columns + lengths // _width(frame_edges)
    bins = np.bincount(places, minlength=(len(edges) - 1) * columns).reshape(-1, columns)
    spoken = (some > 0) & (lengths > 0)
    rate = float(np.median(lengths[spoken] / some[spoken])) if spoken.any() else 0.0
    return TextLengths(
        name, characters, int(some.sum()), int((~there).sum()), bins, frame_edges, edges, rate
    )


def _width(edges: NDArray[np.float64]) -> int:
    return max(round(float(edges[1] - edges[0])), 1)


def _characters(column: Column) -> Ints:
    """Return the number of characters of each text, -1 where there is none."""
    body, null = column.stored()
    if isinstance(body, Codes):
        counts = _characters_of(body.texts)[body.codes]
    elif isinstance(body, Strings):
        counts = _characters_of(body)
    else:
        counts = np.array([len(str(value)) for value in column.values()], np.int64)
    if null is not None:
        counts = np.where(null != 0, -1, counts)
    return counts


AT_ONCE = 1 << 16


def _characters_of(texts: Strings) -> Ints:
    counts = np.diff(texts.ends)
    for begin in range(0, len(texts), AT_ONCE):
        ends = texts.ends[begin : begin + AT_ONCE + 1]
        data = texts.data[ends[0] : ends[-1]]
        inner = (data & 0xC0) == 0x80  # all but the first byte of a character
        if inner.any():
            sums = np.append(0, np.cumsum(inner))
            counts[begin : begin + AT_ONCE] -= np.diff(sums[ends - ends[0]])
    return counts
