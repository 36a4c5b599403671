"""`MultipleIterFactory` and `ShardedIterFactory`: several data sets in turn, a shard per epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

from featcache._checks import whole_number
from featcache.errors import ConfigError
from featcache.iterators.epoch_order import random_state
from featcache.loading.collate import PaddedBatch
from featcache.samplers.ranks import resolve_rank


class IterFactory(Protocol):
    """A factory of the batches of an epoch."""

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterable[PaddedBatch]:
        """Return the batches of an epoch, counted from 1."""
        ...


class MultipleIterFactory:
    """Gives the batches of several factories one after the other; each is made when its turn comes.

    Args:
        build_funcs: functions that each return a factory.
        seed: with the epoch it decides the order of the factories.
        shuffle: whether the factories, and the batches of each, are shuffled.

    >>> from functools import partial
    >>> from featcache.iterators import SequenceIterFactory
    >>> utterances = {id: (id, {}) for id in "abc"}
    >>> halves = [[["a"], ["b"]], [["c"]]]
    >>> build_funcs = [partial(SequenceIterFactory, utterances, half) for half in halves]
    >>> [ids for ids, batch in MultipleIterFactory(build_funcs).build_iter(epoch=1)]
    [('a',), ('b',), ('c',)]
    """

    def __init__(
        self,
        build_funcs: Collection[Callable[[], IterFactory]],
        seed: int = 0,
        shuffle: bool = False,
    ) -> None:
        self._build_funcs = list(build_funcs)
        self._seed, self._shuffle = seed, shuffle

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[PaddedBatch]:
        """Give the batches of an epoch, from 1 on; `shuffle` overrides that of all factories."""
        shuffled = self._shuffle if shuffle is None else shuffle
        functions = self._build_funcs
        if shuffled:
            order = random_state(epoch, self._seed).permutation(len(functions))
            functions = [functions[number] for number in order.tolist()]
        for function in functions:
            yield from _factory(function()).build_iter(epoch, shuffled)


class ShardedIterFactory:
    """Gives the batches of one shard of the data per epoch; each rank takes another shard.

    Epoch 1 takes shard 0 (on rank 0; then follow the other ranks' shards), epoch 2 the next, and so
    on around.

    Args:
        build: returns the factory of a shard, whose number it is given.
        num_shards: how many shards there are, a multiple of the number of ranks.

    Raises `ConfigError` for a number of shards that the ranks cannot share.
    """

    def __init__(self, build: Callable[[int], IterFactory], num_shards: int) -> None:
        self._build = build
        self._num_shards = whole_number("num_shards", num_shards, 1)

    def shard(self, epoch: int) -> int:
        """Return the number of the shard that this rank takes in an epoch."""
        rank, world_size = resolve_rank(None, None)
        if self._num_shards % world_size:
            raise ConfigError(
                f"{self._num_shards} shards cannot be shared evenly by {world_size} ranks; make "
                "num_shards a multiple"
            )
        return ((epoch - 1) * world_size + rank) % self._num_shards

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterable[PaddedBatch]:
        """Return the batches of an epoch, counted from 1."""
        return _factory(self._build(self.shard(epoch))).build_iter(epoch, shuffle)


def _factory(made: IterFactory) -> IterFactory:
    if not hasattr(made, "build_iter"):
        raise ConfigError(
            f"a function must return a factory with build_iter, not {type(made).__name__}"
        )
    return made
