"""Values of a cache's arrays: one pass over them, and what it finds in utterances, dims and tokens.

Which utterances are read is chosen here, too. Nothing is judged here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.errors import CorruptCacheError, FeatcacheError, KeyNotFoundError
from featcache.format import FeatureColumns
from featcache.interface import Array, Ints
from featcache.reading import FeatureArrays, Generation
from featcache.stats import FeatureStats
from featcache.tables import FeatureTable, cut_frames, pieces

Floats = NDArray[np.float64]
Reals = NDArray[np.floating]
Sample = int | Literal["all"] | None
Tick = Callable[[int], object]  # is told of bytes that were read

# The utterances that are read: all, or some at random with the shortest and the longest.

ALL_UTTERANCES = 100_000  # that are read unasked
ALL_BYTES = 5_000_000_000
SAMPLED = 20_000  # of more
ENDS = 0.1  # of a sample, each: the shortest and the longest


@dataclass(frozen=True)
class Chosen:
    """Rows whose arrays are read, ascending."""

    drawn: Ints  # at random, or all
    ends: Ints  # the shortest and the longest of the others
    of: int

    @property
    def is_all(self) -> bool:
        """Whether no row is left out."""
        return len(self.drawn) == self.of

    @property
    def rows(self) -> Ints:
        """All rows, ascending."""
        return np.sort(np.concatenate([self.drawn, self.ends]))


def choose(
    table: FeatureTable, lengths: Ints | None, nbytes: int, sample: Sample, seed: int
) -> Chosen:
    """Choose rows to read: as many as `sample` says, or all where that takes no long time.

    Args:
        table: the rows.
        lengths: frames, by which the shortest and the longest are chosen; None: there are none.
        nbytes: of all arrays in memory.
        sample: a number of utterances, "all", or None.
        seed: draws others. The same ids and seed give the same utterances.
    """
    count = len(table)
    if sample is not None and sample != "all":
        size = min(whole_number("sample", sample, 1), count)
    elif sample is None and (count > ALL_UTTERANCES or nbytes > ALL_BYTES):
        size = min(SAMPLED, count)
    else:
        size = count
    if size == count:
        return Chosen(np.arange(count), np.empty(0, np.int64), count)
    each = int(size * ENDS) if lengths is not None else 0
    drawn = table.rows(table.sample(size - 2 * each, seed=seed).ids)
    if lengths is None or not each:
        return Chosen(np.sort(drawn), np.empty(0, np.int64), count)
    order = np.argpartition(lengths, [each - 1, count - each])
    ends = np.setdiff1d(np.concatenate([order[:each], order[count - each :]]), drawn)
    return Chosen(np.sort(drawn), ends, count)


# Numbers of one feature.


@dataclass(frozen=True)
class UtteranceValues:
    """Numbers of each utterance that was read, one row each; NaN where values are not finite."""

    rows: Ints
    frames: Ints
    not_finite: Ints  # values that are NaN or infinite
    least: Floats
    most: Floats
    at_least: Ints  # values that are equal to the least one
    at_most: Ints
    mean: Floats
    std: Floats
    equal_frames: Ints  # the most equal frames in a row
    equal_from: Ints  # the first of them

    @classmethod
    def empty(cls, rows: Ints, frames: Ints) -> UtteranceValues:
        """Make room for some rows."""
        ints = (np.zeros(len(rows), np.int64) for _ in range(5))
        floats = (np.full(len(rows), np.nan) for _ in range(4))
        not_finite, at_least, at_most, equal, begin = ints
        least, most, mean, std = floats
        return cls(
            rows, frames, not_finite, least, most, at_least, at_most, mean, std, equal, begin
        )


@dataclass(frozen=True)
class Tokens:
    """Counts of tokens, over all frames that were read."""

    values: Ints  # that come, ascending
    counts: Ints

    @property
    def total(self) -> int:
        """Number of tokens."""
        return int(self.counts.sum())

    @property
    def unused(self) -> int:
        """Numbers from 0 to the largest that never come."""
        return int(self.values[-1]) + 1 - len(self.values) if len(self.values) else 0

    def most_frequent(self) -> tuple[Ints, Ints]:
        """Return tokens and counts, the most frequent first."""
        order = np.argsort(-self.counts, kind="stable")
        return self.values[order], self.counts[order]


@dataclass(frozen=True)
class FeatureValues:
    """Values of the arrays of a feature."""

    name: str
    width: int  # numbers of a frame
    utterances: UtteranceValues
    # of utterances that cannot be read: what is wrong
    damaged: dict[int, str]
    stats: FeatureStats | None  # of each dim; None for tokens, and where nothing was read
    stats_are_whole: bool  # of all frames of the cache, also where a sample is read
    tokens: Tokens | None
    frames: Reals  # some, evenly spread over those that were drawn, (number, width)
    scale: tuple[float, float] = (0.0, 1.0)  # 1st and 99th percentile of these

    @property
    def dim_clipped(self) -> Floats:
        """The share of `frames` in which a dim is at its least or its most, if that is not 0."""
        if len(self.frames) < FEW_FRAMES:
            return np.zeros(self.width)
        least, most = self.frames.min(0), self.frames.max(0)
        at_least = np.where(least, (self.frames == least).mean(0), 0)  # zeros are meant
        at_most = np.where(most, (self.frames == most).mean(0), 0)
        return np.maximum(at_least, at_most)


FEW_FRAMES = 100  # of which nothing is said of clipping
SPREAD_FRAMES = 20_000
SPREAD_VALUES = 1 << 22
AT_ONCE_BYTES = 1 << 20  # that stay in the processor's cache
MOST_TOKENS = 1 << 22
TOKEN_WIDTH = 32  # more whole numbers a frame are taken for quantities
WIDE = 4  # in frames of fewer numbers, equal ones in a row are nothing odd


def read_values(opened: Generation, feature: str, chosen: Chosen, tick: Tick) -> FeatureValues:
    """Read the arrays of a feature once, in the order in which they lie."""
    source, drawn = opened.in_set(feature, chosen.drawn)
    _, ends = opened.in_set(feature, chosen.ends)
    arrays = source.arrays(feature)
    run = _Pass(arrays, tick)
    if not opened.sets:
        run.stats_known(source, feature)
    order = (_by_offset(source.index.features[feature], each) for each in (drawn, ends))
    for rows, own, whole in zip(order, (drawn, ends), (True, False), strict=True):
        run.read(own[rows], (chosen.drawn if whole else chosen.ends)[rows], whole)
    return run.found(feature)


def _by_offset(columns: FeatureColumns, rows: Ints) -> Ints:
    """Return the order of rows in which their first bytes lie in the containers."""
    if not len(columns.container):
        return np.arange(len(rows))
    extent = np.minimum(columns.first[rows], len(columns.container) - 1)
    return np.lexsort((columns.offset[extent], columns.container[extent]))


@dataclass
class _Pass:
    arrays: FeatureArrays
    tick: Tick
    stats: FeatureStats | None = None
    known: bool = False
    shift: float | None = None
    position: int = 0  # of a frame among all that were drawn
    step: int = 1
    tokens: _TokenCounts | None = None
    parts: list[UtteranceValues] = field(default_factory=list)
    spread: list[Array] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.width = math.prod(self.arrays.dims)
        whole = self.arrays.declared_dtype.strip("u").startswith(("int", "bool"))
        if whole and self.width <= TOKEN_WIDTH:
            self.tokens = _TokenCounts()

    def stats_known(self, source: Generation, feature: str) -> None:
        """Take the statistics that a cache has."""
        try:
            self.stats, self.known = source.stats(feature), True
        except KeyNotFoundError:
            return

    def read(self, rows: Ints, named: Ints, whole: bool) -> None:
        """Read rows; with `whole`, what is said of all utterances is taken of these."""
        lengths = self.arrays.lengths[rows]
        if whole:
            total = int(lengths.sum())
            most = max(min(SPREAD_FRAMES, SPREAD_VALUES // max(self.width, 1)), 1)
            self.step = max(-(-total // most), 1)
        some = (lengths > 0) & (self.width > 0)
        rows, named, lengths = rows[some], named[some], lengths[some]
        frame_bytes = self.arrays.dtype.itemsize * self.width
        for piece in pieces(lengths * frame_bytes, AT_ONCE_BYTES):
            for place, frames in self._frames(rows[piece], named[piece], lengths[piece]):
                here = slice(piece.start + place.start, piece.start + place.stop)
                self._take(frames, named[here], lengths[here], whole)
            self.tick(int(lengths[piece].sum()) * frame_bytes)

    def _frames(self, rows: Ints, named: Ints, lengths: Ints) -> Iterator[tuple[slice, Array]]:
        """Yield the frames of rows, at once; where some cannot be read, those of each other row."""
        try:
            yield (
                slice(0, len(rows)),
                cut_frames(self.arrays, rows, np.zeros_like(rows), lengths),
            )
            return
        except CorruptCacheError:
            pass
        for place in range(len(rows)):
            one = slice(place, place + 1)
            try:
                frames = cut_frames(self.arrays, rows[one], np.zeros(1, np.int64), lengths[one])
            except FeatcacheError as error:
                self.damaged[int(named[place])] = str(error)
            else:
                yield one, frames

    def _take(self, frames: Array, named: Ints, lengths: Ints, whole: bool) -> None:
        flat = frames.reshape(len(frames), self.width)
        if self.tokens is not None and not self.tokens.add(flat, whole):
            self.tokens = None
        if self.shift is None:
            with np.errstate(all="ignore"):
                mean = float(flat.astype(np.float64).mean())
            self.shift = mean if math.isfinite(mean) else 0.0
        values = _measured(flat, named, lengths, self.shift)
        self.parts.append(values)
        if not whole:
            return
        finite = values.not_finite == 0
        kept = flat if finite.all() else flat[np.repeat(finite, lengths)]
        self.spread.append(kept[-self.position % self.step :: self.step])
        self.position += len(kept)
        if not self.known and len(kept):
            stats = FeatureStats.of(kept)
            self.stats = stats if self.stats is None else self.stats.merge(stats)

    def found(self, feature: str) -> FeatureValues:
        """Return what was read."""
        names = UtteranceValues.__dataclass_fields__
        empty = UtteranceValues.empty(np.zeros(0, np.int64), np.zeros(0, np.int64))
        joined = {
            name: np.concatenate([getattr(each, name) for each in (empty, *self.parts)])
            for name in names
        }
        order = np.argsort(joined["rows"])
        utterances = UtteranceValues(**{name: column[order] for name, column in joined.items()})
        frames = np.concatenate(self.spread) if self.spread else np.empty((0, self.width))
        frames = _as_floats(frames)
        scale = (0.0, 1.0)
        if frames.size:
            low, high = np.percentile(frames, [1, 99]).tolist()
            scale = (low, high if high > low else low + 1.0)
        tokens = None if self.tokens is None else self.tokens.found()
        stats = None if tokens is not None or self.stats is None else self.stats
        return FeatureValues(
            feature, self.width, utterances, self.damaged, stats, self.known, tokens, frames, scale
        )


def _measured(frames: Array, rows: Ints, lengths: Ints, shift: float) -> UtteranceValues:
    """Return numbers of utterances whose frames, (frames, width), follow each other."""
    found = UtteranceValues.empty(rows, lengths)
    x, width = _as_floats(frames), frames.shape[1]
    starts = np.cumsum(lengths) - lengths
    of = np.repeat(np.arange(len(rows)), lengths)
    with np.errstate(all="ignore"):
        low, high = (x[:, 0], x[:, 0]) if width == 1 else (x.min(1), x.max(1))
        least, most = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
        finite = np.isfinite(least) & np.isfinite(most)
        for place in np.flatnonzero(~finite).tolist():
            mine = x[starts[place] : starts[place] + lengths[place]]
            found.not_finite[place] = mine.size - np.count_nonzero(np.isfinite(mine))
            mine[...] = 0
        for ends, of_frame, counts in ((least, low, found.at_least), (most, high, found.at_most)):
            at = np.flatnonzero(of_frame == ends[of])
            equal = np.count_nonzero(x[at] == of_frame[at, None], axis=1)
            counts[...] = np.bincount(of[at], equal, len(rows))
        if width >= WIDE:
            _equal_frames(x, low, high, starts, found)
        x -= (shifted := x.dtype.type(shift))
        size = lengths * float(width)
        mean = np.add.reduceat(x.sum(1).astype(np.float64), starts) / size
        squares = np.einsum("ij,ij->i", x, x).astype(np.float64)
        variance = np.add.reduceat(squares, starts) / size - mean * mean
        numbers = (least, most, mean + float(shifted), np.sqrt(np.maximum(variance, 0)))
    for column, values in zip(
        (found.least, found.most, found.mean, found.std), numbers, strict=True
    ):
        column[finite] = values[finite]
    return found


def _equal_frames(x: Reals, low: Reals, high: Reals, starts: Ints, found: UtteranceValues) -> None:
    """Count the equal frames in a row of each utterance."""
    equal = np.zeros(len(x), np.bool_)  # to the frame before
    equal[1:] = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
    equal[starts] = False
    at = np.flatnonzero(equal)
    equal[at] = (x[at] == x[at - 1]).all(1)
    numbers = np.arange(len(x))
    run = numbers - np.maximum.accumulate(np.where(equal, 0, numbers)) + 1
    longest = np.maximum.reduceat(run, starts)
    ends = np.where(run == np.repeat(longest, found.frames), numbers, len(x))
    found.equal_frames[...] = longest
    found.equal_from[...] = np.minimum.reduceat(ends, starts) - longest + 1 - starts


LARGE = 1e15  # whose squares float32 cannot hold well


def _as_floats(frames: Array) -> Reals:
    """Return a copy as float32, or float64 where that is needed."""
    if frames.dtype.kind != "f" or frames.dtype.itemsize == 8:
        return frames.astype(np.float64)
    copy = frames.astype(np.float32)
    if frames.dtype == np.float32 and copy.size:
        with np.errstate(all="ignore"):
            if max(abs(float(copy.min())), abs(float(copy.max()))) > LARGE:
                return frames.astype(np.float64)
    return copy


class _TokenCounts:
    """Counts of whole numbers from 0 on, as they come."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)

    def add(self, frames: Array, whole: bool) -> bool:
        """Count; False where these are no tokens, but quantities."""
        flat = frames.reshape(-1)
        if not (int(flat.min()) >= 0 and int(flat.max()) < MOST_TOKENS):
            return False
        if whole:
            counts = np.bincount(flat.astype(np.int64), minlength=len(self._counts))
            counts[: len(self._counts)] += self._counts
            self._counts = counts
        return True

    def found(self) -> Tokens:
        """Return what was counted."""
        values = np.flatnonzero(self._counts)
        return Tokens(values, self._counts[values])


def read_one(opened: Generation, feature: str, row: int) -> Array | None:
    """Return the frames of a row, (frames, width); None where they cannot be read."""
    source, rows = opened.in_set(feature, np.array([row]))
    arrays = source.arrays(feature)
    try:
        frames = cut_frames(arrays, rows, np.zeros(1, np.int64), arrays.lengths[rows])
    except FeatcacheError:
        return None
    return frames.reshape(len(frames), math.prod(arrays.dims))
