"""The base of all samplers: an order of batches per epoch, shared out over any number of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np

from featcache._checks import number_in_state, whole_number
from featcache.errors import ConfigError, StateError
from featcache.samplers.batches import Batches
from featcache.samplers.iteration import Iteration, Share, refuse_sharing_again
from featcache.samplers.ranks import resolve_rank, share_out
from featcache.store.format.files import digest

State: TypeAlias = dict[str, object]  # numbers, strings and None


class EpochSampler(ABC):
    """An epoch's batches in an order that depends on seed and epoch alone, shared out over ranks.

    Give it to a DataLoader as `batch_sampler`. In each step the ranks take `world_size` batches
    that follow each other in that order, one each, so that all ranks have the same number of
    batches. Where they do not come out even, the batches of the last step are cut smaller until
    each rank has one; no utterance is given twice to make up the number.

    Without `rank` and `world_size`, those of `torch.distributed` when an iteration begins, or one
    rank if it is not in use. An iteration begins with its first batch. One that came to its end is
    followed by the next epoch, one that was left before by the same again; `set_epoch` has the last
    word. (A DataLoader with workers takes the last batches before it delivers them: left between,
    it goes on to the next epoch.)

    Args:
        seed: draws another order; the same on all ranks.
        rank: number of this process, from 0, together with `world_size`.
        world_size: how many processes share the batches.
        drop_last: leave the last step's batches out instead of cutting them smaller.

    Raises `ConfigError` for what cannot work; for too few utterances to share, when the epoch is
    begun.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.seed = whole_number("seed", seed, 0)
        self._given_rank = None if rank is world_size is None else resolve_rank(rank, world_size)
        self.drop_last = drop_last
        self.epoch = 0
        self._start = 0  # the position of the iteration that was begun last, or of the next one
        self._ended = False  # the loaded state is that of an epoch that had come to its end
        self._iteration: Iteration | None = None  # begun last, in this epoch
        self._waiting = False  # a newer one was made, and has not begun
        # an epoch, and its batches of all ranks together
        self._batches: tuple[int, Batches] | None = None
        self._share: tuple[tuple[int, ...], Share] | None = None

    @property
    def rank(self) -> int:
        """Number of this process, from 0, as it is now.

        Raises `ConfigError` where it cannot be known.
        """
        return self._rank_of_size()[0]

    @property
    def world_size(self) -> int:
        """Number of processes that share the batches, as it is now."""
        return self._rank_of_size()[1]

    @property
    def sampler(self) -> EpochSampler:
        """The sampler itself: Lightning and accelerate look here for `set_epoch`."""
        return self

    @abstractmethod
    def epoch_batches(self, epoch: int) -> Batches:
        """Return an epoch's batches in the order in which all ranks together take them.

        None of them empty.
        """

    @abstractmethod
    def settings(self) -> State:
        """Return what the order depends on beside seed and epoch: settings, a digest as "data"."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        The one that the sampler is in comes again; after `load_state_dict` what was left of it
        comes.
        """
        number = whole_number("epoch", epoch, 0)
        if number != self.epoch:
            self._go_to(number, 0)
        else:
            self._ended = False
            if self._iteration is not None:
                self._iteration.told = True

    def __iter__(self) -> Iterator[list[int] | list[str]]:
        """Iterate over this rank's batches of the epoch; after `load_state_dict` the rest, once."""
        self._waiting = True
        return Iteration(self._begin)

    def __len__(self) -> int:
        """Count the batches of a whole epoch for this rank, wherever in it the sampler is."""
        return len(self._shared(self.epoch, 0))

    def state_dict(self, steps: int | None = None) -> State:
        """Return where the epoch stands, the same on all ranks, as a dict that JSON can hold.

        Any number of ranks can go on from it: "position" counts the utterances that all ranks
        together have taken.

        Args:
            steps: batches that this rank has trained on since the iteration began. By default as
                many as were taken from the newest iterator; a DataLoader with workers takes more
                than it delivers: count these yourself.
        """
        newest = None if self._waiting else self._iteration
        epoch, start = self._coming() if self._waiting else (self.epoch, self._start)
        share = self._shared(epoch, start) if newest is None else newest.share
        ended = self._ended if newest is None else newest.ended and not newest.told
        taken = 0 if newest is None else newest.steps
        done = taken if steps is None else whole_number("steps", steps, 0)
        if done > len(share):
            raise ConfigError(
                f"steps={done} is more than the {len(share)} of this iteration of epoch {epoch}"
            )
        return {
            **self._identity(),
            "epoch": epoch,
            "position": share.position(done),
            # then the next epoch comes, unless set_epoch names this one
            "ended": ended and steps is None,
            "order": self._order(epoch),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to where a state was saved, by any number of ranks.

        What is left of its epoch comes next.

        Raises `StateError` for a state of other data, another seed or other settings, which it
        names, and for a dict that is no state; the sampler is then as it was.
        """
        epoch, position, ended = self._check(state)
        items = len(self._epoch(epoch).items)
        if position > items or state["order"] != self._order(epoch):
            raise StateError(
                f"epoch {epoch} has {items} utterances in another order than when the state was "
                f"saved at position {position}; was that with another version of NumPy? begin the "
                "epoch anew, without the state"
            )
        self._go_to(epoch, position, ended)

    def _go_to(self, epoch: int, position: int, ended: bool = False) -> None:
        self.epoch, self._start, self._ended = epoch, position, ended
        self._iteration, self._waiting = None, False

    def _coming(self) -> tuple[int, int]:
        """Return epoch and position of the next iteration."""
        newest = self._iteration
        if newest is not None and newest.complete:
            return self.epoch + (not newest.told), 0
        return (self.epoch + 1, 0) if self._ended else (self.epoch, self._start)

    def _begin(self, iteration: Iteration) -> Share:
        epoch, start = self._coming()
        share = self._shared(epoch, start)
        if share.world_size > 1:
            refuse_sharing_again(self)
        self._go_to(epoch, start)
        self._iteration = iteration
        return share

    def _where(self) -> str:
        ranks = "" if self._given_rank is None else ", rank {} of {}".format(*self._given_rank)
        return f"epoch {self.epoch}{ranks}"

    def _rank_of_size(self) -> tuple[int, int]:
        return self._given_rank or resolve_rank(None, None)

    def _epoch(self, epoch: int) -> Batches:
        if self._batches is None or self._batches[0] != epoch:
            self._batches = epoch, self.epoch_batches(epoch)
        return self._batches[1]

    def _shared(self, epoch: int, start: int) -> Share:
        """Return an epoch's batches from a position on: one step takes `world_size` in a row."""
        rank, world_size = self._rank_of_size()
        wanted = epoch, start, rank, world_size
        if self._share is None or self._share[0] != wanted:
            batches = self._epoch(epoch)
            ends = share_out(batches.ends, start, world_size, self.drop_last)
            left = Batches(batches.items, ends, batches.keys, batches.numbering)
            self._share = wanted, Share(left, rank, world_size)
        return self._share[1]

    def _identity(self) -> State:
        return {"sampler": type(self).__name__, "seed": self.seed, **self.settings()}

    def _order(self, epoch: int) -> str:
        return digest(np.ascontiguousarray(self._epoch(epoch).items).data)

    def _check(self, state: Mapping[str, object]) -> tuple[int, int, bool]:
        """Return epoch, position and end of a state that is one of this sampler's."""
        if not isinstance(state, Mapping):
            raise StateError(f"a sampler's state is the dict that state_dict() gave, not {state!r}")
        mine = self._identity()
        if state.get("sampler", mine["sampler"]) != mine["sampler"]:
            raise StateError(
                f"the state is of a {state['sampler']}, and this is a {mine['sampler']}"
            )
        keys = {*mine, "epoch", "position", "ended", "order"}
        if keys != set(state):
            found = sorted(map(str, state))
            raise StateError(
                f"the state of a {mine['sampler']} has the keys {sorted(keys)}, not {found}"
            )
        others = [
            f"{name}={state[name]!r} (here {value!r})"
            for name, value in mine.items()
            if state[name] != value
        ]
        if others:
            raise StateError(
                f"the state was saved with {', '.join(others)}; go on with the same data and "
                "settings, or without it"
            )
        epoch = number_in_state("epoch", state)
        return epoch, number_in_state("position", state), state["ended"] is True
