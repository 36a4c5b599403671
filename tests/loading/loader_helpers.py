"""What tests of loaders share: utterances in batches of three, epochs that others go on with."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
from store_helpers import id_of
from torch.utils.data import DataLoader

from featcache import FeatureDataset, FeatureLoader, FeatureTable

NUMBERS = range(40)
BATCHES = [[id_of(n) for n in range(first, min(first + 3, 40))] for first in range(0, 40, 3)]


def ids_of(loader: FeatureLoader[dict[str, Any]]) -> list[str]:
    """The ids of an epoch, in order."""
    return [id for batch in loader for id in batch["id"]]


def each_pair(kinds: Sequence[str]) -> list[tuple[str, int, int]]:
    """Kinds of tables, numbers of ranks and of workers: each pair of two of them comes."""
    numbers = product(enumerate(kinds), enumerate((0, 1, 2, 4)))
    return [(kind, 1 + (k + w) % 3, workers) for (k, kind), (w, workers) in numbers]


def through_workers(
    table: FeatureTable,
    samplers_of: Callable[..., list[Any]],
    random: np.random.Generator,
    *,
    ranks: int,
    workers: int,
) -> tuple[list[Any], int]:
    """Batches of an epoch that DataLoaders stop anywhere and others go on with, and its seed.

    `samplers_of(table, ranks, seed, state)` makes those of all ranks. One utterance of the epoch is
    left for each rank that goes on, since too few to share are refused.
    """
    others, seed = (ranks + int(random.integers(2))) % 3 + 1, int(random.integers(9))
    batches, states = [], []

    def loader(sampler: Any, workers: int) -> DataLoader[Any]:
        return DataLoader(
            FeatureDataset(table),
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=FeatureDataset.collate,
            multiprocessing_context=multiprocessing.get_context("fork") if workers else None,
        )

    samplers = samplers_of(table, ranks, seed)
    steps = int(random.integers(len(samplers[0])))
    for sampler in samplers:
        iterator = iter(loader(sampler, workers))
        batches += [next(iterator) for _ in range(steps)]
        states.append(sampler.state_dict(steps=steps))
    assert all(state == states[0] for state in states)
    size = len(table) if table.plan is None else table.plan.size
    for sampler in samplers_of(table, min(others, size - states[0]["position"]), seed, states[0]):
        batches += loader(sampler, min(workers, 1))
    return batches, seed
