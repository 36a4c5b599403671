"""Rows of one or several caches: joined over the same ids, or one after another."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import id_of, make_cache, oracle

import featcache
from featcache import CacheWriter, FeatureStorageConfig, FeatureTable
from featcache.errors import ConfigError, KeyNotFoundError, RowError, StaleCacheError


def write_one(path: Path, ids: Iterable[str], config: FeatureStorageConfig, width: int = 3) -> Path:
    """A cache of one feature whose arrays are known from the id."""
    with CacheWriter(path, [config]) as writer:
        for id in ids:
            writer.write(id, {config.name: np.full((len(id), width), len(id))})
    return path


def test_rows_of_a_cache_are_in_its_order(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(20)))
    table = FeatureTable.of(cache)
    ids = sorted(oracle(range(20)), key=str.encode)
    assert [table.id(row) for row in range(len(table))] == ids == list(cache)
    assert table.rows(reversed(ids)).tolist() == list(range(19, -1, -1))
    assert table.lengths("fbank").tolist() == cache.lengths("fbank").tolist()
    assert (table.dims("fbank"), table.dims("units")) == ((4,), ())
    assert (table.features, table.dtype("units"), table.has_frames("units")) == (
        ("fbank", "units"),
        "int16",
        True,
    )


def test_the_lengths_of_one_cache_are_its_mapped_column(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(20)))
    lengths = FeatureTable.of(cache).lengths("fbank")
    assert not lengths.flags.writeable
    assert np.shares_memory(lengths, cache.opened.index.features["fbank"].rows)


def test_a_row_is_named_by_number_or_by_id(tmp_path: Path) -> None:
    table = FeatureTable.of(make_cache(tmp_path, range(20)))
    row = int(table.rows([id_of(7)])[0])
    assert table.numbers([row, id_of(7), row]).tolist() == [row] * 3
    assert table.numbers([]).tolist() == []


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    table = featcache.concat(
        make_cache(tmp_path / "a", range(5)), make_cache(tmp_path / "b", range(5, 9))
    )
    with pytest.raises(
        KeyNotFoundError, match=r"'spk3/utt-33' in '.*a' or '.*b'; nearest ids: .*'spk3/utt-3'"
    ):
        table.rows([id_of(7), "spk3/utt-33"])
    for ask in (table.lengths, table.dims, table.dtype, table.has_frames):
        with pytest.raises(KeyNotFoundError, match="no feature 'fbnk'; did you mean 'fbank'"):
            ask("fbnk")
    with pytest.raises(KeyNotFoundError, match="not the one string"):
        table.find(id_of(7))
    others: tuple[Any, ...] = (None, 3)
    for nothing in others:
        for take in (table.find, table.rows, lambda ids: table.read_batch(ids, "fbank")):
            with pytest.raises(KeyNotFoundError, match=f"a list of strings, not {nothing}"):
                take(nothing)
        with pytest.raises(ConfigError, match=f"list of ids or rows, not by {nothing}"):
            table.select(nothing)
    for row in (9, -1):
        with pytest.raises(RowError, match=f"no row {row}: there are 9 utterances"):
            table.id(row)
        with pytest.raises(RowError, match=f"no row {row}"):
            table.numbers([0, row, 1])


def test_a_mask_is_not_taken_for_rows(tmp_path: Path) -> None:
    table = FeatureTable.of(make_cache(tmp_path, range(2)))
    masks: tuple[Any, ...] = ([True, False], [False, True], np.array([True, False]))
    for mask in masks:
        with pytest.raises(RowError, match="chosen by id"):
            table.select(mask)
    others: tuple[Any, ...] = ([], np.array([]), np.array([], bool))
    for nothing in others:
        assert len(table.select(nothing)) == 0


def test_ids_that_may_be_absent_are_found_without_an_error(tmp_path: Path) -> None:
    table = featcache.concat(
        make_cache(tmp_path / "a", range(5)), make_cache(tmp_path / "b", range(5, 9))
    )
    ids = [id_of(7), "nobody", id_of(2), "", id_of(7)]
    found = table.find(ids).tolist()
    assert [table.id(row) if row >= 0 else None for row in found] == [
        id_of(7), None, id_of(2), None, id_of(7),
    ]  # fmt: skip
    assert table.find(iter([])).tolist() == []


def test_lengths_of_some_rows_are_those_of_all_at_their_places(tmp_path: Path) -> None:
    table = FeatureTable.of(make_cache(tmp_path, range(9)))
    rows = table.rows([id_of(7), id_of(2)])
    assert table.lengths("fbank", rows=rows).tolist() == table.lengths("fbank")[rows].tolist()
    assert table.lengths("fbank", rows=rows[:0]).tolist() == []


def test_joined_caches_have_the_features_of_all(tmp_path: Path) -> None:
    ids = ["b", "aaa", "cc"]
    write_one(tmp_path / "x", ids, FeatureStorageConfig("x"))
    write_one(tmp_path / "y", reversed(ids), FeatureStorageConfig("y", dtype="int16"), width=2)
    table = featcache.join(tmp_path / "x", tmp_path / "y")
    assert (len(table), table.features, table.dims("y")) == (3, ("x", "y"), (2,))
    assert table.lengths("x").tolist() == table.lengths("y").tolist() == [3, 1, 2]


def test_caches_of_other_ids_or_of_the_same_feature_are_not_joined(tmp_path: Path) -> None:
    one = write_one(tmp_path / "x", ["a", "b", "c"], FeatureStorageConfig("x"))
    two = write_one(tmp_path / "y", ["a", "c"], FeatureStorageConfig("y"))
    for order in ((one, two), (two, one)):
        with pytest.raises(
            ConfigError, match=r"'b' is in '.*x' \(3 utterances\) and not in '.*y' \(2\)"
        ):
            featcache.join(*order)
    with pytest.raises(ConfigError, match=r"feature 'x' is in .* and in"):
        featcache.join(one, one)
    with pytest.raises(ConfigError, match="at least one"):
        featcache.join()


def test_concatenated_caches_follow_each_other(tmp_path: Path) -> None:
    numbers = (range(5), range(5, 6), range(6, 12))
    caches = [featcache.open(make_cache(tmp_path / str(n), part)) for n, part in enumerate(numbers)]
    table = featcache.concat(caches[0], featcache.concat(caches[1], caches[2]))
    ids = [id for cache in caches for id in cache]
    assert [table.id(row) for row in range(12)] == ids
    assert table.rows(ids).tolist() == list(range(12))
    assert table.lengths("units").tolist() == [
        len(oracle([int(id.split("-")[1])])[id]["units"]) for id in ids
    ]


def test_caches_with_a_common_id_are_not_concatenated(tmp_path: Path) -> None:
    one, two = make_cache(tmp_path / "a", range(5)), make_cache(tmp_path / "b", range(4, 9))
    with pytest.raises(ConfigError, match=rf"utterance '{id_of(4)}' is in .*a' and in .*b'"):
        featcache.concat(one, two)


@pytest.mark.parametrize(
    ("config", "width", "match"),
    [
        (
            FeatureStorageConfig("x", dtype="float64"),
            3,
            r"float32 \(frames, 3\) and float64 \(frames, 3\)",
        ),
        (FeatureStorageConfig("x"), 4, r"float32 \(frames, 3\) and float32 \(frames, 4\)"),
        (
            FeatureStorageConfig("x", time_axis=None),
            3,
            r"float32 \(frames, 3\) and float32 \(1, 3\)",
        ),
        (FeatureStorageConfig("y"), 3, "different features: x and y"),
    ],
)
def test_caches_of_other_features_are_not_concatenated(
    tmp_path: Path, config: FeatureStorageConfig, width: int, match: str
) -> None:
    one = write_one(tmp_path / "a", ["abc"], FeatureStorageConfig("x"))
    two = write_one(tmp_path / "b", ["b"], config, width)
    with pytest.raises(ConfigError, match=match):
        featcache.concat(one, two)


def test_an_empty_cache_goes_with_any_shape(tmp_path: Path) -> None:
    empty = write_one(tmp_path / "a", [], FeatureStorageConfig("x"))
    table = featcache.concat(
        empty, write_one(tmp_path / "b", ["u"], FeatureStorageConfig("x")), empty.parent / "a"
    )
    assert (len(table), table.id(0), table.dims("x")) == (1, "u", (3,))
    assert len(FeatureTable.of(empty)) == 0


def test_a_pickled_table_is_small_and_refuses_to_number_other_rows(tmp_path: Path) -> None:
    table = FeatureTable.of(make_cache(tmp_path, range(200)))
    pickled = pickle.dumps(table)
    assert len(pickled) < 2000
    assert len(pickle.loads(pickled)) == 200  # noqa: S301
    make_cache(tmp_path, range(200, 210))
    assert len(pickle.loads(pickled)) == 200  # noqa: S301 (the generation before is still there)
    make_cache(tmp_path, range(210, 220))
    with pytest.raises(StaleCacheError, match=r"rows have other numbers now; open it again"):
        pickle.loads(pickled)  # noqa: S301


def made_from(path: Path, ids: Iterable[str], feature: str, **fingerprint: object) -> Path:
    with CacheWriter(path, [FeatureStorageConfig(feature)], fingerprint) as writer:
        for id in ids:
            writer.write(id, {feature: np.zeros((len(id), 3))})
    return path


def test_features_made_from_something_else_are_not_concatenated_unless_told(tmp_path: Path) -> None:
    one = made_from(tmp_path / "one", "ab", "x", gain=1, stage="TRAIN")
    same = made_from(tmp_path / "same", "cd", "x", gain=1, stage="VALID")
    other = made_from(tmp_path / "other", "ef", "x", gain=5)
    more = made_from(tmp_path / "more", "gh", "x", gain=1, layer=9)
    assert len(featcache.concat(one, same)) == 4
    for sources, line in (
        ((one, other), "gain: was 1, now 5"),
        ((one, featcache.concat(same, other, unlike="keep")), "gain: was 1, now 5"),
        ((one, same, more), r"layer: was \(absent\), now 9"),
    ):
        with pytest.raises(ConfigError, match=rf"'.*one' and '.*' were made .*:\n  {line}\n.*keep"):
            featcache.concat(*sources)
        assert len(featcache.concat(*sources, unlike="keep")) > 2
    assert len(featcache.concat(featcache.concat(one, other, unlike="keep"))) == 4
    with pytest.raises(ConfigError, match="unlike is 'raise' or 'keep', not 'skip'"):
        featcache.concat(one, unlike="skip")  # type: ignore[arg-type]


def test_joined_caches_of_tables_are_compared_feature_by_feature(tmp_path: Path) -> None:
    x, y = made_from(tmp_path / "x", "ab", "x", gain=1), made_from(tmp_path / "y", "ab", "y", k=2)
    more_x = made_from(tmp_path / "x2", "cd", "x", gain=1)
    more_y, other_y = (made_from(tmp_path / f"y{k}", "cd", "y", k=k) for k in (2, 3))
    assert len(featcache.concat(featcache.join(x, y), featcache.join(more_y, more_x))) == 4
    with pytest.raises(ConfigError, match=r"'.*/y' and '.*/y3' .*\n  k: was 2, now 3\n"):
        featcache.concat(featcache.join(x, y), featcache.join(more_x, other_y))


def test_caches_that_contradict_each_other_are_not_joined_unless_told(tmp_path: Path) -> None:
    x = made_from(tmp_path / "x", "ab", "x", rate=8000, modules={"fbank": 1}, stage="TRAIN")
    y = made_from(tmp_path / "y", "ab", "y", rate=8000, modules={"ssl": 2}, layer=9, stage="VALID")
    other = made_from(tmp_path / "z", "ab", "z", rate=16000, modules={"ssl": 3})
    assert featcache.join(x, y).features == ("x", "y")
    with pytest.raises(
        ConfigError,
        match=r"'.*x' and '.*z' were made from something else .*\n  rate: was 8000, now 16000\n",
    ):
        featcache.join(x, y, other)
    with pytest.raises(ConfigError, match=r"modules\.ssl: was 2, now 3"):
        featcache.join(y, other)
    assert featcache.join(x, y, other, unlike="keep").features == ("x", "y", "z")
    with pytest.raises(ConfigError, match="unlike is 'raise' or 'keep', not None"):
        featcache.join(x, unlike=None)  # type: ignore[arg-type]
