"""The base of samplers that make batches by the lengths of utterances.

An epoch is drawn at once, or, of very many utterances, window by window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.errors import StateError
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.epoch import EpochSampler, State, drawn_evenly, split_up
from featcache.samplers.lengths import LengthsLike, LengthsOfUtterances
from featcache.samplers.windows import (
    DEVIATIONS,
    WINDOW,
    WindowedBatches,
    spare_batches,
    windows_of,
)
from featcache.tables.numbering import Numbering
from featcache.tables.order import drawn


class SamplerByLength(EpochSampler):
    """Batches of utterances by their lengths, of which no epoch has more than another.

    A subclass cuts rows into batches and orders these; all else is here.

    Attributes:
        one_in: an epoch may have one more in so many batches than epoch 0.
        group: the number of batches of a window is a multiple of it.
        table: the table that the utterances are of, where there is one.
        shuffle: whether epochs are drawn at random.
        too_long: row numbers of utterances that are left out.
    """

    one_in: int
    group = 1

    def __init__(
        self,
        lengths: LengthsLike,
        ids: Iterable[str] | None,
        *,
        shuffle: bool,
        seed: int,
        rank: int | None,
        world_size: int | None,
        drop_last: bool,
    ) -> None:
        super().__init__(seed=seed, rank=rank, world_size=world_size, drop_last=drop_last)
        self._of = LengthsOfUtterances(lengths, ids)
        self.table = self._of.table
        self.shuffle = shuffle
        self._count = 0  # of the batches of each epoch, once it is known

    def _leave_out(self, too_long: str, limits: Sequence[str], *, windows: bool = True) -> None:
        """Leave out what does not fit into a batch by itself, or raise `ConfigError` for it."""
        self.too_long = self._of.without(self._fits, too_long, limits)
        self._number = self._of.count(self.too_long)
        self._windows = windows_of(self._number) if self.shuffle and windows else 1

    @property
    def numbering(self) -> Numbering | None:
        """The utterances that row numbers count; None where batches hold ids."""
        return self._of.numbering

    @property
    def random_crop_s(self) -> float | None:
        """Seconds of the random crops that are counted; None where utterances are whole."""
        return self._of.random_crop_s

    def epoch_batches(self, epoch: int) -> Batches | WindowedBatches:
        """Return the batches of an epoch, in its order."""
        if not self.shuffle:
            return self._of.batches(*self._in_order(epoch))
        if self._windows > 1:
            rows = self._of.drawn_rows(self.too_long, self.seed, epoch)
            make = partial(self._window, epoch)
            return WindowedBatches(rows, self._windows, self._per_window, make)
        own_rows = self._of.plan is not None
        rows, ends, self._count = drawn_evenly(
            self._draw, epoch, self._count, self._spare, own_rows=own_rows
        )
        order = self._order(len(ends) - 1, drawn(self.seed, "batches", epoch))
        return self._of.batches(rows, ends).take(order)

    def settings(self) -> State:
        """Return what the order depends on: limits, shuffle, a digest of the lengths."""
        known: State = {"data": self._of.digest, "shuffle": self.shuffle, **self._limits_by_name()}
        if self._windows > 1:  # a state says how many batches these have: to find out takes one
            known |= {"rows_at_once": WINDOW, "batches_a_window": self._per_window}
        return known

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to where a state was saved, by any number of ranks; see `EpochSampler`."""
        known = vars(self).get("_per_window")
        if self._windows > 1 and known is None and isinstance(state, Mapping):
            told = state.get("batches_a_window")
            if isinstance(told, int) and 0 < told <= self._number // self._windows:
                self._per_window = told
        try:
            super().load_state_dict(state)
        except StateError:
            if known is None:
                vars(self).pop("_per_window", None)
            raise

    @abstractmethod
    def _limits_by_name(self) -> State:
        """Return the limits of a batch, and how it is made."""

    @abstractmethod
    def _fits(self, columns: list[Ints]) -> NDArray[np.bool_]:
        """Return for each utterance whether it fits into a batch by itself."""

    @abstractmethod
    def _costs(self, rows: Ints) -> Ints:
        """Return what rows take of a batch, by which numbers of batches differ."""

    @abstractmethod
    def _in_order(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the rows of an epoch that is not shuffled, and where its batches end."""

    @abstractmethod
    def _draw(self, epoch: int, number: int) -> tuple[Ints, Ints]:
        """Return the rows of an epoch, batch by batch, and where these end: draw `number`."""

    @abstractmethod
    def _cut_window(self, rows: Ints, key: int | None) -> tuple[Ints, Ints]:
        """Return rows of a window, batch by batch, and where these end; None: nothing is drawn."""

    @abstractmethod
    def _order(self, count: int, key: int) -> Ints:
        """Return the numbers of so many batches in random order."""

    def _spare(self, usual: int, rows: Ints) -> int:
        """Return how many batches more than these an epoch may have."""
        plan = self._of.plan
        deviations = 4 if plan is not None and plan.varies else 0
        return spare_batches(usual, self._costs(rows), deviations, one_in=self.one_in)

    @cached_property
    def _per_window(self) -> int:
        """The batches of each window."""
        order = self._of.drawn_rows(self.too_long, self.seed, 0)
        rows, ends = self._cut_window(order[: self._number // self._windows], None)
        usual = len(ends) - 1
        spare = spare_batches(usual, self._costs(rows), DEVIATIONS, one_in=self.one_in) + 1
        return min(-(-(usual + spare) // self.group) * self.group, len(rows))

    def _window(self, epoch: int, rows: Ints, number: int, count: int) -> Batches:
        """Return the batches of a window in random order."""
        key = drawn(self.seed, "window", epoch, number)
        rows, ends = self._cut_window(rows, key)
        ends = split_up(ends, count)
        return self._of.batches(rows, ends).take(self._order(len(ends) - 1, key))
