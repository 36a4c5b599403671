"""`Column`: values of rows, one by one and many at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from annotation_helpers import annotations_of, make_annotated, open_writer
from store_helpers import arrays_of, change_index, id_of

import featcache
from featcache.errors import ConfigError, CorruptCacheError, KeyNotFoundError, RowError
from featcache.format import ColumnFile

NUMBERS = range(40)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return featcache.open(make_annotated(tmp_path_factory.mktemp("cache"), NUMBERS))


def values(cache: featcache.Cache, name: str) -> list[Any]:
    by_id = {id_of(number): annotations_of(number)[name] for number in NUMBERS}
    return [by_id[id] for id in cache]


@pytest.mark.parametrize("name", annotations_of(0))
def test_an_annotation_is_a_sequence_of_values(cache: featcache.Cache, name: str) -> None:
    annotation, expected = cache.annotation(name), values(cache, name)
    assert len(annotation) == 40
    assert list(annotation) == expected
    assert [annotation[row] for row in range(40)] == expected
    assert annotation[-1] == expected[-1]
    assert annotation[5:30:7] == expected[5:30:7]
    assert annotation.take(np.array([3, 3, 39])) == [expected[row] for row in (3, 3, 39)]
    assert annotation.take(np.array([], np.int64)) == []
    assert annotation.missing.tolist() == [value is None for value in expected]
    assert annotation.has_missing == (None in expected)
    assert repr(annotation) == f"<Column {name!r}: {annotation.kind} of 40 utterances>"


def test_rows_that_are_not_there_are_refused(cache: featcache.Cache) -> None:
    annotation = cache.annotation("text")
    for row in (40, -41):
        with pytest.raises(RowError, match=f"no row {row}"):
            annotation[row]
    for rows in ([40], [-1]):
        with pytest.raises(RowError, match="from 0 to before 40"):
            annotation.take(np.array(rows))


def test_an_unknown_annotation_is_refused_with_those_that_are_there(
    cache: featcache.Cache,
) -> None:
    with pytest.raises(KeyNotFoundError, match=r"no annotation 'speakers'.*'speaker'"):
        cache.annotation("speakers")


def test_numbers_are_arrays(cache: featcache.Cache) -> None:
    expected = values(cache, "duration")
    found = cache.annotation("duration").to_numpy()
    assert found.dtype == np.float64
    assert found.tolist() == expected
    for name in ("channel", "clean"):
        found = cache.annotation(name).to_numpy()
        assert found.dtype == np.float64
        assert [None if math.isnan(each) else each for each in found.tolist()] == [
            None if each is None else float(each) for each in values(cache, name)
        ]
    for name in ("text", "peaks"):
        with pytest.raises(ConfigError, match=f"'{name}' is .*, not a number"):
            cache.annotation(name).to_numpy()


def test_numbers_without_missing_ones_keep_their_type(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write("a", arrays_of(1), annotations={"n": 2**62 + 1, "ok": False})
        writer.write("b", arrays_of(1), annotations={"n": 3, "ok": True})
    cache = featcache.open(tmp_path)
    assert cache.annotation("n").to_numpy().tolist() == [2**62 + 1, 3]
    ok = cache.annotation("ok").to_numpy()
    assert ok.dtype == np.bool_
    assert ok.tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("speaker", {"spk1", "spk4", "none"}),
        ("speaker", set()),
        ("text", [annotations_of(3)["text"], ""]),
        ("channel", {2**63 - 1, 2, None}),
        ("duration", (3, 1.1, 1e300)),
        ("clean", {True}),
        ("clean", [None]),
    ],
)
def test_rows_of_some_values_are_found(cache: featcache.Cache, name: str, wanted: Any) -> None:
    found = cache.annotation(name).is_in(wanted)
    assert found.dtype == np.bool_
    assert found.tolist() == [value in wanted for value in values(cache, name)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("speaker", [1089]),
        ("speaker", "spk1"),
        ("channel", [1.0]),
        ("channel", [True]),
        ("clean", [1]),
        ("duration", ["1"]),
        ("peaks", [1.0]),
    ],
)
def test_values_of_another_kind_are_refused(cache: featcache.Cache, name: str, wanted: Any) -> None:
    with pytest.raises(ConfigError, match=f"annotation '{name}'"):
        cache.annotation(name).is_in(wanted)


@pytest.mark.parametrize("name", ["speaker", "text", "channel", "duration", "clean"])
def test_codes_number_the_values_in_their_order(cache: featcache.Cache, name: str) -> None:
    expected = values(cache, name)
    codes, distinct = cache.annotation(name).codes()
    assert distinct == sorted({value for value in expected if value is not None})
    assert [None if code < 0 else distinct[code] for code in codes.tolist()] == expected


def test_lists_have_no_codes(cache: featcache.Cache) -> None:
    with pytest.raises(ConfigError, match="'peaks' is a list"):
        cache.annotation("peaks").codes()


def test_codes_pass_over_values_of_other_rows(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        for number in range(20):
            speaker = f"s{number % 4}" if number < 18 else None
            writer.write(f"{number:02}", arrays_of(1), annotations={"speaker": speaker})
    view = featcache.open(tmp_path).table.select([3, 1, 18, 7])
    assert view.annotation("speaker").codes()[1] == ["s1", "s3"]
    assert view.annotation("speaker").codes()[0].tolist() == [1, 0, -1, 1]


def test_an_empty_cache_has_no_annotations(tmp_path: Path) -> None:
    make_annotated(tmp_path, [])
    assert featcache.open(tmp_path).annotations == ()


def test_a_closed_or_copied_cache_has_its_annotations(cache: featcache.Cache) -> None:
    import pickle

    again = pickle.loads(pickle.dumps(cache))  # noqa: S301
    again.close()
    assert list(again.annotation("text")) == values(cache, "text")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("text/ends", lambda ends: ends[::-1].copy()),
        ("text/ends", lambda ends: ends[:-1]),
        ("text/ends", lambda ends: ends + 1),
        ("text/bytes", lambda data: data[:-1]),
        ("speaker/codes", lambda codes: codes + 99),
        ("speaker/codes", lambda codes: codes - 1),
        ("speaker/codes", lambda codes: codes[1:]),
        ("peaks/values", lambda data: data[1:]),
        ("channel/null", lambda null: null[1:]),
        ("duration/values", lambda data: data[1:]),
        ("duration/values", lambda data: data.astype(np.int64)),
    ],
)
def test_columns_that_do_not_fit_are_damage(tmp_path: Path, column: str, change: Any) -> None:
    make_annotated(tmp_path, NUMBERS)
    opened = featcache.open(tmp_path).opened
    name = f"annotations/{column}"
    with ColumnFile(tmp_path, opened.manifest.index) as file:
        before = file.column(name, np.dtype(file.dtypes[name]).type)
    change_index(tmp_path, {name: change(before)})
    cache = featcache.open(tmp_path)
    with pytest.raises(CorruptCacheError, match="damaged"):
        cache.annotation(column.partition("/")[0])


def test_bytes_that_are_no_text_are_damage(tmp_path: Path) -> None:
    make_annotated(tmp_path, NUMBERS)
    manifest = featcache.open(tmp_path).opened.manifest
    with ColumnFile(tmp_path, manifest.index) as file:
        data = file.column("annotations/text/bytes", np.uint8)
    change_index(tmp_path, {"annotations/text/bytes": np.full_like(data, 255)})
    annotation = featcache.open(tmp_path).annotation("text")
    with pytest.raises(CorruptCacheError, match="damaged"):
        list(annotation)
