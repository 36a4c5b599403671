"""`BucketBatchSampler`: batches of utterances of like lengths, within limits."""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache._cached import cached_property
from featcache._checks import whole_number
from featcache.errors import ConfigError, UnknownNameError, nearest
from featcache.format.files import digest
from featcache.interface import Ints
from featcache.reading.opening import CachePath
from featcache.samplers.batches import Batches
from featcache.samplers.epoch import (
    GROUP_SIZES,
    EpochSampler,
    State,
    shuffled_in_groups,
    split_up,
)
from featcache.samplers.order import Order, drawn, orders, share_of
from featcache.samplers.windows import (
    DEVIATIONS,
    MOST_AT_ONCE,
    WINDOW,
    WindowedBatches,
    Without,
    spare_batches,
    windows_of,
)
from featcache.tables.columns import stable_order
from featcache.tables.table import (
    FeatureTable,
    HasSome,
    HasTable,
    Numbering,
    RowOrder,
    column_digest,
    within_table,
)

# Lengths of the utterances to batch: of arrays, or of the features of a cache.

LengthsLike = ArrayLike | Sequence[ArrayLike] | CachePath | FeatureTable | HasTable | HasSome


def columns_of(lengths: LengthsLike) -> tuple[list[Ints], list[int], FeatureTable | None]:
    """Return the frames of all utterances and the numbers of a frame, and the table.

    Of each feature that has a time axis, or of each array. Raises `ConfigError` for what is
    neither, for no utterances and for features of different ones.
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
        columns = [_checked(f"lengths of feature {name!r}", made.lengths(name)) for name in names]
        return columns, [math.prod(made.dims(name)) for name in names], table
    if isinstance(lengths, list | tuple) and len(lengths) > 0 and np.ndim(lengths[0]) > 0:
        arrays = {f"lengths[{number}]": array for number, array in enumerate(lengths)}
    else:
        arrays = {"lengths": lengths}
    columns = [_checked(name, np.asarray(array)) for name, array in arrays.items()]
    counts = list(map(len, columns))
    if len(set(counts)) > 1:
        raise ConfigError(f"the features have lengths for {counts} utterances; give the same ones")
    return columns, [1] * len(columns), None


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


# `BatchLimits`: the most that a batch may hold, padding included, and cuts that keep to it.


@dataclass(frozen=True)
class BatchLimits:
    """The most frames, the most numbers of all features, and the most utterances of a batch."""

    max_frames: int | None
    max_elements: int | None
    batch_size: int | None

    @classmethod
    def of(
        cls, max_frames: int | None, max_elements: int | None, batch_size: int | None
    ) -> BatchLimits:
        """Check limits: whole numbers from 1 on, at least one of them."""
        if max_frames is max_elements is batch_size is None:
            raise ConfigError("a batch needs a limit: max_frames, max_elements or batch_size")
        return cls(
            _checked_limit("max_frames", max_frames),
            _checked_limit("max_elements", max_elements),
            _checked_limit("batch_size", batch_size),
        )

    def named(self, *names: str) -> list[str]:
        """Return those of some limits that are set, as "max_frames=2000"."""
        return [f"{name}={vars(self)[name]}" for name in names if vars(self)[name] is not None]

    def fits(self, columns: Sequence[Ints], frame_elements: Sequence[int]) -> NDArray[np.bool_]:
        """Return for each utterance whether it is within the limits by itself.

        `columns` are the lengths of each feature, `frame_elements` the numbers of its frames.
        """
        fits = np.ones(len(columns[0]), bool)
        if self.max_frames is not None:
            fits &= longest_of(columns) <= self.max_frames
        if self.max_elements is not None:
            elements = [n * column for n, column in zip(frame_elements, columns, strict=True)]
            fits &= np.sum(elements, axis=0) <= self.max_elements
        return fits

    def ends(self, columns: Sequence[Ints], frame_elements: Sequence[int]) -> Iterator[int]:
        """Yield the ends of batches that take utterances in order until one would break a limit."""
        count = len(columns[0])
        size = count if self.batch_size is None else self.batch_size
        if len(columns) > 1 and self.max_elements is not None:
            return self._ends_of_several(columns, frame_elements, size)
        frames = longest_of(columns)
        cap = int(frames.max()) * count if self.max_frames is None else self.max_frames
        if self.max_elements is not None:
            cap = min(cap, self.max_elements // max(frame_elements[0], 1))
        return _ends(frames, cap, size)

    def _ends_of_several(
        self, columns: Sequence[Ints], frame_elements: Sequence[int], size: int
    ) -> Iterator[int]:
        end = count = 0
        longest = [0] * len(columns)
        for lengths in zip(*(column.data for column in columns), strict=True):
            count += 1
            longest = list(map(max, longest, lengths))
            elements = sum(map(operator.mul, frame_elements, longest))
            too_long = self.max_frames is not None and count * max(longest) > self.max_frames
            if too_long or count * elements > (self.max_elements or 0) or count > size:
                end += count - 1
                yield end
                count, longest = 1, list(lengths)
        yield len(columns[0])


def _checked_limit(name: str, limit: int | None) -> int | None:
    return None if limit is None else whole_number(name, limit, 1)


def longest_of(columns: Sequence[Ints]) -> Ints:
    """Return the length of each utterance's longest feature."""
    longest: Ints = columns[0] if len(columns) == 1 else np.max(columns, axis=0)
    return longest


