"""Batches of utterances as two arrays, row numbers that know their table, and windows of epochs.

A million batches take no longer to make than a sort. Epochs of very many rows are made window by
window of the order that a seed draws. A window is a random part of the rows, so sorting it by
length pads as little as sorting all, and the first batch is there after one window, also after a
resume. Each window has one number of batches: a place in the epoch is found without the windows
before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar, cast, overload, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from featcache._cached import cached_property
from featcache.errors import ConfigError
from featcache.format import digest, ends_of
from featcache.interface import Ints
from featcache.tables import FeatureTable, MixOrder, Order, RowOrder

K = TypeVar("K")

# Data sets over the rows of a table: the table of each, whoever made it smaller.


@runtime_checkable
class HasTable(Protocol):
    """A data set over the rows of a table, as `FeatureDataset` is."""

    @property
    def table(self) -> FeatureTable:
        """The rows that it reads."""

    @property
    def features(self) -> Sequence[str]:
        """Names of the features that it reads."""


@runtime_checkable
class HasSome(Protocol):
    """Some items of a data set, as torch's `Subset` and what its `random_split` gives."""

    @property
    def dataset(self) -> object:
        """The data set that they are of."""

    @property
    def indices(self) -> Sequence[int]:
        """Their places in it."""


def within_table(dataset: object) -> tuple[HasTable, FeatureTable] | None:
    """Return the data set over a table that this one is or is made of, and the view that it is.

    None for other data sets.
    """
    if isinstance(dataset, FeatureTable | HasTable):
        return dataset, dataset.table
    found = within_table(dataset.dataset) if isinstance(dataset, HasSome) else None
    if found is None:
        return None
    return found[0], found[1].select(cast(HasSome, dataset).indices)


# Row numbers that know which utterances they count: none is taken for a row of other data.


class Numbering:
    """The utterances that row numbers count: rows of a table, or of arrays of lengths alone."""

    def __init__(
        self,
        count: int,
        table: FeatureTable | None = None,
        lengths: Sequence[Ints] = (),
        *,
        proof: tuple[object, ...] | None = None,
    ) -> None:
        self._count = count
        self._lengths = lengths
        self._known_proof = proof
        self.table = table

    @cached_property
    def proof(self) -> tuple[object, ...]:
        """Digests of what is counted: whether it is a table, how many, and what of."""
        if self._known_proof is not None:
            return self._known_proof
        if self.table is not None:
            return True, len(self.table), self.table.digest
        return False, self._count, *map(column_digest, self._lengths)

    @classmethod
    def of_proof(cls, proof: tuple[object, ...]) -> Numbering:
        """Return a numbering of which nothing but its proof is known, as in another process."""
        return cls(0, proof=proof)

    def __reduce__(self) -> tuple[object, ...]:
        return Numbering.of_proof, (self.proof,)


@dataclass(frozen=True)
class Needs:
    """The layout and the frames that a sampler counted, by which its batches keep to its limits.

    Attributes:
        sampler: name of the sampler's class.
        packed: whether it counted no padding.
        pad_to: lengths that it counted padding to; None: to the longest of a batch.
        of_table: whether it knows the table, and so the crops of a data set.
        random_crop_s: seconds of the crops that it counted; None: whole utterances.
    """

    sampler: str
    packed: bool
    pad_to: int | tuple[int, ...] | None
    of_table: bool
    random_crop_s: float | None


class BatchOf(list[K]):
    """Row numbers or ids of a batch: a list that also says what its numbers count, and its draw.

    Attributes:
        numbering: the utterances that row numbers count, where that is known.
        draw: seed and epoch of the sampler, where it has them: what is random for the utterances of
            the batch is drawn of these, in whatever process.
        needs: the layout and the frames that the sampler counted, where it counts any.
    """

    __slots__ = ("draw", "needs", "numbering")

    def __init__(
        self,
        keys: Iterable[K],
        numbering: Numbering | None,
        draw: tuple[int, int] | None,
        needs: Needs | None = None,
    ) -> None:
        super().__init__(keys)
        self.numbering = numbering
        self.draw = draw
        self.needs = needs

    def __reduce__(self) -> tuple[object, ...]:
        return BatchOf, (list(self), self.numbering, self.draw, self.needs)


def require_rows_of(table: FeatureTable, numbering: Numbering) -> None:
    """Raise `ConfigError` unless the numbers are proved to be rows of this table.

    Lengths alone prove it where they are those of all its rows, in their order.
    """
    if numbering.table is not None and numbering.table.selection is table.selection:
        return
    of_table, count, *digests = numbering.proof
    if of_table:
        if digests != [table.digest]:
            raise ConfigError(
                f"the batch sampler numbers {count} utterances of a cache, which are not those of "
                f"{table!r}: give both the same caches, opened once, as one may grow in between"
            )
        return
    names = [name for name in table.features if table.has_frames(name)]
    columns = {column_digest(table.lengths(name)) for name in names}
    if count != len(table) or not columns.issuperset(digests):
        raise ConfigError(
            f"the batch sampler numbers the {count} utterances of a list of lengths, and nothing "
            f"tells that these are the rows of {table!r} in their order: make the sampler from the "
            "cache, or have it name its utterances: BucketBatchSampler(lengths, ids=[...])"
        )


def column_digest(column: Ints) -> str:
    """Return a digest of lengths."""
    return digest(np.ascontiguousarray(column, np.int64).data)


# Batches of utterances as two arrays: a million of them take no longer to make than a sort.


class ShareOut(Protocol):
    """Cuts batches so that ranks can share them: `share_out`, but for `drop_last`."""

    def __call__(self, ends: Ints, position: int, world_size: int) -> Ints:
        """Return where the batches from a position on begin and end."""


