"""The base of samplers that make batches by the lengths of utterances, and these lengths.

Lengths come as arrays or from the features of a cache. An epoch is drawn at once, or, of very many
utterances, window by window.
"""

from __future__ import annotations

import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache._cached import cached_property
from featcache.errors import ConfigError, StateError, UnknownNameError, nearest
from featcache.format import digest
from featcache.interface import Ints
from featcache.reading import CachePath
from featcache.samplers.batches import (
    DEVIATIONS,
    MOST_AT_ONCE,
    WINDOW,
    Batches,
    HasSome,
    HasTable,
    Needs,
    Numbering,
    WindowedBatches,
    Without,
    column_digest,
    spare_batches,
    windows_of,
    within_table,
)
from featcache.samplers.epoch import EpochSampler, State, drawn_evenly, split_up
from featcache.tables import FeatureTable, Order, RowOrder, StoredLengths, drawn

TOO_LONG = ("raise", "skip")
LengthsColumn = Ints | StoredLengths
LengthsLike = ArrayLike | Sequence[ArrayLike] | CachePath | FeatureTable | HasTable | HasSome


def columns_of(
    lengths: LengthsLike,
) -> tuple[list[LengthsColumn], list[int], FeatureTable | None, float | None]:
    """Return the frames of all utterances, the numbers of a frame, the table, and the crop.

    Of each feature that has a time axis, or of each array. The crop is `random_crop_s` of a data
    set. Raises `ConfigError` for what is neither, for no utterances and for features of different
    ones.
    """
    if isinstance(lengths, FeatureTable | str | os.PathLike):
        lengths = FeatureTable.of(lengths)
    found = within_table(lengths)
    if found is not None:
        owner, table = found
        if not len(table):
            raise ConfigError(f"there are no utterances to sample: {table!r} is empty")
        # a data set may read several stored features as one, or some frames of them
        choices = getattr(owner, "choices", None)
        made = table if choices is None else choices.over(table)
        names = [name for name in owner.features if made.has_frames(name)]
        columns: list[LengthsColumn]
        stored = choices is None or choices.are_stored
        if table.plan is not None and table.selection.cuts is None and stored:
            columns = [StoredLengths(table.selection, [name]) for name in names]
        else:
            columns = [
                _checked(f"lengths of feature {name!r}", made.lengths(name)) for name in names
            ]
        crop_s = None if choices is None else choices.random_crop_s
        return columns, [math.prod(made.dims(name)) for name in names], table, crop_s
    if isinstance(lengths, list | tuple) and len(lengths) > 0 and np.ndim(lengths[0]) > 0:
        arrays = {f"lengths[{number}]": array for number, array in enumerate(lengths)}
    else:
        arrays = {"lengths": lengths}
    given = [_checked(name, np.asarray(array)) for name, array in arrays.items()]
    counts = list(map(len, given))
    if len(set(counts)) > 1:
        raise ConfigError(f"the features have lengths for {counts} utterances; give the same ones")
    return [*given], [1] * len(given), None, None


