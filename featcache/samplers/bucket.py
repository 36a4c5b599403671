"""Batches of like lengths, which are padded little, and the limits that batches keep to.

Lengths that batches are padded to are few, for what is compiled for each shape.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache._checks import whole_number
from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import SPARE
from featcache.samplers.by_length import LengthsLike, SamplerByLength, longest_of
from featcache.samplers.epoch import State, group_size, shuffled_in_groups
from featcache.tables import drawn, orders, share_of, stable_order

# Lengths that batches are padded to: few of them, for what is compiled for each shape.

PadTo = int | Sequence[int]  # all multiples of a number, or a list of lengths


def checked_pad_to(pad_to: PadTo) -> int | tuple[int, ...]:
    """Return what to pad to as plain numbers; raises `ConfigError` for what is none.

    >>> checked_pad_to(np.int64(8)), checked_pad_to([300, 800])
    (8, (300, 800))
    """
    if isinstance(pad_to, str) or not isinstance(pad_to, Sequence | np.ndarray):
        return whole_number("pad_to", pad_to, 1)
    steps = tuple(whole_number("pad_to", length, 1) for length in pad_to)
    if not steps or tuple(sorted(set(steps))) != steps:
        raise ConfigError(
            f"pad_to is a number, or a list of lengths, the shortest first, not {pad_to!r}"
        )
    return steps


def lengths_up_to(pad_to: PadTo, longest: int) -> Ints:
    """Return the lengths to pad to, ascending: those of a list, or multiples up to `longest`.

    >>> lengths_up_to(200, 500).tolist(), lengths_up_to([300, 800], 500).tolist()
    ([200, 400, 600], [300, 800])
    """
    steps = checked_pad_to(pad_to)
    if isinstance(steps, int):
        return np.arange(steps, max(longest, 1) + steps, steps)
    return np.array(steps)


def padded_length(longest: int, pad_to: PadTo | None) -> int:
    """Return the least length to pad to that is not below `longest`; `longest` itself for None.

    Raises `ConfigError` where all are shorter.
    """
    if pad_to is None:
        return longest
    if isinstance(pad_to, int):
        return -(-max(longest, 1) // pad_to) * pad_to
    for length in pad_to:
        if longest <= length:
            return length
    raise ConfigError(
        f"{longest} frames are more than all of pad_to={pad_to!r}; give a longer one, or leave "
        "such utterances out"
    )


@dataclass(frozen=True, eq=False)
class BatchShapes:
    """The lengths to pad to, and how many utterances a batch of each has; both of shape (n,)."""

    lengths: Ints
    sizes: Ints

    def padded(self, frames: Ints) -> Ints:
        """Return what lengths are padded to; the longest of all where that is too short."""
        return self.lengths[np.minimum(self.lengths.searchsorted(frames), len(self.lengths) - 1)]

    def bucket_ends(self, frames: Ints) -> Ints:
        """Return where sorted lengths pass from one length to pad to to the next."""
        return np.concatenate([[0], frames.searchsorted(self.lengths, "right")])

    def ends(self, frames: Ints) -> Ints:
        """Return the ends of batches of sorted lengths, each full but the first.

        A batch that the utterances of its length do not fill takes shorter ones.
        """
        sizes = self.sizes[self.lengths.searchsorted(frames)].tolist()
        ends = [len(frames)]
        while ends[-1] > 0:
            ends.append(max(ends[-1] - sizes[ends[-1] - 1], 0))
        return np.array(ends[::-1])


# `BatchLimits`: the most that a batch may hold, padding included, and cuts that keep to it.


@dataclass(frozen=True)
class BatchLimits:
    """The most frames, the most numbers of all features, and the most utterances of a batch.

    Whole numbers from 1 on, at least one of the three. With `quadratic_frames` an utterance of n
    frames counts as `costs` has it.
    """

    max_frames: int | None
    max_elements: int | None
    batch_size: int | None
    quadratic_frames: int | None = None

    def __post_init__(self) -> None:
        if self.max_frames is self.max_elements is self.batch_size is None:
            raise ConfigError("a batch needs a limit: max_frames, max_elements or batch_size")
        if self.quadratic_frames is not None and self.max_frames is None:
            raise ConfigError("quadratic_frames changes what counts for max_frames; give it, too")
        for name, limit in vars(self).items():
            if limit is not None:
                whole_number(name, limit, 1)

    def costs(self, frames: Ints) -> Ints:
        """Return what lengths count for `max_frames`: n + n * n / quadratic_frames, rounded down.

        As lhotse's `quadratic_duration` has it: attention takes time by the square of the length.
        """
        return frames if self.quadratic_frames is None else quadratic(frames, self.quadratic_frames)

    def named(self, *names: str) -> list[str]:
        """Return those of some limits that are set, as "max_frames=2000"."""
        return [f"{name}={vars(self)[name]}" for name in names if vars(self)[name] is not None]

    def fits(self, columns: Sequence[Ints], frame_elements: Sequence[int]) -> NDArray[np.bool_]:
        """Return for each utterance whether it is within the limits by itself.

        `columns` are the lengths of each feature, `frame_elements` the numbers of its frames.
        """
        fits = np.ones(len(columns[0]), bool)
        if self.max_frames is not None:
            fits &= self.costs(longest_of(columns)) <= self.max_frames
        if self.max_elements is not None:
            elements = [n * column for n, column in zip(frame_elements, columns, strict=True)]
            fits &= np.sum(elements, axis=0) <= self.max_elements
        return fits

    def ends(self, columns: Sequence[Ints], frame_elements: Sequence[int]) -> Iterator[int]:
        """Yield the ends of batches that take utterances in order until one would break a limit."""
        count = len(columns[0])
        size = count if self.batch_size is None else self.batch_size
        if self.max_elements is not None and (len(columns) > 1 or self.quadratic_frames):
            return self._ends_of_several(columns, frame_elements, size)
        frames = self.costs(longest_of(columns))
        cap = int(frames.max()) * count if self.max_frames is None else self.max_frames
        if self.max_elements is not None:
            cap = min(cap, self.max_elements // max(frame_elements[0], 1))
        return _ends(frames, cap, size)

    def _ends_of_several(
        self, columns: Sequence[Ints], frame_elements: Sequence[int], size: int
    ) -> Iterator[int]:
        end = count = 0
        longest, most = [0] * len(columns), 0
        costs = self.costs(longest_of(columns))
        for cost, *lengths in zip(costs.data, *(column.data for column in columns), strict=True):
            count, most = count + 1, max(most, cost)
            longest = list(map(max, longest, lengths))
            elements = sum(map(operator.mul, frame_elements, longest))
            too_long = self.max_frames is not None and count * most > self.max_frames
            if too_long or count * elements > (self.max_elements or 0) or count > size:
                end += count - 1
                yield end
                count, longest, most = 1, list(lengths), cost
        yield len(columns[0])


def quadratic(frames: Ints, quadratic_frames: int) -> Ints:
    """Return n + n * n / quadratic_frames of each, rounded down."""
    return frames + frames * frames // quadratic_frames


def _ends(frames: Ints, cap: int, size: int) -> Iterator[int]:
    if (frames[1:] >= frames[:-1]).all():
        return _ends_of_ascending(frames, cap, size)
    return _ends_in_any_order(frames, cap, size)


def _ends_of_ascending(frames: Ints, cap: int, size: int) -> Iterator[int]:
    """The last utterance of a batch is the longest: one of about the length of the first."""
    lengths, total, begin = frames.data, len(frames), 0
    while begin < total:
        shortest, most = lengths[begin], min(size, total - begin)
        most = min(cap // shortest, most) if shortest else most
        longest = lengths[begin + most - 1]
        least = min(cap // longest, most) if longest else most
        while least < most:
            count = (least + most + 1) // 2
            if lengths[begin + count - 1] * count > cap:
                most = count - 1
            else:
                least = count
        begin += least
        yield begin


def _ends_in_any_order(frames: Ints, cap: int, size: int) -> Iterator[int]:
    end = count = longest = 0
    # a loop over plain numbers takes 70 ns for each, whatever the size of the batches
    for length in frames.data:
        count += 1
        if length > longest:
            longest = length
        if longest * count > cap or count > size:
            end += count - 1
            yield end
            count, longest = 1, length
    yield len(frames)


# `BucketBatchSampler`: batches of utterances of similar length, within limits.

# Utterances whose lengths differ by no more than this change places from epoch to epoch. It is the
# most that is padded for it, and half of it on average.
SPREAD = 1.05


class BucketBatchSampler(SamplerByLength):
    """Batches of row numbers of utterances of similar length, in new company each epoch.

    Each utterance comes once per epoch. In every batch, the longest utterance times the number of
    utterances is at most `max_frames`, and what all its padded features hold is at most
    `max_elements` numbers. All epochs have the same number of batches: hosts ask for it once. For
    how ranks share an epoch and resume, and for the other arguments, see `EpochSampler`. One thread
    iterates over it; forks and pickles have a place of their own.

    Args:
        lengths: frames of each utterance, integers; or a list of such arrays, one per feature of
            the same utterances; or a cache, its path, a `FeatureTable` or a data set (or torch's
            `Subset` of one), whose features with a time axis all count. Frames are seconds divided
            by the frame shift: 400 s of 10 ms are 40,000.
        ids: the utterances that `lengths` are of, in their order; of a cache those to take. Batches
            then hold ids.
        max_frames: the most frames in a batch, padding included; of each feature on its own.
        max_elements: the most numbers in a batch, padding included, over all features with a time
            axis: frames times the numbers of a frame, which a cache knows; of arrays of lengths a
            frame counts as one.
        batch_size: the most utterances in a batch; one of the three limits is needed.
        quadratic_frames: counts an utterance of n frames as n + n * n // quadratic_frames for
            `max_frames`: batches of long utterances become smaller, as attention wants it.
        pad_to: lengths that batches are padded to, of few shapes for what is compiled: a list, the
            shortest first, or a number whose multiples are meant. Each batch then has as many
            utterances as the limits allow of its length, but one an epoch, and but those that are
            cut for the ranks; `drop_last` leaves these out. A mix that has other rows each epoch
            also has full ones cut in two, so that all epochs have one number of batches. A
            `FeatureLoader` pads to the same. So that one alone is not full an epoch is drawn whole,
            at some 50 bytes a row of memory.
        batch_sizes: utterances of a batch of each length in `pad_to`, in place of limits.
        shuffle: False gives the shortest first, the same in every epoch.
        too_long: what becomes of utterances that are over a limit by themselves: "raise", or "skip"
            to leave them out with a warning. The attribute `too_long` holds their row numbers.

    Raises `ConfigError` for what cannot work.

    >>> sampler = BucketBatchSampler([70, 300, 80, 310, 75], max_frames=620, shuffle=False)
    >>> list(sampler)
    [[0, 4, 2], [1, 3]]
    """

    one_in = SPARE

    def __init__(
        self,
        lengths: LengthsLike,
        *,
        ids: Iterable[str] | None = None,
        max_frames: int | None = None,
        max_elements: int | None = None,
        batch_size: int | None = None,
        quadratic_frames: int | None = None,
        pad_to: PadTo | None = None,
        batch_sizes: Sequence[int] | None = None,
        shuffle: bool = True,
        too_long: Literal["raise", "skip"] = "raise",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            lengths,
            ids,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        self.pad_to = pad_to
        if batch_sizes is not None:
            batch_size = _largest(batch_sizes, pad_to, max_frames, max_elements, batch_size)
        self._limits = limits = BatchLimits(max_frames, max_elements, batch_size, quadratic_frames)
        self.max_frames, self.max_elements, self.batch_size, _ = astuple(limits)
        self._shapes = None if pad_to is None else self._shapes_of(pad_to, batch_sizes)
        named = limits.named("max_frames", "max_elements")
        if self._shapes is not None:
            named.append(f"pad_to={pad_to!r}")
        self._leave_out(too_long, named, windows=self._shapes is None)

    def __repr__(self) -> str:
        limits = ", ".join(self._limits.named(*vars(self._limits)))
        return f"<BucketBatchSampler: {self._number} utterances, {limits}, {self._where()}>"

    @property
    def padding_efficiency(self) -> float:
        """Share of real frames among all frames of this epoch's batches: all features and ranks."""
        batches = self._epoch(self.epoch)
        real = padded = 0.0
        for some, column in product(batches.windows, self._of.columns):
            frames = column[some.items]
            real += float(frames.sum(dtype=float))
            longest = np.maximum.reduceat(frames, some.ends[:-1])
            if self._shapes is not None:
                longest = self._shapes.padded(longest)
            padded += float(longest.astype(float) @ some.sizes)
        return real / padded if padded else 1.0

    def _layout(self) -> tuple[bool, int | tuple[int, ...] | None]:
        return False, None if self.pad_to is None else checked_pad_to(self.pad_to)

    def _limits_by_name(self) -> State:
        known: State = {
            "max_frames": self.max_frames,
            "max_elements": self.max_elements,
            "batch_size": self.batch_size,
        }
        if self.max_elements is not None:
            known["frame_elements"] = self._of.frame_elements
        if self._limits.quadratic_frames is not None:
            known["quadratic_frames"] = self._limits.quadratic_frames
        if self._shapes is not None:
            known["pad_to"] = self._shapes.lengths.tolist()
            known["batch_sizes"] = self._shapes.sizes.tolist()
        return known

    def _fits(self, columns: list[Ints]) -> NDArray[np.bool_]:
        """Whether utterances are within the limits by themselves, as they are padded."""
        padded = columns
        if self._shapes is not None:
            padded = [self._shapes.padded(column) for column in columns]
        fits = self._limits.fits(padded, self._of.frame_elements)
        return fits & (longest_of(padded) >= longest_of(columns))

    @cached_property
    def _sorted(self) -> Ints:
        """All rows that are batched, the shortest first."""
        rows = stable_order(self._of.longest[:])
        if len(self.too_long):
            fits = np.ones(len(rows), bool)
            fits[self.too_long] = False
            rows = rows[fits[rows]]
        return rows

    def _rows_of(self, epoch: int) -> Ints:
        """Return the rows of an epoch, the shortest first."""
        plan = self._of.plan
        return self._sorted if plan is None else self._by_length(plan.order(epoch, self.seed)[:])

    def _by_length(self, rows: Ints) -> Ints:
        return rows[stable_order(self._of.longest[rows])]

    def _in_order(self, epoch: int) -> tuple[Ints, Ints]:
        rows = self._rows_of(epoch)
        return rows, self._cut(rows, 0)

    def _cut_window(self, rows: Ints, key: int | None) -> tuple[Ints, Ints]:
        phase = 0 if key is None else share_of(drawn(key, "first"))
        longest = self._of.longest[rows]
        order = stable_order(longest)
        return rows[order], self._cut(rows[order], phase, longest[order])

    def _group_size(self, count: int) -> int:
        return group_size(count)

    def _order(self, count: int, key: int) -> Ints:
        return shuffled_in_groups(count, key)

    def _costs(self, rows: Ints) -> Ints:
        return self._of.longest[rows]

    def _spare(self, usual: int, rows: Ints) -> int:
        plan = self._of.plan
        if self._shapes is not None and not (plan is not None and plan.varies):
            return 0  # there are as many of each shape in all epochs
        return super()._spare(usual, rows)

    def _draw(self, epoch: int, number: int) -> tuple[Ints, Ints]:
        """Return the rows of an epoch, and where its batches end."""
        key = drawn(self.seed, "rows", epoch, number)
        rows = self._ordered(epoch, key)
        # a first batch of any size moves the ends of all others: neighbours part also where
        # utterances are few
        return rows, self._cut(rows, share_of(drawn(key, "first")) if epoch else 0.5)

    def _ordered(self, epoch: int, key: int) -> Ints:
        """Return the rows by length, those of about the same length in random order."""
        rows = self._rows_of(epoch).copy()
        frames = self._of.longest[rows]
        if self._shapes is None:
            ends = _bucket_ends(frames, share_of(drawn(key, "bounds")))
        else:
            ends = self._shapes.bucket_ends(frames)
        sizes = np.diff(ends)
        several = np.flatnonzero(sizes > 1)
        keys = [drawn(key, "bucket", number) for number in several.tolist()]
        for begin, order in zip(ends[several], orders(sizes[several], keys), strict=True):
            rows[begin : begin + len(order)] = rows[begin:][order]
        return rows

    def _cut(self, rows: Ints, phase: float, longest: Ints | None = None) -> Ints:
        """Return where batches of `rows` end; the first is cut short by a share of `phase`.

        `longest` are the frames of their longest features, where these are at hand.
        """
        longest = self._of.longest[rows] if longest is None else longest
        if self._shapes is not None:
            return self._shapes.ends(np.sort(longest))
        lengths = [longest]
        if self.max_elements is not None:
            lengths = [column[rows] for column in self._of.columns]
        first = next(self._limits.ends(lengths, self._of.frame_elements))
        skip = int(first * phase) if first < len(rows) else 0
        left = [column[skip:] for column in lengths]
        ends = np.fromiter(self._limits.ends(left, self._of.frame_elements), np.int64) + skip
        return np.concatenate([[0, skip] if skip else [0], ends])

    def _shapes_of(self, pad_to: PadTo, batch_sizes: Sequence[int] | None) -> BatchShapes:
        """Return the shapes of batches: sizes as given, or as many as the limits allow."""
        lengths = lengths_up_to(pad_to, int(self._of.longest[:].max()))
        if batch_sizes is not None:
            sizes = np.array([whole_number("batch_sizes", size, 1) for size in batch_sizes])
            if len(sizes) != len(lengths):
                raise ConfigError(f"{len(sizes)} batch_sizes for {len(lengths)} lengths of pad_to")
            return BatchShapes(lengths, sizes)
        sizes = np.full(len(lengths), self.batch_size or len(self._of.longest))
        if self.max_frames is not None:
            sizes = np.minimum(sizes, self.max_frames // np.maximum(self._limits.costs(lengths), 1))
        if self.max_elements is not None:
            most = self.max_elements // np.maximum(lengths * sum(self._of.frame_elements), 1)
            sizes = np.minimum(sizes, most)
        return BatchShapes(lengths, np.maximum(sizes, 1))


def _largest(batch_sizes: Sequence[int], pad_to: PadTo | None, *limits: int | None) -> int:
    """Return the largest of the sizes; raises `ConfigError` where they do not stand alone."""
    if pad_to is None or any(limit is not None for limit in limits):
        raise ConfigError(
            "batch_sizes go with pad_to, one for each length, and with no other limit"
        )
    return max(batch_sizes, default=1)


def _bucket_ends(frames: Ints, phase: float) -> Ints:
    """Return where sorted lengths pass from one bucket to the next.

    Each is SPREAD times as long as the one before.
    """
    exponents = np.arange(np.log(max(frames[-1], 1)) / np.log(SPREAD) + 1) + phase
    return np.concatenate([[0], np.searchsorted(frames, SPREAD**exponents), [len(frames)]])
