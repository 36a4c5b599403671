"""Random features: each utterance has generators of its own, from the seed and its id."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

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

    def __init__(self, dataset: Any, ids: Sequence[str], seed: int) -> None:
        self.seeded, self._ids, self._seed = dataset, ids, seed

    def __len__(self) -> int:
        return len(self.seeded)

    def __getitem__(self, index: int) -> Any:
        seed_generators(self._seed, self._ids[index], LOADING)
        return self.seeded[index]

    def __getattr__(self, name: str) -> Any:
        # pickle asks before there is a data set; torch loads several at once by __getitems__
        if name in ("seeded", "__getitems__") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.seeded, name)
