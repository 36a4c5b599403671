"""Place of a loader within its epochs: counts batches that it delivered, not those read ahead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Protocol, cast, runtime_checkable

from featcache._checks import number_in_state, whole_number
from featcache.errors import StateError
from featcache.loading.item_index import Index
from featcache.samplers.epoch import EpochSampler
from featcache.samplers.iteration import Iteration
from featcache.tables.table import FeatureTable

LoaderState = Mapping[str, object]
IndexBatches = Iterable[Sequence[Index]]


@runtime_checkable
class SupportsEpoch(Protocol):
    """A batch sampler with another order each epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        ...


@runtime_checkable
class SupportsState(Protocol):
    """A batch sampler that can go on from where it was."""

    def state_dict(self, steps: int | None = None) -> dict[str, object]:
        """Return the state after `steps` batches of the running iteration."""
        ...

    def load_state_dict(self, state: LoaderState) -> None:
        """Have the next iteration go on from there."""
        ...


class Position:
    """The epoch that a loader is in, and how many of its batches were delivered, for any sampler.

    featcache's samplers know both. For others both are counted here, unless they have a state of
    their own; one that shows its `epoch` is told the next one when an iteration came to its end.
    """

    def __init__(self, sampler: IndexBatches, table: FeatureTable) -> None:
        self._sampler = sampler
        self._table = table
        self._epoch = 0
        self._start = 0  # batches that the running or the next iteration leaves out
        self._delivered = 0
        self._ended = False  # the next iteration is that of the next epoch
        self._told = False  # set_epoch was called since the iteration began
        self._iteration: Iteration | None = None  # of a sampler that knows what was delivered

    def begin(self) -> Iterator[Sequence[Index]]:
        """Begin an iteration: return its batches."""
        self._follow()
        if self._ended:
            self._move_on()
        self._delivered, self._told, self._ended = 0, False, False
        batches = iter(self._sampler)
        if isinstance(batches, Iteration):
            self._iteration, batches.delivered = batches, 0
        return islice(batches, self._start, None)

    def deliver(self) -> None:
        """Count a batch that is handed on."""
        self._delivered += 1
        if self._iteration is not None:
            self._iteration.delivered = self._delivered

    def end(self) -> None:
        """Note that the iteration came to its end."""
        if self._iteration is not None:
            self._iteration.ended = True
        elif not isinstance(self._sampler, SupportsState):
            self._follow()
            self._delivered, self._start = self._start + self._delivered, 0
            self._ended = not self._told

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        number = whole_number("epoch", epoch, 0)
        if isinstance(self._sampler, SupportsEpoch):
            self._sampler.set_epoch(number)
        self._told, self._ended = True, False
        self._enter(number)

    def state_dict(self) -> dict[str, object]:
        """Return epoch, place in it and a digest of the data, as plain numbers and strings."""
        sampler, data = self._sampler, self._table.digest
        if isinstance(sampler, EpochSampler):
            state = sampler.state_dict()
            return {"epoch": state["epoch"], "sampler": state, "data": data}
        self._follow()
        if isinstance(sampler, SupportsState):
            if not inspect.signature(sampler.state_dict).parameters:
                raise StateError(
                    f"{type(sampler).__name__}.state_dict() tells where the sampler is, and the "
                    "loader reads ahead of what it delivered; let it take the number of batches"
                )
            state = sampler.state_dict(self._delivered)
            return {"epoch": self._epoch, "sampler": state, "data": data}
        done = self._start + self._delivered
        here = {"batches": done, "of": self._count(), "ended": self._ended}
        return {"epoch": self._epoch, **here, "data": data}

    def load_state_dict(self, state: LoaderState) -> None:
        """Let the next iteration go on from a state.

        Raises `StateError` for the state of other data or samplers; all then stays as it was.
        """
        sampler = self._sampler
        counted = {"sampler"} if isinstance(sampler, SupportsState) else {"batches", "of", "ended"}
        if not isinstance(state, Mapping) or state.keys() != {"epoch", "data", *counted}:
            raise StateError(
                f"this is no state of a FeatureLoader over a {type(sampler).__name__}: {state!r}"
            )
        if state["data"] != self._table.digest:
            raise StateError(
                f"the state is that of a loader over other utterances than those of {self._table!r}"
            )
        epoch = number_in_state("epoch", state)
        if isinstance(sampler, SupportsState):
            sampler.load_state_dict(cast(LoaderState, state["sampler"]))
            self._epoch, self._start, self._delivered = epoch, 0, 0
            return
        if state["of"] != self._count():
            raise StateError(
                f"the state is that of {state['of']} batches, but there are {self._count()} now"
            )
        done = number_in_state("batches", state)
        self.set_epoch(epoch)
        self._start, self._delivered, self._ended = done, 0, state["ended"] is True

    def _follow(self) -> None:
        """Enter the epoch that the sampler shows, which another may have told it."""
        self._enter(getattr(self._sampler, "epoch", self._epoch))

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._start, self._delivered = epoch, 0, 0
            self._told, self._ended = True, False

    def _move_on(self) -> None:
        """Enter the next epoch; a sampler with `set_epoch` that shows none goes by its own rule."""
        shows = hasattr(self._sampler, "epoch")
        if isinstance(self._sampler, SupportsEpoch):
            if shows:
                self._sampler.set_epoch(self._epoch + 1)
            self._epoch += shows
        else:
            self._epoch += not shows
        self._start = 0

    def _count(self) -> int | None:
        return len(self._sampler) if isinstance(self._sampler, Sized) else None
