"""`Position`: where a loader is within its epochs, by the batches that it delivered."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Protocol, cast, runtime_checkable

from featcache._checks import number_in_state, whole_number
from featcache.errors import ConfigError, StateError
from featcache.loading.dataset import Index
from featcache.samplers.epoch import EpochSampler, Iteration
from featcache.tables.order import VERSION, check_version
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
        """Continue from there in the next iteration."""
        ...


class Delivered:
    """Batches of an iteration that were delivered; a sampler of featcache is told of each."""

    def __init__(self, batches: Iterator[Sequence[Index]]) -> None:
        self.steps = 0
        self._iteration = batches if isinstance(batches, Iteration) else None
        self._tell()

    def add(self) -> None:
        """Count a batch that is handed on."""
        self.steps += 1
        self._tell()

    def end(self) -> None:
        """Note that the iteration came to its end."""
        if self._iteration is not None:
            self._iteration.end()

    def _tell(self) -> None:
        if self._iteration is not None:
            self._iteration.deliver(self.steps)


class Position:
    """The epoch that a loader is in, and how many of its batches were delivered, for any sampler.

    featcache's samplers know both. For others both are counted here, unless they have a state of
    their own; one that shows its `epoch` is told the next one when an iteration came to its end.
    An iteration that still runs where another place is chosen counts no more.
    """

    def __init__(self, sampler: IndexBatches, table: FeatureTable) -> None:
        self._sampler = sampler
        self._table = table
        self._shown = self._shows()  # by the sampler, when that was last followed
        self._own: int | None = None  # what it shows since it changed that itself
        self._epoch = self._shown or 0
        self._start = 0  # batches that the running or the next iteration leaves out
        self._delivered: Delivered | None = None  # of the one begun last, if it is from there on
        self._ended = False  # the next iteration is that of the next epoch
        self._told = False  # set_epoch was called since the iteration began

    def begin(self) -> tuple[Iterator[Sequence[Index]], Delivered]:
        """Begin an iteration: return its batches, and what counts them."""
        self._follow()
        if self._ended:
            self._move_on()
        self._told = False
        self._go_to(self._epoch, self._start)
        before = self._shows()
        with self._own_change():
            batches = iter(self._sampler)
        self._adopt(before)
        self._delivered = Delivered(batches)
        if not isinstance(batches, Iteration):
            batches = self._taken(batches)
        return islice(batches, self._start, None), self._delivered

    def _taken(self, batches: Iterator[Sequence[Index]]) -> Iterator[Sequence[Index]]:
        while True:
            try:
                with self._own_change():
                    batch = next(batches)
            except StopIteration:
                return
            yield batch

    @contextmanager
    def _own_change(self) -> Iterator[None]:
        """Note that the sampler changes the epoch which it shows itself: nobody has chosen it.

        One that counts its iterations does so while its last batches are still read ahead: that
        one is followed when they are delivered, or when the next iteration begins.
        """
        before = self._shows()
        try:
            yield
        finally:
            if self._shows() != before:
                self._own = self._shows()

    def _adopt(self, before: int | None) -> None:
        """Enter the epoch that a sampler shows once it iterates, unless it counts iterations."""
        shown = self._shows()
        if shown is None or before is None or shown in (before, self._epoch):
            return
        if isinstance(self._sampler, SupportsState) or shown != before + 1:
            self._told = True
            self._go_to(shown, self._start)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that was begun last, or that was chosen since."""
        return self._sampler.epoch if isinstance(self._sampler, EpochSampler) else self._epoch

    @property
    def step(self) -> int:
        """Batches of the epoch that are done with, those before a resume among them."""
        if isinstance(self._sampler, EpochSampler):
            return self._sampler.steps_done
        return self._start + self._steps

    def batch(self, step: int) -> Sequence[Index]:
        """Return the batch of a step of the epoch, whether or not it was delivered."""
        if isinstance(self._sampler, EpochSampler):
            return self._sampler.batch(step)
        if not isinstance(self._sampler, Sequence):
            raise ConfigError(
                f"a {type(self._sampler).__name__} gives its batches one after the other; those of "
                "a list, and of the samplers of featcache.samplers, can be looked at before"
            )
        if whole_number("step", step, 0) >= len(self._sampler):
            raise ConfigError(f"there are {len(self._sampler)} steps, and no step {step}")
        return cast(Sequence[Sequence[Index]], self._sampler)[step]

    def seek(self, step: int) -> None:
        """Begin the next iteration at a step of the epoch."""
        if isinstance(self._sampler, EpochSampler):
            self._sampler.seek(step)
            return
        if isinstance(self._sampler, SupportsState):
            raise ConfigError(
                f"a {type(self._sampler).__name__} knows its place itself; load a state of it"
            )
        self._follow(but_own=True)
        number, count = whole_number("step", step, 0), self._count()
        if count is not None and number > count:
            raise ConfigError(f"there are {count} steps, and no step {number}")
        epoch, shown = self._epoch, self._shows()
        if shown is not None and shown != epoch:
            if isinstance(self._sampler, SupportsEpoch):
                self._tell(epoch)
            else:
                epoch = shown
        self._shown, self._own = self._shows(), None
        self._go_to(epoch, number)

    def end(self, delivered: Delivered) -> None:
        """Note that an iteration came to its end."""
        delivered.end()
        self._follow()
        if delivered is self._delivered and not isinstance(self._sampler, SupportsState):
            delivered.steps += self._start
            self._start, self._ended = 0, not self._told

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._choose(whole_number("epoch", epoch, 0))

    def _choose(self, epoch: int) -> None:
        self._tell(epoch)
        self._told, self._ended = True, False
        self._enter(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return epoch, place in it and a digest of the data, as plain numbers and strings."""
        sampler, known = self._sampler, {"data": self._table.digest, "version": VERSION}
        if isinstance(sampler, EpochSampler):
            state = sampler.state_dict()
            return {"epoch": state["epoch"], "sampler": state, **known}
        self._follow(but_own=self._delivered is not None)
        if isinstance(sampler, SupportsState):
            if not inspect.signature(sampler.state_dict).parameters:
                raise StateError(
                    f"{type(sampler).__name__}.state_dict() tells where the sampler is, and the "
                    "loader reads ahead of what it delivered; let it take the number of batches"
                )
            state = sampler.state_dict(self._steps)
            return {"epoch": self._epoch, "sampler": state, **known}
        done = self._start + self._steps
        here = {"batches": done, "of": self._count(), "ended": self._ended}
        return {"epoch": self._epoch, **here, **known}

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue from a state in the next iteration.

        Raises `StateError` for the state of other data or samplers, and of another version of the
        order that a seed gives; all then stays as it was.
        """
        sampler = self._sampler
        counted = {"sampler"} if isinstance(sampler, SupportsState) else {"batches", "of", "ended"}
        keys = {"epoch", "data", "version", *counted}
        if not isinstance(state, Mapping) or state.keys() != keys:
            raise StateError(
                f"this is no state of a FeatureLoader over a {type(sampler).__name__}: {state!r}"
            )
        check_version(state)
        if state["data"] != self._table.digest:
            mixed = "" if self._table.plan is None else ", or another mix of them,"
            raise StateError(
                f"the state is that of a loader over other utterances{mixed} than those of "
                f"{self._table!r}"
            )
        epoch = number_in_state("epoch", state, -1)  # which some begin with, to count at once
        if isinstance(sampler, SupportsState):
            sampler.load_state_dict(cast(LoaderState, state["sampler"]))
            self._shown, self._own = self._shows(), None
            self._go_to(epoch)
            return
        if state["of"] != self._count():
            raise StateError(
                f"the state is that of {state['of']} batches, but there are {self._count()} now"
            )
        if not isinstance(sampler, SupportsEpoch) and self._shows() not in (None, epoch):
            raise StateError(
                f"the state is that of epoch {epoch}, and a {type(sampler).__name__} is in epoch "
                f"{self._shows()} and has no set_epoch(); bring it there first"
            )
        done = number_in_state("batches", state)
        self._choose(epoch)
        self._go_to(epoch, done, ended=state["ended"] is True)

    @property
    def _steps(self) -> int:
        return 0 if self._delivered is None else self._delivered.steps

    def _go_to(self, epoch: int, start: int = 0, *, ended: bool = False) -> None:
        # all at once: a signal's handler may look at the state anywhere
        self._epoch, self._start, self._delivered, self._ended = epoch, start, None, ended

    def _shows(self) -> int | None:
        """Return the epoch that the sampler shows, if it does."""
        return getattr(self._sampler, "epoch", None)

    def _follow(self, *, but_own: bool = False) -> None:
        """Enter the epoch that the sampler shows now, unless it has changed that itself."""
        shown = self._shows()
        if shown is None or shown == self._shown or (but_own and shown == self._own):
            return
        self._shown, self._own = shown, None
        self._enter(shown)

    def _tell(self, epoch: int) -> None:
        """Bring a sampler with `set_epoch` to an epoch."""
        if isinstance(self._sampler, SupportsEpoch):
            self._sampler.set_epoch(epoch)
            self._shown, self._own = self._shows(), None

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._told = True
            self._go_to(epoch)

    def _move_on(self) -> None:
        """Enter the next epoch; a sampler with `set_epoch` that shows none goes by its own rule."""
        shows, is_told = self._shows() is not None, isinstance(self._sampler, SupportsEpoch)
        epoch = self._epoch + (shows is is_told)
        if shows:
            self._tell(epoch)
        self._go_to(epoch)

    def _count(self) -> int | None:
        return len(self._sampler) if isinstance(self._sampler, Sized) else None
