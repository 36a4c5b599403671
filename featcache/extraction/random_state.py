"""Random state: kept as the user has it, and seeded by id for features that draw numbers."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from featcache.extraction.datasets import DataSet
from featcache.staleness.probe import Comparison, Probe

# The global random generators, which an extraction leaves as it found them.


@dataclass(frozen=True, eq=False)
class RandomState:
    """A state of the generators of Python, NumPy and torch.

    >>> before = RandomState.now()
    >>> drawn = torch.rand(2)
    >>> before.is_now()
    False
    >>> before.put_back()
    >>> bool((torch.rand(2) == drawn).all())
    True
    """

    python: Any
    arrays: Any
    cpu: torch.Tensor
    devices: list[torch.Tensor] | None  # of CUDA, where it is in use

    @classmethod
    def now(cls) -> RandomState:
        """Return the state of now."""
        devices = torch.cuda.get_rng_state_all() if _has_begun() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices)

    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        now = RandomState.now()
        arrays = zip(self.arrays, now.arrays, strict=True)
        return (
            self.python == now.python
            and all(np.array_equal(one, other) for one, other in arrays)
            and torch.equal(self.cpu, now.cpu)
            and len(self.devices or ()) == len(now.devices or ())
            and all(map(torch.equal, self.devices or (), now.devices or ()))
        )

    def put_back(self) -> None:
        """Give the generators this state."""
        random.setstate(self.python)
        np.random.set_state(self.arrays)
        torch.set_rng_state(self.cpu)
        if self.devices is not None:
            torch.cuda.set_rng_state_all(self.devices)
        elif _has_begun():  # since then: back to the seeds that it began with
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Yield the generators of Python, NumPy and torch back the state that they had.

    A DataLoader draws the seed of its workers from torch's, also where it needs none; data sets and
    features draw from all of them. A training with the same seed must not go another way because
    its features were cached now.
    """
    state = RandomState.now()
    try:
        yield
    finally:
        state.put_back()


def _has_begun() -> bool:
    """Whether CUDA is in use; looking must not begin it: processes may be forked yet."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


# Random features: each utterance has generators of its own, from the seed and its id.

LOADING, COMPUTING = "load", "compute"


def seed_generators(seed: int, id: str, step: str) -> None:
    """Seed the global generators for one step of one utterance."""
    text = f"{seed}\0{step}\0{id}".encode("utf-8", "surrogatepass")
    number = xxhash.xxh3_64_intdigest(text)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    # not torch.manual_seed: for devices that are not in use yet it notes each call, in 3 ms
    torch.default_generator.manual_seed(number & 0x7FFFFFFFFFFFFFFF)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number & 0x7FFFFFFFFFFFFFFF)


class SeededItems:
    """A data set whose utterances are loaded from generators of their own.

    Args:
        dataset: the data set, which all else is asked of.
        ids: its ids.
        seed: of the generators.
    """

    def __init__(self, dataset: DataSet, ids: Sequence[str], seed: int) -> None:
        self.seeded, self._ids, self._seed = dataset, ids, seed

    def __len__(self) -> int:
        return len(self.seeded)

    def __getitem__(self, index: int) -> object:
        seed_generators(self._seed, self._ids[index], LOADING)
        return self.seeded[index]

    def __getattr__(self, name: str) -> object:
        # pickle asks before there is a data set; torch loads several at once by __getitems__
        if name in ("seeded", "__getitems__") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.seeded, name)


# Random features: how a run says that they are, and what that means for them.

_log = logging.getLogger("featcache")


def tell_random(probe: Probe, twice: Comparison | None) -> None:
    """Log that features are random, if computing utterances twice has shown it.

    Args:
        probe: the utterances.
        twice: how those computed twice differ; None: they do not.
    """
    if twice is None:
        return
    if twice.features:
        of = twice.features[0]
        what = f"{of.feature} of {of.id!r}, computed twice, {of.told()}"
    else:
        id, name = twice.inputs[0]
        what = f"input {name!r} of {id!r} is another each time"
    text = (
        "and even from the same seed (it keeps a state or a generator of its own, or the data "
        "come from a loader, which is used as it is): the cache cannot be checked by computing "
        "again"
    )
    if probe.seed is not None:
        text = (
            f"so each utterance is loaded and computed alone, under generators of the seed and "
            f"its id, and the seed, {probe.seed}, counts (torch.manual_seed sets it)"
        )
    _log.warning("features are random: %s; %s", what, text)
