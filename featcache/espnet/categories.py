"""ESPnet's batches by category: balanced ones, and shares by a power of the sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError, nearest
from featcache.espnet.by_size import by_appearance, chain, ends_over_sum, grouped
from featcache.espnet.shapes import (
    Floats,
    Ints,
    Labels,
    NumberedUtterances,
    PackedStrings,
    codes_of,
    counted,
    ends_of,
    read_table,
)
from featcache.samplers import Batches

# Checks of single arguments of ESPnet's builders.


def count(argument: str, value: float | None) -> int:
    """Return an integer from 1 on; also from a float without a fraction, as YAML reads 1e6."""
    if value is None:
        raise ConfigError(f"{argument} is needed for this type of sampler")
    number = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    if not (number and value >= 1 and value % 1 == 0):
        raise ConfigError(f"{argument} is an integer from 1 on, not {value!r}")
    return int(value)


def require_factor(argument: str, value: float, least: float = 0) -> None:
    """Raise `ConfigError` for all but a finite number from `least` on."""
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise ConfigError(f"{argument} is a number from {least} on, not {value!r}")


def epoch_seed(epoch: int) -> int:
    """Return an epoch that can seed a generator."""
    if not isinstance(epoch, int | np.integer) or not 0 <= epoch < 2**32:
        raise ConfigError(f"epoch is an integer from 0 to 2**32 - 1, not {epoch!r}")
    return int(epoch)


def require_type(type: str, known: Iterable[str], other: str, others: Iterable[str]) -> None:
    """Raise `ConfigError` for a type that is not known here, naming the builder that knows it."""
    if type in others:
        raise ConfigError(f"batches of type {type!r} are made by {other}")
    if type not in known:
        raise ConfigError(
            f"no batch sampler {type!r}; {nearest(type, known)}; {other} makes {', '.join(others)}"
        )


def require_either(argument: str, value: object, other: str, labels: object) -> None:
    """Raise `ConfigError` unless one of two arguments is given."""
    if (value is None) == (labels is None):
        found = "not both" if labels is not None else "none is given"
        raise ConfigError(f"give either {argument} or {other}, {found}")


# `random.shuffle`, element for element, at numpy's speed: ESPnet shuffles lists of a million ids.
#
# CPython's `random.Random(seed).shuffle(x)` is, for lists of less than 2**31 elements::
#
#     for i in n - 1, ..., 1:                        # step i
#         p[i] = the first of the next numbers `word >> (32 - bits)` that is at most i
#         x[i], x[p[i]] = x[p[i]], x[i]              # bits = (i + 1).bit_length()
#
# `getrandbits(32 * n)` gives the next n words at once, the first one lowest. Two loops remain.
#
# **Draws** (`swap_partners`). `bits` is the same for all i + 1 from 2**(bits - 1) to 2**bits - 1:
# take these steps together, from i = high down to low. Word t is kept if it is at most high -
# before[t], where before[t] counts the words kept before it. `_draw_many` guesses `before`,
# decides, counts, and repeats with the counts. Each round makes one more leading entry right,
# since before[t] depends on the words before t only, and before[0] = 0. So the rounds end, and
# counts that equal the guess are those of one word after the other (induction over t). There are
# never more words than steps to come: each step takes at least one, so none is wasted.
#
# **Swaps** (`permutation_by`). Since p[i] <= i, no step after step i touches place i: in the end
# it holds what place p[i] held just before step i. Place q <= i was touched before that by the
# steps s > i with p[s] = q, and the last of these in time, which is the lowest, put there what
# place s held before it. So, with E(q, i) the element at place q just before step i::
#
#     E(q, i) = E(s, s) with s = min(s > i: p[s] = q), or q if there is none
#     x[i] in the end = E(p[i], i)
#
# `earlier` is the s of the first turn. For the turns after it p[s] = q < s, no step is its own
# partner, and s = min(s': p[s'] = s) = `first[s]`. These numbers only grow: all chains of them
# end, and are followed at once. E needs steps from i on only: the end of a list is known without
# the rest.

_AHEAD = 1 << 15  # words looked at together
_FEW = 1 << 9  # below, element by element costs less


def permutation(generator: random.Random, size: int) -> Ints:
    """Return where each element of a list of `size` was before `generator` shuffled it.

    >>> letters = list("abcdefg")
    >>> random.Random(3).shuffle(letters)
    >>> "".join(letters), "".join("abcdefg"[place] for place in permutation(random.Random(3), 7))
    ('acdgfeb', 'acdgfeb')
    """
    return permutation_by(swap_partners(generator, size), np.arange(size))


def swap_partners(generator: random.Random, size: int) -> Ints:
    """Draw for each place i, from the last down to 1, the place up to i that it swaps with.

    That of place 0 is 0.
    """
    partners = np.zeros(size, np.int64)
    high = size - 1
    while high > 0:
        bits = (high + 1).bit_length()
        steps = min(high - max((1 << (bits - 1)) - 1, 1) + 1, _AHEAD)
        draw = _draw_each if steps < _FEW else _draw_many
        drawn = draw(generator, high, steps, bits)
        partners[high - len(drawn) + 1 : high + 1] = drawn[::-1]
        high -= len(drawn)
    return partners


def _draw_each(generator: random.Random, high: int, steps: int, bits: int) -> list[int]:
    drawn = []
    for place in range(high, high - steps, -1):
        while (word := generator.getrandbits(bits)) > place:
            pass
        drawn.append(word)
    return drawn


def _draw_many(generator: random.Random, high: int, steps: int, bits: int) -> NDArray[np.int32]:
    """Take the decisions of `_draw_each` for many words at once: see *Draws* above."""
    drawn = generator.getrandbits(32 * steps).to_bytes(4 * steps, "little")
    words = (np.frombuffer(drawn, "<u4") >> (32 - bits)).astype(np.int32)
    # as if all were kept with the chance of the first; 32 bits take half the time of 64
    before = ((np.arange(steps) * (high + 1)) >> bits).astype(np.int32)
    while True:
        kept = words <= high - before
        counted = np.cumsum(kept, dtype=np.int32)
        counted -= kept
        if np.array_equal(counted, before):
            return words[kept]
        before = counted


def permutation_by(partners: Ints, places: Ints) -> Ints:
    """Return the element that each of `places` holds after all swaps: see *Swaps* above.

    Steps go from the last place to the first; each swaps its place with partners[place] <= place.
    With a place, `places` has all later ones of the same list.
    """
    order = (partners[places] << 32) | places
    order.sort()  # by partner, then by step
    partner, step = (order >> 32).astype(np.int32), order.astype(np.int32)
    earlier = np.full(len(step), -1, np.int32)  # the lowest s > i with p[s] = p[i]
    np.copyto(earlier[:-1], step[1:], where=partner[1:] == partner[:-1])
    # the lowest step that has a place as its partner
    first = np.full(len(partners), -1, np.int32)
    first[partner[::-1]] = step[::-1]  # of several the last stays, which is the lowest step
    ends = np.where(earlier >= 0, earlier, partner)
    moving = np.flatnonzero(earlier >= 0)
    while len(moving):
        onward = first[ends[moving]]
        further = onward >= 0
        moving = moving[further]
        ends[moving] = onward[further]
    found = np.empty(len(partners), np.int64)
    found[step] = ends
    return found[places]


# Categories and data sets of utterances, by files as ESPnet reads them or by labels.


@dataclass(frozen=True)
class Members:
    """The rows of each category, one after another: category c has rows[ends[c] : ends[c + 1]]."""

    rows: Ints
    ends: Ints

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def sizes(self) -> Ints:
        """Rows of each category."""
        return np.diff(self.ends)

    @property
    def codes(self) -> Ints:
        """The category of each of the rows."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def take(self, order: Ints) -> Members:
        """Return the categories that `order` numbers, in that order."""
        sizes = self.sizes[order]
        return Members(
            self.rows[np.repeat(self.ends[order], sizes) + counted(sizes)], ends_of(sizes)
        )

    def renumbered(self, rows: Ints) -> Members:
        """Return the same categories with `rows` in place of these; -1 leaves a row out."""
        kept = rows >= 0
        return Members(rows[kept], ends_of(kept.view(np.int8))[self.ends])

    def swap_partners(self, generator: random.Random) -> Ints:
        """Draw swaps that shuffle each category by itself: for each place the one to swap with."""
        partners = [swap_partners(generator, size) for size in self.sizes.tolist()]
        return np.concatenate(partners) + np.repeat(self.ends[:-1], self.sizes)

    def sums(self, values: Ints) -> Ints:
        """Return the sum of the values of each category's rows, where each has some."""
        return np.add.reduceat(values[self.rows], self.ends[:-1])


