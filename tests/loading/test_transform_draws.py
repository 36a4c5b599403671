"""Draws of a `transform`: a row has one generator an epoch, wherever and whenever it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_helpers import BATCHES, NUMBERS
from store_helpers import make_cache
from torch.utils.data import DataLoader

import featcache
from featcache import FeatureDataset, FeatureLoader
from featcache.samplers import BucketBatchSampler


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), NUMBERS)


def draw(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": item["id"], "drawn": float(rng.random())}


def draws(batches: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    return {
        id: number
        for batch in batches
        for id, number in zip(batch["id"], batch["drawn"].tolist(), strict=True)
    }


def expected(cache: Path, seed: int, epoch: int) -> dict[str, float]:
    return {
        id: np.random.default_rng((seed, epoch, row)).random()
        for row, id in enumerate(featcache.open(cache).ids)
    }


def sampler(cache: Path, **options: Any) -> BucketBatchSampler:
    return BucketBatchSampler(featcache.open(cache), max_frames=90, seed=3, **options)


def loader(cache: Path, **options: Any) -> FeatureLoader[dict[str, Any]]:
    return FeatureLoader(cache, "fbank", transform=draw, **options)


def test_a_generator_is_that_of_seed_epoch_and_row(cache: Path) -> None:
    for options in ({"batch_size": 7, "seed": 3, "shuffle": True}, {"batch_size": 3, "seed": 3}):
        batches = loader(cache, **options)
        for epoch in (0, 1):
            assert draws(batches) == pytest.approx(expected(cache, 3, epoch))
    ids = BucketBatchSampler(
        featcache.open(cache), ids=featcache.open(cache).ids, max_frames=90, seed=3
    )
    assert draws(loader(cache, batch_sampler=ids)) == pytest.approx(expected(cache, 3, 0))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_batch_that_is_asked_for_as_a_list_of_items_has_the_draws_of_its_sampler(
    cache: Path, workers: int
) -> None:
    dataset = FeatureDataset(cache, "fbank", transform=draw)
    batches: DataLoader[Any] = DataLoader(
        dataset,
        sampler=sampler(cache),
        batch_size=None,
        collate_fn=dataset.collate,
        num_workers=workers,
    )
    for epoch in range(2):
        assert draws(batches) == pytest.approx(expected(cache, 3, epoch))


@pytest.mark.parametrize("threads", [0, 2])
def test_ranks_and_threads_have_the_same_draws(cache: Path, threads: int) -> None:
    found: dict[str, float] = {}
    for rank in range(3):
        batches = loader(
            cache, batch_sampler=sampler(cache, rank=rank, world_size=3), threads=threads
        )
        batches.set_epoch(5)
        found |= draws(batches)
    assert found == pytest.approx(expected(cache, 3, 5))


def test_draws_go_on_after_a_resume(cache: Path) -> None:
    first, again = (loader(cache, batch_sampler=sampler(cache)) for _ in range(2))
    first.set_epoch(2)
    batches = iter(first)
    found = draws(next(batches) for _ in range(2))
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = draws(again)
    assert not found.keys() & rest.keys()
    assert found | rest == pytest.approx(expected(cache, 3, 2))


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_that_stay_have_the_draws_of_each_epoch(cache: Path, context: str) -> None:
    batches = DataLoader(
        FeatureDataset(cache, "fbank", transform=draw),
        batch_sampler=sampler(cache),
        collate_fn=FeatureDataset.collate,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    for epoch in (0, 1):
        assert draws(batches) == pytest.approx(expected(cache, 3, epoch))


def test_batches_without_a_seed_have_that_of_the_data_set_and_the_loaders_epoch(
    cache: Path,
) -> None:
    dataset = FeatureDataset(cache, "fbank", transform=draw, seed=8)
    batches = FeatureLoader(dataset, batch_sampler=BATCHES)
    for epoch in (0, 1, 6):
        batches.set_epoch(epoch)
        assert draws(batches) == pytest.approx(expected(cache, 8, epoch))


def test_an_item_read_alone_has_the_epoch_that_the_data_set_is_told(cache: Path) -> None:
    dataset = FeatureDataset(cache, "fbank", transform=draw, seed=8)
    assert dataset[-1]["drawn"] == np.random.default_rng((8, 0, 39)).random()
    dataset.set_epoch(4)
    assert dataset[2]["drawn"] == np.random.default_rng((8, 4, 2)).random()
