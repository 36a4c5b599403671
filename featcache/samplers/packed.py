"""`PackedBatchSampler`: batches whose frames add up to a limit, for attention without padding."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache._checks import whole_number
from featcache.format.columns import ends_of
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.bucket import BatchLimits
from featcache.samplers.epoch import EpochSampler, State, drawn_evenly, split_up
from featcache.samplers.lengths import LengthsLike, LengthsOfUtterances, longest_of
from featcache.samplers.order import Order, drawn
from featcache.samplers.windows import (
    DEVIATIONS,
    WINDOW,
    WindowedBatches,
    Without,
    spare_batches,
    windows_of,
)
from featcache.tables.columns import stable_order
from featcache.tables.table import Numbering, RowOrder

OPEN = 8  # batches of a window that are filled side by side, and of which the rest is packed again
WINDOWS = 1024  # that are packed at once: their open batches stay in the processor's cache
SPARE = 20_000  # an epoch may have one more in so many batches than epoch 0
FIRST_DRAWS = 2  # of which the largest number of batches is that of all epochs, where it is small


class PackedBatchSampler(EpochSampler):
    """Batches of row numbers whose frames add up to at most `max_frames`, in random company.

    For `FeatureLoader(..., layout="packed")` or "jagged": nothing is padded, so utterances of all
    lengths go together. Each utterance comes once per epoch. In the order that seed and epoch draw,
    an utterance joins the open batch that it fills best (best fit: Johnson, Near-optimal bin
    packing algorithms, MIT 1973). All epochs have the same number of batches. For how ranks share
    an epoch and resume, and for the other arguments, see `EpochSampler`. One thread iterates over
    it; forks and pickles have a place of their own.

    Args:
        lengths: as `BucketBatchSampler` takes them; of several features the longest of each
            utterance counts.
        max_frames: the most frames in a batch, all utterances together.
        ids: the utterances that `lengths` are of, in their order; of a cache those to take. Batches
            then hold ids.
        batch_size: the most utterances in a batch.
        quadratic_frames: counts an utterance of n frames as n + n * n / quadratic_frames, so that
            batches take attention about the same time.
        window: utterances, in the order drawn, that are packed together. What is in the least full
            batches of a window is packed again with that of other windows.
        shuffle: False takes them in the order of the rows, the same in every epoch.
        too_long: what becomes of utterances over the limit by themselves: "raise", or "skip" to
            leave them out with a warning. The attribute `too_long` holds their row numbers.

    Raises `ConfigError` for what cannot work.

    >>> sampler = PackedBatchSampler([70, 300, 80, 310, 75], max_frames=500, shuffle=False)
    >>> list(sampler), sampler.fill
    ([[0, 1, 2], [3, 4]], 0.835)
    """

    def __init__(
        self,
        lengths: LengthsLike,
        *,
        max_frames: int,
        ids: Iterable[str] | None = None,
        batch_size: int | None = None,
        quadratic_frames: int | None = None,
        window: int = 1024,
        shuffle: bool = True,
        too_long: Literal["raise", "skip"] = "raise",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed=seed, rank=rank, world_size=world_size, drop_last=drop_last)
        self.max_frames = whole_number("max_frames", max_frames, 1)
        self._limits = BatchLimits(self.max_frames, None, batch_size, quadratic_frames)
        self.window = whole_number("window", window, 1)
        self.shuffle = shuffle
        self._of = LengthsOfUtterances(lengths, ids)
        self.table = self._of.table
        self.too_long = self._of.without(self._fits, too_long, [f"max_frames={max_frames}"])
        self._number = self._of.count(self.too_long)
        self._windows = windows_of(self._number) if shuffle else 1
        self._count = 0  # of the batches of each epoch, once it is known

    def __repr__(self) -> str:
        limits = ", ".join(self._limits.named(*vars(self._limits)))
        return f"<PackedBatchSampler: {self._number} utterances, {limits}, {self._where()}>"

    @property
    def fill(self) -> float:
        """Share of `max_frames` that is taken by this epoch's batches of all ranks, on average."""
        batches = self._epoch(self.epoch)
        taken = sum(float(self._costs(some.items).sum()) for some in batches.windows)
        return taken / (len(batches) * self.max_frames)

    @property
    def numbering(self) -> Numbering | None:
        """The utterances that row numbers count; None where batches hold ids."""
        return self._of.numbering

    def epoch_batches(self, epoch: int) -> Batches | WindowedBatches:
        """Return the batches of an epoch, in its order."""
        plan = self._of.plan
        if not self.shuffle:
            rows: RowOrder = Without(Order(self._number, None), self.too_long)
            if plan is not None:
                rows = plan.order(epoch, self.seed)
            return self._of.batches(*self._packed(rows))
        if self._windows > 1:
            order = self._of.drawn_rows(self.too_long, self.seed, epoch)
            make = partial(self._window, epoch)
            return WindowedBatches(order, self._windows, self._per_window, make)
        rows, ends, self._count = drawn_evenly(
            self._draw, epoch, self._count, self._spare, own_rows=plan is not None
        )
        order = Order(len(ends) - 1, drawn(self.seed, "batches", epoch))
        return self._of.batches(rows, ends).take(order[:])

    def settings(self) -> State:
        """Return what the order depends on: limits, window, shuffle, a digest of the lengths."""
        known: State = {
            "data": self._of.digest,
            "max_frames": self.max_frames,
            "batch_size": self._limits.batch_size,
            "quadratic_frames": self._limits.quadratic_frames,
            "window": self.window,
            "shuffle": self.shuffle,
        }
        if self._windows > 1:
            known["rows_at_once"] = WINDOW
        return known

    def _fits(self, columns: list[Ints]) -> NDArray[np.bool_]:
        return self._limits.costs(longest_of(columns)) <= self.max_frames

    def _costs(self, rows: Ints) -> Ints:
        return self._limits.costs(self._of.longest[rows])

    @cached_property
    def _per_window(self) -> int:
        """The batches of each window of very many utterances."""
        order = self._of.drawn_rows(self.too_long, self.seed, 0)
        rows, ends = self._packed(order[: self._number // self._windows])
        usual = len(ends) - 1
        spare = spare_batches(usual, self._costs(rows), DEVIATIONS, one_in=SPARE)
        return min(usual + spare + 1, len(rows))

    def _window(self, epoch: int, rows: Ints, number: int, count: int) -> Batches:
        """Return the batches of a window of very many utterances."""
        rows, ends = self._packed(rows)
        ends = split_up(ends, count)
        order = Order(len(ends) - 1, drawn(self.seed, "window", epoch, number))
        return self._of.batches(rows, ends).take(order[:])

    def _spare(self, usual: int, rows: Ints) -> int:
        plan = self._of.plan
        varies = plan is not None and plan.varies
        return spare_batches(usual, self._costs(rows), 4 if varies else 0, one_in=SPARE)

    def _draw(self, epoch: int, number: int) -> tuple[Ints, Ints]:
        """Return the rows of an epoch, batch by batch, and where these end."""
        found = self._packed_anew(epoch, number)
        if epoch == 0 and len(found[1]) <= SPARE:
            # of a few batches one more is much, and chance decides it: let all epochs do with it
            others = [self._packed_anew(0, other) for other in range(1, FIRST_DRAWS)]
            found = max([found, *others], key=lambda packed: len(packed[1]))
        return found

    def _packed_anew(self, epoch: int, number: int) -> tuple[Ints, Ints]:
        return self._packed(self._of.drawn_rows(self.too_long, self.seed, epoch, number))

    def _packed(self, rows: RowOrder) -> tuple[Ints, Ints]:
        """Return rows batch by batch, and where these end."""
        packed, done = np.empty(len(rows), np.int64), 0
        sizes, window = [], self.window
        while len(rows):
            again, at_once = [], window * WINDOWS
            for begin in range(0, len(rows), at_once):
                some = rows[begin : begin + at_once]
                full, counts, rest = self._pack(some, window, last=len(rows) <= window)
                packed[done : done + len(full)] = full
                done += len(full)
                sizes.append(counts)
                again.append(rest)
            left = np.concatenate(again)
            if len(left) * 2 > len(rows):  # windows hold too little
                window *= 4
            rows = left
        return packed, ends_of(np.concatenate(sizes))

    def _pack(self, rows: Ints, window: int, *, last: bool) -> tuple[Ints, Ints, Ints]:
        """Return utterances batch by batch, the sizes of these, and what shall be packed again.

        With `last` nothing shall.
        """
        size = self._limits.batch_size
        bins = best_fit(self._costs(rows), self.max_frames, size, window)
        order = stable_order(bins)  # those of a batch stay in the order drawn
        bins, rows = bins[order], rows[order]
        begins = np.flatnonzero(np.diff(bins, prepend=-1))
        counts = np.diff(begins, append=len(rows))
        if last:
            return rows, counts, rows[:0]
        again = _least_full(self._costs(rows), begins, bins[begins] // (window + OPEN))
        left = np.repeat(again, counts)
        return rows[~left], counts[~again], rows[left]


def _least_full(costs: Ints, begins: Ints, windows: Ints) -> NDArray[np.bool_]:
    """Return for each batch whether it is one of the `OPEN` least full ones of its window."""
    sums = np.add.reduceat(costs, begins)
    order = np.lexsort((sums, windows))
    firsts = np.flatnonzero(np.diff(windows, prepend=-1))
    place = np.arange(len(sums)) - np.repeat(firsts, np.diff(firsts, append=len(sums)))
    found: NDArray[np.bool_] = np.zeros(len(sums), bool)
    found[order[place < OPEN]] = True
    return found


def best_fit(costs: Ints, most: int, size: int | None, window: int) -> Ints:
    """Return the batch that each utterance joins, by number: from `window + OPEN` on of the next.

    Each joins the open batch that leaves the least room, of up to `size` utterances whose costs add
    up to `most`. Where none has room, the fullest is closed and another one opened. All windows
    take a step at once: that costs numpy a few calls, and Python nothing for an utterance.

    >>> best_fit(np.array([6, 7, 3, 4, 9]), most=10, size=None, window=100).tolist()
    [0, 1, 1, 0, 2]
    """
    count = -(-len(costs) // window)
    width = min(window, len(costs))
    table = np.zeros((count, width), np.int64)
    table.reshape(-1)[: len(costs)] = costs
    found = np.empty((count, width), np.int64)
    _fit(table, most, size or width, found)
    found += np.arange(count)[:, None] * (window + OPEN)
    return found.reshape(-1)[: len(costs)]


def _fit(costs: Ints, most: int, size: int, found: Ints) -> None:
    """Fill in the batch of each utterance, (windows, utterances), numbered from 0 in each."""
    rows = np.arange(len(costs))
    room = np.full((len(costs), OPEN), most)
    left = np.full((len(costs), OPEN), size)  # utterances that a batch may still take
    number = np.tile(np.arange(OPEN), (len(costs), 1))
    opened = np.full(len(costs), OPEN)
    for step in range(costs.shape[1]):
        cost = costs[:, step]
        rest = room - cost[:, None]
        rest[(rest < 0) | (left == 0)] = most + 1
        best = rest.argmin(axis=1)
        none = np.flatnonzero(rest[rows, best] > most)
        if len(none):
            fullest = np.where(left[none] == 0, -1, room[none]).argmin(axis=1)
            best[none] = fullest
            room[none, fullest], left[none, fullest] = most, size
            number[none, fullest] = opened[none]
            opened[none] += 1
        room[rows, best] -= cost
        left[rows, best] -= 1
        found[:, step] = number[rows, best]
