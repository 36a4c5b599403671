"""Statistics of views: exact, whatever was read for them."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import make_cache, oracle

import featcache
from featcache import CacheWriter, FeatureStats, FeatureStorageConfig, FeatureTable
from featcache.errors import KeyNotFoundError
from featcache.format import Strings
from featcache.reading import FeatureArrays
from featcache.tables import Cuts, RowMap, Selection, selection


def write(path: Path, arrays: dict[str, Any], **settings: Any) -> FeatureTable:
    with CacheWriter(path, [FeatureStorageConfig("x", stats=True, **settings)]) as writer:
        for id, array in arrays.items():
            writer.write(id, {"x": array})
    return FeatureTable.of(path)


def close(found: FeatureStats, frames: np.ndarray) -> None:
    expected = FeatureStats.of(frames)
    assert found.count == expected.count
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.m2, expected.m2, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = random.integers(0, 30, 25).tolist()
    return {
        f"u{n:02}": (random.standard_normal((shape, 3)) * [1, 5, 0] + [0, 100, 7]).astype("float32")
        for n, shape in enumerate(shapes)
    }


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray]) -> FeatureTable:
    return write(tmp_path_factory.mktemp("cache"), arrays)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(st.integers(0, 24), unique=True))
def test_statistics_of_a_view_are_those_of_its_frames(
    table: FeatureTable, arrays: dict[str, np.ndarray], rows: list[int]
) -> None:
    view = table.select(rows)
    frames = [arrays[id] for id in view]
    close(view.stats("x"), np.concatenate([np.zeros((0, 3)), *frames]))
    assert view.stats("x") is view.stats("x")


def frames_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of frames of all arrays that are read from now on."""
    read, whole = list[int](), FeatureArrays.read_many

    def noted(self: FeatureArrays, rows: Any, starts: Any, lengths: Any, outs: Any) -> None:
        read.extend(lengths.tolist())
        whole(self, rows, starts, lengths, outs)

    monkeypatch.setattr(FeatureArrays, "read_many", noted)
    return read


