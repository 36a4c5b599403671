"""`BucketBatchSampler`: batches of utterances of similar length, never more padded frames than asked for."""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError, UnknownNameError, nearest
from featcache.loading.batches import Batches
from featcache.loading.samplers.epoch import EpochSampler, State
from featcache.loading.samplers.sharing import shuffled_in_groups, whole_number
from featcache.loading.samplers.utterances import HasTable
from featcache.loading.table import FeatureTable
from featcache.store.cache import Cache, CachePath
from featcache.store.files import digest

Ints = NDArray[np.int64]
TOO_LONG = ("error", "skip")
# Utterances whose lengths differ by no more than this change places from epoch to epoch. It is the most that is padded
# for it, and half of it on average.
SPREAD = 1.05


Frames = NDArray[np.integer[Any]] | Sequence[int]
Lengths = Frames | Sequence[Frames] | Cache | CachePath | FeatureTable | HasTable


class BucketBatchSampler(EpochSampler):
    """Batches of row numbers of utterances of similar length, which change companions from epoch to epoch.

    Each utterance comes once per epoch. In every batch, the longest utterance times the number of utterances is at
    most `max_frames`, and what all its padded features hold is at most `max_elements` numbers. The number of batches
    may differ a little from epoch to epoch. For how ranks share an epoch and resume, and for the other arguments, see
    `EpochSampler`.

    Args:
        lengths: frames of each utterance, integers; or a list of such arrays, one per feature of the same utterances;
            or a cache, its path, a `FeatureTable` or a data set, whose features with a time axis all count.
        max_frames: the most frames in a batch, padding included; of each feature on its own.
        max_elements: the most numbers in a batch, padding included, over all features: frames times the numbers of a
            frame, which a cache knows; of arrays of lengths a frame counts as one.
        batch_size: the most utterances in a batch; one of the three limits is needed.
        shuffle: False gives the shortest first, the same in every epoch.
        too_long: what becomes of utterances that are over a limit by themselves: "error", or "skip" to leave them out
            with a warning. The attribute `too_long` holds their row numbers.

    Raises `ConfigError` for what cannot work.

    >>> sampler = BucketBatchSampler([70, 300, 80, 310, 75], max_frames=620, shuffle=False)
    >>> list(sampler)
    [[0, 4, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        max_frames: int | None = None,
        max_elements: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        too_long: Literal["error", "skip"] = "error",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed=seed, rank=rank, world_size=world_size, drop_last=drop_last)
        if max_frames is max_elements is batch_size is None:
            raise ConfigError("a batch needs a limit: max_frames, max_elements or batch_size")
        if too_long not in TOO_LONG:
            raise UnknownNameError(f"too_long has no choice {too_long!r}; {nearest(too_long, TOO_LONG)}")
        self.max_frames = None if max_frames is None else whole_number("max_frames", max_frames, 1)
        self.max_elements = None if max_elements is None else whole_number("max_elements", max_elements, 1)
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
        self.shuffle = shuffle
        self._lengths, self._frame_elements, self.table = _columns(lengths)
        self._longest: Ints = self._lengths[0] if len(self._lengths) == 1 else np.max(self._lengths, axis=0)
        rows = _argsort(self._longest)  # the shortest first
        fits = self._fits()[rows]
        self._rows, self.too_long = rows[fits], np.sort(rows[~fits])
        if len(self.too_long):
            self._report(int(rows[~fits][-1]), leave_out=too_long == "skip")
        self._digest: str | None = None

    def __repr__(self) -> str:
        limits = {"max_frames": self.max_frames, "max_elements": self.max_elements, "batch_size": self.batch_size}
        return (
            f"<BucketBatchSampler: {len(self._rows)} utterances in {len(self._all_batches())} batches, "
            + "".join(f"{name}={limit}, " for name, limit in limits.items() if limit is not None)
            + f"padding efficiency {self.padding_efficiency:.3f}, epoch {self.epoch}, "
            f"rank {self.rank} of {self.world_size}>"
        )

    @property
    def padding_efficiency(self) -> float:
        """Share of real frames among all frames of this epoch's batches, over all features and ranks."""
        batches = self._all_batches()
        real = padded = 0.0
        for column in self._lengths:
            frames = column[batches.items]
            real += float(frames.sum(dtype=float))
            padded += float(np.maximum.reduceat(frames, batches.ends[:-1]).astype(float) @ batches.sizes)
        return real / padded if padded else 1.0

    def epoch_batches(self, epoch: int) -> Batches:
        """Return the batches of an epoch, in its order."""
        if not self.shuffle:
            return Batches(self._rows, self._cut(self._rows, 0))
        random = np.random.default_rng((self.seed, epoch))
        rows = self._rows.copy()
        for begin, end in pairwise(_bucket_ends(self._longest[rows], random.random())):
            random.shuffle(rows[begin:end])
        # a first batch of any size moves the ends of all others: neighbours part also where utterances are few
        batches = Batches(rows, self._cut(rows, random.random()))
        return batches.take(shuffled_in_groups(len(batches), random))

    def settings(self) -> State:
        """Return what the order depends on: the limits, whether it is shuffled, and a digest of the lengths."""
        if self._digest is None:
            digests = [digest(np.ascontiguousarray(column).data) for column in self._lengths]
            self._digest = digest("".join(digests).encode())
        return {
            "data": self._digest,
            "max_frames": self.max_frames,
            "max_elements": self.max_elements,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
        }

    def _cut(self, rows: Ints, phase: float) -> Ints:
        first = next(self._ends(rows))
        skip = int(first * phase) if first < len(rows) else 0
        ends = np.fromiter(self._ends(rows[skip:]), np.int64) + skip
        return np.concatenate([[0, skip] if skip else [0], ends])

    def _ends(self, rows: Ints) -> Iterator[int]:
        size = len(rows) if self.batch_size is None else self.batch_size
        frames = self._longest[rows]
        cap = int(frames.max()) * len(frames) if self.max_frames is None else self.max_frames
        if self.max_elements is None:
            return _ends(frames, cap, size)
        if len(self._lengths) == 1:
            return _ends(frames, min(cap, self.max_elements // max(self._frame_elements[0], 1)), size)
        columns = [column[rows] for column in self._lengths]
        return _ends_of_several(columns, self._frame_elements, cap, self.max_elements, size)

    def _fits(self) -> NDArray[np.bool_]:
        fits = np.ones(len(self._longest), bool)
        if self.max_frames is not None:
            fits &= self._longest <= self.max_frames
        if self.max_elements is not None:
            elements = [n * column for n, column in zip(self._frame_elements, self._lengths, strict=True)]
            fits &= np.sum(elements, axis=0) <= self.max_elements
        return fits

    def _report(self, longest: int, *, leave_out: bool) -> None:
        named = f"row {longest}" if self.table is None else f"{self.table.id(longest)!r} (row {longest})"
        limits = {"max_frames": self.max_frames, "max_elements": self.max_elements}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        what = (
            f"{len(self.too_long)} of {len(self._longest)} utterances are longer than "
            f"{' or '.join(f'{name}={limit}' for name, limit in given.items())}, the longest is {named} with "
            f"{self._longest[longest]} frames"
        )
        if leave_out and len(self._rows):
            warnings.warn(f"{what}; they are left out", stacklevel=3)
        else:
            how = "" if leave_out else ", or leave them out: too_long=skip"
            raise ConfigError(f"{what}; raise {' or '.join(given)}{how}")


def _bucket_ends(frames: Ints, phase: float) -> list[int]:
    """Return where sorted lengths pass from one bucket to the next, each SPREAD times as long as the one before."""
    exponents = np.arange(np.log(max(frames[-1], 1)) / np.log(SPREAD) + 1) + phase
    return [0, *np.searchsorted(frames, SPREAD**exponents).tolist(), len(frames)]


def _ends(frames: Ints, cap: int, size: int) -> Iterator[int]:
    """Give the ends of batches that take one utterance after the other until another would break a limit."""
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


def _ends_of_several(columns: list[Ints], frame_elements: list[int], cap: int, most: int, size: int) -> Iterator[int]:
    """Give the ends of batches of several features, which all together hold at most `most` numbers."""
    end = count = 0
    longest = [0] * len(columns)
    for lengths in zip(*(column.data for column in columns), strict=True):
        count += 1
        longest = list(map(max, longest, lengths))
        elements = sum(map(operator.mul, frame_elements, longest))
        if count * max(longest) > cap or count * elements > most or count > size:
            end += count - 1
            yield end
            count, longest = 1, list(lengths)
    yield len(columns[0])


def _argsort(lengths: Ints) -> Ints:
    """Sort the row numbers by length, rows of one length in their order."""
    # NumPy sorts 16 bits by radix: a third of the time
    return np.argsort(lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths, kind="stable")


def _columns(lengths: Lengths) -> tuple[list[Ints], list[int], FeatureTable | None]:
    """Return the lengths of each feature, the numbers of a frame, and the table that they come from, if any."""
    if isinstance(lengths, Cache | str | os.PathLike):
        lengths = FeatureTable.of(lengths)
    table = lengths if isinstance(lengths, FeatureTable) else getattr(lengths, "table", None)
    if isinstance(table, FeatureTable):
        source = cast(FeatureTable | HasTable, lengths)
        names = [name for name in source.features if table.has_frames(name)]
        if not names:
            raise ConfigError(f"no feature of {source!r} has a time axis; give lengths of your own")
        frame_elements = [math.prod(table.dims(name)) for name in names]
        return [_checked(table.lengths(name)) for name in names], frame_elements, table
    several = isinstance(lengths, list | tuple) and len(lengths) > 0 and np.ndim(lengths[0]) == 1
    columns = [_checked(column) for column in (cast(list[object], lengths) if several else [lengths])]
    if len(set(map(len, columns))) > 1:
        raise ConfigError(f"the features have lengths for {[*map(len, columns)]} utterances, not for the same ones")
    return columns, [1] * len(columns), None


def _checked(lengths: object) -> Ints:
    array = np.asarray(lengths)
    if array.ndim == 1 and len(array) == 0:
        raise ConfigError("there are no utterances to sample: lengths is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"lengths are frames of each utterance, integers, not {array.dtype} of shape {array.shape}")
    frames = array.astype(np.int64, copy=False)
    if frames.min() < 0:
        row = int(frames.argmin())
        raise ConfigError(f"lengths cannot be negative: row {row} has {array[row]}")
    return frames