def read_members(path: str) -> tuple[PackedStrings, Members]:
    """Read a file of a category and its utterances on each line, in the order of the file.

    Rows count the utterances of the file.
    """
    table = read_table(path)
    counts = table.widths - 1
    if counts.min() == 0:
        line = int(counts.argmin())
        raise ConfigError(
            f"{path!r}, line {line + 1}: {table.keys[line]!r} has no utterances; remove the line"
        )
    member = np.ones(len(table.starts), bool)
    member[table.heads[:-1]] = False
    ends = ends_of(counts)
    return table.tokens(np.flatnonzero(member)), Members(np.arange(ends[-1]), ends)


def labelled_members(labels: Labels, count: int, argument: str) -> Members:
    """Group rows by their labels, in the order that the labels come in."""
    return Members(*grouped(by_appearance(codes_of(labels, count, argument))))


def categorized(
    utterances: NumberedUtterances | None, category2utt_file: str | None, labels: Labels | None
) -> tuple[NumberedUtterances, Members]:
    """Return utterances with their categories, by a file or by the labels of all rows.

    None: the utterances of the file, or one for each label.
    """
    require_either("category2utt_file", category2utt_file, "categories", labels)
    if labels is not None:
        found = utterances or NumberedUtterances("categories", len(labels), [], None)
        return found, labelled_members(labels, found.count, "categories")
    name = f"category file {str(category2utt_file)!r}"
    ids, members = read_members(str(category2utt_file))
    if utterances is None:
        return NumberedUtterances(name, len(ids), [], ids), members
    return utterances, Members(utterances.rows(ids, members.codes, name), members.ends)


