"""Views by annotations: conditions, splits and orders, against plain Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig, FeatureTable
from featcache.errors import ConfigError, RowError

COUNT = 60


def values_of(number: int) -> dict[str, Any]:
    """The annotations of an utterance; some are missing of some."""
    return {
        "speaker": f"spk{number % 11}",
        "text": None if number % 9 == 4 else f"word{number * 7 % 60} é" + "x" * (number % 5),
        "snr": None if number % 8 == 3 else number * 1.5 % 17,
        "year": 1990 + number * 13 % 31,
        "clean": None if number % 10 == 7 else number % 3 == 0,
        "tags": [number, 1],
    }


def write(path: Path, numbers: range) -> Path:
    with CacheWriter(path, [FeatureStorageConfig("x")]) as writer:
        for n in numbers:
            writer.write(f"u{n:02}", {"x": np.zeros((n % 7 + 1, 2))}, annotations=values_of(n))
    return path


@pytest.fixture(scope="module", params=["cache", "caches", "view"])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    home = tmp_path_factory.mktemp("caches")
    if request.param == "cache":
        return FeatureTable.of(write(home / "all", range(COUNT)))
    parts = (range(20), range(20, 27), range(27, COUNT))
    table = featcache.concat(*(write(home / str(n), part) for n, part in enumerate(parts)))
    if request.param == "view":
        return table.select(np.random.default_rng(0).permutation(COUNT)[:50])
    return table


def values(table: FeatureTable) -> dict[str, dict[str, Any]]:
    """The annotations of all rows by id, in their order."""
    return {id: values_of(int(id[1:])) for id in table}


CONDITIONS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "a set": (
        {"speaker": {"spk1", "spk9", "nobody"}},
        lambda row: row["speaker"] in ("spk1", "spk9"),
    ),
    "one value": ({"speaker": "spk3"}, lambda row: row["speaker"] == "spk3"),
    "a long text": ({"text": ["word7 éx"]}, lambda row: row["text"] == "word7 éx"),
    "a range": ({"snr": (2, 9.0)}, lambda row: row["snr"] is not None and 2 <= row["snr"] <= 9),
    "an open range": ({"year": (2000, None)}, lambda row: row["year"] >= 2000),
    "a number": ({"year": 1990 + 13}, lambda row: row["year"] == 2003),
    "numbers of NumPy": (
        {"year": {np.int64(2003), np.int16(1999)}, "speaker": np.str_("spk1")},
        lambda row: row["year"] in (2003, 1999) and row["speaker"] == "spk1",
    ),
    "an array": ({"year": np.array([2003, 1999])}, lambda row: row["year"] in (2003, 1999)),
    "a whole number": ({"snr": {3}}, lambda row: row["snr"] == 3),
    "a bool": ({"clean": True}, lambda row: row["clean"] is True),
    "false": ({"clean": False}, lambda row: row["clean"] is False),
    "missing": ({"text": None}, lambda row: row["text"] is None),
    "missing or not": ({"clean": {None, True}}, lambda row: row["clean"] is not False),
    "a missing number": ({"snr": [None]}, lambda row: row["snr"] is None),
    "two": (
        {"snr": (0, 12), "clean": False},
        lambda row: row["snr"] is not None and row["snr"] <= 12 and row["clean"] is False,
    ),
    "a function": ({"where": lambda row: 1 in row["tags"][:1]}, lambda row: row["tags"][0] == 1),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_choose_what_python_would(table: FeatureTable, name: str) -> None:
    conditions, keep = CONDITIONS[name]
    assert list(table.filter(**conditions)) == [
        id for id, row in values(table).items() if keep(row)
    ]


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"speaker": 3}, "'speaker' holds str, not 3"),
        ({"speaker": ("a", "b")}, "is no range of numbers"),
        ({"clean": (0, 1)}, "is no range of numbers"),
        ({"clean": 1}, "'clean' holds bool, not 1"),
        ({"year": True}, "'year' holds int, not True"),
        ({"tags": [[1, 2]]}, r"'tags' holds ints, not \[1, 2\]"),
        ({"tags": (1, 2)}, "is no range of numbers"),
    ],
)
def test_values_of_another_kind_are_refused(
    table: FeatureTable, conditions: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        table.filter(**conditions)


@pytest.mark.parametrize("by", ["speaker", "year"])
def test_no_speaker_is_on_both_sides_of_a_split(table: FeatureTable, by: str) -> None:
    shares = {"train": 0.7, "valid": 0.2, "test": 0.1}
    parts = table.split(shares, by=by, seed=5)
    sides = [{values_of(int(id[1:]))[by] for id in part} for part in parts.values()]
    assert sum(map(len, sides)) == len(set().union(*sides))
    assert sorted(id for part in parts.values() for id in part) == sorted(table)
    largest = max(list(table.annotation(by)).count(value) for value in set().union(*sides))
    for part, share in zip(parts.values(), shares.values(), strict=True):
        assert abs(len(part) - share * len(table)) <= largest / 2 + 1
    again = table.select(list(table)[::-1]).split(shares, by=by, seed=5)
    assert {name: set(part) for name, part in again.items()} == {
        name: set(part) for name, part in parts.items()
    }
    assert set(table.split(shares, by=by, seed=6)["test"]) != set(parts["test"])


def test_a_split_by_what_is_missing_is_refused(table: FeatureTable) -> None:
    first = next(id for id, row in values(table).items() if row["text"] is None)
    with pytest.raises(ConfigError, match=f"utterance '{first}' has no 'text'"):
        table.split({"a": 0.5, "b": 0.5}, by="text")
    with pytest.raises(ConfigError, match="'tags' is a list"):
        table.split({"a": 0.5, "b": 0.5}, by="tags")


@pytest.mark.parametrize("by", ["speaker", "text", "snr", "year", "clean"])
@pytest.mark.parametrize("descending", [False, True])
def test_rows_are_sorted_by_value_and_those_without_one_are_last(
    table: FeatureTable, by: str, descending: bool
) -> None:
    rows = values(table)
    there = [id for id in rows if rows[id][by] is not None]
    ordered = sorted(there, key=lambda id: rows[id][by], reverse=descending)
    missing = [id for id in rows if rows[id][by] is None]
    assert list(table.sort(by, descending=descending)) == ordered + missing


def test_lists_have_no_order(table: FeatureTable) -> None:
    with pytest.raises(ConfigError, match="'tags' holds ints, by which nothing is sorted"):
        table.sort("tags")


def test_what_a_condition_raises_names_the_utterance_and_what_it_lacks(
    table: FeatureTable,
) -> None:
    lacking = next(id for id, row in values(table).items() if row["snr"] is None)
    with pytest.raises(TypeError) as raised:
        table.filter(where=lambda row: cast(float, row["snr"]) > 5)
    [note] = raised.value.__notes__
    assert f"in where= of filter, at utterance {lacking!r}" in note
    assert "'snr'" in note
    assert "where None stands for what is missing: '" in note


def test_values_that_are_no_list_are_refused(table: FeatureTable) -> None:
    for given in (None, "spk1", 5):
        with pytest.raises(ConfigError, match=r"'speaker': values are a list or a set of them"):
            table.annotation("speaker").is_in(given)  # type: ignore[arg-type]


def test_an_annotation_says_how_the_value_of_an_id_is_read(table: FeatureTable) -> None:
    id = table.ids[3]
    with pytest.raises(RowError, match=r"by row number or slice, not by 'u.*table\.rows"):
        table.annotation("speaker")[id]  # type: ignore[call-overload]
    assert table.annotation("speaker")[table.rows([id])[0]] == values(table)[id]["speaker"]
