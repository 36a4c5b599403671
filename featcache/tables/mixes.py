"""`mix`: a table of several, of which each epoch takes as many rows of each as is planned.

Here the plan is made, and the rows of an epoch are drawn by it. Any piece of an epoch is drawn by
itself: nothing is held of the rest, and a resume draws the piece that it goes on in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache._cached import cached_property
from featcache._checks import whole_number
from featcache.errors import ConfigError, nearest
from featcache.format import Codes, Column, SharedArray, Strings, Taken, digest, ends_of
from featcache.interface import Ints
from featcache.reading import CachePath
from featcache.tables.blocks import RowMap
from featcache.tables.columns import mixed
from featcache.tables.combine import concat
from featcache.tables.order import AT_ONCE, Order, drawn
from featcache.tables.selection import Selection
from featcache.tables.table import FeatureTable

# Rows that an epoch takes of one source: place k of it, from 0 to before `taken`, is a row.
#
# Rows of a source count from 0. An utterance that an epoch can take several times has as many rows,
# one after another, so that no row comes twice in an epoch.


class MixSource(Protocol):
    """One source of a mix."""

    @property
    def taken(self) -> int:
        """Rows that an epoch takes."""

    @property
    def copies(self) -> Ints:
        """Rows of each utterance: those that an epoch can take of it."""

    @property
    def digest(self) -> str:
        """A digest of what the rows of an epoch depend on."""

    def rows(self, places: Ints, epoch: int, key: int) -> Ints:
        """Return the rows at ascending places of an epoch."""


@dataclass(frozen=True)
class EvenSource:
    """A source whose utterances come equally often: none again before all have come.

    Epochs take them by turns, in a random order that begins anew where a turn ends with an epoch.
    """

    count: int
    taken: int

    @property
    def copies(self) -> Ints:
        """Rows of each utterance."""
        return np.broadcast_to(np.int64(self._copies), self.count)

    @property
    def _copies(self) -> int:
        return -(-self.taken // self.count)

    @property
    def is_whole(self) -> bool:
        """Whether each epoch takes all utterances, one as often as the other."""
        return self.taken % self.count == 0

    @property
    def digest(self) -> str:
        """A digest of what the rows of an epoch depend on."""
        return digest(f"{self.count}/{self.taken}".encode())

    def rows(self, places: Ints, epoch: int, key: int) -> Ints:
        """Return the rows at ascending places of an epoch."""
        begin = epoch * self.taken
        if self.count % self.taken and self.taken % self.count:
            # turns end within epochs: the order stays, and what an epoch takes of a turn is mixed
            places = self._mixed_within_turns(places, epoch, key)
            turns = self.count // math.gcd(self.count, self.taken)
            order = Order(self.count, drawn(key, "turns", epoch // turns))
            utterances = order.at((begin + places) % self.count)
        else:
            utterances = np.empty_like(places)
            stream = begin + places
            for turn, some in _runs(stream // self.count):
                order = Order(self.count, drawn(key, "turn", turn))
                utterances[some] = order.at(stream[some] - turn * self.count)
        return utterances * self._copies + places // self.count

    def _mixed_within_turns(self, places: Ints, epoch: int, key: int) -> Ints:
        done = epoch * self.taken % self.count  # of the turn that the epoch begins in
        found = np.empty_like(places)
        for turn, some in _runs((done + places) // self.count):
            begin = max(turn * self.count - done, 0)
            end = min((turn + 1) * self.count - done, self.taken)
            order = Order(end - begin, drawn(key, "epoch", epoch, turn))
            found[some] = begin + order.at(places[some] - begin)
        return found


def _runs(numbers: Ints) -> Iterator[tuple[int, slice]]:
    """Yield each of some ascending numbers once, and where it stands."""
    if not len(numbers):
        return
    begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(numbers)], strict=True):
        yield int(numbers[begin]), slice(begin, end)


TICK_BITS = 20
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples lie evenly, Knuth, TAOCP 3, 6.4


class WeightedSource:
    """A source whose utterances come as often as their weights say.

    In an epoch each comes as often as its share of `taken`, rounded up or down: by ticks at equal
    distances along a line on which each utterance has a piece of its weight. They begin elsewhere
    in each epoch, so that all epochs together come near to the weights.
    """

    def __init__(self, ends: SharedArray[np.int64], taken: int) -> None:
        self._ends = ends  # of the pieces, in parts of a tick
        self.taken = taken

    @classmethod
    def of(cls, weights: NDArray[np.float64], taken: int) -> WeightedSource:
        """Give each utterance its piece of the line."""
        # summed as whole numbers, so that rows of equal weights have equal pieces
        sums = np.cumsum(np.rint(weights / _sum(weights) * 2.0**62).astype(np.int64))
        ends = np.rint(sums / sums[-1] * (taken << TICK_BITS)).astype(np.int64)
        ends[np.flatnonzero(weights)[-1] :] = taken << TICK_BITS
        return cls(SharedArray(ends), taken)

    def __reduce__(self) -> tuple[object, ...]:
        return WeightedSource, (self._ends, self.taken)

    @property
    def copies(self) -> Ints:
        """Rows of each utterance."""
        return np.diff(self._firsts)

    @cached_property
    def _firsts(self) -> Ints:
        """The first row of each utterance: made with the mix, so that a resume has it."""
        pieces = np.diff(self._ends.values, prepend=0)
        return ends_of(-(-pieces >> TICK_BITS))

    @cached_property
    def _guide(self) -> tuple[int, Ints]:
        """Bits of equal steps along the line, and the utterance at the begin of each."""
        bits = TICK_BITS + max(self.taken // len(self._ends.values), 1).bit_length()
        begins = np.arange((self.taken << TICK_BITS >> bits) + 2) << bits
        return bits, self._ends.values.searchsorted(begins, side="right")

    def _utterances_at(self, points: Ints) -> Ints:
        """Return the utterances that have these points: `searchsorted`, among few each."""
        bits, guide = self._guide
        ends, steps = self._ends.values, points >> bits
        found: Ints = guide[steps]
        width = 1 << int((guide[steps + 1] - found).max(initial=0)).bit_length()
        while width := width >> 1:
            last = np.minimum(found + width, len(ends)) - 1
            found = np.where(ends[last] <= points, last + 1, found)
        return found

    @property
    def digest(self) -> str:
        """A digest of what the rows of an epoch depend on."""
        return digest(f"{self._ends.digest}/{self.taken}".encode())

    def rows(self, places: Ints, epoch: int, key: int) -> Ints:
        """Return the rows at ascending places of an epoch."""
        ends = self._ends.values
        offset = (drawn(key, "offset") + epoch * _GOLDEN) % 2**64 >> (64 - TICK_BITS)
        ticks = Order(self.taken, drawn(key, "epoch", epoch)).at(places)
        back = np.argsort(ticks)  # what ascends is found several times as fast
        ticks = ticks[back]
        utterances = self._utterances_at((ticks << TICK_BITS) + offset)
        begins = np.where(utterances > 0, ends[utterances - 1], 0)
        first_ticks = np.maximum(-((offset - begins) >> TICK_BITS), 0)
        rows = np.empty_like(ticks)
        rows[back] = self._firsts[utterances] + ticks - first_ticks
        return rows


# The rows of all sources in one order, in which each is spread evenly over the epoch.
#
# Row k of the `taken` of a source lies at (k + u) / taken of the epoch, u random from 1/4 to 3/4.
# With S sources, any rows that follow on have less than 2 S of one more or fewer than its share.

_STEPS_BITS = 12  # of such a u
_TOGETHER = 8  # pieces of an epoch that are drawn at once, where many are asked for


class MixOrder:
    """The rows of an epoch of a mix, drawn when they are asked for; `order[3:9]`."""

    def __init__(self, plan: MixPlan, epoch: int, seed: int) -> None:
        self._sources = plan.sources
        self._starts = plan.starts
        self._epoch = epoch
        self._keys = [drawn(seed, "mix", number) for number in range(len(plan.sources))]
        self._spread = [drawn(key, "spread", epoch) for key in self._keys]
        self._count = plan.size
        self._pieces = -(-self._count // AT_ONCE)
        # the pieces that were drawn last: their numbers, the first place, and the rows
        self._last: tuple[range, int, Ints] = range(0), 0, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: slice) -> Ints:
        begin, end, _ = places.indices(self._count)
        if end <= begin:
            return np.empty(0, np.int64)
        first, last = self._piece_of(begin), self._piece_of(end - 1)
        found, step = [], _TOGETHER if last - first > 1 else 1
        for number in range(first, last + 1, step):
            start, rows = self._drawn(range(number, min(number + step, last + 1)))
            found.append(rows[max(begin - start, 0) : end - start])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _piece_of(self, place: int) -> int:
        number = place * self._pieces // self._count  # or one beside it
        while self._begin(number) > place:
            number -= 1
        while self._begin(number + 1) <= place:
            number += 1
        return number

    def _begin(self, piece: int) -> int:
        return sum(self._before(source, piece) for source in range(len(self._sources)))

    def _before(self, source: int, piece: int) -> int:
        """Count the rows of a source that lie before a piece of the epoch."""
        taken = self._sources[source].taken
        if piece >= self._pieces:
            return taken
        count = piece * taken // self._pieces
        at = int(self._at(source, np.array([count]))[0])
        return count + (at * self._pieces < (piece * taken) << _STEPS_BITS)

    def _at(self, source: int, places: Ints) -> Ints:
        """Return where rows of a source lie, k + u in whole steps."""
        random = mixed(places.astype(np.uint64), self._spread[source]) >> np.uint64(
            65 - _STEPS_BITS
        )
        return (places << _STEPS_BITS) + (1 << (_STEPS_BITS - 2)) + random.astype(np.int64)

    def _drawn(self, pieces: range) -> tuple[int, Ints]:
        """Return the first place of pieces that follow on, and their rows."""
        if self._last[0] != pieces:
            at, rows, first = [], [], 0  # of each source, piece by piece
            for which, source in enumerate(self._sources):
                ends = [self._before(which, piece) for piece in (*pieces, pieces.stop)]
                places, first = np.arange(ends[0], ends[-1]), first + ends[0]
                inner = np.array(ends[1:-1], np.int64) - ends[0]
                found = source.rows(places, self._epoch, self._keys[which])
                rows.append(np.split(found + self._starts[which], inner))
                at.append(np.split(self._at(which, places) / source.taken, inner))
            ordered = [
                np.concatenate(some)[np.argsort(np.concatenate(where), kind="stable")]
                for some, where in zip(zip(*rows, strict=True), zip(*at, strict=True), strict=True)
            ]
            self._last = pieces, first, np.concatenate(ordered)
        return self._last[1], self._last[2]


class MixPlan:
    """The plan of a mix: how many rows an epoch takes of each source.

    Attributes:
        taken: rows of each source in an epoch, by name.
        size: rows of an epoch.
        label: the annotation that names the source of a row; None for none.
        sources: the sources, in their order.
        starts: the first row of each, and the number of all rows of the table.
    """

    def __init__(
        self, names: Sequence[str], sources: Sequence[MixSource], label: str | None
    ) -> None:
        self.taken = {name: each.taken for name, each in zip(names, sources, strict=True)}
        self.size = sum(self.taken.values())
        self.label = label
        self.sources = tuple(sources)
        self.starts = [0, *accumulate(int(each.copies.sum()) for each in sources)]

    def __repr__(self) -> str:
        told = (f"{name!r} {count / self.size:.3g}" for name, count in self.taken.items())
        return f"<MixPlan: {self.size:,} rows an epoch: {', '.join(told)}>"

    def __reduce__(self) -> tuple[object, ...]:
        return MixPlan, ([*self.taken], self.sources, self.label)

    @property
    def varies(self) -> bool:
        """Whether epochs have other rows than each other: not where all sources come whole."""
        return not all(isinstance(each, EvenSource) and each.is_whole for each in self.sources)

    def order(self, epoch: int, seed: int) -> MixOrder:
        """Return the rows of an epoch in their order."""
        return MixOrder(self, epoch, seed)

    def first_rows(self) -> Iterator[tuple[int, Ints]]:
        """Yield the first row of each source, and beyond it the first of each of its utterances."""
        for start, source in zip(self.starts, self.sources, strict=False):
            yield start, ends_of(source.copies)[:-1][source.copies > 0]

    def source_of(self, rows: Ints) -> Ints:
        """Return the number of the source of each row."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def column(self) -> Column:
        """Return the name of the source of each row."""
        names = Strings.of([*self.taken])

        def named(rows: Ints | None) -> Column:
            rows = np.arange(self.starts[-1]) if rows is None else rows
            codes = self.source_of(rows).astype(np.int32)
            return Column("str", Codes(codes, names), name=self.label or "")

        return Column("str", Taken(self.starts[-1], named), name=self.label or "")

    @cached_property
    def digest(self) -> str:
        """A digest of the plan."""
        made = [
            f"{name!r}{each.digest}" for name, each in zip(self.taken, self.sources, strict=True)
        ]
        return digest(f"{self.label!r}{''.join(made)}".encode())


