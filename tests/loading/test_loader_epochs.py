"""A loader's epochs: a finished one is followed by the next, one that was left comes again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from loader_helpers import BATCHES, NUMBERS, ids_of
from store_helpers import make_cache

from featcache import FeatureLoader
from featcache.samplers import BucketBatchSampler, ShuffledBatchSampler


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), NUMBERS)


class Rotating:
    """A sampler of other people, which begins each epoch with another batch."""

    def __init__(self) -> None:
        self.number = 0

    def set_epoch(self, epoch: int) -> None:
        self.number = epoch

    def __len__(self) -> int:
        return len(BATCHES)

    def __iter__(self) -> Iterator[list[str]]:
        return iter(BATCHES[self.number :] + BATCHES[: self.number])


class Showing(Rotating):
    @property
    def epoch(self) -> int:
        return self.number


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("make", [ShuffledBatchSampler, lambda batches: Showing()])
def test_only_a_finished_iteration_moves_on(make: Any, threads: int, cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=make(BATCHES), threads=threads)  # all is read ahead
    first = [batch["id"] for batch in loader]
    whole = [id for ids in first for id in ids]
    loader.set_epoch(0)
    for steps in (1, 5, 13):
        assert [batch["id"] for batch in islice(loader, steps)] == first[:steps]
    assert [batch["id"] for batch in loader] == first
    second, third = ids_of(loader), ids_of(loader)
    assert len({tuple(sorted(epoch)) for epoch in (second, third)}) == 1
    assert whole != second != third
    loader.set_epoch(1)
    assert ids_of(loader) == second
    loader.batch_sampler.set_epoch(1)  # type: ignore[attr-defined]  # told past the loader
    assert ids_of(loader) == (second if make is ShuffledBatchSampler else third)
    loader.set_epoch(0)
    assert ids_of(loader) == whole


def test_a_sampler_that_does_not_show_its_epoch_is_told_nothing(cache: Path) -> None:
    sampler = Rotating()
    loader = FeatureLoader(cache, batch_sampler=sampler)
    sampler.set_epoch(3)
    assert ids_of(loader) == ids_of(loader)
    assert sampler.number == 3


@pytest.mark.parametrize(
    "make", [lambda: BATCHES, Rotating, Showing, lambda: ShuffledBatchSampler(BATCHES, seed=1)]
)
@pytest.mark.parametrize("steps", [0, 3, 14, None])
def test_a_state_goes_on_where_the_loader_was(make: Any, steps: int | None, cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=make())
    ids_of(loader)
    batches = iter(loader)
    for _ in range(14 if steps is None else steps):
        next(batches)
    if steps is None:
        assert list(batches) == []  # now it has ended, and the state is of what comes then
    state = json.loads(json.dumps(loader.state_dict()))
    rest = ids_of(loader) if steps is None else [id for batch in batches for id in batch["id"]]
    again = FeatureLoader(cache, batch_sampler=make())
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert len(again) == 14
    assert ids_of(again) == rest
    assert ids_of(again) == ids_of(loader)


def test_the_length_is_that_of_the_whole_epoch(cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=BucketBatchSampler(cache, max_frames=60))
    whole = len(loader)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(loader) == len(loader.batch_sampler) == whole  # type: ignore[arg-type]
    assert len(list(loader)) == whole - 1
    assert loader.sampler is loader
