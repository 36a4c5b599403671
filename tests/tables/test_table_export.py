"""Tables as Arrow, Parquet and pandas hold them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig, FeatureTable
from featcache.errors import MissingDependencyError

VALUES = {
    "a": {"text": "hé", "speaker": "x", "snr": 1.5, "n": 2**60 + 1, "tags": [1, 2], "ok": True},
    "bb": {"speaker": "y", "all": 1, "none": [0.5]},
    "ccc": {"text": "", "speaker": "x", "snr": 2.0, "tags": [], "ok": False, "all": 3},
}
NAMES = ("text", "speaker", "snr", "n", "tags", "ok", "all", "none")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    path = tmp_path_factory.mktemp("cache")
    features = [FeatureStorageConfig("x"), FeatureStorageConfig("v", time_axis=None)]
    with CacheWriter(path, features) as writer:
        for id, annotations in VALUES.items():
            arrays = {"x": np.zeros((len(id), 2)), "v": np.zeros(3)}
            writer.write(id, arrays, annotations=annotations)
    return FeatureTable.of(path)


def rows(table: FeatureTable) -> list[dict[str, object]]:
    return [
        {"id": id, "x": len(id), **{name: VALUES[id].get(name) for name in table.annotations}}
        for id in table
    ]


def test_arrow_and_parquet_have_ids_frames_and_annotations(
    table: FeatureTable, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for view in (table, table.select([2, 0]), table.select([])):
        made = view.to_arrow()
        assert made.to_pylist() == rows(view)
        parquet.write_table(made, tmp_path / "table.parquet")
        found = parquet.read_table(tmp_path / "table.parquet")
        assert found.to_pylist() == rows(view)
        assert found.schema == made.schema


def test_a_parquet_file_annotates_a_cache_exactly(table: FeatureTable, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(table.to_arrow(), tmp_path / "table.parquet")
    with CacheWriter(tmp_path / "other", [FeatureStorageConfig("y")]) as writer:
        for id in VALUES:
            writer.write(id, {"y": np.zeros((1, 2))})
    cache = featcache.open(tmp_path / "other")
    cache.annotate(parquet.read_table(tmp_path / "table.parquet", columns=["id", *NAMES]))
    again = featcache.open(tmp_path / "other").table
    assert {*again.annotations} == {*NAMES}
    for name in NAMES:
        assert list(again.annotation(name)) == [VALUES[id].get(name) for id in again]
        assert again.annotation(name).kind == table.annotation(name).kind


def test_pandas_has_ids_frames_and_annotations(table: FeatureTable) -> None:
    pandas = pytest.importorskip("pandas")
    for view in (table, table.select([2, 0]), table.select([])):
        frame = view.to_pandas()
        assert list(frame.columns) == ["id", "x", *view.annotations]
        found = frame.astype(object).where(frame.notna(), None).to_dict("records")
        assert found == rows(view)
        assert frame["x"].dtype == np.int64
    assert isinstance(table.to_pandas()["n"].dtype, pandas.Int64Dtype)


@pytest.mark.parametrize(("library", "method"), [("pyarrow", "to_arrow"), ("pandas", "to_pandas")])
def test_a_library_that_is_missing_is_named(
    table: FeatureTable, library: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependencyError, match=f"{method} needs .*pip install {library}"):
        getattr(table, method)()
