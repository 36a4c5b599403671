"""Stamps that workers and ranks make, and those of data sets of other kinds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from recordings import Recordings, assert_holds, frames_of, recorder
from torchrun import run_ranks

import featcache
from featcache import EnvironmentProvider, FeatureStorageConfig
from featcache.errors import StaleCacheError

pytestmark = pytest.mark.usefixtures("quick_workers")

WORKERS = {"env": "local", "n_workers": 2}
X = [FeatureStorageConfig("x")]


def of_samples(item: dict[str, Any], name: str = "samples") -> dict[str, Any]:
    import torch

    return {"id": item["id"], "x": frames_of(torch.from_numpy(item[name])).numpy()}


def compute_samples(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [of_samples(item) for item in items]


def compute_paths(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    read = [
        {"id": item["id"], "samples": soundfile.read(item["audio"], dtype="float32")[0]}
        for item in items
    ]
    return [of_samples(item) for item in read]


class Provider(EnvironmentProvider):
    """Gives a list of paths, or what loads them."""

    def __init__(self, recordings: Recordings, *, loads: bool) -> None:
        self.items = [
            {"id": id, "audio": listed["wav"]} for id, listed in recordings.listed.items()
        ]
        self.loads = loads

    def build_env_local(self) -> dict[str, object]:
        if self.loads:
            return {
                "dataset": featcache.utterances(self.items),
                "compute_features": compute_samples,
            }
        ids = [item["id"] for item in self.items]
        return {"dataset": self.items, "ids": ids, "compute_features": compute_paths}


def extract(recordings: Recordings, folder: Path, *, loads: bool, **settings: Any) -> Any:
    provider = Provider(recordings, loads=loads)
    return featcache.open(
        featcache.extract(provider, folder / "cache", X, progressbar=False, **settings).path
    )


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("parallel", [None, WORKERS])
def test_a_changed_recording_is_named_and_recomputed_by_workers(
    tmp_path: Path, parallel: Any, loads: bool
) -> None:
    recordings = Recordings(tmp_path / "recordings")
    extract(recordings, tmp_path, loads=loads, parallel=parallel, batch_size=2)
    recordings.record("utt-3", seed=33)
    os.utime(recordings.listed["utt-4"]["wav"], ns=(1, 1))
    with pytest.raises(StaleCacheError, match=r"1 utterance .*'utt-3'"):
        extract(recordings, tmp_path, loads=loads, parallel=parallel)
    before = featcache.open(tmp_path / "cache").opened.manifest.parts
    cache = extract(
        recordings, tmp_path, loads=loads, parallel=parallel, on_changed="recompute", batch_size=2
    )
    assert_holds(cache, recordings.truth())
    assert cache.complete
    added = [part for part in cache.opened.manifest.parts if part.name not in str(before)]
    assert [part.rows for part in added] == [1]
    assert_holds(extract(recordings, tmp_path, loads=loads), recordings.truth())


def test_stamps_are_the_same_whoever_makes_them(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path / "recordings")
    found = []
    for name, parallel in (("one", None), ("two", WORKERS)):
        cache = extract(recordings, tmp_path / name, loads=True, parallel=parallel)
        stamps = cache.opened.index.stamps
        assert stamps is not None
        assert all(column.all() for column in stamps)
        found.append({id: stamps.input[cache.opened.row(id)] for id in cache})
    assert found[0] == found[1]


def test_a_brain_on_workers_names_what_has_changed(tmp_path: Path) -> None:
    recordings, brain = Recordings(tmp_path / "recordings"), recorder(tmp_path / "features")
    brain.cache_features(recordings.dataset(), parallel=WORKERS)
    recordings.record("utt-3", seed=33)
    with pytest.raises(StaleCacheError, match="'utt-3'"):
        brain.cache_features(recordings.dataset())
    cache = brain.cache_features(recordings.dataset(), parallel=WORKERS, on_changed="recompute")
    assert_holds(cache, recordings.truth())


RANKS = """
import os, sys
from pathlib import Path
from recordings import Recordings, recorder
from speechbrain.utils.distributed import ddp_init_group
from featcache.errors import FeatcacheError

ddp_init_group({"distributed_backend": "gloo"})
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
recordings = Recordings.__new__(Recordings)
recordings.folder, recordings.loads = folder / "recordings", folder / f"loads-{rank}"
recordings.listed = {f"utt-{n}": {"wav": str(folder / f"recordings/utt-{n}.wav")} for n in range(6)}
brain = recorder(folder / "features")
try:
    brain.cache_features(recordings.dataset(), on_changed=sys.argv[2], check=None)
