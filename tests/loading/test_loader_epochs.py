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
from featcache.errors import StateError
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


class CountsWhenAsked(Showing):
    """One that shows the epoch of the next iteration as soon as one begins."""

    def __iter__(self) -> Iterator[list[str]]:
        batches = super().__iter__()
        self.number += 1
        return batches


class CountsAtItsBegin(Showing):
    def __iter__(self) -> Iterator[list[str]]:
        batches = super().__iter__()
        self.number += 1
        yield from batches


class CountsFromBefore(Showing):
    """One whose first iteration is epoch 0, as it counts at once."""

    def __init__(self) -> None:
        self.number = -1

    def __iter__(self) -> Iterator[list[str]]:
        self.number += 1
        yield from super().__iter__()


class CountsAtItsEnd(Showing):
    def __iter__(self) -> Iterator[list[str]]:
        yield from super().__iter__()
        self.number += 1


COUNTING = (CountsWhenAsked, CountsAtItsBegin, CountsAtItsEnd)


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
    "make",
    [lambda: BATCHES, Rotating, Showing, *COUNTING, lambda: ShuffledBatchSampler(BATCHES, seed=1)],
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


@pytest.mark.parametrize("make", [Showing, *COUNTING])
@pytest.mark.parametrize("threads", [0, 1])
def test_a_sampler_may_count_its_epochs_itself(make: Any, threads: int, cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=make(), threads=threads)
    for epoch in range(3):
        for step, _ in enumerate(loader, 1):
            found = loader.metrics()
            assert (found["epoch"], found["step"]) == (epoch, step)
            state = loader.state_dict()
            assert (state["epoch"], state["batches"]) == (epoch, step)


@pytest.mark.parametrize("make", [Showing, *COUNTING, CountsFromBefore])
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_sampler_that_counts_its_epochs_itself_resumes_in_any_of_them(
    make: Any, threads: int, epochs: int, cache: Path
) -> None:
    loader = FeatureLoader(cache, batch_sampler=make(), threads=threads)
    for _ in range(epochs):
        ids_of(loader)
    found, state = [], {}
    for step, batch in enumerate(loader):
        if step == 4:
            state = json.loads(json.dumps(loader.state_dict()))
        found.append(batch["id"])
    again = FeatureLoader(cache, batch_sampler=make(), threads=threads)
    again.load_state_dict(state)
    assert [batch["id"] for batch in again] == found[5:]
    assert ids_of(again) == ids_of(loader)


@pytest.mark.parametrize("make", [Showing, *COUNTING])
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("taken", [3, 99])
def test_what_a_sampler_is_told_past_the_loader_holds(
    make: Any, threads: int, taken: int, cache: Path
) -> None:
    sampler = make()
    loader = FeatureLoader(cache, batch_sampler=sampler, threads=threads)
    for epoch in (0, 1, 2, 5, 4, 0):
        sampler.set_epoch(epoch)
        first = next(id for batch in islice(loader, taken) for id in batch["id"])
        assert first == BATCHES[epoch][0]


@pytest.mark.parametrize("make", [Showing, *COUNTING])
@pytest.mark.parametrize("threads", [0, 1])
def test_batches_of_a_left_epoch_are_skipped_whoever_counts_it(
    make: Any, threads: int, cache: Path
) -> None:
    loader = FeatureLoader(cache, batch_sampler=make(), threads=threads)
    whole = [batch["id"] for batch in loader]
    loader.set_epoch(0)
    assert len(list(islice(loader, 3))) == 3
    loader.skip(2)
    assert [batch["id"] for batch in loader] == whole[5:]


def test_a_state_of_an_epoch_that_a_sampler_cannot_be_brought_to_is_refused(cache: Path) -> None:
    class Untold:
        epoch = 0

        def __iter__(self) -> Iterator[list[str]]:
            yield from BATCHES
            self.epoch += 1

    loader = FeatureLoader(cache, batch_sampler=Untold())
    whole = ids_of(loader)
    for _ in islice(loader, 3):
        state = loader.state_dict()
    again = FeatureLoader(cache, batch_sampler=Untold())
    with pytest.raises(StateError, match=r"epoch 1, and a Untold is in epoch 0 and has no set_ep"):
        again.load_state_dict(state)
    assert ids_of(again) == whole
    again.load_state_dict(state)
    assert ids_of(again) == [id for batch in BATCHES[3:] for id in batch]


def test_what_stops_an_epoch_at_its_begin_leaves_all_of_it_to_come(cache: Path) -> None:
    class Failing(Showing):
        fails = False

        def __iter__(self) -> Iterator[list[str]]:
            if self.fails:
                raise OSError("no list of batches")
            return super().__iter__()

    sampler = Failing()
    loader = FeatureLoader(cache, batch_sampler=sampler)
    ids_of(loader)
    sampler.fails = True
    with pytest.raises(OSError, match="no list"):
        ids_of(loader)
    assert loader.metrics()["step"] == 0
    state = loader.state_dict()
    assert (state["epoch"], state["batches"], state["ended"]) == (1, 0, False)


def test_the_length_is_that_of_the_whole_epoch(cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=BucketBatchSampler(cache, max_frames=60))
    whole = len(loader)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(loader) == len(loader.batch_sampler) == whole  # type: ignore[arg-type]
    assert len(list(loader)) == whole - 1
    assert loader.sampler is loader
