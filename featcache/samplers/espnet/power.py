"""Batches drawn by category, rare ones more often than they occur (catpow)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches, counted
from featcache.samplers.espnet.arguments import count, require_factor
from featcache.samplers.espnet.categories import Members
from featcache.samplers.espnet.cut import chain, ends_over_sum, grouped
from featcache.samplers.espnet.python_shuffle import permutation_by

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """Size of a batch: it ends with the utterance that makes it larger than `bins` frames."""

    bins: int
    min_batch_size: int
    max_batch_size: int | None
    drop_last: bool

    @classmethod
    def of(cls, bins: int | None, minimum: int, maximum: int | None, drop_last: bool) -> Limits:
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


def power_batches(lengths: Ints, pools: Pools, limits: Limits, epoch: int) -> Batches:
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


def drawn_batches(lengths: Ints, pools: Pools, limits: Limits, epoch: int) -> Batches:
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
        return _drawn(pools.chances[0], generator.random_sample(draws))
    uniform = generator.random_sample(2 * draws).reshape(draws, 2)
    order, ends = grouped(_drawn(pools.datasets, uniform[:, 0]), len(pools.chances))
    pool, first = np.empty(draws, np.int64), 0
    for here, chances in zip(np.split(order, ends[1:-1]), pools.chances, strict=True):
        if len(here):
            pool[here] = _drawn(chances, uniform[here, 1]) + first
        first += len(chances)
    return pool


def _drawn(chances: Floats, uniform: Floats) -> Ints:
    """Return the draws that numpy's RandomState.choice(p=chances) makes of uniform numbers."""
    until = chances.cumsum()
    until /= until[-1]
    return np.searchsorted(until, uniform, side="right")
