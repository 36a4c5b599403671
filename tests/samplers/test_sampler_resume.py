from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from featcache.errors import ConfigError, StateError
from featcache.format import ends_of
from featcache.samplers import Batches, BucketBatchSampler, ShuffledBatchSampler
from featcache.samplers.epoch import EpochSampler, State

Make = Callable[..., EpochSampler]
LENGTHS = np.random.default_rng(0).integers(1, 60, 90)
BATCHES = [
    list(range(start, start + size)) for start, size in zip(range(0, 90, 5), [5] * 18, strict=True)
]


def shuffled(**options: Any) -> ShuffledBatchSampler:
    return ShuffledBatchSampler(BATCHES, **options)


def bucket(**options: Any) -> BucketBatchSampler:
    return BucketBatchSampler(LENGTHS, max_frames=300, **options)


def run(
    make: Make, world_size: int, steps: int, state: State | None, **options: Any
) -> tuple[list[int], State]:
    """Train on all ranks for some steps of epoch 3; return the utterances they saw, and the state,
    the same on all.
    """
    seen: list[list[int]] = []
    states: list[State] = []
    for rank in range(world_size):
        sampler = make(rank=rank, world_size=world_size, **options)
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        sampler.set_epoch(3)
        batches = iter(sampler)
        seen.extend(batch for _, batch in zip(range(steps), batches, strict=False))  # type: ignore[misc]
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    return [item for batch in seen for item in batch], states[0]


@pytest.mark.parametrize("make", [shuffled, bucket])
@given(
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=6),
    last=st.integers(1, 5),
)
def test_an_epoch_resumed_by_any_numbers_of_ranks_has_every_utterance_once(
    make: Make, legs: list[tuple[int, int]], last: int
) -> None:
    seen: list[int] = []
    state: State | None = None
    try:
        for world_size, steps in legs:
            items, state = run(make, world_size, steps, state)
            seen += items
            assert state["position"] == len(seen) == len(set(seen))
        items, state = run(make, last, 1000, state)
    except ConfigError:  # fewer utterances are left than ranks
        assert 0 < 90 - len(seen) < 5
    else:
        assert sorted(seen + items) == list(range(90))
        assert state["position"] == 90
        assert run(make, 3, 1000, state) == ([], state)


def of_few(**options: Any) -> ShuffledBatchSampler:
    """Batches so small that those of several steps are cut for the ranks."""
    return ShuffledBatchSampler(
        Batches(range(9), ends_of([2, 1, 3, 1, 2])), shuffle=False, **options
    )


@pytest.mark.parametrize(
    ("make", "drop_last"),
    [(shuffled, False), (shuffled, True), (bucket, False), (bucket, True), (of_few, False)],
)
def test_what_comes_after_a_resume_is_what_would_have_come(make: Make, drop_last: bool) -> None:
    sampler = make(rank=1, world_size=4, drop_last=drop_last)
    sampler.set_epoch(2)
    expected = list(sampler)
    for steps in range(len(expected) + 1):
        again = make(rank=1, world_size=4, drop_last=drop_last)
        again.load_state_dict(sampler.state_dict(steps))
        assert again.epoch == 2
        assert len(again) == len(expected)
        assert list(again) == expected[steps:]
        again.load_state_dict(again.state_dict(len(expected) - steps))
        assert list(again) == []


def test_with_drop_last_an_epoch_that_came_to_its_end_stays_at_its_end() -> None:
    _, state = run(shuffled, 4, 1000, None, drop_last=True)
    assert run(shuffled, 1, 1000, state, drop_last=True)[0] == []
    seen, state = run(shuffled, 4, 3, None, drop_last=True)
    more, _ = run(shuffled, 3, 1000, state, drop_last=True)
    assert len(set(seen + more)) == len(seen + more) == 90


def test_the_state_counts_what_was_taken_or_what_it_is_told() -> None:
    sampler = shuffled(shuffle=False, rank=0, world_size=2)
    assert sampler.state_dict()["position"] == 0
    batches = iter(sampler)
    next(batches)
    next(batches)
    assert sampler.state_dict()["position"] == 20
    assert sampler.state_dict(steps=1)["position"] == 10
    newer = iter(sampler)
    assert sampler.state_dict()["position"] == 0
    next(newer)
    next(batches)
    assert sampler.state_dict()["position"] == 10
    sampler.load_state_dict(sampler.state_dict(steps=2))
    assert sampler.state_dict(steps=0)["position"] == 20
    assert sampler.state_dict(steps=7)["position"] == 90


@pytest.mark.parametrize(
    ("steps", "message"), [(10, "more than the 9 "), (-1, "least 0"), (1.0, ""), ("1", "")]
)
def test_a_state_after_steps_that_the_epoch_does_not_have_is_refused(
    steps: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"steps.*{message}"):
        shuffled(rank=0, world_size=2).state_dict(steps)


def test_set_epoch_keeps_the_position_in_the_loaded_epoch_only() -> None:
    sampler, whole = bucket(), bucket()
    sampler.set_epoch(5)
    sampler.load_state_dict(sampler.state_dict(steps=4))
    sampler.set_epoch(5)
    rest = list(sampler)
    for epoch in (6, 5):
        sampler.set_epoch(epoch)
        whole.set_epoch(epoch)
        assert list(sampler) == list(whole)
    whole.set_epoch(5)
    assert list(whole)[4:] == rest