def dataset_members(
    utterances: NumberedUtterances, folder: str | None, labels: Labels | None
) -> Members:
    """Return the data sets of `folder`/dataset2utt, or of the labels of all rows.

    Utterances of the file that are not there are passed over, as in ESPnet.
    """
    require_either("dataset2utt_parent_dir", folder, "datasets", labels)
    if labels is not None:
        return labelled_members(labels, utterances.count, "datasets")
    path = str(Path(str(folder), "dataset2utt"))
    ids, members = read_members(path)
    return members.renumbered(utterances.find(ids, f"data set file {path!r}"))


# Batches in which all categories have about as many utterances (catbel).


def balanced_batches(members: Members, batch_size: int, epoch: int) -> Batches:
    """Deal categories out in random order; a batch passes over those that it has enough of.

    It has one utterance of a category, or batch_size // categories + 1 where there are fewer
    categories. An utterance passed over is lost for the epoch, and so is a last batch that does not
    fill: ESPnet's way. Raises `ConfigError` if not one batch can be filled.
    """
    generator = random.Random(epoch)
    members = members.take(permutation(generator, len(members)))
    partners = members.swap_partners(generator)
    dealt = members.codes[permutation(generator, len(members.rows))]
    most = 1 if len(members) >= batch_size else batch_size // len(members) + 1
    taken = dealt[_taken(dealt, batch_size, most)]
    if len(taken) == 0:
        raise ConfigError(
            f"no batch of {batch_size} utterances (batch_size) can be filled from "
            f"{len(members.rows)} utterances of {len(members)} categories with about as "
            "many of each; try a smaller batch_size"
        )
    # each category hands out its shuffled utterances from the last one on: no others need to be
    # shuffled
    turns, ends = grouped(taken, len(members))
    used = np.diff(ends)
    rows = np.empty(len(taken), np.int64)
    places = np.repeat(members.ends[1:] - 1, used) - counted(used)
    rows[turns] = members.rows[permutation_by(partners, places)]
    return Batches(rows, np.arange(0, len(rows) + 1, batch_size))