def _ends(frames: Ints, cap: int, size: int) -> Iterator[int]:
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

TOO_LONG = ("raise", "skip")
# Utterances whose lengths differ by no more than this change places from epoch to epoch. It is the
# most that is padded for it, and half of it on average.
SPREAD = 1.05
DRAWS = 20  # of an epoch's batches, until they are not too many


class BucketBatchSampler(EpochSampler):
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
        max_elements: the most numbers in a batch, padding included, over all features: frames times
            the numbers of a frame, which a cache knows; of arrays of lengths a frame counts as one.
        batch_size: the most utterances in a batch; one of the three limits is needed.
        shuffle: False gives the shortest first, the same in every epoch.
        too_long: what becomes of utterances that are over a limit by themselves: "raise", or "skip"
            to leave them out with a warning. The attribute `too_long` holds their row numbers.

    Raises `ConfigError` for what cannot work.

    >>> sampler = BucketBatchSampler([70, 300, 80, 310, 75], max_frames=620, shuffle=False)
    >>> list(sampler)
    [[0, 4, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: LengthsLike,
        *,
        ids: Iterable[str] | None = None,
        max_frames: int | None = None,
        max_elements: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        too_long: Literal["raise", "skip"] = "raise",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed=seed, rank=rank, world_size=world_size, drop_last=drop_last)
        self._lengths, self._frame_elements, self.table = columns_of(lengths)
        if not self._lengths:
            raise ConfigError(
                f"no feature of {lengths!r} has a time axis; give lengths of your own"
            )
        if too_long not in TOO_LONG:
            raise UnknownNameError(
                f"too_long has no choice {too_long!r}; {nearest(too_long, TOO_LONG)}"
            )
        self._limits = limits = BatchLimits.of(max_frames, max_elements, batch_size)
        self.max_frames, self.max_elements, self.batch_size = astuple(limits)
        self.shuffle = shuffle
        self._ids = None if ids is None else self._name(list(ids))
        self._longest = longest_of(self._lengths)
        self.too_long = self._over_limits()
        if len(self.too_long):
            self._report(leave_out=too_long == "skip")
        self._plan = None if self.table is None else self.table.plan
        rows = len(self._longest) - len(self.too_long) if self._plan is None else self._plan.size
        self._windows = windows_of(rows) if shuffle else 1
        self._number = rows
        self._count = 0  # of the batches of each epoch, or of each window, once it is known

    def __repr__(self) -> str:
        limits = ", ".join(self._limits.named("max_frames", "max_elements", "batch_size"))
        return f"<BucketBatchSampler: {self._number} utterances, {limits}, {self._where()}>"

    @property
    def padding_efficiency(self) -> float:
        """Share of real frames among all frames of this epoch's batches: all features and ranks."""
        batches = self._epoch(self.epoch)
        real = padded = 0.0
        for some, column in product(batches.windows, self._lengths):
            frames = column[some.items]
            real += float(frames.sum(dtype=float))
            padded += float(np.maximum.reduceat(frames, some.ends[:-1]).astype(float) @ some.sizes)
        return real / padded if padded else 1.0

    @cached_property
    def numbering(self) -> Numbering | None:
        """The utterances that row numbers count; None where batches hold ids."""
        if self._ids is not None:
            return None
        return Numbering(len(self._longest), self.table, self._lengths)

    def epoch_batches(self, epoch: int) -> Batches | WindowedBatches:
        """Return the batches of an epoch, in its order."""
        if not self.shuffle:
            rows = self._rows_of(epoch)
            return self._batches_of(rows, self._cut(rows, 0))
        if self._windows > 1:
            make = partial(self._window, epoch)
            return WindowedBatches(self._order(epoch), self._windows, self._per_window, make)
        rows, ends = self._draw(epoch)
        batches = self._batches_of(rows, split_up(ends, self._count))
        return batches.take(shuffled_in_groups(len(batches), drawn(self.seed, "batches", epoch)))

    def settings(self) -> State:
        """Return what the order depends on: limits, shuffle, and a digest of the lengths."""
        return {
            "data": self._digest,
            "max_frames": self.max_frames,
            "max_elements": self.max_elements,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            **({"window": WINDOW} if self._windows > 1 else {}),
        }

    @cached_property
    def _digest(self) -> str:
        ids = "\0".join(self._ids or ()).encode(errors="surrogatepass")
        plan = "" if self._plan is None else self._plan.digest
        return digest("".join([*map(column_digest, self._lengths), digest(ids), plan]).encode())

    def _over_limits(self) -> Ints:
        """Return the rows that are over a limit by themselves; memory for some at a time."""
        found = [np.empty(0, np.int64)]
        for begin in range(0, len(self._longest), MOST_AT_ONCE):
            some = [column[begin : begin + MOST_AT_ONCE] for column in self._lengths]
            found.append(begin + np.flatnonzero(~self._limits.fits(some, self._frame_elements)))
        return np.concatenate(found)

    @cached_property
    def _sorted(self) -> Ints:
        """All rows that are batched, the shortest first."""
        rows = stable_order(self._longest)
        if len(self.too_long):
            fits = np.ones(len(rows), bool)
            fits[self.too_long] = False
            rows = rows[fits[rows]]
        return rows

    def _rows_of(self, epoch: int) -> Ints:
        """Return the rows of an epoch, the shortest first."""
        return self._sorted if self._plan is None else self._by_length(self._order(epoch)[:])

    def _by_length(self, rows: Ints) -> Ints:
        return rows[stable_order(self._longest[rows])]

    def _order(self, epoch: int) -> RowOrder:
        """Return the rows of an epoch in the order that they are drawn in."""
        if self._plan is not None:
            return self._plan.order(epoch, self.seed)
        order = Order(self._number, drawn(self.seed, "rows", epoch))
        return Without(order, self.too_long)

    @cached_property
    def _per_window(self) -> int:
        """The batches of each window."""
        rows = self._by_length(self._order(0)[: self._number // self._windows])
        usual = len(self._cut(rows, 0)) - 1
        spare = spare_batches(usual, self._longest[rows], DEVIATIONS) + 1
        # so that the groups of all windows begin where a step of the ranks does
        whole_groups = -(-(usual + spare) // GROUP_SIZES[-1]) * GROUP_SIZES[-1]
        return min(whole_groups, len(rows))

    def _window(self, epoch: int, rows: Ints, number: int, count: int) -> Batches:
        """Return the batches of a window in random order."""
        key, rows = drawn(self.seed, "window", epoch, number), self._by_length(rows)
        ends = split_up(self._cut(rows, share_of(drawn(key, "first"))), count)
        return self._batches_of(rows, ends).take(shuffled_in_groups(len(ends) - 1, key))

    def _draw(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the rows of an epoch, and where its batches end.

        Epoch 0 settles how many they are; it comes again where no draw of an epoch keeps to that.
        An epoch of a mix, which has rows of its own, then has more.
        """
        if epoch and not self._count:
            self._draw(0)
        for number in range(DRAWS if epoch else 0):
            key = drawn(self.seed, "rows", epoch, number)
            rows = self._ordered(epoch, key)
            # a first batch of any size moves the ends of all others: neighbours part also where
            # utterances are few
            ends = self._cut(rows, share_of(drawn(key, "first")))
            if len(ends) - 1 <= self._count:
                return rows, ends
        again = 0 if self._plan is None else epoch
        rows = self._ordered(again, drawn(self.seed, "rows", again, 0))
        ends = self._cut(rows, 0.5)
        if not again:
            usual = len(ends) - 1
            varies = self._plan is not None and self._plan.varies
            spare = spare_batches(usual, self._longest[rows], 4 if varies else 0)
            self._count = min(usual + spare, len(rows))
        return rows, ends

    def _ordered(self, epoch: int, key: int) -> Ints:
        """Return the rows by length, those of about the same length in random order."""
        rows = self._rows_of(epoch).copy()
        ends = _bucket_ends(self._longest[rows], share_of(drawn(key, "bounds")))
        sizes = np.diff(ends)
        several = np.flatnonzero(sizes > 1)
        keys = [drawn(key, "bucket", number) for number in several.tolist()]
        for begin, order in zip(ends[several], orders(sizes[several], keys), strict=True):
            rows[begin : begin + len(order)] = rows[begin:][order]
        return rows

    def _batches_of(self, rows: Ints, ends: Ints) -> Batches:
        return Batches(rows, ends, keys=self._ids, numbering=self.numbering)

    def _cut(self, rows: Ints, phase: float) -> Ints:
        """Return where batches of `rows` end; the first is cut short by a share of `phase`."""
        first = next(self._ends(rows))
        skip = int(first * phase) if first < len(rows) else 0
        ends = np.fromiter(self._ends(rows[skip:]), np.int64) + skip
        return np.concatenate([[0, skip] if skip else [0], ends])

    def _ends(self, rows: Ints) -> Iterator[int]:
        columns = [self._longest] if self.max_elements is None else self._lengths
        return self._limits.ends([column[rows] for column in columns], self._frame_elements)

    def _name(self, ids: list[str]) -> list[str]:
        """Take the lengths of these utterances, where they come from a table."""
        if len(set(ids)) < len(ids):
            raise ConfigError("ids names an utterance twice")
        if self.table is not None:
            if self.table.plan is not None:
                raise ConfigError("ids= chooses of a mix; select them of its sources instead")
            rows = self.table.rows(ids)
            self._lengths = [column[rows] for column in self._lengths]
        elif len(ids) != len(self._lengths[0]):
            raise ConfigError(f"{len(ids)} ids for {len(self._lengths[0])} lengths")
        if not ids:
            raise ConfigError("there are no utterances to sample: ids is empty")
        return ids

    def _report(self, *, leave_out: bool) -> None:
        """Warn of the utterances that are too long, the longest above all, or refuse them."""
        longest = int(self._by_length(self.too_long)[-1])
        limits = self._limits.named("max_frames", "max_elements")
        what = (
            f"{len(self.too_long)} of {len(self._longest)} utterances are longer than "
            f"{' or '.join(limits)}, the longest is {self._named(longest)} with "
            f"{self._longest[longest]} frames"
        )
        if leave_out and self.table is not None and self.table.plan is not None:
            raise ConfigError(f"{what}; leave them out of the sources of the mix, with filter")
        if leave_out and len(self.too_long) < len(self._longest):
            warnings.warn(f"{what}; they are left out", stacklevel=3)
        else:
            names = " or ".join(limit.partition("=")[0] for limit in limits)
            how = "" if leave_out else ", or leave them out: too_long=skip"
            raise ConfigError(f"{what}; raise {names}{how}")

    def _named(self, row: int) -> str:
        if self._ids is not None:
            return repr(self._ids[row])
        return f"row {row}" if self.table is None else f"{self.table.id(row)!r} (row {row})"


def _bucket_ends(frames: Ints, phase: float) -> Ints:
    """Return where sorted lengths pass from one bucket to the next.

    Each is SPREAD times as long as the one before.
    """
    exponents = np.arange(np.log(max(frames[-1], 1)) / np.log(SPREAD) + 1) + phase
    return np.concatenate([[0], np.searchsorted(frames, SPREAD**exponents), [len(frames)]])
