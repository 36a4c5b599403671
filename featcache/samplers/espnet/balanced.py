"""Batches in which all categories have about as many utterances (catbel)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.categories import Categorized, Members
from featcache.samplers.espnet.cut import grouped
from featcache.samplers.espnet.python_shuffle import Shuffles, apply_swaps


@dataclass(frozen=True)
class CatBel:
    """Categories are dealt out in random order; a batch passes over those that it has enough of.

    It has one utterance of a category, or batch_size // categories + 1 where there are fewer
    categories. An utterance passed over is lost for the epoch, and so is a last batch that does not
    fill: ESPnet's way.
    """

    batch_size: int

    def batches(self, found: Categorized, epoch: int) -> Batches:
        """Draw the batches of an epoch; raises `ConfigError` if not one can be filled."""
        members = found.categories
        rows = _balanced_rows(members, self.batch_size, epoch)
        if len(rows) == 0:
            raise ConfigError(
                f"no batch of {self.batch_size} utterances (batch_size) can be filled from "
                f"{len(members.rows)} utterances of {len(members.sizes)} categories with about as "
                "many of each; try a smaller batch_size"
            )
        return found.named(Batches(rows, np.arange(0, len(rows) + 1, self.batch_size)))


def _balanced_rows(members: Members, batch_size: int, epoch: int) -> Ints:
    """Return the rows of all batches, one batch after the other."""
    shuffles = Shuffles(epoch)
    categories = len(members.ends) - 1
    most = 1 if categories >= batch_size else batch_size // categories + 1
    order = shuffles.permutation(categories)
    sizes = members.sizes[order]
    partners = [shuffles.swap_partners(size) for size in sizes.tolist()]
    dealt = np.repeat(np.arange(categories), sizes)[shuffles.permutation(len(members.rows))]
    taken = _taken(dealt, batch_size, most)
    # each category hands out its shuffled utterances from the last one on: no others need to be
    # shuffled
    turns, ends = grouped(dealt[taken], categories)
    used = np.diff(ends)
    starts = np.cumsum(sizes) - sizes
    steps = np.repeat(starts + sizes - used, used) + _counted(used)
    at = apply_swaps(
        np.concatenate(
            [part + start for part, start in zip(partners, starts.tolist(), strict=True)]
        ),
        steps,
    )
    last_first = np.repeat(np.cumsum(used), used) - 1 - _counted(used)
    source = at[last_first] - np.repeat(starts - members.ends[:-1][order], used)
    rows = np.empty(len(taken), np.int64)
    rows[turns] = members.rows[source]
    return rows


def _counted(sizes: Ints) -> Ints:
    """Return 0, 1, ... up to each size, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


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