def _checked(name: str, array: NDArray[np.generic]) -> Ints:
    if array.ndim and not array.size:
        raise ConfigError(f"there are no utterances to sample: {name} is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}"
        if array.dtype.kind == "O" and array.ndim == 0:
            found = (
                f"a {type(array.item()).__name__}; if Lightning puts it there to share batches "
                "out, which the sampler does itself, set Trainer(use_distributed_sampler=False)"
            )
        raise ConfigError(f"{name} are frames of each utterance, integers, not {found}")
    whole = array.astype(np.int64, copy=False)
    if whole.min() < 0:
        row = int(whole.argmin())
        raise ConfigError(f"{name} cannot be negative: row {row} has {array[row].tolist()}")
    return whole


def longest_of(columns: Sequence[Ints]) -> Ints:
    """Return the length of each utterance's longest feature."""
    longest: Ints = columns[0] if len(columns) == 1 else np.max(columns, axis=0)
    return longest


Fits = Callable[[list[Ints]], NDArray[np.bool_]]


def _without(columns: Sequence[LengthsColumn], fits: Fits) -> Ints:
    """Return the rows of columns that do not fit."""
    found = []
    for begin in range(0, len(columns[0]), MOST_AT_ONCE):  # memory for some at a time
        some = [column[begin : begin + MOST_AT_ONCE] for column in columns]
        if not fits([column.max(keepdims=True) for column in some]).all():  # else shorter ones do
            found.append(begin + np.flatnonzero(~fits(some)))
    return np.concatenate(found) if found else np.empty(0, np.int64)


class LengthsOfUtterances:
    """The lengths of the utterances that a sampler draws from, one column a feature, and their ids.

    Raises `ConfigError` for what `columns_of` refuses, and for ids that do not fit the lengths.

    Attributes:
        columns: frames of each utterance, by feature.
        frame_elements: the numbers of a frame of each feature.
        table: the table that they are of, where there is one.
        random_crop_s: seconds that its utterances are cropped to, at random; None: they are whole.
        plan: its plan of epochs, where it is a mix.
        ids: ids in place of row numbers, where they are given.
        longest: frames of each utterance's longest feature.
    """

    def __init__(self, lengths: LengthsLike, ids: Iterable[str] | None) -> None:
        self.columns, self.frame_elements, self.table, self.random_crop_s = columns_of(lengths)
        if not self.columns:
            raise ConfigError(
                f"no feature of {lengths!r} has a time axis; give lengths of your own"
            )
        self.plan = None if self.table is None else self.table.plan
        self.ids = None if ids is None else self._take(list(ids))
        stored = [each for each in self.columns if isinstance(each, StoredLengths)]
        self._stored = StoredLengths.longest(stored) if stored else None
        self.longest = self._stored or longest_of([each[:] for each in self.columns])

    @cached_property
    def numbering(self) -> Numbering | None:
        """The utterances that row numbers count; None where batches hold ids."""
        if self.ids is not None:
            return None
        lengths = [each[:] for each in self.columns] if self.table is None else []
        return Numbering(len(self.longest), self.table, lengths)

    @cached_property
    def digest(self) -> str:
        """Digest of the lengths and the ids; of a mix that of the table and of its caches' lengths.

        So what is digested of a mix does not grow with the rows that an epoch can take of one.
        """
        ids = "\0".join(self.ids or ()).encode(errors="surrogatepass")
        made = "" if self.table is None or self.plan is None else self.table.digest
        columns = [self.columns] if self._stored is None else self._stored.of_caches()
        digests = [column_digest(each[:]) for some in columns for each in some]
        return digest("".join([*digests, digest(ids), made]).encode())

    def drawn_rows(self, left_out: Ints, seed: int, epoch: int, number: int = 0) -> RowOrder:
        """Return the rows of an epoch but those left out, in random order: draw `number` of them.

        Those of a mix in the order of its plan.
        """
        key = drawn(seed, "rows", epoch, number)
        if self.plan is None:
            return Without(Order(len(self.longest) - len(left_out), key), left_out)
        planned = self.plan.order(epoch, seed)
        return planned if number == 0 else planned[:][Order(len(planned), key)[:]]

    def count(self, left_out: Ints) -> int:
        """Count the utterances of an epoch."""
        return len(self.longest) - len(left_out) if self.plan is None else self.plan.size

    def without(
        self,
        fits: Fits,
        too_long: str,
        limits: Sequence[str],
    ) -> Ints:
        """Return the rows that do not fit into a batch by themselves, which a warning counts.

        `fits` says it of some utterances, by their columns. Raises `ConfigError` for those that do
        not unless `too_long` is "skip"; `limits` are what they are over, as "max_frames=2000".
        """
        if too_long not in TOO_LONG:
            raise UnknownNameError(
                f"too_long has no choice {too_long!r}; {nearest(too_long, TOO_LONG)}"
            )
        total = len(self.longest)
        if self._stored is not None and not any(
            len(_without(columns, fits)) for columns in self._stored.of_caches()
        ):
            return np.empty(0, np.int64)  # the rows of the mix are among them
        rows = _without(self.columns, fits)
        if not len(rows):
            return rows
        frames = self.longest[rows]
        longest = len(rows) - 1 - int(frames[::-1].argmax())
        what = (
            f"{len(rows)} of {total} utterances are longer than {' or '.join(limits)}, the "
            f"longest is {self._named(int(rows[longest]))} with {frames[longest]} frames"
        )
        names = " or ".join(limit.partition("=")[0] for limit in limits)
        how = "" if too_long == "skip" else ", or leave them out: too_long=skip"
        if self.plan is not None:
            how = ", or leave them out of the sources of the mix, with filter"
        elif too_long == "skip" and len(rows) < total:
            warnings.warn(f"{what}; they are left out", stacklevel=4)
            return rows
        raise ConfigError(f"{what}; raise {names}{how}")

    def _take(self, ids: list[str]) -> list[str]:
        """Take the lengths of these utterances, where they come from a table."""
        if len(set(ids)) < len(ids):
            raise ConfigError("ids names an utterance twice")
        if self.table is not None:
            if self.table.plan is not None:
                raise ConfigError("ids= chooses of a mix; select them of its sources instead")
            rows = self.table.rows(ids)
            self.columns = [column[rows] for column in self.columns]
        elif len(ids) != len(self.columns[0]):
            raise ConfigError(f"{len(ids)} ids for {len(self.columns[0])} lengths")
        if not ids:
            raise ConfigError("there are no utterances to sample: ids is empty")
        return ids

    def _named(self, row: int) -> str:
        if self.ids is not None:
            return repr(self.ids[row])
        return f"row {row}" if self.table is None else f"{self.table.id(row)!r} (row {row})"


# The base of samplers that make batches by the lengths of utterances.


class SamplerByLength(EpochSampler):
    """Batches of utterances by their lengths, of which no epoch has more than another.

    A subclass cuts rows into batches and orders these; all else is here.

    Attributes:
        one_in: an epoch may have one more in so many batches than epoch 0.
        table: the table that the utterances are of, where there is one.
        shuffle: whether epochs are drawn at random.
        too_long: row numbers of utterances that are left out.
    """

    one_in: int

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

    @cached_property
    def needs(self) -> Needs:
        """The layout and the frames that the sampler counts: a data set has to have them."""
        packed, pad_to = self._layout()
        of_table = self.table is not None
        return Needs(type(self).__name__, packed, pad_to, of_table, self._of.random_crop_s)

    def epoch_batches(self, epoch: int) -> Batches | WindowedBatches:
        """Return the batches of an epoch, in its order."""
        if not self.shuffle:
            return self._batches_of(*self._in_order(epoch))
        if self._windows > 1:
            rows = self._of.drawn_rows(self.too_long, self.seed, epoch)
            make = partial(self._window, epoch)
            return WindowedBatches(rows, self._windows, self._per_window, make)
        own_rows = self._of.plan is not None
        rows, ends, self._count = drawn_evenly(
            self._draw, epoch, self._count, self._spare, own_rows=own_rows
        )
        order = self._order(len(ends) - 1, drawn(self.seed, "batches", epoch))
        return self._batches_of(rows, ends).take(order)

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

    def _batches_of(self, rows: Ints, ends: Ints) -> Batches:
        """Return batches of these rows that end there."""
        of = self._of
        return Batches(rows, ends, keys=of.ids, numbering=of.numbering, needs=self.needs)

    @abstractmethod
    def _layout(self) -> tuple[bool, int | tuple[int, ...] | None]:
        """Return whether batches are to be packed, and the lengths that they are padded to."""

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

    def _group_size(self, count: int) -> int:
        """Return a size of groups: so many batches of a window are rounded up to some of these.

        Groups of all windows then begin where a step of the ranks does.
        """
        return 1

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
        group = self._group_size(usual + spare)
        return min(-(-(usual + spare) // group) * group, len(rows))

    def _window(self, epoch: int, rows: Ints, number: int, count: int) -> Batches:
        """Return the batches of a window in random order."""
        key = drawn(self.seed, "window", epoch, number)
        rows, ends = self._cut_window(rows, key)
        ends = split_up(ends, count)
        return self._batches_of(rows, ends).take(self._order(len(ends) - 1, key))
