"""`mix`: each row as often as planned, spread evenly, and tables that cannot be mixed."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import id_of, make_cache

import featcache
from featcache import FeatureTable, GlobalMVN
from featcache.errors import ConfigError, KeyNotFoundError
from featcache.tables import EvenSource, MixPlan, MixSource, WeightedSource

COUNTS = {"a": 40, "b": 25, "c": 7}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FeatureTable]:
    home, begin, made = tmp_path_factory.mktemp("caches"), 0, {}
    for name, count in COUNTS.items():
        cache = featcache.open(make_cache(home / name, range(begin, begin + count)))
        cache.annotate({id: {"weight": n % 4} for n, id in enumerate(cache.ids)})
        made[name], begin = featcache.open(home / name).table, begin + count
    return made


def times_of(table: FeatureTable, epochs: range, seed: int = 3) -> Counter[str]:
    """How often each utterance comes."""
    return Counter(
        table.id(row) for epoch in epochs for row in table.epoch_rows(epoch, seed=seed)[:].tolist()
    )


def plan_of(counts: list[int], taken: list[int]) -> MixPlan:
    sources: list[MixSource] = [EvenSource(*each) for each in zip(counts, taken, strict=True)]
    return MixPlan([f"s{number}" for number in range(len(counts))], sources, None)


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    taken=st.lists(st.integers(1, 150), min_size=6, max_size=6),
    epochs=st.integers(1, 5),
    begin=st.integers(0, 900),
    seed=st.integers(0, 9),
)
def test_each_row_comes_as_often_as_planned_and_none_before_its_source_is_through(
    counts: list[int], taken: list[int], epochs: int, begin: int, seed: int
) -> None:
    plan = plan_of(counts, taken[: len(counts)])
    streams: list[list[int]] = [[] for _ in counts]
    for epoch in range(epochs):
        rows = plan.order(epoch, seed)[:]
        assert len(set(rows.tolist())) == len(rows) == plan.size
        np.testing.assert_array_equal(plan.order(epoch, seed)[begin : begin + 9], rows[begin:][:9])
        for row, source in zip(rows.tolist(), plan.source_of(rows).tolist(), strict=True):
            copies = -(-taken[source] // counts[source])
            streams[source].append((row - plan.starts[source]) // copies)
    for stream, count, each in zip(streams, counts, taken, strict=False):
        assert len(stream) == each * epochs
        for turn in range(0, len(stream), count):
            some = stream[turn : turn + count]
            assert len(set(some)) == len(some)


@given(
    weights=st.lists(st.floats(0, 9), min_size=1, max_size=30).filter(any),
    taken=st.integers(1, 100),
    epochs=st.integers(1, 30),
)
def test_weighted_rows_come_as_often_as_their_weights_say(
    weights: list[float], taken: int, epochs: int
) -> None:
    array = np.array(weights)
    plan = MixPlan(["s"], [WeightedSource.of(array, taken)], None)
    rates = array / array.sum() * taken
    utterance_of = np.repeat(np.arange(len(array)), plan.sources[0].copies)
    total = np.zeros(len(array))
    for epoch in range(epochs):
        rows = plan.order(epoch, 5)[:]
        assert len(set(rows.tolist())) == len(rows) == taken
        times = np.bincount(utterance_of[rows], minlength=len(array))
        assert (np.abs(times - rates) < 1 + 1e-5).all()
        total += times
    assert (np.abs(total - rates * epochs) < 3).all()
    assert not total[array == 0].any()


@pytest.mark.parametrize("weight", [1, 0.1, 1 / 3, 7e-9])
@pytest.mark.parametrize("count", [7, 100, 10_000, 300_000])
def test_rows_of_equal_weights_have_as_many_rows_as_an_epoch_takes_of_each(
    weight: float, count: int
) -> None:
    for times in (1, 2):
        source = WeightedSource.of(np.full(count, weight), times * count)
        assert set(source.copies.tolist()) == {times}


@given(
    taken=st.lists(st.integers(1, 3000), min_size=2, max_size=5).filter(lambda t: sum(t) > 1000),
    epoch=st.integers(0, 3),
)
def test_shares_hold_within_1_percent_over_any_1000_rows(taken: list[int], epoch: int) -> None:
    plan = plan_of(taken, taken)
    source_of = plan.source_of(plan.order(epoch, 1)[:])
    for number, count in enumerate(taken):
        before = np.concatenate([[0], np.cumsum(source_of == number)])
        share = (before[1000:] - before[:-1000]) / 1000
        assert np.abs(share - count / plan.size).max() <= 0.01


def test_any_piece_of_a_large_mix_is_drawn_by_itself() -> None:
    plan = plan_of([200_000, 70_000, 9000], [150_000, 100_000, 9000])
    whole = plan.order(2, 7)[:]
    assert len(np.unique(whole)) == len(whole) == 259_000
    one_by_one = plan.order(2, 7)
    np.testing.assert_array_equal(
        np.concatenate([one_by_one[at : at + 999] for at in range(0, len(whole), 999)]), whole
    )
    for begin in (0, 32_760, 65_536, 131_071, 200_000, 258_990):
        for count in (50, 100_000):
            piece = plan.order(2, 7)[begin : begin + count]
            np.testing.assert_array_equal(piece, whole[begin:][:count])


def test_a_seed_draws_the_same_mix_in_all_releases_of_a_version() -> None:
    rows = plan_of([50, 10], [20, 15]).order(3, 11)[:12].tolist()
    assert rows == [24, 52, 13, 66, 45, 68, 14, 7, 56, 8, 60, 40]
    plan = MixPlan(["s"], [WeightedSource.of(np.arange(9.0), 14)], None)
    assert plan.order(4, 2)[:].tolist() == [13, 6, 11, 0, 7, 4, 8, 14, 12, 2, 15, 16, 9, 3]


def test_by_default_no_utterance_comes_twice_and_the_smallest_come_whole(
    sources: dict[str, FeatureTable],
) -> None:
    table = featcache.mix(sources)
    assert table.plan is not None
    assert table.plan.taken == COUNTS
    assert set(times_of(table, range(3)).values()) == {3}
    table = featcache.mix(sources, weights={"a": 1, "b": 1, "c": 1})
    assert table.plan is not None
    assert table.plan.taken == {"a": 7, "b": 7, "c": 7}
    times = times_of(table, range(1))
    assert set(times.values()) == {1}
    assert times.keys() >= set(sources["c"])
    assert {times_of(table, range(12))[id] for id in sources["a"]} == {2, 3}


def test_how_long_an_epoch_is_and_what_it_repeats(sources: dict[str, FeatureTable]) -> None:
    def taken(**options: Any) -> list[int]:
        plan = featcache.mix(sources, **options).plan
        assert plan is not None
        return [*plan.taken.values()]

    equal = {"a": 1, "b": 1, "c": 1}
    assert taken(weights=equal, epoch_size="all") == [40, 40, 40]
    assert taken(weights={"a": 2, "b": 1, "c": 1}, epoch_size=100) == [50, 25, 25]
    assert taken(temperature=0, epoch_size=90) == [30, 30, 30]
    assert taken(temperature=0.5, epoch_size=1000) == [453, 358, 189]
    assert taken(repeat={"c": 3, "b": 0.5}) == [40, 12, 21]
    assert taken(weights=equal, epoch_size=100) == [34, 33, 33]


def test_weights_of_rows_by_an_array_or_an_annotation(sources: dict[str, FeatureTable]) -> None:
    by_name = featcache.mix(sources, weights="weight", epoch_size=200)
    arrays = {name: table.annotation("weight").to_numpy() for name, table in sources.items()}
    by_array = featcache.mix(sources, weights=arrays, epoch_size=200)
    assert by_name.digest == by_array.digest
    times = times_of(by_name, range(20))
    weights = {id: n % 4 for table in sources.values() for n, id in enumerate(table.ids)}
    total = sum(weights.values())
    for id, weight in weights.items():
        assert abs(times[id] - weight / total * 200 * 20) < 25
    assert not any(times[id] for id, weight in weights.items() if weight == 0)
    mixed = featcache.mix(
        sources, weights={"a": "weight", "b": np.divide(arrays["b"], 2), "c": 10}, epoch_size=100
    )
    assert mixed.plan is not None
    assert mixed.plan.taken["a"] == round(100 * 60 / (60 + 18 + 10))


def test_a_mix_answers_as_a_table(sources: dict[str, FeatureTable]) -> None:
    table = featcache.mix(sources, repeat={"c": 3})
    rows = table.epoch_rows(0)[:]
    assert len(table) == 40 + 25 + 7 * 3
    assert {id: table.annotation("source")[row] for row, id in enumerate(table.ids)} == {
        id: name for name, source in sources.items() for id in source
    }
    id = sources["c"].ids[2]
    np.testing.assert_array_equal(table.read(id, "fbank"), sources["c"].read(id, "fbank"))
    lengths = table.lengths("fbank")
    for row in rows.tolist()[::9]:
        assert lengths[row] == len(table.read(table.id(row), "fbank"))
    whole = featcache.concat(*sources.values())
    assert table.stats("fbank").count == whole.stats("fbank").count
    np.testing.assert_allclose(
        GlobalMVN.from_cache(table, "fbank").mean, GlobalMVN.from_cache(whole, "fbank").mean
    )
    assert "86 rows an epoch of 72 utterances" in repr(table)
    assert "86" in table._repr_html_()
    assert repr(table.plan) == ("<MixPlan: 86 rows an epoch: 'a' 0.465, 'b' 0.291, 'c' 0.244>")


def test_a_pickle_has_the_same_plan(sources: dict[str, FeatureTable]) -> None:
    arrays = {name: np.arange(1.0, len(table) + 1) for name, table in sources.items()}
    for weights in (None, arrays):
        table = featcache.mix(sources, weights=weights, epoch_size=90)
        again = pickle.loads(pickle.dumps(table))  # noqa: S301
        assert again.digest == table.digest
        np.testing.assert_array_equal(
            again.epoch_rows(4, seed=1)[:], table.epoch_rows(4, seed=1)[:]
        )


def test_another_plan_has_another_digest(sources: dict[str, FeatureTable]) -> None:
    plans: list[dict[str, Any]] = [
        {},
        {"epoch_size": 50},
        {"weights": {"a": 2, "b": 1, "c": 1}},
        {"weights": "weight"},
        {"label": "corpus"},
    ]
    digests = {featcache.mix(sources, **plan).digest for plan in plans}
    assert len(digests) == len(plans)
    assert featcache.concat(*sources.values()).digest not in digests


def test_the_digest_tells_which_rows_of_the_sources_are_mixed_in_which_order(
    sources: dict[str, FeatureTable],
) -> None:
    a, b = sources["a"], sources["b"]
    backwards = a.select(range(len(a))[::-1])
    mixed = [
        {"a": a, "b": b},
        {"a": backwards, "b": b},
        {"a": a.select([*range(20, 40), *range(20)]), "b": b},
        {"a": a.select(range(39)), "b": b},
        {"b": b, "a": a},
    ]
    for repeat in (1, 3):
        plans = [dict.fromkeys(each, repeat) for each in mixed]
        both = list(zip(mixed, plans, strict=True))
        digests = [featcache.mix(each, repeat=plan).digest for each, plan in both]
        assert len(set(digests)) == len(mixed)
        assert digests == [featcache.mix(each, repeat=plan).digest for each, plan in both]


def test_segments_are_mixed_too(tmp_path: Path) -> None:
    features = [featcache.FeatureStorageConfig("fbank", frame_s=0.01)]
    tables = {}
    for name in "xy":
        with featcache.CacheWriter(tmp_path / name, features) as writer:
            for number in range(3):
                array = np.arange(40.0).reshape(20, 2) + number
                writer.write(f"{name}{number}", {"fbank": array})
        tables[name] = featcache.open(tmp_path / name).segments(featcache.Windows(0.05))
    table = featcache.mix(tables, repeat={"x": 2})
    rows = table.epoch_rows(0)[:].tolist()
    assert Counter(map(table.id, rows)) == {
        id: 2 if id.startswith("x") else 1 for id in (*tables["x"], *tables["y"])
    }
    for row in rows:
        np.testing.assert_array_equal(
            table.read(table.id(row), "fbank"),
            tables[table.id(row)[0]].read(table.id(row), "fbank"),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"a": 1, "b": 1}}, "says nothing of source 'c'"),
        ({"weights": {"a": 1, "b": 1, "d": 1}}, "names a source 'd'"),
        ({"weights": {"a": 1, "b": 1, "c": 0}}, "above 0"),
        ({"weights": {"a": 1, "b": 1, "c": np.ones(6)}}, "for each of its 7 rows"),
        ({"weights": {"a": 1, "b": 1, "c": -np.ones(7)}}, "from 0 on"),
        ({"weights": {"a": 1, "b": 1, "c": np.zeros(7)}}, "not all 0"),
        ({"weights": 3}, "mapping"),
        ({"weights": {"a": 1e6, "b": 1, "c": 1}, "epoch_size": 10}, "takes none of 'b'"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 9999}, "from 0 to about 1"),
        ({"repeat": {"a": 1e11}}, "too long"),
        ({"epoch_size": 1 << 41}, "too long"),
        ({"epoch_size": 0}, "epoch_size"),
        ({"epoch_size": "whole"}, "a number of rows, or 'all', not 'whole'"),
        ({"repeat": {"d": 2}}, "names a source 'd'"),
        ({"repeat": {"a": 0}}, "above 0"),
        ({"repeat": {"c": 0.01}}, "none"),
        ({"repeat": {"a": 2}, "epoch_size": 7}, "takes the place"),
        ({"label": "weight"}, "have an annotation 'weight'"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(
    sources: dict[str, FeatureTable], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        featcache.mix(sources, **options)


def test_sources_that_do_not_fit_are_refused(sources: dict[str, FeatureTable]) -> None:
    with pytest.raises(ConfigError, match="tables by name"):
        featcache.mix([*sources.values()])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is in"):
        featcache.mix({"a": sources["a"], "again": sources["a"].select([id_of(3)])})
    with pytest.raises(ConfigError, match="no utterances"):
        featcache.mix({"a": sources["a"], "none": sources["b"].select([])})
    with pytest.raises(KeyNotFoundError, match="no annotation 'loudness'"):
        featcache.mix(sources, weights="loudness")


def test_sources_are_filtered_and_put_together_before_they_are_mixed(
    sources: dict[str, FeatureTable],
) -> None:
    """What the error of a mix that is filtered, or mixed again, says to do."""
    some = {name: table.filter(fbank=(4, None)) for name, table in sources.items()}
    mixed = featcache.mix(some, weights=dict.fromkeys(some, 1), epoch_size=30)
    ids = {mixed.id(row) for row in mixed.epoch_rows(0)[:].tolist()}
    assert ids <= {id for table in some.values() for id in table}
    names = [*sources]
    both = featcache.concat(sources[names[0]], sources[names[1]])
    again = featcache.mix({"both": both, "rest": sources[names[2]]}, repeat={"rest": 2})
    assert again.plan is not None
    assert again.plan.taken == {"both": len(both), "rest": 2 * len(sources[names[2]])}


def test_what_is_made_of_a_mix_would_have_no_plan(sources: dict[str, FeatureTable]) -> None:
    table = featcache.mix({"a": sources["a"], "b": sources["b"]})
    for make in (
        lambda: table.filter(fbank=(2, 9)),
        lambda: table.sample(0.5),
        lambda: table.split({"x": 0.5, "y": 0.5}),
        lambda: table.sort("id"),
        lambda: table.select([0, 1]),
        lambda: featcache.concat(table, sources["c"]),
        lambda: featcache.join(table),
        lambda: featcache.mix({"m": table, "c": sources["c"]}),
    ):
        with pytest.raises(ConfigError, match="a mix is made last"):
            make()
