"""Batches of a number of rows, shuffled or in the order of the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from featcache._cached import cached_property
from featcache._checks import whole_number
from featcache.errors import ConfigError
from featcache.format import digest, ends_of
from featcache.samplers.batches import Batches, BatchOf, Needs, Numbering
from featcache.samplers.epoch import EpochSampler, State, shuffled_in_groups
from featcache.tables import FeatureTable, Order, drawn

# `ShuffledBatchSampler`: batches that were made before, in another order each epoch.


class ShuffledBatchSampler(EpochSampler):
    """Gives batches that were made before, in another order each epoch.

    The batches themselves stay as they are.

    Batches that follow each other in the list are taken to be of similar length: they stay in one
    group, groups and the batches in them are shuffled, and so the ranks get batches of similar
    length in the same step. For how ranks share and resume, and for the other arguments, see
    `EpochSampler`. One thread iterates over it; forks and pickles have a place of their own.

    Args:
        batches: `Batches`, or lists of row numbers or of ids; empty ones are left out.
        shuffle: False keeps the given order.

    >>> sampler = ShuffledBatchSampler([[0, 1], [2], [3, 4]], shuffle=False, rank=1, world_size=2)
    >>> list(sampler)
    [[2], [4]]
    >>> sampler.load_state_dict(sampler.state_dict(steps=1))
    >>> list(sampler)
    [[4]]
    """

    def __init__(
        self,
        batches: Batches | Iterable[Iterable[int] | Iterable[str]],
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed=seed, rank=rank, world_size=world_size, drop_last=drop_last)
        given = batches if isinstance(batches, Batches) else _from_lists(batches)
        self.batches = given if given.sizes.all() else given.take(np.flatnonzero(given.sizes))
        self.shuffle = shuffle
        if not len(self.batches):
            raise ConfigError("there are no batches to sample, or only empty ones")

    @property
    def numbering(self) -> Numbering | None:
        """The utterances that row numbers count, where that is known."""
        return self.batches.numbering

    @property
    def needs(self) -> Needs | None:
        """The layout and the frames that the sampler counted which made the batches, if any did."""
        return self.batches.needs

    def __repr__(self) -> str:
        return f"<ShuffledBatchSampler: {self.batches!r}, {self._where()}>"

    def epoch_batches(self, epoch: int) -> Batches:
        """Return the batches in the order of an epoch."""
        if not self.shuffle:
            return self.batches
        return self.batches.take(
            shuffled_in_groups(len(self.batches), drawn(self.seed, "batches", epoch))
        )

    def settings(self) -> State:
        """Return what the order depends on: whether it is shuffled, and a digest of the batches."""
        return {"data": self._digest, "shuffle": self.shuffle}

    @cached_property
    def _digest(self) -> str:
        numbers = np.concatenate([self.batches.items, self.batches.ends])
        ids = "\0".join(self.batches.keys or ()).encode(errors="surrogatepass")
        return digest((digest(numbers.data) + digest(ids)).encode())


def _from_lists(lists: Iterable[Iterable[int] | Iterable[str]]) -> Batches:
    batches = list(lists)
    numbering, needs = _known_of(batches)
    # a string would pass for a list of one-letter ids, a number is no list at all
    wrong = (str, int, float, np.number)
    listed: list[list[object]] = [
        [None] if isinstance(batch, wrong) else list(batch) for batch in batches
    ]
    flat = [item for batch in listed for item in batch]
    ends = ends_of(list(map(len, listed)))
    ids = [item for item in flat if isinstance(item, str)]
    if ids and len(ids) == len(flat):
        return Batches(np.arange(len(ids)), ends, keys=ids, needs=needs)
    if not all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in flat):
        raise ConfigError("batches are lists of row numbers, integers, or lists of ids, strings")
    return Batches(np.array(flat, np.int64), ends, numbering=numbering, needs=needs)


def _known_of(batches: Sequence[object]) -> tuple[Numbering | None, Needs | None]:
    """Return what samplers of featcache that made all of these batches know of them.

    Raises `ConfigError` where they number the rows of several tables.
    """
    known = [batch for batch in batches if isinstance(batch, BatchOf)]
    if not known or len(known) < len(batches):
        return None, None
    needs = {batch.needs for batch in known}
    need = needs.pop() if len(needs) == 1 else None
    numberings = list({id(batch.numbering): batch.numbering for batch in known}.values())
    if any(each is None for each in numberings):
        return None, need
    if numberings[1:] and len({each.proof for each in numberings if each is not None}) > 1:
        raise ConfigError("the batches number rows of several tables; those of one are needed")
    return numberings[0], need


# `PlainBatchSampler`: batches of one size, without regard to lengths.


class PlainBatchSampler(EpochSampler):
    """Batches of `batch_size` rows of a table, in their order or, other ones each epoch, at random.

    Those of a mix come in its order, shuffled or not. The last batch may be smaller; `drop_last`
    leaves it out, and what then does not come out even for the ranks. For how they share and
    resume, see `EpochSampler`.

    Raises `ConfigError` where `drop_last` leaves nothing.
    """

    def __init__(
        self,
        table: FeatureTable,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed=seed, drop_last=drop_last)
        self.table = table
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.shuffle = shuffle
        count = len(table) if table.plan is None else table.plan.size
        if drop_last and 0 < count < self.batch_size:
            raise ConfigError(
                f"drop_last leaves nothing of the {count} utterances of an epoch in batches of "
                f"{self.batch_size}; use a smaller batch_size, or leave out drop_last"
            )

    def __repr__(self) -> str:
        return (
            f"<PlainBatchSampler: {len(self.table)} utterances, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle}, {self._where()}>"
        )

    def epoch_batches(self, epoch: int) -> Batches:
        """Return the batches of an epoch, in its order."""
        rows = self.table.epoch_rows(epoch, seed=self.seed)
        count = len(rows)
        if self.shuffle and self.table.plan is None:
            rows = Order(count, drawn(self.seed, "rows", epoch))
        ends = np.arange(0, count + 1, self.batch_size)
        if ends[-1] < count and not self.drop_last:
            ends = np.append(ends, count)
        return Batches(rows, ends, numbering=Numbering(len(self.table), self.table))

    def settings(self) -> State:
        """Return what the order depends on: the size, whether it is shuffled, and the table."""
        return {
            "data": self.table.digest,
            "batch_size": self.batch_size,
            "shuffle": bool(self.shuffle),
        }