def test_the_smaller_of_a_view_and_the_rest_is_read_once(
    table: FeatureTable, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = frames_read(monkeypatch)
    few, ids = list(arrays)[:4], list(arrays)
    monkeypatch.setattr(selection, "AT_ONCE_BYTES", 500)
    for view in (table.select(few), table.select(ids[4:]), table, table.select(ids[::-1])):
        read.clear()
        view.stats("x")
        expected = [len(arrays[id]) for id in few] if len(view) < 25 else []
        assert sorted(read) == sorted(expected)
        view.stats("x")
        assert sorted(read) == sorted(expected)


def test_nothing_is_taken_away_where_digits_would_be_lost(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    quiet = {f"q{n}": random.standard_normal((20, 2)).astype("float32") for n in range(9)}
    loud = {"zz": random.standard_normal((20, 2)).astype("float32") * 1e6}
    table = write(tmp_path / "loud", quiet | loud)
    close(table.select(list(quiet)).stats("x"), np.concatenate(list(quiet.values())))
    far = {id: array * 1e-4 + 1000 for id, array in quiet.items()}
    table = write(tmp_path / "far", far)
    close(table.select(list(far)[1:]).stats("x"), np.concatenate(list(far.values())[1:]))


def test_statistics_that_cannot_be_taken_apart_are_not() -> None:
    whole = FeatureStats.of(np.random.default_rng(0).standard_normal((50, 2)))
    assert whole.without(FeatureStats.empty((2,))) is whole
    assert whole.without(whole) is None
    assert whole.without(FeatureStats(40, whole.mean, whole.m2 * 0.9999)) is None


def test_of_several_caches_and_of_segments(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    ids = list(arrays)
    parts = [
        write(tmp_path / name, {id: arrays[id] for id in some})
        for name, some in (("a", ids[:10]), ("b", ids[10:]))
    ]
    both = featcache.concat(*parts)
    close(both.stats("x"), np.concatenate(list(arrays.values())))
    some = [*ids[3:7], *ids[12:]]
    close(both.select(some[::-1]).stats("x"), np.concatenate([arrays[id] for id in some]))
    long = [id for id in ids if len(arrays[id]) > 9][:3]
    cuts = Cuts.of(
        Strings.of(["s", "t", "u"]), {"x": (np.array([2, 0, 5]), np.array([3, 0, 4]))}, {}
    )
    segments = FeatureTable(Selection(both.selection.blocks, RowMap(both.rows(long)), cuts))
    frames = [arrays[id][s : s + n] for id, s, n in zip(long, (2, 0, 5), (3, 0, 4), strict=True)]
    close(segments.stats("x"), np.concatenate(frames))


def test_of_a_lossy_codec_what_is_read_counts(tmp_path: Path) -> None:
    arrays = {f"u{n}": np.random.default_rng(n).standard_normal((50, 4)) for n in range(9)}
    table = write(tmp_path, arrays, backend="lilcom")
    read = [table.read(id, "x") for id in list(table)[1:]]
    close(table.select(list(table)[1:]).stats("x"), np.concatenate(read))


@pytest.mark.parametrize("time_axis", [0, None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int16"])
def test_of_all_dtypes_with_and_without_a_time_axis(
    tmp_path: Path, dtype: str, time_axis: int | None
) -> None:
    arrays = {f"u{n}": np.arange(8).reshape(4, 2) + n for n in range(9)}
    table = write(tmp_path, arrays, dtype=dtype, time_axis=time_axis)
    some = list(arrays)[2:5]
    stacked = np.stack([arrays[id] for id in some])
    expected = stacked if time_axis is None else stacked.reshape(-1, 2)
    close(table.select(some).stats("x"), expected)


def test_statistics_that_were_not_collected_are_not_there(tmp_path: Path) -> None:
    table = FeatureTable.of(make_cache(tmp_path, range(5)))
    assert table.stats("fbank").count == sum(
        len(each["fbank"]) for each in oracle(range(5)).values()
    )
    for view in (table, table.select([1]), table.select([])):
        with pytest.raises(KeyNotFoundError, match="has no statistics of feature 'units'"):
            view.stats("units")


def test_reading_for_long_is_told(
    table: FeatureTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "featcache"):
        table.select([1, 2]).stats("x")
        assert not caplog.records
        monkeypatch.setattr(selection, "LONG_S", -1.0)
        table.select([1, 2]).stats("x")
    assert "statistics of feature 'x' over 2 utterances" in caplog.text


def test_a_view_normalises_as_a_cache_does(
    table: FeatureTable, arrays: dict[str, np.ndarray]
) -> None:
    view = table.select(list(arrays)[1:9])
    mvn = featcache.GlobalMVN.from_cache(view, "x")
    frames = np.concatenate([arrays[id] for id in view])
    np.testing.assert_allclose(mvn.mean.numpy(), frames.astype(float).mean(0), rtol=1e-6)


def test_a_view_of_an_unfinished_cache_says_which(tmp_path: Path) -> None:
    with (
        contextlib.suppress(ZeroDivisionError),
        CacheWriter(tmp_path, [FeatureStorageConfig("x")]) as writer,
    ):
        writer.write("a", {"x": np.zeros((3, 2))})
        writer.commit()
        raise ZeroDivisionError
    view = FeatureTable.of(tmp_path).select([])
    assert not view.complete
    with pytest.raises(featcache.errors.IncompleteError, match=f"cache '{tmp_path}' is incomplete"):
        featcache.GlobalMVN.from_cache(view, "x")


@pytest.mark.parametrize("beside", [False, True])
def test_a_cache_without_rows_has_statistics_of_none(tmp_path: Path, beside: bool) -> None:
    write(tmp_path, {"a": np.ones((2, 3), "float32"), "b": np.ones((4, 3), "float32")})
    if beside:  # a feature set that has no utterance in common with the first one any more
        with CacheWriter(tmp_path, [FeatureStorageConfig("y")]) as writer:
            writer.write("a", {"y": np.ones(5)})
    featcache.open(tmp_path).delete(["a"] if beside else ["a", "b"])
    table = FeatureTable.of(tmp_path)
    assert len(table) == 0
    assert table.dims("x") == (3,)
    assert table.stats("x").count == 0
    assert table.stats("x").mean.shape == (3,)
    assert table.read_batch([], "x").data.shape == (0, 0, 3)
