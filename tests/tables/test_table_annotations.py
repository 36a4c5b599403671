"""Annotations of tables: over caches side by side and one after another, and of views."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from annotation_helpers import annotations_of, make_annotated, open_writer
from store_helpers import arrays_of, id_of, make_cache

import featcache
from featcache import FeatureStorageConfig, FeatureTable
from featcache.errors import ConfigError, KeyNotFoundError


def values(table: FeatureTable, name: str) -> list[object]:
    numbers = [int(id.rpartition("-")[2]) for id in table.ids]
    return [annotations_of(number)[name] for number in numbers]


@pytest.mark.parametrize("name", annotations_of(0))
def test_a_view_has_the_values_of_its_rows(tmp_path: Path, name: str) -> None:
    caches = [
        make_annotated(tmp_path / "a", range(9)),
        make_annotated(tmp_path / "b", range(9, 30)),
    ]
    both = featcache.concat(*caches)
    view = both.select(np.random.default_rng(7).permutation(30)[:17].tolist())
    deeper = view.select([16, 2, 9])
    for table in (FeatureTable.of(caches[0]), both, view, deeper, both.select([])):
        annotation = table.annotation(name)
        assert list(annotation) == values(table, name)
        assert annotation.take(np.arange(len(table))[::-1]) == values(table, name)[::-1]
        assert annotation.missing.tolist() == [each is None for each in values(table, name)]
    found = pickle.loads(pickle.dumps(view))  # noqa: S301
    assert list(found.annotation(name)) == values(view, name)


def test_rows_of_caches_without_an_annotation_have_none(tmp_path: Path) -> None:
    first, second = make_cache(tmp_path / "a", [0, 1]), make_annotated(tmp_path / "b", [2, 3])
    table = featcache.concat(first, second)
    assert list(table.annotations) == list(featcache.open(second).annotations)
    annotation = table.annotation("speaker")
    assert list(annotation) == [None, None, "spk2", "spk3"]
    assert annotation.has_missing
    assert annotation.is_in({"spk3"}).tolist() == [False, False, False, True]
    assert annotation.is_in({None}).tolist() == [True, True, False, False]
    assert annotation.codes()[0].tolist() == [-1, -1, 0, 1]


def test_caches_side_by_side_add_their_annotations(tmp_path: Path) -> None:
    make_annotated(tmp_path / "a", range(9))
    with featcache.CacheWriter(tmp_path / "b", [FeatureStorageConfig("other")]) as writer:
        for number in range(9):
            told = {"speaker": "other", "more": number}
            writer.write(id_of(number), {"other": np.zeros((2, 3), "f4")}, annotations=told)
    table = featcache.join(tmp_path / "a", tmp_path / "b")
    assert {*table.annotations} == {*annotations_of(0), "more"}
    assert list(table.annotation("speaker")) == values(table, "speaker")
    assert sorted(table.annotation("more").to_numpy().tolist()) == [*range(9)]


def test_kinds_of_several_caches_must_fit(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 0.5), ("c", "text")):
        with open_writer(tmp_path / name) as writer:
            writer.write(name, arrays_of(1), annotations={"snr": value})
    table = featcache.concat(tmp_path / "a", tmp_path / "b")
    assert table.annotation("snr").kind == "float"
    assert [repr(value) for value in table.annotation("snr")] == ["1.0", "0.5"]
    assert repr(table.select(["a"]).annotation("snr")[0]) == "1.0"
    table = featcache.concat(tmp_path / "a", tmp_path / "c")
    with pytest.raises(ConfigError, match=r"annotation 'snr' is .*int.* str|str.* int"):
        table.annotation("snr")


def test_an_unknown_annotation_is_refused(tmp_path: Path) -> None:
    table = FeatureTable.of(make_annotated(tmp_path, range(3)))
    with pytest.raises(KeyNotFoundError, match=r"no annotation 'speakers'.*'speaker'"):
        table.annotation("speakers")
