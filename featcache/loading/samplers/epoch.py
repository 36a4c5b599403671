"""What all samplers share: an order of batches per epoch, shared out over ranks, that any number of ranks resumes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.loading.batches import Batches
from featcache.loading.samplers.sharing import place, share_out, shuffled_in_groups, whole_number
from featcache.store.files import digest

Ints = NDArray[np.int64]
State: TypeAlias = dict[str, object]  # numbers, strings and None


class EpochSampler(ABC):
    """An epoch's batches in an order that depends on seed and epoch alone, shared out over ranks.

    Give it to a DataLoader as `batch_sampler`. In each step the ranks take `world_size` batches that follow each other
    in that order, one each, so that all ranks have the same number of batches. Where they do not come out even, the
    batches of the last step are cut smaller until each rank has one; no utterance is given twice to make up the number.

    Without `rank` and `world_size`, those of `torch.distributed`, or one rank if it is not in use. Call `set_epoch`
    before each epoch, else the same one comes again.

    Args:
        seed: draws another order; the same on all ranks.
        rank: number of this process, from 0, together with `world_size`.
        world_size: how many processes share the batches.
        drop_last: leave the last step's batches out instead of cutting them smaller.

    Raises `ConfigError` for what cannot work; for too few utterances to share, when the epoch is begun.
    """

    def __init__(
        self, *, seed: int = 0, rank: int | None = None, world_size: int | None = None, drop_last: bool = False
    ) -> None:
        self.seed = whole_number("seed", seed, 0)
        self.rank, self.world_size = place(rank, world_size)
        self.drop_last = drop_last
        self.epoch = 0
        self._batches: Batches | None = None  # of this epoch, all ranks together
        self._left: tuple[int, Batches] | None  # those from a position on
        self._taken: list[int]  # how many the iteration that was begun last has given; empty before
        self._go_to(0)

    @abstractmethod
    def epoch_batches(self, epoch: int) -> Batches:
        """Return an epoch's batches in the order in which all ranks together take them; none of them empty."""

    @abstractmethod
    def settings(self) -> State:
        """Return what the order depends on beside seed and epoch: settings, and a digest of the data as "data"."""

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the one that the sampler is in already goes on from the state that was loaded, if any."""
        number = whole_number("epoch", epoch, 0)
        if number != self.epoch:
            self.epoch, self._batches = number, None
            self._go_to(0)

    def __iter__(self) -> Iterator[list[int] | list[str]]:
        """Give this rank's batches of the epoch: all, or after `load_state_dict` once those that were left."""
        self._start = self._next_start()
        shares, taken = self._shares(self._start), [0]
        self._taken = taken  # an older iterator that is still in use counts for itself

        def share() -> Iterator[list[int] | list[str]]:
            for number in range(self.rank, len(shares), self.world_size):
                taken[0] += 1
                yield shares[number]

        return share()

    def __len__(self) -> int:
        """Count the batches that the next iteration gives this rank; after `load_state_dict`, those that are left."""
        return len(self._shares(self._next_start())) // self.world_size

    def state_dict(self, steps: int | None = None) -> State:
        """Return where the epoch stands, the same on all ranks, as a dict that JSON can hold.

        Any number of ranks can go on from it: "position" counts the utterances that all ranks together have taken.

        Args:
            steps: batches that this rank has trained on since the iteration began. By default as many as were taken
                from the newest iterator; a DataLoader with workers takes more than it delivers: count these yourself.
        """
        shares = self._shares(self._start)
        all_steps = len(shares) // self.world_size
        done = sum(self._taken) if steps is None else whole_number("steps", steps, 0)
        if done > all_steps:
            raise ConfigError(f"steps={done} is more than the {all_steps} of this iteration of epoch {self.epoch}")
        # at the end, what drop_last leaves out is done with, too
        position = len(shares.items) if done == all_steps else int(shares.ends[done * self.world_size])
        return {**self._identity(), "epoch": self.epoch, "position": position, "order": self._order()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to where a state was saved, by any number of ranks: what is left of its epoch comes next.

        Raises `ConfigError` for a state of other data, another seed or other settings, which it names, and for a dict
        that is no state; the sampler is then as it was.
        """
        epoch, position = self._check(state)
        before = self.epoch, self._batches
        if epoch != self.epoch:
            self.epoch, self._batches = epoch, None
        items = len(self._all_batches().items)
        if position > items or state["order"] != self._order():
            self.epoch, self._batches = before
            raise ConfigError(
                f"epoch {epoch} has {items} utterances in another order than when the state was saved at position "
                f"{position}; was that with another version of NumPy? begin the epoch anew, without the state"
            )
        self._go_to(position)

    def _go_to(self, position: int) -> None:
        self._start, self._taken, self._left = position, [], None

    def _next_start(self) -> int:
        """Return where the next iteration begins: after one that came to its end, the whole epoch comes again."""
        if self._taken and self._taken[0] == len(self._shares(self._start)) // self.world_size:
            return 0
        return self._start

    def _all_batches(self) -> Batches:
        if self._batches is None:
            self._batches = self.epoch_batches(self.epoch)
        return self._batches

    def _shares(self, start: int) -> Batches:
        """Return the batches from a position on, as many in a row as there are ranks being one step."""
        if self._left is None or self._left[0] != start:
            batches = self._all_batches()
            ends = share_out(batches.ends, start, self.world_size, self.drop_last)
            self._left = start, Batches(batches.items, ends, batches.keys)
        return self._left[1]

    def _identity(self) -> State:
        return {"sampler": type(self).__name__, "seed": self.seed, **self.settings()}

    def _order(self) -> str:
        return digest(np.ascontiguousarray(self._all_batches().items).data)

    def _check(self, state: Mapping[str, object]) -> tuple[int, int]:
        """Return epoch and position of a state that is one of this sampler's."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"a sampler's state is the dict that state_dict() gave, not {state!r}")
        mine = self._identity()
        if state.get("sampler", mine["sampler"]) != mine["sampler"]:
            raise ConfigError(f"the state is of a {state['sampler']}, and this is a {mine['sampler']}")
        keys = {*mine, "epoch", "position", "order"}
        if keys != set(state):
            found = sorted(map(str, state))
            raise ConfigError(f"the state of a {mine['sampler']} has the keys {sorted(keys)}, not {found}")
        others = [f"{name}={state[name]!r} (here {value!r})" for name, value in mine.items() if state[name] != value]
        if others:
            raise ConfigError(
                f"the state was saved with {', '.join(others)}; go on with the same data and settings, or without it"
            )
        return whole_number("epoch", state["epoch"], 0), whole_number("position", state["position"], 0)


class ShuffledBatchSampler(EpochSampler):
    """Gives batches that were made before, in another order each epoch; the batches themselves stay as they are.

    Batches that follow each other in the list are taken to be of similar length: they stay in one group, groups and the
    batches in them are shuffled, and so the ranks get batches of similar length in the same step. For how ranks share
    and resume, and for the other arguments, see `EpochSampler`.

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
        self._digest: str | None = None
        if not len(self.batches):
            raise ConfigError("there are no batches to sample, or only empty ones")

    def __repr__(self) -> str:
        return f"<ShuffledBatchSampler: {self.batches!r}, epoch {self.epoch}, rank {self.rank} of {self.world_size}>"

    def epoch_batches(self, epoch: int) -> Batches:
        """Return the batches in the order of an epoch."""
        if not self.shuffle:
            return self.batches
        return self.batches.take(shuffled_in_groups(len(self.batches), np.random.default_rng((self.seed, epoch))))

    def settings(self) -> State:
        """Return what the order depends on: whether it is shuffled, and a digest of the batches."""
        if self._digest is None:
            numbers = np.concatenate([self.batches.items, self.batches.ends])
            ids = "\0".join(self.batches.keys or ()).encode(errors="surrogatepass")
            self._digest = digest((digest(numbers.data) + digest(ids)).encode())
        return {"data": self._digest, "shuffle": self.shuffle}


def _from_lists(batches: Iterable[Iterable[int] | Iterable[str]]) -> Batches:
    # a string would pass for a list of one-letter ids, a number is no list at all
    wrong = (str, int, float, np.number)
    listed: list[list[object]] = [[None] if isinstance(batch, wrong) else list(batch) for batch in batches]
    flat = [item for batch in listed for item in batch]
    ends = np.cumsum([0, *map(len, listed)])
    ids = [item for item in flat if isinstance(item, str)]
    if ids and len(ids) == len(flat):
        return Batches(np.arange(len(ids)), ends, ids)
    if not all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in flat):
        raise ConfigError("batches are lists of row numbers, integers, or lists of ids, strings")
    return Batches(np.array(flat, np.int64), ends)
