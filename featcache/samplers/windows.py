"""Epochs of very many rows: batches made window by window of the order that a seed draws.

A window is a random part of the rows, so sorting it by length pads as little as sorting all, and
the first batch is there after one window, also after a resume. Each window has one number of
batches: a place in the epoch is found without the windows before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches, ShareOut
from featcache.tables.table import RowOrder

WINDOW = 1 << 18  # rows, about
MOST_AT_ONCE = 1 << 20  # rows that are batched together; of more, each window by itself
SPARE = 200  # an epoch may have one more in so many batches than epoch 0
DEVIATIONS = 10  # of the frames of a window from the average: more do not come


def windows_of(count: int) -> int:
    """Return how many windows so many rows are cut into; 1: they are batched together."""
    return 1 if count <= MOST_AT_ONCE else -(-count // WINDOW)


def spare_batches(usual: int, frames: Ints, deviations: float, *, one_in: int) -> int:
    """Return how many more batches others may need than these frames, which take `usual` ones.

    One in `one_in`; where others have other frames, as many as deviate so often from the average.
    """
    spread = float(frames.std()) / max(float(frames.mean()), 1.0) / math.sqrt(len(frames))
    return max(usual // one_in, math.ceil(deviations * spread * usual))


class Without:
    """Rows in an order, some of all left out; `order[3:9]`.

    Args:
        order: numbers of those that are not left out.
        left_out: these rows, ascending.
    """

    def __init__(self, order: RowOrder, left_out: Ints) -> None:
        self._order = order
        self._shifted = left_out - np.arange(len(left_out))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, places: slice) -> Ints:
        numbers = self._order[places]
        if not len(self._shifted):
            return numbers
        return numbers + self._shifted.searchsorted(numbers, side="right")


class WindowedBatches:
    """The batches of an epoch, of which two windows at most are held.

    Args:
        rows: the rows in their order.
        windows: how many parts of one size they are cut into; the last has what is over, too.
        per_window: batches of each; the last one has one more for each row that is over.
        make: makes batches of the rows of a window: rows, its number, and how many batches.
    """

    def __init__(
        self,
        rows: RowOrder,
        windows: int,
        per_window: int,
        make: Callable[[Ints, int, int], Batches],
    ) -> None:
        self._rows = rows
        self._windows = windows
        self._size, self._over = divmod(len(rows), windows)
        self.per_window = per_window
        self._make = make
        self._held: dict[int, Batches] = {}

    def __len__(self) -> int:
        return self._windows * self.per_window + self._over

    def __iter__(self) -> Iterator[list[int] | list[str]]:
        return chain.from_iterable(self.windows)

    def __repr__(self) -> str:
        return f"<{len(self)} batches of {self.utterances} utterances>"

    @property
    def utterances(self) -> int:
        """Utterances of all batches."""
        return len(self._rows)

    @property
    def windows(self) -> Iterator[Batches]:
        """The batches of each window."""
        return map(self._window, range(self._windows))

    def batch(self, number: int) -> list[int] | list[str]:
        """Return batch `number`, counted from 0 on."""
        window = self._window_of(number)
        return self._window(window).batch(number - window * self.per_window)

    def end(self, number: int) -> int:
        """Return how many utterances come before batch `number`."""
        window = self._window_of(number)
        inner = number - window * self.per_window
        return window * self._size + (int(self._window(window).ends[inner]) if inner else 0)

    def number_at(self, position: int) -> int:
        """Return the number of the batch that has the utterance at a position."""
        if position >= self.utterances:
            return len(self)
        window = min(position // self._size, self._windows - 1)
        ends = self._window(window).ends
        inner = int(ends.searchsorted(position - window * self._size, side="right")) - 1
        return window * self.per_window + inner

    def between(self, begin: int, end: int, draw: tuple[int, int] | None) -> list[int] | list[str]:
        """Return the batch of the utterances from one position to another, of one window."""
        window = min(begin // self._size, self._windows - 1)
        ends = np.array([begin, end]) - window * self._size
        return self._window(window).recut(ends, draw).batch(0)

    def rest(
        self, position: int, *, world_size: int, share: ShareOut, draw: tuple[int, int]
    ) -> Rest:
        """Return the batches from a position on, the last ones cut so that ranks share them."""
        return Rest(self, position, world_size, share, draw)

    def _window_of(self, batch: int) -> int:
        return min(batch // self.per_window, self._windows - 1)

    def _window(self, number: int) -> Batches:
        if number not in self._held:
            last = number == self._windows - 1
            begin, count = number * self._size, self.per_window + self._over * last
            rows = self._rows[begin : begin + self._size + self._over * last]
            made = self._make(rows, number, count)
            if len(made) != count:
                raise ConfigError(
                    f"window {number} of an epoch needs {len(made)} batches in place of "
                    f"{count}, as its lengths are far from those of others; use another "
                    "seed, or leave out the longest utterances"
                )
            for held in list(self._held)[:-1]:
                del self._held[held]
            self._held[number] = made
        return self._held[number]


class Rest:
    """The batches of an epoch from a position on, shared out over ranks."""

    def __init__(
        self,
        whole: WindowedBatches,
        position: int,
        world_size: int,
        share: ShareOut,
        draw: tuple[int, int],
    ) -> None:
        self._whole, self._position, self._draw = whole, position, draw
        self._first = whole.number_at(position)
        count = len(whole) - self._first
        self._kept = count  # the batches before those that are cut
        self._tail: Ints = np.empty(0, np.int64)
        if count % world_size:
            # those of the last window are enough to make up what the last step lacks
            steps = min(-(-max(count - whole.per_window, 0) // world_size), count // world_size)
            self._kept = steps * world_size
            numbers = range(self._first + self._kept, len(whole) + 1)
            ends = np.array([whole.end(number) for number in numbers])
            begin = self.end(self._kept) if self._kept else position
            self._tail = share(ends, begin, world_size)

    def __len__(self) -> int:
        return self._kept + max(len(self._tail) - 1, 0)

    @property
    def utterances(self) -> int:
        """Utterances of the whole epoch."""
        return self._whole.utterances

    def end(self, number: int) -> int:
        """Return how many utterances of the epoch come before a batch."""
        if number == 0:
            return self._position
        if number > self._kept:
            return int(self._tail[number - self._kept])
        return self._whole.end(self._first + number)

    def batch(self, number: int) -> list[int] | list[str]:
        """Return a batch."""
        return self._whole.between(self.end(number), self.end(number + 1), self._draw)
