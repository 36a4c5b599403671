"""The order that a seed gives: that of version 1, pinned; another one needs another `VERSION`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from store_helpers import make_cache

import featcache
from featcache.samplers import BucketBatchSampler, ShuffledBatchSampler
from featcache.samplers.epoch import EpochSampler
from featcache.samplers.shuffled import PlainBatchSampler
from featcache.tables import VERSION, Order, drawn, orders

LENGTHS = np.arange(1, 41) * 37 % 41 + 10


def samplers(cache: Path) -> dict[str, EpochSampler]:
    pairs = [[row, row + 1] for row in range(0, 40, 2)]
    table = featcache.open(cache).table
    return {
        "bucket": BucketBatchSampler(LENGTHS, max_frames=160, seed=3),
        "made": ShuffledBatchSampler(pairs, seed=3),
        "rows": PlainBatchSampler(table, 4, shuffle=True, seed=3),
    }


def first_batches(sampler: EpochSampler, epoch: int) -> list[list[int] | list[str]]:
    sampler.set_epoch(epoch)
    return list(islice(sampler, 3))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), range(40))


@pytest.mark.parametrize(
    ("count", "purpose", "first", "last"),
    [
        (5, (0, "rows", 0), [1, 4, 2, 3], [3, 0]),
        (4096, (1, "rows", 0), [2439, 1310, 4006, 3143], [3184, 2420]),
        (4097, (1, "rows", 0), [3696, 3542, 722, 1749], [882, 3077]),
        (1000003, (7, "rows", 2), [366482, 927758, 873006, 921395], [423776, 680081]),
        (
            100000000,
            (1208925819614629174706176, "rows", 31),
            [25641288, 42504479, 16186695, 24913121],
            [78329045, 68244408],
        ),
    ],
)
def test_a_seed_draws_the_same_order_in_all_releases_of_a_version(
    count: int, purpose: tuple[int | str, ...], first: list[int], last: list[int]
) -> None:
    order = Order(count, drawn(*purpose))
    assert (VERSION, order[:4].tolist(), order[count - 2 : count].tolist()) == (1, first, last)


@pytest.mark.parametrize(
    ("name", "epoch", "batches"),
    [
        ("bucket", 0, [[3, 33, 23, 2], [24, 14, 34, 13], [5, 15, 25, 4, 35]]),
        ("bucket", 5, [[31, 10, 0], [20, 30], [13, 23, 2, 33]]),
        ("made", 0, [[18, 19], [22, 23], [20, 21]]),
        ("made", 5, [[32, 33], [38, 39], [36, 37]]),
        ("rows", 0, [[32, 13, 35, 12], [28, 33, 4, 11], [26, 0, 25, 19]]),
        ("rows", 5, [[11, 32, 9, 15], [16, 29, 25, 2], [26, 18, 34, 31]]),
    ],
)
def test_a_seed_gives_the_same_batches_in_all_releases_of_a_version(
    cache: Path, name: str, epoch: int, batches: list[list[int]]
) -> None:
    assert first_batches(samplers(cache)[name], epoch) == batches


@given(count=st.integers(1, 9000), seed=st.integers(0, 9), begin=st.integers(0, 9000))
def test_a_piece_of_an_order_is_computed_by_itself(count: int, seed: int, begin: int) -> None:
    whole = Order(count, drawn(seed))[:]
    assert sorted(whole.tolist()) == list(range(count))
    np.testing.assert_array_equal(Order(count, drawn(seed))[begin : begin + 7], whole[begin:][:7])


def test_several_orders_at_once_are_those_drawn_one_by_one() -> None:
    counts, keys = np.array([3, 5000, 2, 700]), [drawn(7, number) for number in range(4)]
    for count, key, order in zip(counts, keys, orders(counts, keys), strict=True):
        np.testing.assert_array_equal(order, Order(int(count), key)[:])


def test_all_orders_of_few_numbers_are_drawn_about_equally_often() -> None:
    orders = [tuple(Order(3, drawn(seed))[:].tolist()) for seed in range(1200)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert min(counts) > 150