def _taken(dealt: Ints, batch_size: int, most: int) -> Ints:
    """Return the places of `dealt` that full batches take.

    There are at most `most` of one category in a batch.
    """
    order, ends = grouped(dealt)
    # the place where the category was dealt `most` times before, or -1
    earlier = np.empty(len(dealt), np.int32)
    earlier[order[most:]] = order[:-most]
    heads = ends[:-1, None] + np.arange(most)
    earlier[order[heads[heads < ends[1:, None]]]] = -1
    starts, ahead = [0], 4 * batch_size
    while True:
        start = starts[-1]
        (free,) = (earlier[start : start + ahead] < start).nonzero()
        if len(free) >= batch_size:
            length = free.item(batch_size - 1) + 1
            starts.append(start + length)
            ahead = 2 * length
        elif start + ahead < len(dealt):
            ahead *= 2
        else:
            break
    return np.flatnonzero(earlier[: starts[-1]] < np.repeat(starts[:-1], np.diff(starts)))


# Batches drawn by category, rare ones more often than they occur (catpow).


@dataclass(frozen=True)
class CategoryLimits:
    """Size of a batch: it ends with the utterance that makes it larger than `bins` frames."""

    bins: int
    min_batch_size: int
    max_batch_size: int | None
    drop_last: bool

    @classmethod
    def of(
        cls, bins: int | None, minimum: int, maximum: int | None, drop_last: bool
    ) -> CategoryLimits:
        """Check ESPnet's arguments."""
        most = None if maximum is None else count("max_batch_size", maximum)
        return cls(count("batch_bins", bins), count("min_batch_size", minimum), most, drop_last)


@dataclass(frozen=True)
class Pools:
    """Pools of utterances to draw from, one per (data set, category), with draw probabilities.

    A pair without utterances has no pool.
    """

    members: Members
    chances: list[Floats]  # of the pools of each data set
    # the chance of each data set, 0 of one without a pool; None: pools are drawn by category alone
    datasets: Floats | None
    frames: int  # to draw


def power_batches(lengths: Ints, pools: Pools, limits: CategoryLimits, epoch: int) -> Batches:
    """Draw the batches of an epoch; raises `ConfigError` if not one can be filled."""
    members = pools.members
    places = permutation_by(
        members.swap_partners(random.Random(epoch)), np.arange(len(members.rows))
    )
    shuffled = replace(pools, members=replace(members, rows=members.rows[places]))
    batches = drawn_batches(lengths, shuffled, limits, epoch)
    if len(batches) == 0:
        why = f", or none was larger than {limits.bins} frames (batch_bins) with drop_last=True"
        raise ConfigError(
            f"no batch could be made: fewer than {limits.min_batch_size} utterances "
            f"(min_batch_size) were drawn{why if limits.drop_last else ''}"
        )
    return batches


def category_pools(lengths: Ints, members: Members, upsampling: float, scaling: float) -> Pools:
    """Return a pool for each category, of the chance (frames / all frames) ** upsampling.

    The frames to draw are those of all utterances times `scaling`.
    """
    require_factor("upsampling_factor", upsampling)
    require_factor("dataset_scaling_factor", scaling, least=1)
    sums = members.sums(lengths)
    chances = _chances(sums, upsampling, "the categories")
    return Pools(members, [chances], None, int(int(sums.sum()) * scaling))


