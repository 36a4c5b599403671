"""Tables and views of caches of feature sets, also where the sets have other utterances."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import featcache
from featcache import (
    CacheWriter,
    FeatureDataset,
    FeatureLoader,
    FeatureStats,
    FeatureStorageConfig,
    FeatureTable,
    Windows,
)
from featcache.errors import ConfigError, KeyNotFoundError, StaleCacheError

FBANK = FeatureStorageConfig("fbank", frame_s=0.01)
SSL = FeatureStorageConfig("ssl", frame_s=0.02)
MADE = {"layer": 1}
LEFT = ["u2", "u4", "u5", "u6"]


def frames(number: int, feature: FeatureStorageConfig) -> NDArray[np.float32]:
    """Frames of an utterance: 200 or more of 10 ms, half as many of 20 ms; numbers of its own."""
    count = 200 + 20 * number
    values = np.arange(count, dtype=np.float32)[:, None] % 17 + 100 * number
    return values if feature is FBANK else values[::2] + 1000


def write(path: Path, feature: FeatureStorageConfig, numbers: Iterable[int], **made: Any) -> None:
    with CacheWriter(path, [feature], made or MADE) as writer:
        for number in numbers:
            writer.write(f"u{number}", {feature.name: frames(number, feature)})


@pytest.fixture
def cache(tmp_path: Path) -> featcache.Cache:
    """fbank of 0 to 7, ssl of 2 to 9: rows are 2 to 7."""
    path = tmp_path / "train"
    write(path, FBANK, range(8))
    write(path, SSL, range(2, 10))
    return featcache.open(path)


def assert_rows(table: FeatureTable, numbers: Iterable[int]) -> None:
    listed = list(numbers)
    assert list(table) == [f"u{number}" for number in listed]
    for feature in (FBANK, SSL):
        arrays = [frames(number, feature) for number in listed]
        assert table.lengths(feature.name).tolist() == [*map(len, arrays)]
        for id, array in zip(table, arrays, strict=True):
            np.testing.assert_array_equal(table.read(id, feature.name), array)


def test_views_hold_the_rows_that_all_sets_have(cache: featcache.Cache) -> None:
    table = cache.table
    assert_rows(table, range(2, 8))
    view = table.select(["u6", "u3", "u5"])
    assert view.path == cache.path
    assert_rows(view, [6, 3, 5])
    assert_rows(pickle.loads(pickle.dumps(view)), [6, 3, 5])  # noqa: S301
    assert_rows(table.filter(ssl=(140, 150)).sort("ssl", descending=True), [5, 4])


@pytest.mark.parametrize("numbers", [range(2, 8), [2], [7, 3, 4, 5, 6], [5, 3]])
@pytest.mark.parametrize("feature", [FBANK, SSL])
def test_statistics_of_a_view_are_those_of_its_rows(
    cache: featcache.Cache, numbers: Iterable[int], feature: FeatureStorageConfig
) -> None:
    table = cache.table.select([f"u{number}" for number in numbers])
    exact = FeatureStats.of(np.concatenate([frames(number, feature) for number in numbers]))
    found = table.stats(feature.name)
    assert found.count == exact.count
    np.testing.assert_allclose(found.mean, exact.mean, rtol=1e-12)
    np.testing.assert_allclose(found.m2, exact.m2, rtol=1e-9)


def test_statistics_of_a_whole_table_are_those_of_its_rows(cache: featcache.Cache) -> None:
    rows = sum(len(frames(number, FBANK)) for number in range(2, 8))
    assert cache.stats("fbank").count == cache.table.stats("fbank").count == rows


def test_windows_cut_features_of_all_sets_at_the_same_time(cache: featcache.Cache) -> None:
    table = cache.table.segments(Windows(1.0, hop_s=0.5))
    row = list(table).index(next(id for id in table if id.startswith("u4")))
    id = table.id(row + 1)
    np.testing.assert_array_equal(table.read(id, "fbank"), frames(4, FBANK)[50:150])
    np.testing.assert_array_equal(table.read(id, "ssl"), frames(4, SSL)[25:75])


def test_segments_are_cut_by_name_where_sets_end_apart(tmp_path: Path) -> None:
    write(tmp_path, FBANK, [1])
    with CacheWriter(tmp_path, [SSL], MADE) as writer:
        writer.write("u1", {"ssl": frames(1, SSL)[:-1]})
    table = featcache.open(tmp_path).table
    view = table.segments({"end": ("u1", 1.0, 2.2)})
    assert (len(view.read("end", "fbank")), len(view.read("end", "ssl"))) == (118, 59)


def test_utterances_whose_sets_end_apart_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, FBANK, [1, 2])
    with CacheWriter(tmp_path, [SSL], MADE) as writer:
        writer.write("u1", {"ssl": frames(1, SSL)[:-5]})
        writer.write("u2", {"ssl": frames(2, SSL)})
    featcache.open(tmp_path, verify="columns")
    assert "features of 1 of 2 utterances end more than 2 frames" in caplog.text


def test_items_and_batches_of_views_have_features_and_annotations_of_all_sets(
    cache: featcache.Cache,
) -> None:
    cache.annotate({f"u{number}": {"text": f"text {number}"} for number in range(8)})
    cache.refresh()
    view = cache.table.select(["u7", "u2", "u4"])
    dataset = FeatureDataset(view, annotations=["text"], allow_incomplete=True)
    assert dataset["u4"]["text"] == "text 4"
    np.testing.assert_array_equal(dataset["u4"]["ssl"], frames(4, SSL))
    (batch,) = FeatureLoader(dataset, batch_sampler=[["u4", "u7"]])
    assert batch["text"] == ["text 4", "text 7"]
    np.testing.assert_array_equal(batch["fbank"][1], frames(7, FBANK))


def test_a_stale_feature_says_why_it_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, FBANK, range(3))
    write(tmp_path, SSL, range(3), layer=2)
    table = featcache.open(tmp_path, expect=MADE).table
    assert table.features == ("fbank",)
    for ask in (table.lengths, table.stats, table.sort, lambda name: table.read("u1", name)):
        with pytest.raises(StaleCacheError, match="layer"):
            ask("ssl")
    with pytest.raises(StaleCacheError, match="layer"):
        FeatureDataset(table, "ssl")
    with pytest.raises(KeyNotFoundError, match="no feature 'pitch'"):
        table.lengths("pitch")


def test_a_cache_of_sets_is_joined_with_another_one(cache: featcache.Cache, tmp_path: Path) -> None:
    other = tmp_path / "energy"
    with CacheWriter(other, [FeatureStorageConfig("energy")], MADE) as writer:
        for number in range(2, 8):
            writer.write(f"u{number}", {"energy": np.full((1, 1), number, np.float32)})
    both = featcache.join(cache, other)
    assert both.features == ("fbank", "ssl", "energy")
    assert both.read("u5", "energy").item() == 5
    np.testing.assert_array_equal(both.read("u5", "ssl"), frames(5, SSL))
    cache.annotate({f"u{number}": {"number": number} for number in range(8)})
    cache.refresh()
    shuffled = featcache.join(featcache.open(other).table.select(["u7", "u3", *LEFT]), cache)
    assert list(shuffled)[:2] == ["u7", "u3"]
    assert shuffled.annotation("number")[:3] == [7, 3, 2]
    with pytest.raises(ConfigError, match="several caches"):
        _ = both.path