def test_an_iteration_that_came_to_its_end_is_followed_by_the_next_epoch() -> None:
    epochs = []
    for epoch in range(3):
        alone = shuffled()
        alone.set_epoch(epoch)
        epochs.append(list(alone))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    sampler = shuffled()
    assert [list(sampler), list(sampler), list(sampler)] == epochs
    assert sampler.epoch == 2


def test_an_iteration_that_is_left_is_followed_by_its_epoch_again() -> None:
    sampler = shuffled()
    whole = list(sampler)
    sampler.set_epoch(0)
    for steps in (3, 16):
        sampler.load_state_dict(sampler.state_dict(steps))
        next(iter(sampler), None)
        assert len(sampler) == 18
        assert list(sampler) == whole[steps:]
        assert sampler.state_dict()["position"] == 90
        assert sampler.state_dict(steps=0)["position"] == 5 * steps
        sampler.set_epoch(0)
        assert list(sampler) == whole
        sampler.set_epoch(0)


def test_the_last_word_on_the_epoch_is_that_of_set_epoch() -> None:
    sampler, first = shuffled(), list(shuffled())
    batches = iter(sampler)
    next(batches)
    sampler.set_epoch(0)  # since it began
    assert [first[0], *batches] == first
    assert list(sampler) == first
    sampler.set_epoch(0)  # since it ended
    assert list(sampler) == first
    unused = iter(sampler)
    sampler.set_epoch(0)  # before it begins
    assert list(unused) == first


@pytest.mark.parametrize("make", [shuffled, bucket])
def test_the_state_of_an_epoch_that_ended_goes_on_with_the_next(make: Make) -> None:
    sampler = make()
    list(sampler)
    ended, last = sampler.state_dict(), sampler.state_dict(steps=len(sampler))
    following = list(sampler)
    for state, told, expected in [
        (ended, None, following),
        (ended, 0, []),  # the epoch that is over
        (ended, 1, following),
        (last, None, []),  # saved within the loop over the epoch, which is gone through again
        (last, 1, following),
    ]:
        again = make()
        again.load_state_dict(json.loads(json.dumps(state)))
        assert again.state_dict() == state
        if told is not None:
            again.set_epoch(told)
        assert list(again) == expected


def test_the_state_of_an_iteration_is_the_same_when_all_was_read_ahead() -> None:
    sampler, other = shuffled(), shuffled()
    batches = list(sampler)
    sampler.load_state_dict(other.state_dict(steps=0))
    list(sampler)  # a DataLoader took the last batch long before it delivers it
    other.load_state_dict(sampler.state_dict(steps=15))
    assert list(other) == batches[15:]


def changed(**entries: object) -> State:
    return {**bucket(seed=1).state_dict(steps=2), **entries}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            BucketBatchSampler(LENGTHS[1:], max_frames=300, seed=1).state_dict(),
            r"saved with data='\w+' \(here '\w+'\)",
        ),
        (
            BucketBatchSampler(LENGTHS, max_frames=301, seed=1).state_dict(),
            r"saved with max_frames=301 \(here 300\)",
        ),
        (bucket(batch_size=3, seed=1).state_dict(), r"saved with batch_size=3 \(here None\)"),
        (bucket(seed=1, shuffle=False).state_dict(), r"saved with shuffle=False \(here True\)"),
        (
            bucket(seed=2).state_dict(),
            r"saved with seed=2 \(here 1\); go on with the same data and settings",
        ),
        (
            shuffled(seed=1).state_dict(),
            "of a ShuffledBatchSampler, and this is a BucketBatchSampler",
        ),
        ({}, r"keys \[.*'position'.*\], not \[\]"),
        (None, "the dict that state_dict"),
        ([1, 2], "the dict that state_dict"),
        ({**changed(), "more": 1}, r"has the keys .*, not .*'more'"),
        (changed(position=91), "has 90 utterances, and the state is of position 91; begin"),
        (changed(position=-1), "position must be an integer of at least 0, not -1"),
        (changed(position="3"), "position must be an integer"),
        (changed(epoch=1.5), "epoch must be an integer"),
        (changed(version=2), "version 2 of the order .* draws version 1: begin the epoch anew"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    sampler = bucket(seed=1)
    sampler.set_epoch(4)
    whole = list(sampler)
    sampler.load_state_dict(sampler.state_dict(steps=3))
    before = sampler.state_dict()
    with pytest.raises(StateError, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before
    assert list(sampler) == whole[3:]


def test_batches_of_other_ids_are_other_data() -> None:
    first = ShuffledBatchSampler(Batches([0, 1], [0, 1, 2], keys=["a", "b"]))
    same = ShuffledBatchSampler([["a"], ["b"]])
    other = ShuffledBatchSampler(Batches([0, 1], [0, 1, 2], keys=["a", "c"]))
    same.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="data="):
        other.load_state_dict(first.state_dict())


def test_another_number_of_ranks_or_drop_last_is_no_other_setting() -> None:
    state = bucket(rank=3, world_size=4, drop_last=True).state_dict(1)
    sampler = bucket()
    sampler.load_state_dict(state)
    assert len(list(sampler)) == len(bucket()) - 4


def test_too_few_utterances_left_for_the_ranks_are_refused_before_any_is_given() -> None:
    state = shuffled().state_dict(steps=17)
    sampler = shuffled(rank=0, world_size=6)
    sampler.load_state_dict(state)
    with pytest.raises(
        ConfigError, match="1 batches of 5 utterances cannot be shared by 6 ranks; use fewer ranks"
    ):
        next(iter(sampler))
    sampler = shuffled(rank=0, world_size=6, drop_last=True)
    sampler.load_state_dict(state)
    assert list(sampler) == []
