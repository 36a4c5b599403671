"""Views, annotations and deletions of features that a Brain or `extract` has added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speechbrain as sb
from brain_helpers import HOP, Audio, EnergyAlone, Recipe, make_brain, make_dataset
from parallel_helpers import ONE_WORKER

import featcache
from featcache import FeatureStorage, FeatureStorageConfig, unpad
from featcache.format import read_manifest

OLD = [FeatureStorageConfig("ssl"), FeatureStorageConfig("units", dtype="int64")]
ENERGY = FeatureStorageConfig("energy")
ALL = [*OLD, ENERGY]
TRAIN = sb.Stage.TRAIN


class More(Recipe):
    """The recipe, whose code computes one more feature now."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        frames = batch.sig.data.unfold(1, HOP, HOP)
        features = {"ssl": self.modules.encoder(frames), "units": frames.sum(dim=2).long()}
        return unpad(batch.id, batch.frames, {**features, "energy": frames.square().sum(dim=2)})


def described(utterances: int = 10, audio: Any = None, word: str = "word") -> Any:
    dataset = make_dataset(utterances, audio)
    for number, entry in enumerate(dataset.data.values()):
        entry["text"] = f"{word} {number}"
    return dataset


def texts(dataset: Any) -> list[str]:
    return [dataset.data[id]["text"] for id in sorted(dataset.data_ids, key=str.encode)]


@pytest.fixture
def storage(tmp_path: Path) -> FeatureStorage:
    """Features of before are cached, without annotations."""
    make_brain(FeatureStorage(tmp_path, OLD)).cache_features(make_dataset(), TRAIN)
    return FeatureStorage(tmp_path, ALL)


def test_the_view_of_a_data_set_has_old_and_added_features(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    make_brain(storage, More).cache_features(make_dataset(), TRAIN)
    caplog.clear()
    view = make_brain(storage, More).cache_features(make_dataset(6), TRAIN)
    assert view.features == ("ssl", "units", "energy")
    assert (len(view), len(featcache.open(view.path))) == (6, 10)
    assert view.path == storage.path("train")
    told = [line for line in caplog.messages if "4 of them not in this data set" in line]
    assert len(told) == 1


def test_annotations_are_stored_once_with_the_first_features(storage: FeatureStorage) -> None:
    dataset = described()
    brain = make_brain(storage, More)
    view = brain.cache_features(dataset, TRAIN, annotations="text")
    assert [*view.annotation("text")] == texts(dataset)
    own, added = read_manifest(view.path), read_manifest(view.path / "sets/energy")
    assert (bool(own.annotations), bool(added.annotations)) == (True, False)
    again = described(word="other")
    view = brain.cache_features(again, TRAIN, annotations="text", check=None)
    assert [*view.annotation("text")] == texts(again)
    assert [*view.filter(text="other 3").annotation("text")] == ["other 3"]


def test_a_second_brain_reads_the_annotations_that_it_stores(storage: FeatureStorage) -> None:
    first, second = FeatureStorage(storage.root, OLD), FeatureStorage(storage.root, [ENERGY])
    dataset, newer = described(), described(word="newer")
    make_brain(first).cache_features(dataset, TRAIN, annotations="text")
    view = make_brain(second, EnergyAlone).cache_features(newer, TRAIN, annotations="text")
    assert [*view.annotation("text")] == texts(newer)
    assert view.path == storage.path("train")
    assert [*storage.cache("train").annotation("text")] == texts(dataset)  # of the first set
    storage.cache("train").annotate({id: {"text": "x"} for id in dataset.data_ids})
    assert {*storage.cache("train").annotation("text")} == {"x"}
    assert {*second.cache("train").annotation("text")} == {"x"}


def test_a_deleted_utterance_is_computed_again_with_all_features(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage, More), make_dataset()
    view = brain.cache_features(dataset, TRAIN)
    gone, before = dataset.data_ids[3], view.ids
    featcache.open(view.path).tag("v1")
    featcache.open(view.path).delete([gone])
    audio = Audio()
    view = brain.cache_features(make_dataset(10, audio), TRAIN, check=None)
    assert {*audio.loaded} == {gone}
    assert [*view.ids] == [*before]
    assert featcache.open(view.path).complete
    featcache.open(view.path).compact(drop_tags=True)
    assert len(featcache.open(view.path, verify="arrays")) == 10


class Tones(featcache.EnvironmentProvider):
    """Makes tones, and since later their energies."""

    def __init__(self, names: tuple[str, ...], count: int = 5) -> None:
        self.names, self.count, self.computed = names, count, list[tuple[str, ...]]()

    def build_env_local(self) -> dict[str, Any]:
        entries = [{"id": f"u{n}", "n": n, "text": f"tone {n}"} for n in range(self.count)]
        return {
            "dataset": entries,
            "ids": [entry["id"] for entry in entries],
            "compute_features": self.compute,
        }

    def compute(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = {"tone": 1, "loud": 2}
        return [
            {
                "id": item["id"],
                **{name: np.full((item["n"] + 1, 1), made[name], "f4") for name in self.names},
            }
            for item in items
        ]


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("parallel", [None, ONE_WORKER])
def test_extract_adds_features_and_returns_the_view_of_all(tmp_path: Path, parallel: Any) -> None:
    tone, loud = FeatureStorageConfig("tone"), FeatureStorageConfig("loud")
    path = tmp_path / "tones"
    featcache.extract(Tones(("tone",), 8), path, [tone], progressbar=False)
    files = {file: file.stat().st_mtime_ns for file in path.rglob("parts/*/*.npy")}
    both = featcache.extract(
        Tones(("tone", "loud"), 5),
        path,
        [tone, loud],
        accept=True,
        parallel=parallel,
        progressbar=False,
        annotations="text",
    )
    assert both.features == ("tone", "loud")
    assert [*both.annotation("text")] == [f"tone {number}" for number in range(5)]
    assert {each.stat().st_mtime_ns for each in path.glob("parts/*/*.npy")} == {*files.values()}
    assert not featcache.open(path / "sets/loud").annotations
    assert featcache.open(both.path).missing("loud") == ("u5", "u6", "u7")
    assert both.read("u4", "loud").shape == both.read("u4", "tone").shape
    alone = featcache.extract(Tones(("loud",), 5), path, [loud], accept=True, progressbar=False)
    assert alone.features == ("loud",)
