"""Views by conditions, at random, shared out and sorted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import make_cache
from test_feature_table import write_one

import featcache
from featcache import FeatureStorageConfig, FeatureTable
from featcache.errors import ConfigError, KeyNotFoundError
from featcache.tables import drawn_parts, mixed
from featcache.tables.columns import _assigned, _whole_sizes


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[FeatureTable]:
    """One table of a cache, of several, and of a view of it in another order: the same ids."""
    home = tmp_path_factory.mktemp("cache")
    whole = FeatureTable.of(make_cache(home / "a", range(40)))
    parts = featcache.concat(
        *(make_cache(home / f"b{n}", range(n, 40, 3)) for n in range(3)),
    )
    return [whole, parts, whole.select(parts.ids)]


def test_frames_in_a_range_are_kept(tables: list[FeatureTable]) -> None:
    for table in tables:
        frames = dict(zip(table, table.lengths("fbank").tolist(), strict=True))
        for ends in ((3, 9), (None, 5), (4, None), (None, None), (3.5, np.int64(5)), (9, 3)):
            least, most = (0 if ends[0] is None else ends[0]), (99 if ends[1] is None else ends[1])
            expected = [id for id in table if least <= frames[id] <= most]
            assert list(table.filter(fbank=ends)) == expected
        assert list(table.filter(fbank={2, 5})) == [id for id in table if frames[id] in (2, 5)]
        assert list(table.filter(fbank=4)) == [id for id in table if frames[id] == 4]
        assert list(table.filter(fbank=np.array([4]))) == list(table.filter(fbank=[4]))
        assert list(table.filter()) == list(table)


@pytest.mark.parametrize("number", range(3))
def test_conditions_are_met_all_at_once_and_the_function_is_asked_last(
    tables: list[FeatureTable], number: int
) -> None:
    table, asked = tables[number], []
    frames, units = (
        dict(zip(table, table.lengths(name).tolist(), strict=True)) for name in table.features
    )

    def where(row: Mapping[str, Any]) -> bool:
        asked.append(row["id"])
        assert dict(row) == {"id": row["id"], "fbank": frames[row["id"]], "units": row["units"]}
        return bool(row["units"] % 2)

    some = list(table)[::2]
    view = table.filter(fbank=(2, 20), id=set(some) | {"nobody"}, where=where)
    assert asked == [id for id in some if 2 <= frames[id] <= 20]
    assert list(view) == [id for id in asked if units[id] % 2]
    assert list(table.filter(where, fbank=(2, 20), id=set(some))) == list(view)
    assert view.digest == table.select(table.rows(view)).digest


def test_conditions_that_cannot_be_met_are_refused(tables: list[FeatureTable]) -> None:
    condition: Any
    for condition in ((1, 2, 3), ("a", "b"), (True, 5)):
        with pytest.raises(ConfigError, match=r"no range of numbers, \(least, most\), of 'fbank'"):
            tables[0].filter(fbank=condition)
    with pytest.raises(ConfigError, match="'fbank' holds int, not 'a'"):
        tables[0].filter(fbank="a")
    with pytest.raises(ConfigError, match="'fbank' holds int, not True"):
        tables[0].filter(fbank={True})
    with pytest.raises(ConfigError, match="is no range of numbers"):
        tables[0].filter(id=("a", "b"))
    for condition in ({"a": 1}, len):
        with pytest.raises(ConfigError, match="and a function as where="):
            tables[0].filter(id=condition)
    with pytest.raises(KeyNotFoundError, match="no column 'fbnk'; did you mean 'fbank'"):
        tables[0].filter(fbnk=(1, 2))


def test_a_feature_without_frames_is_no_column(tmp_path: Path) -> None:
    config = FeatureStorageConfig("x", time_axis=None)
    table = FeatureTable.of(write_one(tmp_path, ["a"], config))
    with pytest.raises(ConfigError, match="feature 'x' has no time axis"):
        table.sort("x")


def test_a_sample_depends_on_ids_and_seed_alone(tables: list[FeatureTable]) -> None:
    amount: Any
    for amount, count in (
        (0.1, 4),
        (7, 7),
        (0.0, 0),
        (0, 0),
        (1.0, 40),
        (np.int64(40), 40),
        (np.float32(0.5), 20),
    ):
        views = [table.sample(amount, seed=3) for table in tables]
        assert {frozenset(view) for view in views} == {frozenset(views[0])}
        for table, view in zip(tables, views, strict=True):
            assert len(view) == count
            assert list(view) == [id for id in table if id in set(view)]
    assert list(tables[0].sample(9, seed=1)) != list(tables[0].sample(9))
    seed: Any = np.int64(1)
    assert list(tables[0].sample(9, seed=seed)) == list(tables[0].sample(9, seed=1))
    most = set(tables[0].select(list(tables[0])[1:]).sample(20))
    assert len(most & set(tables[0].sample(20))) >= 19  # what comes or goes moves nothing else
    for amount in (-1, 41, 1.5, -0.1, float("nan"), True, "0.1"):
        with pytest.raises(ConfigError, match="a sample"):
            tables[0].sample(amount)
    with pytest.raises(ConfigError, match="seed must be"):
        tables[0].sample(1, seed=-1)


@given(
    hashes=st.lists(st.integers(0, 5), max_size=30),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_parts_have_their_sizes_even_where_ids_have_one_hash(
    hashes: list[int], sizes: list[int]
) -> None:
    fitting = [min(size, max(len(hashes) - sum(sizes[:n]), 0)) for n, size in enumerate(sizes)]
    parts = drawn_parts(np.array(hashes, np.uint64), 3, fitting)
    assert [*map(len, parts)] == fitting
    rows = [row for part in parts for row in part.tolist()]
    assert len(set(rows)) == len(rows) == sum(fitting)
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


def test_a_split_shares_out_every_utterance_once(tables: list[FeatureTable]) -> None:
    shares = {"train": 0.8, "valid": 0.125, "test": 0.075}
    for table in tables:
        parts = table.split(shares, seed=2)
        assert {name: len(part) for name, part in parts.items()} == {
            "train": 32,
            "valid": 5,
            "test": 3,
        }
        assert Counter(id for part in parts.values() for id in part) == Counter(list(table))
        assert set(parts["test"]) == set(tables[0].split(shares, seed=2)["test"])
        assert set(parts["test"]) != set(table.split(shares, seed=1)["test"])
        assert list(parts["train"]) == [id for id in table if id in set(parts["train"])]


def test_a_split_by_a_column_leaves_no_value_on_both_sides(tables: list[FeatureTable]) -> None:
    for table in tables:
        parts = table.split({"a": 0.5, "b": 0.5}, by="fbank")
        a, b = (set(part.lengths("fbank").tolist()) for part in parts.values())
        assert not a & b
        assert sorted([*parts["a"], *parts["b"]]) == sorted(table)
        assert set(parts["a"]) == set(tables[0].split({"a": 0.5, "b": 0.5}, by="fbank")["a"])


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=4, max_size=60),
    shares=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=4),
    seed=st.integers(0, 9),
)
def test_groups_are_shared_out_as_near_as_can_be(
    sizes: list[int], shares: list[float], seed: int
) -> None:
    groups = np.array(sizes)
    wanted = np.array(shares) / sum(shares) * sum(sizes)
    order = np.argsort(mixed(np.arange(len(sizes), dtype=np.uint64), seed))
    part_of = _assigned(groups, order, wanted)
    got = np.bincount(part_of, groups, minlength=len(shares))
    assert np.bincount(part_of, minlength=len(shares)).min() >= 1
    for here in range(len(shares)):
        for there in range(len(shares)):
            # no group could move and leave both parts nearer to what was wanted
            for size in groups[part_of == here] if (part_of == here).sum() > 1 else ():
                off = np.abs(got - wanted)
                after = abs(got[here] - size - wanted[here]) + abs(
                    got[there] + size - wanted[there]
                )
                assert here == there or after >= off[here] + off[there] - 1e-5


def test_many_small_groups_come_out_even() -> None:
    sizes = np.random.default_rng(1).integers(1, 400, 2000)
    wanted = np.array([0.9, 0.05, 0.05]) * sizes.sum()
    part_of = _assigned(sizes, np.arange(2000), wanted)
    assert np.abs(np.bincount(part_of, sizes) - wanted).max() <= 1


@given(shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), count=st.integers(0, 99))
def test_sizes_are_rounded_to_whole_numbers_of_the_same_sum(
    shares: list[float], count: int
) -> None:
    wanted = np.array(shares) / sum(shares) * count
    sizes = _whole_sizes(wanted)
    assert sizes.sum() == count
    assert np.abs(sizes - wanted).max() < 1 + 1e-5


def test_shares_that_lose_utterances_are_refused(tables: list[FeatureTable]) -> None:
    for shares, message in (
        ({"a": 0.8, "b": 0.1}, "add up to 1, not to 0.9"),
        ({"a": 0.8, "b": 0.3}, r"add up to 1, not to 1\.1"),
        ({"a": 1.5, "b": -0.5}, "share of 'b' is a number above 0, not -0.5"),
        ({"a": "x"}, "share of 'a' is a number above 0, not 'x'"),
        ({}, "a mapping of names to shares"),
        ([0.9, 0.1], "a mapping of names to shares"),
    ):
        with pytest.raises(ConfigError, match=message):
            tables[0].split(shares)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there are 1 values of 'fbank' for 2 parts"):
        tables[0].filter(fbank=3).split({"a": 0.5, "b": 0.5}, by="fbank")


def test_rows_are_sorted_and_rows_of_one_value_keep_their_order(tables: list[FeatureTable]) -> None:
    for table in tables:
        frames = dict(zip(table, table.lengths("fbank").tolist(), strict=True))
        assert list(table.sort("fbank")) == sorted(table, key=frames.__getitem__)
        down = table.sort("fbank", descending=True)
        assert list(down) == sorted(table, key=lambda id: -frames[id])
        assert list(table.sort("id")) == sorted(table, key=str.encode)
        assert list(table.sort("id", descending=True)) == sorted(table, key=str.encode)[::-1]
        assert list(table.select([]).sort("id")) == []
