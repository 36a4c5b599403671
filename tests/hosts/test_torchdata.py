"""torchdata's `StatefulDataLoader` over featcache's samplers: resumed to the batch."""

from __future__ import annotations

from typing import Any

import pytest
from host_helpers import IDS, make_host_cache
from torchdata.stateful_dataloader import StatefulDataLoader

import featcache
from featcache import FeatureDataset
from featcache.samplers import BucketBatchSampler

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return make_host_cache(tmp_path_factory.mktemp("cache"))


def make(cache: featcache.Cache, workers: int, rank: int = 0, ranks: int = 1) -> Any:
    sampler = BucketBatchSampler(cache, max_frames=90, rank=rank, world_size=ranks)
    collate = FeatureDataset.collate
    return StatefulDataLoader(
        FeatureDataset(cache), batch_sampler=sampler, collate_fn=collate, num_workers=workers
    )


def ids_of(loader: Any, most: int | None = None) -> list[str]:
    return [id for _, batch in zip(range(most or 1000), loader, strict=False) for id in batch["id"]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 4, 11])
def test_an_epoch_goes_on_with_the_next_batch(
    workers: int, steps: int, cache: featcache.Cache
) -> None:
    loader = make(cache, workers)
    first, second, third = (ids_of(loader) for _ in range(3))
    assert sorted(first) == sorted(second) == sorted(third) == IDS
    assert first != second != third != first
    loader = make(cache, workers)
    assert ids_of(loader) == first
    batches = iter(loader)
    before = [id for _ in range(steps) for id in next(batches)["id"]]
    again = make(cache, workers)
    again.load_state_dict(loader.state_dict())
    assert len(again) == len(loader)
    assert before + ids_of(again) == second
    assert ids_of(again) == third


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_the_end_of_an_epoch_goes_on_with_the_next(
    workers: int, cache: featcache.Cache
) -> None:
    loader = make(cache, workers)
    ids_of(loader)
    again = make(cache, workers)
    again.load_state_dict(loader.state_dict())
    assert ids_of(again) == ids_of(loader)


def test_two_ranks_share_each_epoch_and_resume_it(cache: featcache.Cache) -> None:
    loaders = [make(cache, 0, rank, 2) for rank in range(2)]
    for _ in range(3):
        assert sorted(id for loader in loaders for id in ids_of(loader)) == IDS
    seen = []
    for rank, loader in enumerate(loaders):
        batches = iter(loader)
        seen += [id for _ in range(2) for id in next(batches)["id"]]
        again = make(cache, 0, rank, 2)
        again.load_state_dict(loader.state_dict())
        seen += ids_of(again)
    assert sorted(seen) == IDS
