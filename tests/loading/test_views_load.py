"""Views in loaders and samplers: every utterance of a view once, and no other."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loader_helpers import ids_of
from store_helpers import arrays_of, id_of, make_cache
from torch.utils.data import DataLoader, Subset, random_split

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.errors import ConfigError, StateError
from featcache.samplers import BucketBatchSampler, ShuffledBatchSampler, build_batch_sampler
from featcache.tables.table import FeatureTable

COUNT = 45


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def whole(home: Path) -> FeatureTable:
    path = home / "whole"
    make_cache(path, range(COUNT))
    cache = featcache.open(path)
    cache.annotate({id_of(n): {"speaker": f"s{n % 7}"} for n in range(COUNT)})
    return featcache.open(path).table


@pytest.fixture(scope="module")
def views(home: Path, whole: FeatureTable) -> dict[str, FeatureTable]:
    """A view of each kind."""
    parts = featcache.concat(
        *(make_cache(home / f"part{n}", range(n, COUNT, 3)) for n in range(3)),
    )
    with CacheWriter(home / "labels", [FeatureStorageConfig("labels", dtype="int16")]) as writer:
        for n in range(COUNT):
            writer.write(id_of(n), {"labels": np.full((n % 5 + 1, 1), n)})
    joined = featcache.join(
        whole.select(list(parts)), FeatureTable.of(home / "labels"), unlike="keep"
    )
    split = whole.split({"a": 0.5, "b": 0.5}, by="speaker", seed=1)
    return {
        "filter": whole.filter(fbank=(2, 9), where=lambda row: row["speaker"] != "s3"),
        "select": whole.select([id_of(n) for n in (9, 3, 30, 31, 2, 44, 17, 5, 6)]),
        "sample": parts.sample(0.5, seed=2),
        "split": split["b"],
        "sort": parts.sort("fbank", descending=True),
        "join": joined.filter(labels={2, 3}),
        "concat": featcache.concat(split["a"].select(range(5)), split["b"].sort("id")),
        "view of views": parts.sort("units").sample(30).filter(fbank=(1, None)),
    }


def samplers_of(table: FeatureTable, ranks: int, seed: int, state: Any = None) -> list[Any]:
    found = []
    for rank in range(ranks):
        sampler = BucketBatchSampler(
            table, max_frames=60, batch_size=2, seed=seed, rank=rank, world_size=ranks
        )
        if state is not None:
            sampler.load_state_dict(state)
        found.append(sampler)
    return found


def assert_holds(batch: dict[str, Any], table: FeatureTable) -> None:
    for place, id in enumerate(batch["id"]):
        length = int(batch["fbank_lengths"][place])
        number = int(id.rpartition("-")[2])
        np.testing.assert_array_equal(batch["fbank"][place][:length], arrays_of(number)["fbank"])
    assert set(batch["id"]) <= set(table)


KINDS = ("filter", "select", "sample", "split", "sort", "join", "concat", "view of views")


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ranks=st.integers(1, 3),
    others=st.integers(1, 3),
    stop=st.floats(0, 1),
    seed=st.integers(0, 5),
    threads=st.integers(0, 2),
)
def test_every_utterance_of_a_view_comes_once_wherever_the_epoch_was_stopped(
    views: dict[str, FeatureTable],
    kind: str,
    ranks: int,
    others: int,
    stop: float,
    seed: int,
    threads: int,
) -> None:
    table, batches, states = views[kind], [], []
    for sampler in samplers_of(table, ranks, seed):
        loader = FeatureLoader(table, batch_sampler=sampler, threads=threads)
        iterator = iter(loader)
        batches += [next(iterator) for _ in range(int(stop * len(loader)))]
        states.append(json.loads(json.dumps(loader.state_dict()))["sampler"])
        iterator.close()  # type: ignore[attr-defined]
    assert all(state == states[0] for state in states)
    assume(len(table) - states[0]["position"] >= others)  # too few to share are refused
    for sampler in samplers_of(table, others, seed, states[0]):
        batches += FeatureLoader(table, batch_sampler=sampler, threads=threads)
    assert sorted(id for batch in batches for id in batch["id"]) == sorted(table)
    for batch in batches:
        assert_holds(batch, table)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
# more workers than cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("ranks", "workers", "kind"),
    [
        (ranks, workers, KINDS[number % len(KINDS)])
        for number, (ranks, workers) in enumerate(product((1, 2, 3), (0, 1, 2, 4)))
    ],
)
def test_every_utterance_of_a_view_comes_once_through_the_workers_of_a_data_loader(
    views: dict[str, FeatureTable], kind: str, ranks: int, workers: int
) -> None:
    table, batches, states = views[kind], [], []

    def loader(sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            FeatureDataset(table),
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=FeatureDataset.collate,
            multiprocessing_context=multiprocessing.get_context("fork") if workers else None,
        )

    for sampler in samplers_of(table, ranks, 0):
        batches += list(loader(sampler))[:1]
        states.append(sampler.state_dict(steps=1))
    for sampler in samplers_of(table, ranks % 3 + 1, 0, states[0]):
        batches += list(loader(sampler))
    assert sorted(id for batch in batches for id in batch["id"]) == sorted(table)
    for batch in batches:
        assert_holds(batch, table)


def test_a_spawned_worker_reads_a_view(views: dict[str, FeatureTable]) -> None:
    for table in (views["filter"], views["join"]):
        loader: DataLoader[Any] = DataLoader(
            FeatureDataset(table),
            batch_sampler=BucketBatchSampler(table, batch_size=4),
            num_workers=1,
            collate_fn=FeatureDataset.collate,
            multiprocessing_context=multiprocessing.get_context("spawn"),
        )
        assert sorted(id for batch in loader for id in batch["id"]) == sorted(table)


def test_states_and_samplers_of_other_views_are_refused(whole: FeatureTable) -> None:
    one, other = whole.sample(20), whole.sample(20, seed=1)
    again = FeatureTable.of(featcache.open(whole.cache.path)).sample(20)
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


@pytest.mark.parametrize("transform", [None, lambda item: {**item, "twice": 2}])
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
