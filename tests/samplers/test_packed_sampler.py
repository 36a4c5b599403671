"""`PackedBatchSampler`: every utterance once, full batches, the same rules of epochs as others."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray
from store_helpers import make_cache

import featcache
from featcache.errors import ConfigError, StateError
from featcache.samplers import PackedBatchSampler
from featcache.samplers.packed import OPEN, best_fit


def utterances(count: int) -> NDArray[np.int64]:
    """Frames of speech: lognormal, 50 to 3,000."""
    return np.random.default_rng(0).lognormal(6.4, 0.5, count).clip(50, 3000).astype(np.int64)


def rows_of(batches: Iterable[list[int] | list[str]]) -> list[list[int]]:
    return [cast(list[int], batch) for batch in batches]


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    cap=st.integers(1, 250),
    batch_size=st.none() | st.integers(1, 9),
    quadratic=st.none() | st.integers(1, 60),
    window=st.sampled_from([1, 2, 7, 1000]),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_utterance_comes_once_and_no_batch_is_over_its_limits(
    lengths: list[int],
    cap: int,
    batch_size: int | None,
    quadratic: int | None,
    window: int,
    world_size: int,
    epoch: int,
    shuffle: bool,
) -> None:
    costs = [n + n * n // quadratic if quadratic else n for n in lengths]
    rows = [row for row, cost in enumerate(costs) if cost <= cap]
    options: dict[str, Any] = {
        "max_frames": cap,
        "batch_size": batch_size,
        "quadratic_frames": quadratic,
        "window": window,
        "too_long": "skip",
        "shuffle": shuffle,
        "world_size": world_size,
    }
    if not rows:
        with pytest.raises(ConfigError, match=r"; raise max_frames$"):
            PackedBatchSampler(lengths, rank=0, **options)
        return
    with warnings.catch_warnings(action="ignore"):
        samplers = [PackedBatchSampler(lengths, rank=rank, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    count = len(samplers[0].epoch_batches(epoch))
    if -(-count // world_size) * world_size > len(rows):
        with pytest.raises(ConfigError, match="cannot be shared"):
            list(samplers[0])
        return
    shares = [rows_of(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {-(-count // world_size)}
    batches = [batch for share in shares for batch in share]
    assert sorted(row for batch in batches for row in batch) == rows
    for batch in batches:
        assert sum(costs[row] for row in batch) <= cap
        assert len(batch) <= (batch_size or len(lengths))


def slow_best_fit(costs: list[int], most: int, size: int, open_batches: int) -> list[int]:
    """Best fit, one utterance after the other."""
    batches = [[number, most, size] for number in range(open_batches)]
    found: list[int] = []
    for cost in costs:
        fitting = [batch for batch in batches if batch[1] >= cost and batch[2]]
        if fitting:
            best = min(fitting, key=lambda batch: batch[1] - cost)
        else:
            best = min(batches, key=lambda batch: batch[1] if batch[2] else -1)
            best[:] = [max([open_batches - 1, *found]) + 1, most, size]
        best[1] -= cost
        best[2] -= 1
        found.append(best[0])
    return found


@given(
    costs=st.lists(st.integers(0, 40), min_size=1, max_size=80),
    most=st.integers(40, 120),
    size=st.integers(1, 9),
    window=st.sampled_from([5, 30, 1000]),
)
def test_each_utterance_joins_the_batch_of_its_window_that_it_fills_best(
    costs: list[int], most: int, size: int, window: int
) -> None:
    found = best_fit(np.array(costs), most, size, window).tolist()
    for number, begin in enumerate(range(0, len(costs), window)):
        expected = slow_best_fit(costs[begin : begin + window], most, size, OPEN)
        first = number * (window + OPEN)
        assert [batch - first for batch in found[begin : begin + window]] == expected


@pytest.mark.parametrize("count", [10_000, 100_000])
def test_batches_of_speech_are_full(count: int) -> None:
    lengths = utterances(count)
    sampler = PackedBatchSampler(lengths, max_frames=20_000)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        frames = [lengths[batch].sum() for batch in rows_of(sampler)]
        assert sampler.fill == pytest.approx(np.mean(frames) / 20_000)
        assert sampler.fill >= 0.99


@pytest.mark.parametrize("count", [9, 60, 1000])
def test_all_epochs_have_the_same_number_of_batches(count: int) -> None:
    for seed in range(3):
        sampler = PackedBatchSampler(utterances(count), max_frames=9000, seed=seed)
        later = PackedBatchSampler(utterances(count), max_frames=9000, seed=seed)
        later.set_epoch(17)
        assert {len(sampler.epoch_batches(epoch)) for epoch in range(20)} == {len(later)}
        orders = {tuple(map(tuple, rows_of(sampler.epoch_batches(epoch)))) for epoch in range(20)}
        assert len(orders) > 15


def test_utterances_have_new_companions_of_all_lengths_in_each_epoch() -> None:
    lengths = utterances(4000)
    sampler = PackedBatchSampler(lengths, max_frames=20_000)
    companions = []
    for epoch in range(2):
        batches = rows_of(sampler.epoch_batches(epoch))
        companions.append({row: set(batch) for batch in batches for row in batch})
        spread = [np.std(lengths[batch]) for batch in batches if len(batch) > 10]
        assert np.mean(spread) > 0.8 * np.std(lengths)
    common = [len(companions[0][row] & companions[1][row]) for row in range(4000)]
    assert np.mean(common) < 2  # itself, and hardly one other


def test_attention_costs_batches_about_the_same_where_squares_count() -> None:
    lengths = utterances(20_000)

    def unevenness(**options: Any) -> float:
        sampler = PackedBatchSampler(lengths, max_frames=20_000, **options)
        costs = [
            float((lengths[batch] ** 2 / 1000 + lengths[batch]).sum()) for batch in rows_of(sampler)
        ]
        return float(np.subtract(*np.quantile(costs, [0.95, 0.05])) / np.mean(costs))

    assert unevenness(quadratic_frames=1000) < 0.05 < 0.15 < unevenness()


@pytest.mark.parametrize("ranks", [(1, 3), (3, 2), (2, 1)])
def test_an_epoch_goes_on_from_its_state_on_other_ranks(ranks: tuple[int, int]) -> None:
    lengths, (before, after) = utterances(900), ranks

    def samplers(count: int) -> list[PackedBatchSampler]:
        return [
            PackedBatchSampler(lengths, max_frames=5000, seed=4, rank=rank, world_size=count)
            for rank in range(count)
        ]

    first = samplers(before)
    for sampler in first:
        sampler.set_epoch(2)
    taken = [batch for sampler in first for batch in rows_of(sampler)[:7]]
    states = [json.dumps(sampler.state_dict(steps=7)) for sampler in first]
    assert len(set(states)) == 1
    rest = []
    for sampler in samplers(after):
        sampler.load_state_dict(json.loads(states[0]))
        rest += rows_of(sampler)
    assert sorted(row for batch in taken + rest for row in batch) == list(range(900))
    whole = samplers(1)[0].epoch_batches(2)
    assert sorted(map(tuple, taken)) == sorted(map(tuple, rows_of(whole)[: 7 * before]))


def test_a_state_of_another_limit_or_window_is_refused() -> None:
    state = PackedBatchSampler(utterances(90), max_frames=5000).state_dict()
    for options in ({"max_frames": 5001}, {"max_frames": 5000, "window": 12}):
        with pytest.raises(StateError, match="saved with"):
            PackedBatchSampler(utterances(90), **options).load_state_dict(state)  # type: ignore[arg-type]


def test_the_same_batches_come_from_a_seed_in_all_releases_of_a_version() -> None:
    sampler = PackedBatchSampler(np.arange(1, 41) * 37 % 41 + 10, max_frames=160, seed=3)
    assert rows_of(sampler.epoch_batches(0))[:2] == [[20, 14, 29, 21, 38], [3, 32, 30, 7]]
    assert rows_of(sampler.epoch_batches(5))[:2] == [[20, 21, 31, 38], [10, 12, 2]]


def test_a_cache_gives_lengths_and_ids_give_ids(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path / "cache", range(20)))
    ids = list(cache)[3:9]
    sampler = PackedBatchSampler(cache, ids=ids, max_frames=50)
    assert sorted(id for batch in sampler for id in batch) == sorted(ids)
    assert sampler.numbering is None
    frames = PackedBatchSampler(cache.lengths("fbank"), max_frames=50)
    assert rows_of(frames.epoch_batches(1)) == rows_of(
        PackedBatchSampler(cache, max_frames=50).epoch_batches(1)
    )


def test_the_repr_says_what_is_sampled() -> None:
    with pytest.warns(UserWarning, match="1 of 3 utterances are longer than max_frames=40") as told:
        sampler = PackedBatchSampler([10, 20, 999], max_frames=40, too_long="skip")
    assert told[0].filename == __file__
    assert sampler.too_long.tolist() == [2]
    assert repr(sampler) == "<PackedBatchSampler: 2 utterances, max_frames=40, epoch 0>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_frames": 0}, "max_frames must be an integer of at least 1"),
        ({"max_frames": 9, "window": 0}, "window must be an integer of at least 1"),
        ({"max_frames": 9, "batch_size": 0}, "batch_size must be"),
        ({"max_frames": 9, "quadratic_frames": 0}, "quadratic_frames must be"),
        ({"max_frames": 9, "too_long": "drop"}, "too_long has no choice 'drop'"),
        ({"max_frames": 4}, "raise max_frames, or leave them out: too_long=skip"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackedBatchSampler([3, 5, 2], **options)