# `mix`: how many rows of each source an epoch takes.

RowWeights = NDArray[np.float64]
_ROUNDING = 1e-9  # by which products of shares may be off
MOST_ROWS = 1 << 34  # of an epoch: of more, each taken once, the numbers alone fill 128 GiB
Weight = float | str | ArrayLike


def mix(
    sources: Mapping[str, FeatureTable | CachePath],
    *,
    weights: Mapping[str, Weight] | str | None = None,
    temperature: float = 1.0,
    repeat: Mapping[str, float] | None = None,
    epoch_size: int | Literal["all"] | None = None,
    label: str | None = "source",
    unlike: Literal["raise", "keep"] = "raise",
) -> FeatureTable:
    """Mix several tables: each epoch takes so many rows of each, and spreads them evenly.

    A table that goes where a cache goes. Its rows are those of all sources, one source after
    another, and samplers of `featcache.samplers` take those of an epoch, `epoch_rows`. Epochs go on
    where the one before ended: an utterance comes again when all of its source have come. One that
    an epoch takes several times has as many rows, and a draw of its own in each. Over any 1,000
    rows of an epoch, shares hold within 1 % for up to five sources, and for far more in practice;
    `source_shares` of a sampler tells those of its batches.

    Filter, split and cut the sources: what is made of a mix would have no plan.

    Args:
        sources: caches, their paths, or tables, by name; no utterance is in two of them.
        weights: shares of the rows of an epoch, by source, in any unit; by default the number of
            its rows. In place of a number, a value for each row, whose sum is the source's weight,
            as an array or the name of an annotation: rows then come as often as these say, rounded
            up or down in each epoch. A name alone stands for that annotation of all sources.
        temperature: the power that weights are raised to; 0 makes all sources equal.
        repeat: in place of weights, how often an epoch takes each row of a source, `{"libri": 3,
            "giga": 0.5}`; 1 for those that it does not name.
        epoch_size: rows of an epoch. By default as many as there can be without taking any row
            twice; "all": as many as it takes until each row has come.
        label: the annotation that names the source of a row; None for none.
        unlike: as for `concat`.

    Raises `ConfigError` for tables that `concat` refuses, and for a plan that leaves a source out.

    >>> table = featcache.mix({"libri": a, "giga": b}, weights={"libri": 2, "giga": 1})
    ... # doctest: +SKIP
    >>> sampler = BucketBatchSampler(table, max_frames=40_000)  # doctest: +SKIP
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError(f"a mix is made of tables by name, not of {sources!r:.100}")
    tables = {name: FeatureTable.of(source) for name, source in sources.items()}
    for name, each in tables.items():
        if not len(each):
            raise ConfigError(f"source {name!r} of the mix has no utterances; leave it out")
    wanted = _Wanted.of(tables, weights, temperature)
    if repeat is None:
        taken = wanted.taken(epoch_size)
    else:
        if weights is not None or temperature != 1 or epoch_size is not None:
            raise ConfigError("repeat takes the place of weights, temperature and epoch_size")
        taken = _repeated(tables, repeat)
    if sum(taken) > MOST_ROWS:
        raise ConfigError(f"an epoch of {sum(taken):,} rows is too long: {MOST_ROWS:,} at most")
    planned: list[MixSource] = [
        EvenSource(len(each), count) if of_rows is None else WeightedSource.of(of_rows, count)
        for each, count, of_rows in zip(tables.values(), taken, wanted.of_rows, strict=True)
    ]
    whole = concat(*tables.values(), unlike=unlike).selection
    if label is not None and label in whole.annotations:
        raise ConfigError(
            f"the sources have an annotation {label!r}; give the name of a source another: label="
        )
    told = (f"{name!r} {count:,}" for name, count in zip(tables, taken, strict=True))
    made = f"mix({', '.join(told)})"
    return FeatureTable(_planned(whole, MixPlan([*tables], planned, label)), made)


def _planned(whole: Selection, plan: MixPlan) -> Selection:
    """Return the rows of a plan: each utterance as often as an epoch can take it."""
    copies = [each.copies for each in plan.sources]
    if all((each == 1).all() for each in copies):
        return Selection(whole.blocks, whole.row_map, whole.cuts, plan)
    rows = np.repeat(np.arange(len(whole)), np.concatenate(copies))
    cuts = None if whole.cuts is None else whole.cuts.take(rows)
    # the digest of the plan, which stands beside it, tells how often each row comes
    made, ascends = ("", True) if whole.row_map is None else (whole.row_map.digest, None)
    row_map = RowMap(whole.below(rows), made=made, ascends=ascends)
    return Selection(whole.blocks, row_map, cuts, plan)


@dataclass(frozen=True)
class _Wanted:
    """Shares of the rows of an epoch by source, and how often one takes a row, for one row in all.

    Attributes:
        names: the sources.
        shares: of each; together 1.
        of_rows: the weight of each row where these differ; else None.
        most, least: the share of the epoch that the most and the least frequent row of each has.
    """

    names: Sequence[str]
    shares: Sequence[float]
    of_rows: Sequence[RowWeights | None]
    most: Sequence[float]
    least: Sequence[float]

    @classmethod
    def of(
        cls,
        tables: Mapping[str, FeatureTable],
        weights: Mapping[str, Weight] | str | None,
        temperature: float,
    ) -> _Wanted:
        """Check weights, and take the power of those of sources."""
        given = dict.fromkeys(tables, weights) if isinstance(weights, str) else weights
        given = {name: len(each) for name, each in tables.items()} if given is None else given
        _check_names("weights", given, tables, all_of_them=True)
        if not _is_number(temperature) or temperature < 0:
            raise ConfigError(f"temperature is a number from 0 on, not {temperature!r}")
        of_rows = [_of_rows(name, table, given[name]) for name, table in tables.items()]
        totals = [
            _above_0(f"the weight of {name!r}", given[name]) if each is None else _sum(each)
            for name, each in zip(tables, of_rows, strict=True)
        ]
        try:
            powers = totals if temperature == 1 else [total**temperature for total in totals]
            shares = [power / sum(powers) for power in powers]
        except (OverflowError, ZeroDivisionError) as error:
            raise ConfigError(
                f"temperature={temperature!r} raises weights such as {max(totals):,.0f} to powers "
                "that no number holds; weights are raised to it, so it lies from 0 to about 1"
            ) from error
        most, least = [], []
        for table, share, each in zip(tables.values(), shares, of_rows, strict=True):
            ends = (1.0, 1.0) if each is None else (float(each.max()), float(each[each > 0].min()))
            whole = len(table) if each is None else _sum(each)
            most.append(share * ends[0] / whole)
            least.append(share * ends[1] / whole)
        return cls([*tables], shares, of_rows, most, least)

    def taken(self, epoch_size: int | Literal["all"] | None) -> list[int]:
        """Return how many rows an epoch takes of each source."""
        if epoch_size is None:
            once = math.floor(1 / max(self.most) + _ROUNDING)
            caps = [share / most for share, most in zip(self.shares, self.most, strict=True)]
            taken = self._rounded(max(once, 1))
            return [min(n, math.floor(cap + _ROUNDING)) for n, cap in zip(taken, caps, strict=True)]
        if epoch_size == "all":
            return self._rounded(math.ceil(1 / min(self.least) - _ROUNDING))
        if isinstance(epoch_size, str):
            raise ConfigError(f"epoch_size is a number of rows, or 'all', not {epoch_size!r}")
        return self._rounded(whole_number("epoch_size", epoch_size, 1))

    def _rounded(self, size: int) -> list[int]:
        exact = [share * size for share in self.shares]
        taken = [math.floor(each + _ROUNDING) for each in exact]
        rest = sorted(range(len(exact)), key=lambda number: taken[number] - exact[number])
        for number in rest[: size - sum(taken)]:
            taken[number] += 1
        for name, share, count in zip(self.names, self.shares, taken, strict=True):
            if not count:
                raise ConfigError(
                    f"an epoch of {size:,} rows takes none of {name!r}, whose share is "
                    f"{share:.3g}; give it a larger weight, the mix a larger epoch_size, or leave "
                    "it out"
                )
        return taken


def _repeated(tables: Mapping[str, FeatureTable], repeat: Mapping[str, float]) -> list[int]:
    """Return how many rows an epoch takes of each source, by how often it takes each."""
    _check_names("repeat", repeat, tables)
    taken = []
    for name, table in tables.items():
        times = _above_0(f"repeat of {name!r}", repeat.get(name, 1))
        taken.append(round(times * len(table)))
        if not taken[-1]:
            raise ConfigError(f"repeat takes {times!r} of {len(table)} rows of {name!r}: none")
    return taken


def _check_names(
    what: str, given: object, tables: Mapping[str, FeatureTable], *, all_of_them: bool = False
) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} is a mapping of sources to numbers, not {given!r:.100}")
    for name in given:
        if name not in tables:
            raise ConfigError(f"{what} names a source {name!r}; {nearest(str(name), [*tables])}")
    for name in tables if all_of_them else ():
        if name not in given:
            raise ConfigError(f"{what} says nothing of source {name!r}")


def _of_rows(name: str, table: FeatureTable, given: Weight) -> RowWeights | None:
    """Return the weight of each row of a source; None where it has one number for all."""
    if isinstance(given, str):
        column = table.annotation(given)
        if column.has_missing and column.missing.any():
            raise ConfigError(f"rows of {name!r} have no {given!r} to weigh them by; filter them")
        given = column.to_numpy()
    if _is_number(given):
        return None
    found = np.asarray(given)
    if found.shape != (len(table),) or found.dtype.kind not in "iuf":
        raise ConfigError(
            f"the weight of {name!r} is a number, the name of an annotation, or a number for each "
            f"of its {len(table)} rows, not {found.dtype} of shape {found.shape}"
        )
    weights: RowWeights = found.astype(np.float64)
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ConfigError(f"the weights of the rows of {name!r} are from 0 on, and not all 0")
    return weights


def _sum(weights: RowWeights) -> float:
    return float(np.cumsum(weights)[-1])  # in order: the same on every machine


def _above_0(what: str, value: object) -> float:
    if not _is_number(value) or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"{what} is a number above 0, not {value!r}")
    return float(value)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, Real | np.integer | np.floating) and not isinstance(value, bool)
