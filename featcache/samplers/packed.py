"""Batches whose frames add up to a limit, without padding: for attention over packed batches."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.format import ends_of
from featcache.interface import Ints
from featcache.samplers.batches import Without
from featcache.samplers.bucket import BatchLimits
from featcache.samplers.by_length import LengthsLike, SamplerByLength, longest_of
from featcache.samplers.epoch import State
from featcache.tables import Order, RowOrder, stable_order

OPEN = 8  # batches of a window that are filled side by side, and of which the rest is packed again
WINDOWS = 64  # of which costs are held as plain numbers at a time
PACKED_SPARE = 20_000  # an epoch may have one more in so many batches than epoch 0
FIRST_DRAWS = 2  # of which the largest number of batches is that of all epochs, where it is small


class PackedBatchSampler(SamplerByLength):
    """Batches of row numbers whose frames add up to at most `max_frames`, in random company.

    For `FeatureLoader(..., layout="packed")` or "jagged": nothing is padded, so utterances of all
    lengths go together. Each utterance comes once per epoch. In the order that seed and epoch draw,
    an utterance joins the open batch that it fills best (best fit: Johnson, Near-optimal bin
    packing algorithms, MIT 1973). All epochs have the same number of batches, but of a mix that is
    not shuffled. For how ranks share an epoch and resume, and for the other arguments, see
    `EpochSampler`. One thread iterates over it; forks and pickles have a place of their own.

    Args:
        lengths: as `BucketBatchSampler` takes them; of several features the longest of each
            utterance counts.
        max_frames: the most frames in a batch, all utterances together.
        ids: the utterances that `lengths` are of, in their order; of a cache those to take. Batches
            then hold ids.
        batch_size: the most utterances in a batch.
        quadratic_frames: counts an utterance of n frames as n + n * n // quadratic_frames, so that
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

    one_in = PACKED_SPARE

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
        super().__init__(
            lengths,
            ids,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        self.max_frames = whole_number("max_frames", max_frames, 1)
        self._limits = BatchLimits(self.max_frames, None, batch_size, quadratic_frames)
        self.window = whole_number("window", window, 1)
        self._leave_out(too_long, [f"max_frames={max_frames}"])

    def __repr__(self) -> str:
        limits = ", ".join(self._limits.named(*vars(self._limits)))
        return f"<PackedBatchSampler: {self._number} utterances, {limits}, {self._where()}>"

    @property
    def fill(self) -> float:
        """Share of `max_frames` that is taken by this epoch's batches of all ranks, on average."""
        batches = self._epoch(self.epoch)
        taken = sum(float(self._costs(some.items).sum()) for some in batches.windows)
        return taken / (len(batches) * self.max_frames)

    def _layout(self) -> tuple[bool, int | tuple[int, ...] | None]:
        return True, None

    def _limits_by_name(self) -> State:
        return {
            "max_frames": self.max_frames,
            "batch_size": self._limits.batch_size,
            "quadratic_frames": self._limits.quadratic_frames,
            "window": self.window,
        }

    def _fits(self, columns: list[Ints]) -> NDArray[np.bool_]:
        return self._limits.costs(longest_of(columns)) <= self.max_frames

    def _costs(self, rows: Ints) -> Ints:
        return self._limits.costs(self._of.longest[rows])

    def _in_order(self, epoch: int) -> tuple[Ints, Ints]:
        if self._of.plan is not None:
            return self._packed(self._of.plan.order(epoch, self.seed))
        return self._packed(Without(Order(self._number, None), self.too_long))

    def _cut_window(self, rows: Ints, key: int | None) -> tuple[Ints, Ints]:
        return self._packed(rows)

    def _order(self, count: int, key: int) -> Ints:
        return Order(count, key)[:]

    def _draw(self, epoch: int, number: int) -> tuple[Ints, Ints]:
        """Return the rows of an epoch, batch by batch, and where these end."""
        found = self._packed_anew(epoch, number)
        if epoch == 0 and len(found[1]) <= PACKED_SPARE:
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
    up to `most`. Where none has room, the fullest is closed and another one opened.

    >>> best_fit(np.array([6, 7, 3, 4, 9]), most=10, size=None, window=100).tolist()
    [0, 1, 1, 0, 2]
    """
    found = np.empty(len(costs), np.int64)
    scaled = costs * OPEN
    for number, begin in enumerate(range(0, len(costs), window)):
        some = scaled[begin : begin + window].tolist()
        found[begin : begin + window] = _fit(some, most * OPEN, size or window)
        found[begin : begin + window] += number * (window + OPEN)
    return found


def _fit(costs: list[int], most: int, size: int) -> list[int]:
    """Return the batch of each utterance of one window, numbered from 0.

    Costs are in units of 1 / OPEN, so that the rest of a room by OPEN is the place of its batch.
    """
    # plain numbers, sorted: a bisection takes 0.2 us an utterance, numpy as long for a thousand
    # windows at once and far longer for a few
    rooms = [most + place for place in range(OPEN)]
    full: list[int] = []  # places of batches of `size` utterances
    left, number, opened = [size] * OPEN, [*range(OPEN)], OPEN
    found = []
    for cost in costs:
        best = bisect_left(rooms, cost)
        if best < len(rooms):
            room = rooms.pop(best)
            place = room % OPEN
        else:
            place = full.pop(full.index(min(full))) if full else rooms.pop(0) % OPEN
            room, left[place], number[place] = most + place, size, opened
            opened += 1
        found.append(number[place])
        left[place] -= 1
        if left[place]:
            insort(rooms, room - cost)
        else:
            full.append(place)
    return found
