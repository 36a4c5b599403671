"""Epochs that are batched window by window: each row once, like lengths, resumed anywhere."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from featcache.errors import ConfigError, StateError
from featcache.interface import Ints
from featcache.samplers import BucketBatchSampler, PackedBatchSampler

LENGTHS = np.random.default_rng(0).integers(10, 400, 3000)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcache.samplers.batches.MOST_AT_ONCE", 1500)
    monkeypatch.setattr("featcache.samplers.batches.WINDOW", 700)


def sampler_of(lengths: Ints = LENGTHS, **options: Any) -> BucketBatchSampler:
    return BucketBatchSampler(lengths, **{"max_frames": 3000, "seed": 3, **options})


def flat(batches: Any) -> list[int]:
    return [row for batch in batches for row in cast(list[int], batch)]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    count=st.integers(1501, 3000),
    ranks=st.integers(1, 5),
    others=st.integers(1, 5),
    stop=st.floats(0, 1),
    stop_again=st.floats(0, 1),
    epoch=st.integers(0, 3),
    batch_size=st.sampled_from([None, 2]),
)
def test_each_row_comes_once_wherever_the_epoch_was_stopped(
    count: int,
    ranks: int,
    others: int,
    stop: float,
    stop_again: float,
    epoch: int,
    batch_size: int | None,
) -> None:
    lengths = LENGTHS[:count]
    batches: list[Any] = []
    state: Any = None
    for size, part in ((ranks, stop), (others, stop_again), (ranks, None)):
        states = []
        for rank in range(size):
            sampler = sampler_of(lengths, rank=rank, world_size=size, batch_size=batch_size)
            sampler.set_epoch(epoch)
            if state is not None:
                assume(count - state["position"] >= 3 * size)
                sampler.load_state_dict(state)
            steps = None if part is None else int(part * len(sampler) / 2)
            batches += islice(sampler, steps)
            states.append(sampler.state_dict())
        assert all(each == states[0] for each in states)
        state = states[0]
    assert sorted(flat(batches)) == list(range(count))
    assert all(len(batch) * lengths[batch].max() <= 3000 for batch in batches)
    assert state["position"] == count


def test_all_epochs_have_one_number_of_batches_of_like_lengths() -> None:
    sampler = sampler_of()
    counts, ends = set(), set()
    for epoch in range(6):
        sampler.set_epoch(epoch)
        batches = [*sampler.epoch_batches(epoch)]
        counts |= {len(batches), len(sampler)}
        ends.add(tuple(batches[0]))
        assert sampler.padding_efficiency > 0.9
    assert len(counts) == 1
    assert len(ends) == 6


def test_a_new_sampler_gives_the_same_batches() -> None:
    for epoch in (0, 4):
        first, again = sampler_of(), sampler_of()
        first.set_epoch(0)
        list(first)
        first.set_epoch(epoch)
        again.set_epoch(epoch)
        assert [*first] == [*again]


def test_one_utterance_a_batch_and_too_long_ones_are_left_out() -> None:
    assert sorted(flat(sampler_of(batch_size=1))) == list(range(3000))
    with pytest.warns(UserWarning, match="left out"):
        sampler = sampler_of(max_frames=380, too_long="skip")
    assert sorted(flat(sampler)) == np.flatnonzero(LENGTHS <= 380).tolist()
    np.testing.assert_array_equal(sampler.too_long, np.flatnonzero(LENGTHS > 380))


def test_lengths_that_are_not_drawn_alike_keep_their_number_of_batches() -> None:
    lengths = np.where(np.arange(3000) % 100 == 0, 3000, 3)
    batches = [*sampler_of(lengths)]
    assert sorted(flat(batches)) == list(range(3000))


def test_a_state_of_an_epoch_without_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = sampler_of().state_dict()
    monkeypatch.setattr("featcache.samplers.batches.MOST_AT_ONCE", 5000)
    with pytest.raises(StateError, match="window"):
        sampler_of().load_state_dict(state)


@pytest.mark.parametrize("kind", [BucketBatchSampler, PackedBatchSampler], ids=["bucket", "packed"])
def test_a_resume_batches_the_window_that_it_goes_on_in_and_no_other(
    kind: type[BucketBatchSampler | PackedBatchSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, anew = (kind(LENGTHS, max_frames=3000, seed=3) for _ in range(2))
    first.set_epoch(2)
    batches = list(first)
    first.set_epoch(2)
    steps = len(first) // 5 * 2
    list(islice(first, steps))
    cut: list[Ints] = []
    cut_window = kind._cut_window

    def counted(self: Any, rows: Ints, key: int | None) -> tuple[Ints, Ints]:
        cut.append(rows)
        return cut_window(self, rows, key)

    monkeypatch.setattr(kind, "_cut_window", counted)
    anew.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert next(iter(anew)) == batches[steps]
    assert len(cut) == 1


def test_a_state_that_is_refused_says_nothing_of_windows() -> None:
    state, sampler = sampler_of().state_dict(), sampler_of()
    with pytest.raises(StateError, match="seed"):
        sampler.load_state_dict({**state, "seed": 4, "batches_a_window": 1})
    assert list(sampler) == list(sampler_of())


def test_a_window_that_is_far_from_all_others_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of()
    monkeypatch.setattr(BucketBatchSampler, "_per_window", 24)
    with pytest.raises(ConfigError, match="in place of 24"):
        list(sampler)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ranks=st.integers(1, 3), stop=st.floats(0, 1), epoch=st.integers(0, 2))
def test_packed_batches_hold_each_row_once_wherever_the_epoch_was_stopped(
    ranks: int, stop: float, epoch: int
) -> None:
    batches: list[Any] = []
    state: Any = None
    for part in (stop, None):
        for rank in range(ranks):
            sampler = PackedBatchSampler(
                LENGTHS, max_frames=3000, seed=3, rank=rank, world_size=ranks
            )
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(state)
            batches += islice(sampler, None if part is None else int(part * len(sampler) / 2))
            if rank == ranks - 1:
                state = sampler.state_dict()
    assert sorted(flat(batches)) == list(range(len(LENGTHS)))
    assert max(LENGTHS[batch].sum() for batch in batches) <= 3000


def test_packed_batches_of_windows_are_about_as_full_as_those_of_one() -> None:
    sampler = PackedBatchSampler(LENGTHS, max_frames=3000, seed=3)
    assert len(list(sampler)) == len(sampler)
    # as many more batches as a window of 750 may need: of 262,144 they are one in a hundred
    assert sampler.fill > 0.75


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_steps_before_a_resume_are_known_without_the_windows_between(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    made: list[int] = []
    make = BucketBatchSampler._window

    def counted(self: BucketBatchSampler, epoch: int, rows: Ints, number: int, count: int) -> Any:
        made.append(number)
        return make(self, epoch, rows, number, count)

    sampler = sampler_of(rank=0, world_size=ranks)
    step = len(sampler) // 2
    state = sampler.state_dict(step)
    monkeypatch.setattr(BucketBatchSampler, "_window", counted)
    after = sampler_of(rank=0, world_size=ranks)
    after.load_state_dict(state)
    batches = iter(after)
    for number in range(3):
        assert after.steps_before == step
        assert after.steps_done == step + number
        next(batches)
    assert len(made) <= 2  # that of the resume, and the last one, whose batches ranks share


def test_windows_of_few_batches_are_not_cut_into_many() -> None:
    sampler = sampler_of(max_frames=12_000)
    # those of a few large batches have some more, for windows of longer utterances, not 48 each
    assert len(sampler) < 1.7 * LENGTHS.sum() / 12_000
    assert len(list(sampler)) == len(sampler)
