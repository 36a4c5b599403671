"""`BucketBatchSampler`: batches of utterances of similar length.

They never have more padded frames than asked for.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.errors import ConfigError, UnknownNameError, nearest
from featcache.samplers.batches import Batches
from featcache.samplers.epoch import EpochSampler, State
from featcache.samplers.lengths import Lengths, columns_of
from featcache.samplers.ranks import shuffled_in_groups, split_up
from featcache.store.format.files import digest
from featcache.tables.numbering import Numbering, column_digest

Ints = NDArray[np.int64]
TOO_LONG = ("raise", "skip")
# Utterances whose lengths differ by no more than this change places from epoch to epoch. It is the
# most that is padded for it, and half of it on average.
SPREAD = 1.05
DRAWS = 20  # of an epoch's batches, until they are not too many; then the shortest come first


class BucketBatchSampler(EpochSampler):
    """Batches of row numbers of utterances of similar length.

    The utterances change companions from epoch to epoch.

    Each utterance comes once per epoch. In every batch, the longest utterance times the number of
    utterances is at most `max_frames`, and what all its padded features hold is at most
    `max_elements` numbers. All epochs have the same number of batches: hosts ask for it once. For
    how ranks share an epoch and resume, and for the other arguments, see `EpochSampler`.

    Args: lengths: frames of each utterance, integers; or a list of such arrays, one per feature of
        the same utterances;
            or a cache, its path, a `FeatureTable` or a data set, whose features with a time axis
            all count. Frames are seconds divided by the frame shift: 400 s of 10 ms are 40,000.
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
        lengths: Lengths,
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
        if max_frames is max_elements is batch_size is None:
            raise ConfigError("a batch needs a limit: max_frames, max_elements or batch_size")
        if too_long not in TOO_LONG:
            raise UnknownNameError(
                f"too_long has no choice {too_long!r}; {nearest(too_long, TOO_LONG)}"
            )
        self.max_frames = None if max_frames is None else whole_number("max_frames", max_frames, 1)
        self.max_elements = (
            None if max_elements is None else whole_number("max_elements", max_elements, 1)
        )
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
        self.shuffle = shuffle
        self._ids = None if ids is None else self._name(list(ids))
        self._longest: Ints = (
            self._lengths[0] if len(self._lengths) == 1 else np.max(self._lengths, axis=0)
        )
        rows = _argsort(self._longest)  # the shortest first
        fits = self._fits()[rows]
        self._rows, self.too_long = rows[fits], np.sort(rows[~fits])
        if len(self.too_long):
            self._report(int(rows[~fits][-1]), leave_out=too_long == "skip")
        self._digest: str | None = None
        self._count: int | None = None

    def __repr__(self) -> str:
        limits = {
            "max_frames": self.max_frames,
            "max_elements": self.max_elements,
            "batch_size": self.batch_size,
        }
        given = "".join(f"{name}={limit}, " for name, limit in limits.items() if limit is not None)
        return f"<BucketBatchSampler: {len(self._rows)} utterances, {given}{self._where()}>"

    @property
    def padding_efficiency(self) -> float:
        """Share of real frames among all frames of this epoch's batches.

        It is over all features and ranks.
        """
        batches = self._epoch(self.epoch)
        real = padded = 0.0
        for column in self._lengths:
            frames = column[batches.items]
            real += float(frames.sum(dtype=float))
            padded += float(
                np.maximum.reduceat(frames, batches.ends[:-1]).astype(float) @ batches.sizes
            )
        return real / padded if padded else 1.0

    @cached_property
    def numbering(self) -> Numbering | None:
        """The utterances that row numbers count; None where batches hold ids."""
        if self._ids is not None:
            return None
        return Numbering(len(self._longest), self.table, self._lengths)

    def epoch_batches(self, epoch: int) -> Batches:
        """Return the batches of an epoch, in its order."""
        if not self.shuffle:
            return self._batches_of(self._rows, self._cut(self._rows, 0))
        if self._count is None:
            self._count = self._count_batches()
        random = np.random.default_rng((self.seed, epoch))
        for _ in range(DRAWS):
            rows = self._drawn(random)
            # a first batch of any size moves the ends of all others: neighbours part also where
            # utterances are few
            ends = self._cut(rows, random.random())
            if len(ends) - 1 <= self._count:
                break
        else:
            rows, ends = self._rows, self._cut(self._rows, 0)
        batches = self._batches_of(rows, split_up(ends, self._count))
        return batches.take(shuffled_in_groups(len(batches), random))

    def settings(self) -> State:
        """Return what the order depends on.

        The limits, whether it is shuffled, and a digest of the lengths.
        """
        if self._digest is None:
            named = (
                ""
                if self._ids is None
                else digest("\0".join(self._ids).encode(errors="surrogatepass"))
            )
            self._digest = digest("".join([*map(column_digest, self._lengths), named]).encode())
        return {
            "data": self._digest,
            "max_frames": self.max_frames,
            "max_elements": self.max_elements,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
        }

    def _drawn(self, random: np.random.Generator) -> Ints:
        """Return the rows by length, those of about the same length in random order."""
        rows = self._rows.copy()
        for begin, end in pairwise(_bucket_ends(self._longest[rows], random.random())):
            random.shuffle(rows[begin:end])
        return rows

    def _count_batches(self) -> int:
        """Return a number of batches that epochs seldom exceed, and that none is far below."""
        fewest = len(self._cut(self._rows, 0)) - 1
        usual = len(self._cut(self._drawn(np.random.default_rng(self.seed)), 0.5)) - 1
        return min(max(usual + (usual - fewest) // 4, fewest), len(self._rows))

    def _batches_of(self, rows: Ints, ends: Ints) -> Batches:
        return Batches(rows, ends, self._ids, self.numbering)

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
            return _ends(
                frames, min(cap, self.max_elements // max(self._frame_elements[0], 1)), size
            )
        columns = [column[rows] for column in self._lengths]
        return _ends_of_several(columns, self._frame_elements, cap, self.max_elements, size)

    def _fits(self) -> NDArray[np.bool_]:
        fits = np.ones(len(self._longest), bool)
        if self.max_frames is not None:
            fits &= self._longest <= self.max_frames
        if self.max_elements is not None:
            elements = [
                n * column for n, column in zip(self._frame_elements, self._lengths, strict=True)
            ]
            fits &= np.sum(elements, axis=0) <= self.max_elements
        return fits

    def _name(self, ids: list[str]) -> list[str]:
        """Take the lengths of these utterances, where they come from a table."""
        if len(set(ids)) < len(ids):
            raise ConfigError("ids names an utterance twice")
        if self.table is not None:
            rows = self.table.rows(ids)
            self._lengths = [column[rows] for column in self._lengths]
        elif len(ids) != len(self._lengths[0]):
            raise ConfigError(f"{len(ids)} ids for {len(self._lengths[0])} lengths")
        if not ids:
            raise ConfigError("there are no utterances to sample: ids is empty")
        return ids

    def _report(self, longest: int, *, leave_out: bool) -> None:
        named = (
            f"row {longest}"
            if self.table is None
            else f"{self.table.id(longest)!r} (row {longest})"
        )
        if self._ids is not None:
            named = repr(self._ids[longest])
        limits = {"max_frames": self.max_frames, "max_elements": self.max_elements}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        what = (
            f"{len(self.too_long)} of {len(self._longest)} utterances are longer than "
            f"{' or '.join(f'{name}={limit}' for name, limit in given.items())}, the longest is "
            f"{named} with "
            f"{self._longest[longest]} frames"
        )
        if leave_out and len(self._rows):
            warnings.warn(f"{what}; they are left out", stacklevel=3)
        else:
            how = "" if leave_out else ", or leave them out: too_long=skip"
            raise ConfigError(f"{what}; raise {' or '.join(given)}{how}")


def _bucket_ends(frames: Ints, phase: float) -> list[int]:
    """Return where sorted lengths pass from one bucket to the next.

    Each is SPREAD times as long as the one before.
    """
    exponents = np.arange(np.log(max(frames[-1], 1)) / np.log(SPREAD) + 1) + phase
    return [0, *np.searchsorted(frames, SPREAD**exponents).tolist(), len(frames)]


def _ends(frames: Ints, cap: int, size: int) -> Iterator[int]:
    """Give the ends of batches that take utterances in order until one would break a limit."""
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


def _ends_of_several(
    columns: list[Ints], frame_elements: list[int], cap: int, most: int, size: int
) -> Iterator[int]:
    """Give the ends of batches of several features, which together hold at most `most` numbers."""
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
    return np.argsort(
        lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths, kind="stable"
    )
