"""Batches drawn by category, rare ones more often than they occur (catpow)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.arguments import count, count_or_none
from featcache.samplers.espnet.categories import Categorized, Members
from featcache.samplers.espnet.cut import chain, ends_over_sum, grouped, stable_order
from featcache.samplers.espnet.python_shuffle import Shuffles, apply_swaps

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """Size of a batch: it ends with the utterance that makes it larger than `bins` frames."""

    bins: int
    min_batch_size: int
    max_batch_size: int | None
    drop_last: bool

    @classmethod
    def of(
        cls,
        batch_bins: int | None,
        min_batch_size: int,
        max_batch_size: int | None,
        drop_last: bool,
    ) -> Limits:
        """Check ESPnet's arguments."""
        return cls(
            count("batch_bins", batch_bins),
            count("min_batch_size", min_batch_size),
            count_or_none("max_batch_size", max_batch_size),
            drop_last,
        )


@dataclass(frozen=True)
class Pools:
    """Pools of utterances to draw from, one per (data set, category), with draw probabilities.

    A pair without utterances has no pool.
    """

    members: Members
    # the chance of each data set, 0 of one without utterances of any category; None: by category
    # alone
    datasets: Floats | None
    first: Ints  # the first pool of each data set, then the number of pools
    chances: list[Floats]  # of the pools of each data set
    frames: int  # to draw


@dataclass(frozen=True)
class CatPow:
    """Categories are drawn with the chance (frames / all frames) ** upsampling."""

    limits: Limits
    upsampling: float
    scaling: float  # frames to draw, over those that are there

    def batches(self, found: Categorized, epoch: int) -> Batches:
        """Draw the batches of an epoch; raises `ConfigError` if not one can be filled."""
        pools = category_pools(found.lengths, found.categories, self.upsampling, self.scaling)
        return found.named(_at_least_one_batch(found.lengths, pools, self.limits, epoch))


@dataclass(frozen=True)
class CatPowBalanced:
    """Data sets are drawn first, then categories within: see `dataset_pools`."""

    limits: Limits
    upsampling: float
    dataset_upsampling: float
    scaling: float

    def batches(self, found: Categorized, epoch: int) -> Batches:
        """Draw the batches of an epoch; raises `ConfigError` if not one can be filled."""
        assert found.datasets is not None
        pools = dataset_pools(
            found.lengths,
            found.categories,
            found.datasets,
            self.upsampling,
            self.dataset_upsampling,
            self.scaling,
        )
        return found.named(_at_least_one_batch(found.lengths, pools, self.limits, epoch))


def _at_least_one_batch(lengths: Ints, pools: Pools, limits: Limits, epoch: int) -> Batches:
    pools = replace(pools, members=shuffled(pools.members, epoch))
    batches = drawn_batches(lengths, pools, limits, epoch)
    if len(batches) == 0:
        none_closed = (
            f", or none was larger than {limits.bins} frames (batch_bins) with drop_last=True"
        )
        raise ConfigError(
            f"no batch could be made: fewer than {limits.min_batch_size} utterances "
            f"(min_batch_size) were drawn{none_closed if limits.drop_last else ''}"
        )
    return batches


