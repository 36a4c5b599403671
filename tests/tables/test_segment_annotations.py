"""Annotations of segments: their own, in place of those of their recordings."""

from __future__ import annotations

import mmap
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig, FeatureTable
from featcache.errors import KeyNotFoundError
from featcache.format import columns
from featcache.samplers import BucketBatchSampler

OWN: dict[str, dict[str, Any]] = {
    "s1": {"text": "one", "n": 3, "tags": [1, 2], "clean": True, "kind": "x"},
    "s2": {"text": "two", "n": 1, "tags": [], "kind": "x"},
    "s3": {"n": 2**60 + 1, "tags": [3], "clean": False, "kind": "y"},
    "s4": {"text": "größer 数", "n": None, "clean": True, "kind": "x"},
}
NAMES = ("speaker", "text", "n", "tags", "clean", "kind")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    path = tmp_path_factory.mktemp("cache")
    with CacheWriter(path, [FeatureStorageConfig("fbank", frame_s=0.01)]) as writer:
        for id in ("rec-1", "rec-2"):
            told = {"text": f"all of {id}", "speaker": f"speaker of {id}"}
            writer.write(id, {"fbank": np.arange(400.0)}, annotations=told)
    return FeatureTable.of(path)


@pytest.fixture(scope="module")
def view(table: FeatureTable) -> FeatureTable:
    segments = {
        id: (f"rec-{2 - n % 2}", 0.5 * n, 0.5 * n + 0.1 * (n + 1), own)
        for n, (id, own) in enumerate(OWN.items())
    }
    return table.segments(segments)


def expected(id: str) -> dict[str, Any]:
    number = 2 - [*OWN].index(id) % 2
    return {name: OWN[id].get(name) for name in NAMES} | {"speaker": f"speaker of rec-{number}"}


def found(view: FeatureTable) -> dict[str, dict[str, Any]]:
    columns = {name: list(view.annotation(name)) for name in view.annotations}
    return {id: {name: columns[name][row] for name in NAMES} for row, id in enumerate(view.ids)}


def test_a_segment_has_its_own_annotations_and_else_those_of_its_recording(
    view: FeatureTable,
) -> None:
    assert sorted(view.annotations) == sorted(NAMES)
    assert found(view) == {id: expected(id) for id in OWN}
    assert list(view.annotation("text")) == ["one", "two", None, "größer 数"]
    with pytest.raises(KeyNotFoundError, match="'txt'"):
        view.annotation("txt")


def test_views_of_segments_choose_by_their_annotations(view: FeatureTable) -> None:
    assert list(view.filter(text={"one", None})) == ["s1", "s3"]
    assert list(view.filter(n=(2, None), speaker="speaker of rec-2")) == ["s1", "s3"]
    assert list(view.filter(where=lambda row: row["tags"] == [])) == ["s2"]
    assert list(view.sort("n")) == ["s2", "s1", "s3", "s4"]
    assert list(view.sort("text", descending=True)) == ["s2", "s1", "s4", "s3"]
    parts = view.split({"a": 0.75, "b": 0.25}, by="kind")
    assert {name: sorted(part) for name, part in parts.items()} == {
        "a": ["s1", "s2", "s4"],
        "b": ["s3"],
    }


def test_views_of_segments_keep_their_annotations_and_pickle_them(view: FeatureTable) -> None:
    some = view.select(["s4", "s1", "s3"]).select([2, 0])
    for each in (some, view.select([])):
        again = pickle.loads(pickle.dumps(each))  # noqa: S301
        assert found(again) == found(each) == {id: expected(id) for id in each}
        assert again.digest == each.digest


def test_other_annotations_make_another_view(table: FeatureTable) -> None:
    tables = [
        table.segments({"x": ("rec-1", 0.0, 1.0, own)})
        for own in ({}, {"text": "a"}, {"text": "b"}, {"txt": "a"}, {"text": ["a"][:0]}, {"n": 1})
    ]
    assert len({each.digest for each in tables}) == len(tables)


def test_a_file_has_them_as_further_columns(table: FeatureTable, tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text(
        "id,recording,start_s,stop_s,text,speaker\nx,rec-1,0,1,hello,7\ny,rec-2,1,2,,8\n"
    )
    view = table.segments(tmp_path / "s.csv")
    assert list(view.annotation("text")) == ["hello", None]
    assert list(view.annotation("speaker")) == ["7", "8"]  # text, as the recordings have it
    windows = table.segments(featcache.Windows(2.0))
    assert list(windows.annotation("text")) == ["all of rec-1"] * 2 + ["all of rec-2"] * 2


def test_arrow_has_them(view: FeatureTable) -> None:
    pytest.importorskip("pyarrow")
    rows = view.to_arrow().to_pylist()
    assert [{name: row[name] for name in NAMES} for row in rows] == [expected(id) for id in OWN]


@pytest.mark.parametrize("workers", [None, "fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_batches_have_them(view: FeatureTable, workers: str | None) -> None:
    dataset = FeatureDataset(view, annotations=["text", "n", "speaker"])
    sampler = BucketBatchSampler(dataset, batch_size=2)
    batches: Any = FeatureLoader(dataset, batch_sampler=sampler)
    if workers:
        batches = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=1,
            collate_fn=dataset.collate,
            multiprocessing_context=multiprocessing.get_context(workers),
        )
    seen = {}
    for batch in batches:
        for place, id in enumerate(batch["id"]):
            seen[id] = {name: batch[name][place] for name in ("text", "n", "speaker")}
    assert seen == {id: {name: expected(id)[name] for name in seen[id]} for id in OWN}


def seen_in_a_worker(view: FeatureTable, answers: Any) -> None:
    assert view.selection.cuts is not None
    shared = [each for own in view.selection.cuts.own.values() for each in own.arrays().values()]
    answers.put((found(view), all(map(is_mapped, shared))))


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array.obj if isinstance(array, memoryview) else array, mmap.mmap)


def test_a_process_that_is_no_fork_maps_their_columns(
    view: FeatureTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PICKLED_BYTES", 0)
    processes = multiprocessing.get_context("forkserver")
    answers = processes.SimpleQueue()
    process = processes.Process(target=seen_in_a_worker, args=(view, answers))
    process.start()
    assert answers.get() == ({id: expected(id) for id in OWN}, True)
    process.join()
    process.close()
    answers.close()
