"""One iteration of a sampler on one rank, and hosts that would share its batches out again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from featcache.errors import ConfigError
from featcache.samplers.batches import Batches

# attributes by which wrappers hold the sampler that they share out
HOLDS = ("batch_sampler", "sampler", "dataset")


@dataclass(frozen=True, slots=True)
class Share:
    """The batches of all ranks from a position on, in steps of one batch for each rank."""

    batches: Batches
    rank: int
    world_size: int

    def __len__(self) -> int:
        return len(self.batches) // self.world_size

    def __getitem__(self, step: int) -> list[int] | list[str]:
        return self.batches.batch(step * self.world_size + self.rank)

    def position(self, step: int) -> int:
        """Return how many utterances of the epoch all ranks have taken after that many steps."""
        if step == len(self):  # what drop_last leaves out is done with, too
            return len(self.batches.items)
        return int(self.batches.ends[step * self.world_size])


class Iteration(Iterator[list[int] | list[str]]):
    """This rank's batches of an epoch, which may still be chosen until the first one is taken.

    A loader that reads ahead sets `delivered`, and counts there the batches that it has handed on;
    it then also sets `ended`.
    """

    def __init__(self, begin: Callable[[Iteration], Share]) -> None:
        self._begin = begin
        self._share: Share | None = None
        self._steps = 0  # of the share: asking for its length costs as much as a batch
        self._taken = 0
        self.delivered: int | None = None
        self.ended = False  # it was asked for more than there is
        self.told = False  # set_epoch named its epoch anew: that epoch comes again

    def __next__(self) -> list[int] | list[str]:
        if self._share is None:
            self._share = self._begin(self)
            self._steps = len(self._share)
        step = self._taken
        if step == self._steps:
            self.ended = self.ended or self.delivered is None
            raise StopIteration
        self._taken = step + 1
        return self._share[step]

    @property
    def share(self) -> Share:
        """The batches of this iteration, which has begun."""
        assert self._share is not None
        return self._share

    @property
    def steps(self) -> int:
        """Batches that were taken, or delivered."""
        return self._taken if self.delivered is None else self.delivered

    @property
    def complete(self) -> bool:
        """True once all batches were taken, or delivered."""
        return self.steps == len(self.share)


def refuse_sharing_again(sampler: object) -> None:
    """Raise `ConfigError` if a wrapper that iterates gives its process a part of the batches only.

    The sampler has shared them out already: most would never be seen. Such wrappers (of
    accelerate, SpeechBrain) name the number of processes in an attribute, and ask for the first
    batch from a method of their own.
    """
    frame = sys._getframe(1)  # noqa: SLF001  # no other way to look
    while frame is not None:
        caller = frame.f_locals.get("self")
        processes = _processes(caller)
        if processes > 1 and _leads_to(caller, sampler):
            raise ConfigError(
                f"{type(caller).__name__} would share the batches out over {processes} processes, "
                "but the sampler does so itself, and most would never be seen: leave the loader "
                "out of accelerate's prepare(), or use a FeatureLoader, which prepare() hands on "
                "as it is; give SpeechBrain the loader whole, not as loader arguments"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _processes(caller: object) -> int:
    found = getattr(caller, "__dict__", {})
    counts = [found.get("num_processes"), found.get("num_replicas")]
    return max((count for count in counts if isinstance(count, int)), default=1)


def _leads_to(holder: object, sampler: object, depth: int = 4) -> bool:
    if holder is sampler:
        return True
    held = getattr(holder, "__dict__", {})
    return depth > 0 and any(
        _leads_to(held[name], sampler, depth - 1) for name in HOLDS if name in held
    )
