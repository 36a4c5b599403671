"""Batches in which all categories have about as many utterances (catbel)."""

from __future__ import annotations

import random

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches, counted
from featcache.samplers.espnet.categories import Members
from featcache.samplers.espnet.cut import grouped
from featcache.samplers.espnet.python_shuffle import permutation, permutation_by


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
