"""Batches of an epoch and their order: ESPnet's rules, by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches

Utterance = int | str
BatchList = Sequence[Sequence[Utterance]]


def random_state(epoch: int, seed: int) -> np.random.RandomState:
    """Return ESPnet's generator of an epoch; raises `ConfigError` where there is none."""
    if not 0 <= epoch + seed < 2**32:
        raise ConfigError(
            f"the sum of epoch and seed, {epoch + seed}, is not within 0 to 2**32 - 1; epochs "
            "count from 1"
        )
    return np.random.RandomState(epoch + seed)


def epoch_order(batches: int, epoch: int, seed: int, shuffle: bool, per_epoch: int | None) -> Ints:
    """Return the numbers of the batches that epoch `epoch` (from 1 on) takes out of `batches`.

    Without `per_epoch` all of them. Otherwise that many: passes over all batches follow each other,
    each with an order of its own, and each epoch goes on where the one before it ended.

    >>> epoch_order(3, epoch=2, seed=0, shuffle=False, per_epoch=2)
    array([2, 0])
    """
    if per_epoch is None:
        return _pass(batches, epoch, seed, shuffle)
    if not batches:
        raise ConfigError(f"there are no batches of which to take {per_epoch} per epoch")
    start = per_epoch * (epoch - 1)
    stop = start + per_epoch
    taken = [
        _pass(batches, begin // batches, seed, shuffle)[max(start - begin, 0) : stop - begin]
        for begin in range(start // batches * batches, stop, batches)
    ]
    return np.concatenate(taken)


@dataclass(frozen=True)
class EpochRule:
    """The batches that epochs take; `per_epoch` None: all of them."""

    per_epoch: int | None
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.per_epoch is not None and self.per_epoch < 1:
            raise ConfigError(f"an epoch takes at least 1 batch, not {self.per_epoch!r}")

    def batches(self, batches: BatchList, epoch: int, shuffle: bool | None) -> BatchList:
        """Return those of `batches` that an epoch takes; `shuffle` overrides that of the rule."""
        shuffled = self.shuffle if shuffle is None else shuffle
        order = epoch_order(len(batches), epoch, self.seed, shuffled, self.per_epoch)
        if isinstance(batches, Batches):
            return batches.take(order)
        return [batches[number] for number in order.tolist()]


def mixed(batches: BatchList, epoch: int, seed: int) -> BatchList:
    """Shuffle the utterances of all batches into batches of the size of the first.

    Raises `ConfigError` if the first batch is empty.
    """
    if not len(batches):
        return batches
    size = len(batches[0])
    if not size:
        raise ConfigError(
            "the first batch is empty, and with shuffle_within_batch it gives the size of all"
        )
    if isinstance(batches, Batches):
        items = batches.items[batches.ends[0] : batches.ends[-1]]
        shuffled = items[random_state(epoch, seed).permutation(len(items))]
        return Batches(
            shuffled,
            np.append(np.arange(0, len(items), size), len(items)),
            batches.keys,
            batches.numbering,
        )
    flat = [utterance for batch in batches for utterance in batch]
    flat = [flat[place] for place in random_state(epoch, seed).permutation(len(flat)).tolist()]
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def _pass(batches: int, number: int, seed: int, shuffle: bool) -> Ints:
    # shuffling a list and permuting its numbers take the same draws
    return random_state(number, seed).permutation(batches) if shuffle else np.arange(batches)
