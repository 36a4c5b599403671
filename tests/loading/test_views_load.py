"""Views in loaders and samplers: what is taken for one, and which states are refused."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_helpers import ids_of
from torch.utils.data import DataLoader, Subset, random_split
from view_helpers import views_of, whole_table

import featcache
from featcache import FeatureDataset, FeatureLoader, FeatureTable
from featcache.errors import ConfigError, StateError
from featcache.espnet import build_batch_sampler
from featcache.samplers import BucketBatchSampler, ShuffledBatchSampler


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    return whole_table(tmp_path_factory.mktemp("caches"))


def test_a_worker_that_is_no_fork_reads_a_view(whole: FeatureTable, tmp_path: Path) -> None:
    views = views_of(tmp_path, whole)
    for table in (views["join"], views["view of segments"]):
        loader: DataLoader[Any] = DataLoader(
            FeatureDataset(table),
            batch_sampler=BucketBatchSampler(table, batch_size=4),
            num_workers=1,
            collate_fn=FeatureDataset.collate,
            multiprocessing_context=multiprocessing.get_context("forkserver"),
        )
        assert sorted(id for batch in loader for id in batch["id"]) == sorted(table)


def test_states_and_samplers_of_other_views_are_refused(whole: FeatureTable) -> None:
    one, other = whole.sample(20), whole.sample(20, seed=1)
    again = FeatureTable.of(featcache.open(whole.path)).sample(20)
    loader = FeatureLoader(one, batch_size=3)
    next(iter(loader))
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1000
    for table in (other, whole, one.select(range(20)[::-1])):
        with pytest.raises(StateError):
            FeatureLoader(table, batch_size=3).load_state_dict(state)
        with pytest.raises(ConfigError, match="20 utterances of a cache, which are not those of"):
            FeatureLoader(table, batch_sampler=BucketBatchSampler(one, batch_size=3))
    FeatureLoader(again, batch_size=3).load_state_dict(state)
    FeatureLoader(again, batch_sampler=BucketBatchSampler(one, batch_size=3))
    pickled = pickle.loads(pickle.dumps(BucketBatchSampler(one, batch_size=3)))  # noqa: S301
    assert sorted(ids_of(FeatureLoader(one, batch_sampler=pickled))) == sorted(one)


@pytest.mark.parametrize("transform", [None, lambda item, rng: {**item, "twice": 2}])
def test_a_subset_of_torch_is_a_view(whole: FeatureTable, transform: Any) -> None:
    dataset = FeatureDataset(whole, "fbank", dtypes={"fbank": "float64"}, transform=transform)
    subset: Any = Subset(dataset, range(3, 30))
    some = [list(whole)[row] for row in range(3, 30)]
    nested = Subset(subset, [4, 0, 9])
    for part, ids in ((subset, some), (nested, [some[4], some[0], some[9]])):
        sampler = BucketBatchSampler(part, max_frames=60)
        batches = list(FeatureLoader(part, batch_sampler=sampler))
        assert sorted(id for batch in batches for id in batch["id"]) == sorted(ids)
        assert {batch["fbank"].dtype for batch in batches} == {torch.float64}
        assert all(("twice" in batch) == (transform is not None) for batch in batches)
        assert ids_of(FeatureLoader(part, batch_size=5)) == ids
        by_torch = DataLoader(part, batch_sampler=sampler, collate_fn=FeatureDataset.collate)
        assert sorted(id for batch in by_torch for id in batch["id"]) == sorted(ids)
        espnet = ShuffledBatchSampler(build_batch_sampler("sorted", batch_size=4, lengths=part))
        assert sorted(ids_of(FeatureLoader(part, batch_sampler=espnet))) == sorted(ids)
    with pytest.raises(ConfigError, match="27 utterances of a cache, which are not those of"):
        FeatureLoader(dataset, batch_sampler=BucketBatchSampler(subset, batch_size=3))
    with pytest.raises(ConfigError, match="chosen twice"):
        FeatureLoader(Subset(dataset, [3, 3]), batch_size=1)
    with pytest.raises(ConfigError, match="those of the FeatureDataset"):
        FeatureLoader(subset, "fbank", batch_size=1)


def test_a_random_split_of_torch_gives_views(whole: FeatureTable) -> None:
    parts = random_split(FeatureDataset(whole), [0.8, 0.2], torch.Generator().manual_seed(3))
    seen = []
    for part in parts:
        loader = FeatureLoader(part, batch_sampler=BucketBatchSampler(part, batch_size=4))
        seen += ids_of(loader)
        assert len(loader.dataset) == len(part)
    assert sorted(seen) == sorted(whole)
