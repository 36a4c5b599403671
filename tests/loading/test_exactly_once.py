"""Every utterance once per epoch: through DataLoader workers, over ranks, and resumed by another
number of ranks.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import arrays_of, id_of, make_cache
from torch.utils.data import DataLoader

import featcache
from featcache import FeatureDataset
from featcache.samplers import BucketBatchSampler

NUMBERS = range(60)
STEPS = 2  # that each rank trains on before all are stopped


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), NUMBERS)


def loaders_of(
    cache: Path, ranks: int, workers: int, start: str, state: dict[str, Any] | None
) -> list[tuple[BucketBatchSampler, DataLoader[Any]]]:
    found = []
    for rank in range(ranks):
        sampler = BucketBatchSampler(
            featcache.open(cache).lengths("fbank"),
            max_frames=60,
            batch_size=3,
            seed=5,
            rank=rank,
            world_size=ranks,
        )
        sampler.set_epoch(1)
        if state is not None:
            sampler.load_state_dict(state)
        here = workers if start == "fork" or rank == 0 else 0  # spawning takes a second for each
        loader: DataLoader[Any] = DataLoader(
            FeatureDataset(cache, "fbank"),
            batch_sampler=sampler,
            num_workers=here,
            collate_fn=FeatureDataset.collate,
            multiprocessing_context=multiprocessing.get_context(start) if here else None,
        )
        found.append((sampler, loader))
    return found


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
# more workers than cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("ranks", "workers", "start"),
    [
        *((ranks, workers, "fork") for ranks in (1, 2, 3) for workers in (0, 1, 2, 4)),
        (3, 2, "spawn"),
        (2, 4, "spawn"),
    ],
)
def test_every_utterance_comes_once_in_an_epoch_that_other_ranks_go_on_with(
    cache: Path, ranks: int, workers: int, start: str
) -> None:
    batches, states = [], []
    for sampler, loader in loaders_of(cache, ranks, workers, start, None):
        # not stopped in the middle: torch may abort workers that it has just spawned
        batches += list(loader)[:STEPS]
        states.append(sampler.state_dict(steps=STEPS))
    assert all(state == states[0] for state in states)
    for _, loader in loaders_of(cache, ranks % 3 + 1, workers, start, states[0]):
        batches += list(loader)
    assert sorted(id for batch in batches for id in batch["id"]) == sorted(map(id_of, NUMBERS))
    for batch in batches:
        for id, array, length in zip(
            batch["id"], batch["fbank"], batch["fbank_lengths"].tolist(), strict=True
        ):
            np.testing.assert_array_equal(array[:length], arrays_of(int(id.split("-")[1]))["fbank"])
