"""A `FeatureLoader`'s state: an epoch goes on with the very next batch, on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_helpers import BATCHES, NUMBERS, ids_of
from store_helpers import id_of, make_cache

import featcache
from featcache import FeatureLoader
from featcache.errors import ConfigError, StateError
from featcache.samplers import BucketBatchSampler, ShuffledBatchSampler


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), NUMBERS)


@pytest.mark.parametrize("steps", [0, 1, 6, 14])
def test_any_sampler_resumes_to_the_batch(cache: Path, steps: int) -> None:
    loader = FeatureLoader(cache, batch_sampler=BATCHES)
    batches = iter(loader)
    before = [id for _ in range(steps) for id in next(batches)["id"]]
    state = json.loads(json.dumps(loader.state_dict()))
    other = FeatureLoader(cache, batch_sampler=BATCHES)
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.set_epoch(0)
    assert before + ids_of(other) == [id for batch in BATCHES for id in batch]
    assert len(ids_of(other)) == 40  # the next time all come
    other.load_state_dict(state)
    other.set_epoch(1)
    assert len(ids_of(other)) == 40


class Drawn:
    """A sampler of other people whose order is in its state alone."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.start = order, 0

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        return ([row] for row in self.order[start:])

    def state_dict(self, steps: int | None = None) -> dict[str, object]:
        return {"order": self.order, "start": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order, self.start = state["order"], state["start"]


def test_a_sampler_with_a_state_of_its_own_goes_on_in_its_own_order(cache: Path) -> None:
    drawn = [7, 3, 9, 1, 0]
    loader = FeatureLoader(cache, batch_sampler=Drawn(drawn))
    batches = iter(loader)
    seen = [id for _ in range(2) for id in next(batches)["id"]]
    other = FeatureLoader(cache, batch_sampler=Drawn([4, 5, 6, 2, 8]))
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    ids = featcache.open(cache).ids
    assert seen + ids_of(other) == [ids[row] for row in drawn]


def test_a_sampler_whose_state_cannot_follow_what_was_read_ahead_is_refused(cache: Path) -> None:
    class ReadAhead(Drawn):
        def state_dict(self) -> dict[str, object]:  # type: ignore[override]
            return {}

    loader = FeatureLoader(cache, batch_sampler=ReadAhead([1, 2]))
    with pytest.raises(StateError, match="let it take the number of batches"):
        loader.state_dict()


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize(("ranks", "resumed_by"), [(1, 1), (1, 3), (2, 3), (3, 1), (3, 2)])
def test_an_epoch_goes_on_with_other_ranks(
    cache: Path, steps: int, ranks: int, resumed_by: int
) -> None:
    def loaders(count: int) -> Iterator[FeatureLoader[dict[str, Any]]]:
        for rank in range(count):
            sampler = BucketBatchSampler(
                featcache.open(cache).lengths("fbank"),
                max_frames=60,
                batch_size=2,
                rank=rank,
                world_size=count,
                seed=3,
            )
            yield FeatureLoader(cache, batch_sampler=sampler)

    seen, states = [], []
    for loader in loaders(ranks):
        loader.set_epoch(2)
        batches = iter(loader)
        seen += [id for _ in range(steps) for id in next(batches)["id"]]
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    for loader in loaders(resumed_by):
        loader.load_state_dict(json.loads(json.dumps(states[0])))
        seen += ids_of(loader)
    assert sorted(seen) == sorted(map(id_of, NUMBERS))


def test_each_epoch_has_an_order_of_its_own(cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=ShuffledBatchSampler(BATCHES, seed=1))
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append(ids_of(loader))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_the_state_of_something_else_is_refused(cache: Path) -> None:
    plain = FeatureLoader(cache, batch_sampler=BATCHES)
    shuffled = FeatureLoader(cache, batch_sampler=ShuffledBatchSampler(BATCHES))
    for state in ({}, shuffled.state_dict(), 3):
        with pytest.raises(StateError, match="no state of a FeatureLoader over a list"):
            plain.load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="that of 5 batches, but there are 14 now"):
        plain.load_state_dict(FeatureLoader(cache, batch_sampler=BATCHES[:5]).state_dict())
    with pytest.raises(StateError, match="no state of a FeatureLoader over a ShuffledBatchSampler"):
        shuffled.load_state_dict(plain.state_dict())
    fewer = FeatureLoader(cache, batch_sampler=ShuffledBatchSampler(BATCHES[:5]))
    fewer.set_epoch(3)
    with pytest.raises(StateError, match="data"):
        shuffled.load_state_dict(fewer.state_dict())
    assert shuffled.state_dict()["epoch"] == 0
    assert len(ids_of(plain)) == len(ids_of(shuffled)) == 40


def test_the_state_of_other_utterances_is_refused(cache: Path, tmp_path: Path) -> None:
    rows = [[0, 1], [2]]
    state = FeatureLoader(cache, batch_sampler=rows).state_dict()
    other = FeatureLoader(make_cache(tmp_path, range(5)), batch_sampler=rows)
    with pytest.raises(StateError, match="other utterances"):
        other.load_state_dict(state)
    for change in ({"batches": -3}, {"epoch": "x"}, {"of": 7}):
        with pytest.raises(StateError):
            FeatureLoader(cache, batch_sampler=rows).load_state_dict({**state, **change})


def test_an_epoch_that_the_sampler_was_told_of_begins_anew(cache: Path) -> None:
    sampler = ShuffledBatchSampler(BATCHES)
    loader = FeatureLoader(cache, batch_sampler=sampler)
    list(loader)
    sampler.set_epoch(1)
    state = loader.state_dict()
    assert state["epoch"] == 1
    assert isinstance(state["sampler"], dict)
    assert state["sampler"]["position"] == 0
    with pytest.raises(ConfigError, match="epoch must be"):
        loader.set_epoch(-1)
    assert loader.state_dict()["epoch"] == 1
    loader.set_epoch(np.int64(2))  # type: ignore[arg-type]
    json.dumps(loader.state_dict())