class EpochBatches(Protocol):
    """Batches of an epoch, or of what is left of one."""

    def __len__(self) -> int:
        """Count the batches."""

    @property
    def utterances(self) -> int:
        """Utterances of the whole epoch."""

    def end(self, number: int) -> int:
        """Return how many utterances of the epoch come before a batch."""

    def number_at(self, position: int) -> int:
        """Return the number of the batch that has the utterance at a position, if any has."""

    def batch(self, number: int) -> list[int] | list[str]:
        """Return a batch."""


class Batches(Sequence[list[int] | list[str]]):
    """A list of batches, each a list of row numbers, or of ids where `keys` are given.

    Batch b is `items[ends[b]:ends[b + 1]]`. `numbering` says which utterances row numbers count,
    `draw` of which seed and epoch they are, where that is known, `needs` what a sampler counted.

    >>> Batches([2, 0, 1], [0, 1, 3])[1]
    [0, 1]
    >>> list(Batches([2, 0, 1], [0, 1, 3], keys=["x", "y", "z"]))
    [['z'], ['x', 'y']]
    """

    def __init__(
        self,
        items: ArrayLike | RowOrder,
        ends: ArrayLike,
        *,
        keys: Sequence[str] | None = None,
        numbering: Numbering | None = None,
        draw: tuple[int, int] | None = None,
        needs: Needs | None = None,
    ) -> None:
        drawn = isinstance(items, Order | MixOrder)  # when they are asked for
        self._items = cast(RowOrder, items) if drawn else np.asarray(items, np.int64)
        self.ends: Ints = np.asarray(ends, np.int64)
        self.keys = keys
        self.numbering = numbering
        self.draw = draw
        self.needs = needs

    @classmethod
    def of(cls, batches: Sequence[Sequence[int]]) -> Batches:
        """Make them from lists of row numbers."""
        return cls([item for batch in batches for item in batch], ends_of(list(map(len, batches))))

    @property
    def items(self) -> Ints:
        """The row numbers of all batches."""
        return self._items[:]

    @property
    def sizes(self) -> Ints:
        """Utterances of each batch."""
        return np.diff(self.ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, index: int) -> list[int] | list[str]: ...
    @overload
    def __getitem__(self, index: slice) -> Batches: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[str] | Batches:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self.batch(range(len(self))[index])

    def __iter__(self) -> Iterator[list[int] | list[str]]:
        for begin, end in zip(self.ends[:-1].tolist(), self.ends[1:].tolist(), strict=True):
            yield self._named(self._items[begin:end].tolist())

    def __repr__(self) -> str:
        return f"<{len(self)} batches of {self.utterances} utterances>"

    @property
    def utterances(self) -> int:
        """Utterances of all batches."""
        return len(self._items)

    def batch(self, number: int) -> list[int] | list[str]:
        """Return batch `number`, counted from 0 on: what `[number]` does, in half the time."""
        rows = self._items[self.ends.item(number) : self.ends.item(number + 1)]
        return self._named(rows.tolist())

    def take(self, order: Ints) -> Batches:
        """Return the batches that `order` numbers, in that order."""
        sizes = self.sizes[order]
        ends = ends_of(sizes)
        source = np.arange(ends[-1]) + np.repeat(self.ends[order] - ends[:-1], sizes)
        return self._of_same(self.items[source], ends, None)

    @property
    def windows(self) -> Iterator[Batches]:
        """These batches, as the one window that they are made of."""
        return iter([self])

    def end(self, number: int) -> int:
        """Return how many utterances come before batch `number`."""
        return self.ends.item(number)

    def number_at(self, position: int) -> int:
        """Return the number of the batch that has the utterance at a position."""
        return int(self.ends.searchsorted(position, side="right")) - 1

    def rest(
        self, position: int, *, world_size: int, share: ShareOut, draw: tuple[int, int]
    ) -> Batches:
        """Return the batches from a position on, the last ones cut so that ranks share them."""
        return self.recut(share(self.ends, position, world_size), draw)

    def recut(self, ends: Ints, draw: tuple[int, int] | None) -> Batches:
        """Return batches of the same utterances that end elsewhere, of this seed and epoch."""
        return self._of_same(self._items, ends, draw)

    def _of_same(
        self, items: ArrayLike | RowOrder, ends: Ints, draw: tuple[int, int] | None
    ) -> Batches:
        return Batches(
            items, ends, keys=self.keys, numbering=self.numbering, draw=draw, needs=self.needs
        )

    def _named(self, rows: list[int]) -> list[int] | list[str]:
        if self.keys is not None:
            ids = [self.keys[row] for row in rows]
            known = self.draw is not None or self.needs is not None
            return BatchOf(ids, None, self.draw, self.needs) if known else ids
        known = self.numbering is not None or self.draw is not None
        return BatchOf(rows, self.numbering, self.draw, self.needs) if known else rows


# Epochs of very many rows: batches made window by window of the order that a seed draws.

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
        within = position - window * self._size
        return window * self.per_window + (self._window(window).number_at(within) if within else 0)

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
        made = self._held.get(number)
        if made is None:
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
                self._held.pop(held, None)  # a signal's handler may have been here
            self._held[number] = made
        return made


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

    def number_at(self, position: int) -> int:
        """Return the number of the batch that has the utterance at a position."""
        if len(self._tail) and position >= self._tail[0]:
            return self._kept + int(self._tail.searchsorted(position, side="right")) - 1
        return self._whole.number_at(position) - self._first

    def batch(self, number: int) -> list[int] | list[str]:
        """Return a batch."""
        return self._whole.between(self.end(number), self.end(number + 1), self._draw)
