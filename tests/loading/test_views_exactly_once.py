"""Each utterance or segment of a view comes once, stopped anywhere, on another number of ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loader_helpers import each_pair, through_workers
from view_helpers import KINDS, assert_holds, samplers_of, views_of, whole_table

from featcache import FeatureLoader, FeatureTable


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FeatureTable]:
    home = tmp_path_factory.mktemp("caches")
    return views_of(home, whole_table(home / "whole"))


def assert_once(batches: list[dict[str, Any]], table: FeatureTable) -> None:
    assert sorted(id for batch in batches for id in batch["id"]) == sorted(table)
    for batch in batches:
        assert_holds(batch, table)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ranks=st.integers(1, 3),
    others=st.integers(1, 3),
    stop=st.floats(0, 1),
    seed=st.integers(0, 5),
    threads=st.sampled_from([0, 1, 2, 4]),
)
def test_wherever_the_epoch_was_stopped(
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
    assert_once(batches, table)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
# more workers than cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("kind", "ranks", "workers"), each_pair(KINDS))
def test_through_the_workers_of_a_data_loader(
    views: dict[str, FeatureTable], kind: str, ranks: int, workers: int
) -> None:
    table = views[kind]
    random = np.random.default_rng((ranks, workers, KINDS.index(kind)))
    batches, _ = through_workers(table, samplers_of, random, ranks=ranks, workers=workers)
    assert_once(batches, table)