except FeatcacheError as error:
    (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
(folder / f"computed-{rank}").write_text(" ".join(brain.computed_now()))
"""


def test_ranks_stamp_and_compute_again_what_has_changed(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path / "recordings")

    def run(on_changed: str) -> list[str]:
        paths = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
        run_ranks(RANKS, tmp_path, tmp_path, on_changed, environment={"PYTHONPATH": paths})
        return sorted(" ".join(path.read_text() for path in tmp_path.glob("computed-*")).split())

    assert len(run("raise")) == 6
    recordings.record("utt-3", seed=33)
    assert run("raise") == []
    errors = sorted(path.read_text() for path in tmp_path.glob("error-*"))
    assert [error.split(":")[0] for error in errors] == ["IncompleteError", "StaleCacheError"]
    assert "'utt-3'" in errors[1]
    assert run("recompute") == ["utt-3"]
    cache = featcache.open(tmp_path / "features" / "train")
    assert_holds(cache, recordings.truth())


# Data sets of other kinds


class Items:
    """A data set that tells of entries of its own, and counts what is loaded."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.loaded = texts, 0
        self.ids = [str(number) for number in range(len(texts))]
        self.entries = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.loaded += 1
        return {"id": self.ids[index], "codes": np.frombuffer(self.texts[index].encode(), np.uint8)}


class ItemsProvider(EnvironmentProvider):
    def __init__(self, dataset: Any, **env: Any) -> None:
        self.dataset, self.env = dataset, env

    def build_env_local(self) -> dict[str, object]:
        return {"dataset": self.dataset, "compute_features": lengths_of, **self.env}


def lengths_of(items: Any) -> list[dict[str, Any]]:
    return [{"id": item["id"], "x": np.zeros((2, 1), np.float32)} for item in items]


def run(dataset: Any, folder: Path, **env: Any) -> Any:
    provider = ItemsProvider(dataset, **env)
    settings: Any = {"batch_size": 3, "check": None, "progressbar": False}
    return featcache.open(featcache.extract(provider, folder / "x", X, **settings).path)


def test_a_data_set_may_tell_its_entries(tmp_path: Path) -> None:
    run(Items(["one", "two"]), tmp_path)
    again = Items(["one", "two"])
    run(again, tmp_path)
    assert not again.loaded
    with pytest.raises(StaleCacheError, match="'1'"):
        run(Items(["one", "2"]), tmp_path)


def test_stamps_go_by_utterance_whatever_order_items_are_collated_in(tmp_path: Path) -> None:
    items = [{"id": str(number), "x": [number]} for number in range(3)]
    run(items, tmp_path, ids=["0", "1", "2"], collate_fn=backwards)
    cache = run(items, tmp_path, ids=["0", "1", "2"], collate_fn=backwards)
    stamps = cache.opened.index.stamps
    assert stamps is not None
    assert len(set(stamps.input.tolist())) == 3
    items[1]["x"] = [5]
    with pytest.raises(StaleCacheError, match="'1'"):
        run(items, tmp_path, ids=["0", "1", "2"], collate_fn=backwards)


def backwards(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "x": None} for item in reversed(items)]


def test_rows_of_a_data_set_of_huggingface_are_compared(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    recordings = Recordings(tmp_path / "recordings", 3)

    def rows() -> Any:
        paths = [listed["wav"] for listed in recordings.listed.values()]
        table = datasets.Dataset.from_dict({"id": list(recordings.listed), "audio": paths})
        return featcache.utterances(table.cast_column("audio", datasets.Audio(16000)))

    run(rows(), tmp_path)
    os.utime(recordings.listed["utt-0"]["wav"], ns=(1, 1))
    run(rows(), tmp_path)
    recordings.record("utt-2", seed=22)
    with pytest.raises(StaleCacheError, match=r"1 utterance .*'utt-2'"):
        run(rows(), tmp_path)


def test_cuts_of_lhotse_are_compared(tmp_path: Path) -> None:
    lhotse = pytest.importorskip("lhotse")
    recordings = Recordings(tmp_path / "recordings", 3)

    def cuts() -> Any:
        found = [
            lhotse.Recording.from_file(listed["wav"], id).to_cut()
            for id, listed in recordings.listed.items()
        ]
        return featcache.utterances(lhotse.CutSet.from_cuts(found))

    run(cuts(), tmp_path)
    recordings.record("utt-2", seed=22)
    with pytest.raises(StaleCacheError, match=r"1 utterance .*'utt-2'"):
        run(cuts(), tmp_path)


def test_what_nothing_describes_is_told_of_only_when_it_may_have_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Strange(Items):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"id": self.ids[index], "decoder": object()}

    run(Strange(["one", "two"]), tmp_path)
    run(Strange(["one", "two"]), tmp_path)
    assert not caplog.records
    # their entries stand in
    with pytest.raises(StaleCacheError, match="'1'"):
        run(Strange(["one", "2"]), tmp_path)