def category_pools(lengths: Ints, members: Members, upsampling: float, scaling: float) -> Pools:
    """Return a pool for each category, of the chance (frames / all frames) ** upsampling."""
    sums = members.sums(lengths).tolist()
    chances = _chances(sums, upsampling, "the categories")
    return Pools(members, None, np.array([0, len(sums)]), [chances], int(sum(sums) * scaling))


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
    codes, pools = _crossed(len(lengths), members, datasets)
    sums = pools.sums(lengths)
    count = len(datasets.ends) - 1
    first = np.searchsorted(codes // (len(members.ends) - 1), np.arange(count + 1))
    chances, frames = [], np.zeros(count)
    for number, (start, end) in enumerate(
        zip(first[:-1].tolist(), first[1:].tolist(), strict=True)
    ):
        chances.append(
            _chances(sums[start:end].tolist(), upsampling, f"data set number {number + 1}")
        )
        if end > start:  # floats, added in order: what is drawn depends on the last bit
            frames[number] = np.cumsum(sums[start:end].sum() * chances[-1])[-1]
    total = np.cumsum(frames)[-1]
    powers = np.array(
        [
            float(part / total) ** dataset_upsampling if size else 0.0
            for part, size in zip(frames, np.diff(first), strict=True)
        ]
    )
    return Pools(pools, powers / powers.sum(), first, chances, int(total * scaling))


def _chances(sums: list[int], upsampling: float, where: str) -> Floats:
    total = sum(sums)
    if sums and total == 0:
        raise ConfigError(
            f"all utterances of {where} have length 0: nothing can be drawn by length"
        )
    powers = np.array([(part / total) ** upsampling for part in sums])
    chances: Floats = powers / powers.sum()
    return chances


def _crossed(count: int, members: Members, datasets: Members) -> tuple[Ints, Members]:
    """Return the number of each pair of a data set and a category, and its rows.

    Only pairs that have rows in common count.
    """
    categories = len(members.ends) - 1
    by_row = stable_order(datasets.rows)
    dataset = datasets.codes[by_row]
    times = np.bincount(datasets.rows, minlength=count)
    starts = np.cumsum(times) - times
    repeats = times[members.rows]
    item = np.repeat(np.arange(len(members.rows)), repeats)
    place = np.arange(len(item)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    rows = members.rows[item]
    pair = dataset[starts[rows] + place] * categories + members.codes[item]
    if len(rows) == 0:
        raise ConfigError("no utterance is both in a category and in a data set")
    order = stable_order(pair)
    rows, pair = rows[order], pair[order]
    # an utterance may be named twice on a line
    once = np.sort(np.unique(pair * count + rows, return_index=True)[1])
    rows, pair = rows[once], pair[once]
    ends = np.concatenate([[0], np.flatnonzero(pair[1:] != pair[:-1]) + 1, [len(pair)]])
    return pair[ends[:-1]], Members(rows, ends)


def shuffled(members: Members, epoch: int) -> Members:
    """Shuffle each pool by itself."""
    shuffles = Shuffles(epoch)
    partners = np.empty(len(members.rows), np.int64)
    for start, end in zip(members.ends[:-1].tolist(), members.ends[1:].tolist(), strict=True):
        partners[start:end] = shuffles.swap_partners(end - start) + start
    return Members(members.rows[apply_swaps(partners, np.arange(len(partners)))], members.ends)


def drawn_batches(lengths: Ints, pools: Pools, limits: Limits, epoch: int) -> Batches:
    """Draw from shuffled pools and cut into batches.

    Each pool is drawn in turn from its first utterance on and around.
    """
    draws = int(pools.frames / lengths.mean())
    pool = _drawn_pools(pools, draws, epoch)
    members = pools.members
    order, ends = grouped(pool, len(members.ends) - 1)
    sizes = np.diff(ends)
    turn = np.arange(draws) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows = np.empty(draws, np.int64)
    rows[order] = members.rows[
        np.repeat(members.ends[:-1], sizes) + turn % np.repeat(members.sizes, sizes)
    ]
    cut = chain(
        ends_over_sum(lengths[rows], limits.bins, limits.min_batch_size, limits.max_batch_size)
    )
    if not limits.drop_last and draws - cut[-1] >= limits.min_batch_size:
        cut = np.append(cut, draws)
    return Batches(rows[: cut[-1]], cut)


def _drawn_pools(pools: Pools, draws: int, epoch: int) -> Ints:
    random = np.random.RandomState(epoch)
    if pools.datasets is None:
        return _drawn(pools.chances[0], random.random_sample(draws))
    uniform = random.random_sample(2 * draws).reshape(draws, 2)
    dataset = _drawn(pools.datasets, uniform[:, 0])
    order, ends = grouped(dataset, len(pools.chances))
    pool = np.empty(draws, np.int64)
    for number, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        if end > start:
            here = order[start:end]
            pool[here] = _drawn(pools.chances[number], uniform[here, 1]) + pools.first[number]
    return pool


def _drawn(chances: Floats, uniform: Floats) -> Ints:
    """Return the draws that numpy's RandomState.choice(p=chances) makes of uniform numbers."""
    until = chances.cumsum()
    until /= until[-1]
    return np.searchsorted(until, uniform, side="right")