def dataset_pools(
    lengths: Ints,
    members: Members,
    datasets: Members,
    upsampling: float,
    dataset_upsampling: float,
    scaling: float,
) -> Pools:
    """Return a pool for each category in each data set, in the order of the category's utterances.

    Chance of a category in a data set as in `category_pools`; of a data set (its frames / all) **
    dataset_upsampling.
    """
    require_factor("category_upsampling_factor", upsampling)
    require_factor("dataset_upsampling_factor", dataset_upsampling)
    require_factor("dataset_scaling_factor", scaling, least=1)
    dataset, pools = _crossed(len(lengths), members, datasets)
    parts = np.split(pools.sums(lengths), np.searchsorted(dataset, np.arange(1, len(datasets))))
    chances = [
        _chances(sums, upsampling, f"data set number {number}")
        for number, sums in enumerate(parts, 1)
    ]
    # floats, added in order: what is drawn depends on the last bit
    frames = [
        np.cumsum([0.0, *(sums.sum() * chance)])[-1]
        for sums, chance in zip(parts, chances, strict=True)
    ]
    total = np.cumsum(frames)[-1]
    powers = np.array(
        [
            float(part / total) ** dataset_upsampling if len(sums) else 0.0
            for part, sums in zip(frames, parts, strict=True)
        ]
    )
    return Pools(pools, chances, powers / powers.sum(), int(total * scaling))


def _chances(sums: Ints, upsampling: float, where: str) -> Floats:
    frames = sums.tolist()
    total = sum(frames)
    if frames and total == 0:
        raise ConfigError(
            f"all utterances of {where} have length 0: nothing can be drawn by length"
        )
    powers = np.array([(part / total) ** upsampling for part in frames])
    chances: Floats = powers / powers.sum()
    return chances


def _crossed(rows_in_all: int, members: Members, datasets: Members) -> tuple[Ints, Members]:
    """Return the rows of each pair of a data set and a category that has some; and its data set."""
    places, starts = grouped(datasets.rows, rows_in_all)
    times = np.diff(starts)[members.rows]
    rows = np.repeat(members.rows, times)
    if len(rows) == 0:
        raise ConfigError("no utterance is both in a category and in a data set")
    dataset = datasets.codes[places[starts[rows] + counted(times)]]
    pair = dataset * len(members) + np.repeat(members.codes, times)
    # an utterance may be named twice on a line
    once = np.sort(np.unique(pair * rows_in_all + rows, return_index=True)[1])
    order, ends = grouped(pair[once])
    (found,) = np.diff(ends).nonzero()
    return found // len(members), Members(rows[once][order], np.append(0, ends[found + 1]))


def drawn_batches(lengths: Ints, pools: Pools, limits: CategoryLimits, epoch: int) -> Batches:
    """Draw from shuffled pools and cut into batches.

    Each pool is drawn in turn from its first utterance on and around.
    """
    draws = int(pools.frames / lengths.mean())
    members = pools.members
    order, ends = grouped(_drawn_pools(pools, draws, epoch), len(members))
    sizes = np.diff(ends)
    turn = counted(sizes) % np.repeat(members.sizes, sizes)
    rows = np.empty(draws, np.int64)
    rows[order] = members.rows[np.repeat(members.ends[:-1], sizes) + turn]
    cut = chain(
        ends_over_sum(lengths[rows], limits.bins, limits.min_batch_size, limits.max_batch_size)
    )
    if not limits.drop_last and draws - cut[-1] >= limits.min_batch_size:
        cut = np.append(cut, draws)
    return Batches(rows[: cut[-1]], cut)


def _drawn_pools(pools: Pools, draws: int, epoch: int) -> Ints:
    generator = np.random.RandomState(epoch)
    if pools.datasets is None:
        return drawn_by(pools.chances[0], generator.random_sample(draws))
    uniform = generator.random_sample(2 * draws).reshape(draws, 2)
    order, ends = grouped(drawn_by(pools.datasets, uniform[:, 0]), len(pools.chances))
    pool, first = np.empty(draws, np.int64), 0
    for here, chances in zip(np.split(order, ends[1:-1]), pools.chances, strict=True):
        if len(here):
            pool[here] = drawn_by(chances, uniform[here, 1]) + first
        first += len(chances)
    return pool


def drawn_by(chances: Floats, uniform: Floats) -> Ints:
    """Return the draws that numpy's RandomState.choice(p=chances) makes of uniform numbers."""
    until = chances.cumsum()
    until /= until[-1]
    return np.searchsorted(until, uniform, side="right")
