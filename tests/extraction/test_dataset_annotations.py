"""`annotations=` of `cache_features` and `extract`: values that the data set tells anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brain_helpers import Audio, make_brain, make_dataset
from parallel_helpers import ONE_WORKER
from torch.utils.data import DataLoader, Subset

import featcache
from featcache import FeatureStorage, FeatureStorageConfig
from featcache.errors import ComputeError, ConfigError, FeatureError

X = [FeatureStorageConfig("x")]


def described(utterances: int = 10, audio: Any = None) -> Any:
    """A recipe's data set: text and speaker of its entries, and dynamic items of these."""
    dataset = make_dataset(utterances, audio)
    for number, entry in enumerate(dataset.data.values()):
        entry |= {"text": "word " * (number % 3), "duration": number / 4}
    dataset.data["spk/utt-1"]["speaker"] = "anna"  # the others have none
    dataset.pipeline.add_static_keys(["text", "duration"])
    dataset.add_dynamic_item(str.split, takes="text", provides="words")
    dataset.add_dynamic_item(len, takes="words", provides="number")
    dataset.add_dynamic_item(encoded, takes="number", provides="tokens")
    return dataset


def encoded(number: int) -> torch.Tensor:
    return torch.arange(number)


NAMES = ["text", "speaker", "duration", "number", "tokens"]


def told(dataset: Any, id: str) -> list[Any]:
    entry = dataset.data[id]
    number = len(entry["text"].split())
    return [
        entry["text"],
        entry.get("speaker"),
        entry["duration"],
        number,
        list(range(number)),
    ]


def assert_tells(view: featcache.FeatureTable, dataset: Any) -> None:
    columns = [view.annotation(name) for name in NAMES]
    for row, id in enumerate(view.ids):
        assert [column[row] for column in columns] == told(dataset, id)


def test_what_the_data_set_tells_is_stored_and_no_audio_loaded_for_it(
    storage: FeatureStorage,
) -> None:
    audio = Audio()
    dataset, brain = described(10, audio), make_brain(storage)
    view = brain.cache_features(dataset, annotations=NAMES, check=None)
    assert_tells(view, dataset)
    assert sorted(audio.loaded) == sorted(dataset.data_ids)  # once, for its features
    assert [view.annotation(name).kind for name in NAMES] == ["str", "str", "float", "int", "ints"]
    assert (
        featcache.open(view.path, verify="arrays").annotations
        == featcache.open(view.path).annotations
    )


def test_utterances_that_are_in_the_cache_already_get_them_too(storage: FeatureStorage) -> None:
    brain, audio = make_brain(storage), Audio()
    brain.cache_features(described(6), check=None)
    dataset = described(10, audio)
    view = brain.cache_features(dataset, annotations=NAMES, check=None)
    assert_tells(view, dataset)
    assert sorted(audio.loaded) == [f"spk/utt-{number}" for number in range(6, 10)]


def test_nothing_is_written_where_all_is_stored(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    first = brain.cache_features(described(), annotations=NAMES, check=None)
    generation = featcache.open(first.path).generation
    again = brain.cache_features(described(), annotations=NAMES, check=None)
    assert featcache.open(again.path).generation == generation


def test_a_value_that_the_data_set_has_changed_is_stored_anew(storage: FeatureStorage) -> None:
    brain, audio = make_brain(storage), Audio()
    brain.cache_features(described(), annotations=NAMES, check=None)
    dataset = described(4, audio)
    dataset.data["spk/utt-3"]["text"] = "other words"
    del dataset.data["spk/utt-1"]["speaker"]
    dataset.data["spk/utt-2"]["speaker"] = "otto"
    view = brain.cache_features(dataset, annotations=NAMES, check=None)
    assert_tells(view, dataset)
    assert not brain.cache_features(dataset, check=None).annotation("speaker")[1]
    assert (
        featcache.open(view.path).annotation("duration")[9] == 9 / 4
    )  # not of this data set: as it was


def test_what_failed_has_none(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), described(5)
    brain.bad = frozenset(["spk/utt-2"])
    view = brain.cache_features(dataset, annotations=NAMES, on_error="skip", check=None)
    assert len(view) == 4
    assert_tells(view, dataset)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"text": 7}, FeatureError, r"'text' of utterance 'spk/utt-9' is 7, int, but str"),
        ({"text": {"a": 1}}, FeatureError, r"'text' of utterance 'spk/utt-9' is \{'a': 1\}, of"),
    ],
)
def test_values_that_are_no_annotation_are_refused_before_anything_is_computed(
    storage: FeatureStorage, change: Any, error: Any, match: str
) -> None:
    brain, audio = make_brain(storage), Audio()
    dataset = described(10, audio)
    dataset.data["spk/utt-9"] |= change
    with pytest.raises(error, match=match):
        brain.cache_features(dataset, annotations=["text"])
    assert (audio.loaded, getattr(brain, "calls", [])) == ([], [])


def test_a_dynamic_item_that_fails_names_the_utterance(storage: FeatureStorage) -> None:
    dataset = described(3)
    dataset.data["spk/utt-2"]["text"] = None
    with pytest.raises(ComputeError, match="annotation 'number' of utterance 'spk/utt-2' failed w"):
        make_brain(storage).cache_features(dataset, annotations="number")


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("txt", ConfigError, r"no key 'txt'; did you mean 'text'"),
        ("ssl", FeatureError, "'ssl': this is the name of a feature"),
        ("a/b", FeatureError, "without '/'"),
    ],
)
def test_a_name_that_cannot_be_meant_is_refused(
    storage: FeatureStorage, name: str, error: Any, match: str
) -> None:
    with pytest.raises(error, match=match):
        make_brain(storage).cache_features(described(), annotations=["text", name])


def test_an_item_that_is_made_of_cached_features_is_refused(storage: FeatureStorage) -> None:
    brain, dataset = make_brain(storage), described(3)
    brain.cache_features(dataset)
    storage.attach(dataset, "train", "ssl")
    dataset.add_dynamic_item(len, takes="ssl", provides="frames-of-ssl")
    with pytest.raises(ConfigError, match=r"'frames-of-ssl' .* is made of cached features"):
        brain.cache_features(dataset, annotations=["frames-of-ssl"])


def test_a_data_set_that_shows_no_ids_cannot_be_annotated(storage: FeatureStorage) -> None:
    rows: Any = [{"id": "a", "text": "b"}]
    loader = DataLoader(rows, collate_fn=list)
    with pytest.raises(ConfigError, match="annotations belong to ids, and this data set shows non"):
        make_brain(storage).cache_features(loader, annotations=["text"])


def test_the_data_set_of_a_loader_tells_them(storage: FeatureStorage) -> None:
    from speechbrain.dataio.batch import PaddedBatch

    dataset = described(4)
    loader = DataLoader(dataset, batch_size=2, collate_fn=PaddedBatch)
    assert_tells(make_brain(storage).cache_features(loader, annotations=NAMES), dataset)


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("parallel", [None, ONE_WORKER])
def test_workers_need_know_nothing_of_them(storage: FeatureStorage, parallel: Any) -> None:
    dataset = described(12)
    brain = make_brain(storage)
    view = brain.cache_features(dataset, annotations=NAMES, parallel=parallel, check=None)
    assert_tells(view, dataset)


# extract


class Provider(featcache.EnvironmentProvider):
    def __init__(self, dataset: Any, ids: Any = None) -> None:
        self.dataset, self.ids = dataset, ids

    def build_env_local(self) -> dict[str, object]:
        return {"dataset": self.dataset, "ids": self.ids, "compute_features": ones}


def ones(items: Any) -> list[dict[str, object]]:
    return [{"id": item["id"], "x": np.ones((2, 1), np.float32)} for item in items]


def extracted(folder: Path, dataset: Any, names: Any, ids: Any = None) -> featcache.FeatureTable:
    declared, provider = [FeatureStorageConfig("x")], Provider(dataset, ids)
    return featcache.extract(
        provider, folder / "x", declared, annotations=names, check=None, progressbar=False
    )


ROWS: list[Any] = [
    {"id": "a", "text": "one", "samples": np.zeros(800), "sampling_rate": 8000},
    {"id": "b", "text": "two", "samples": np.zeros(400), "sampling_rate": 8000},
]


class Listing:
    """A data set of a user's own class, which holds a row for each utterance."""

    def __init__(self) -> None:
        self.rows = [{"id": row["id"], "text": row["text"]} for row in ROWS]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


class Telling(Listing):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [{"id": row["id"]} for row in self.rows]

    def annotation(self, name: str) -> list[str]:
        return [f"{name} of {row['id']}" for row in self.rows]


def test_entries_of_any_data_set_are_taken(tmp_path: Path) -> None:
    for number, dataset in enumerate((ROWS, Listing(), Subset(Listing(), [0, 1]))):  # type: ignore[arg-type]
        view = extracted(tmp_path / str(number), dataset, ["text"], ["a", "b"])
        assert list(view.annotation("text")) == ["one", "two"]


def test_a_data_set_may_tell_them_itself(tmp_path: Path) -> None:
    view = extracted(tmp_path, Telling(), "text", ["a", "b"])
    assert list(view.annotation("text")) == ["text of a", "text of b"]


def test_features_of_a_cache_take_its_annotations_with_them(tmp_path: Path) -> None:
    first = extracted(tmp_path / "first", ROWS, ["text"], ["a", "b"])
    dataset = featcache.FeatureDataset(first.select(["b"]))
    view = extracted(tmp_path / "second", dataset, ["text"], ["b"])
    assert list(view.annotation("text")) == ["two"]


def test_a_key_that_no_entry_has_is_refused(tmp_path: Path) -> None:
    for dataset in (ROWS, Listing()):
        with pytest.raises(ConfigError, match=r"has 'txt'; did you mean 'text'"):
            extracted(tmp_path, dataset, ["txt"], ["a", "b"])


def test_a_data_set_that_shows_nothing_says_what_it_needs(tmp_path: Path) -> None:
    class Bare:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> Any:
            return ROWS[number]

    with pytest.raises(ConfigError, match=r"'Bare' does not show 'text' .* attribute `entries`"):
        extracted(tmp_path, Bare(), ["text"], ["a", "b"])


def test_cuts_tell_what_they_and_their_supervision_have(tmp_path: Path) -> None:
    lhotse = pytest.importorskip("lhotse")
    cuts = lhotse.CutSet.from_cuts(map(cut_of, "ab"))
    dataset = featcache.utterances(cuts)
    assert dataset.annotation("duration") == [2.0, 2.0]
    assert dataset.annotation("speaker") == ["anna", "anna"]
    assert dataset.annotation("text") == ["a text", None]
    with pytest.raises(ConfigError, match="neither the cuts nor their supervisions have 'txt'"):
        dataset.annotation("txt")
    for cut in cuts:
        cut.supervisions = []
    assert dataset.annotation("text") == [None, None]


def cut_of(id: str) -> Any:
    import lhotse

    supervision = lhotse.SupervisionSegment(
        id, id, 0, 2, text="a text" if id == "a" else None, speaker="anna"
    )
    recording = lhotse.Recording(id, [], 8000, 16000, 2.0)
    return lhotse.MonoCut(id, 0, 2, 0, [supervision], recording=recording)


def test_a_cut_of_several_supervisions_is_refused_by_name() -> None:
    lhotse = pytest.importorskip("lhotse")
    cut = cut_of("a")
    cut.supervisions = [*cut.supervisions, *cut.supervisions]
    with pytest.raises(ConfigError, match="cut 'a' has 2 supervisions, and not one 'text'"):
        featcache.utterances(lhotse.CutSet.from_cuts([cut])).annotation("text")


def test_columns_of_a_huggingface_data_set_are_taken() -> None:
    datasets = pytest.importorskip("datasets")
    audio = {"path": None, "bytes": b""}
    table = datasets.Dataset.from_list(
        [{"id": id, "audio": audio, "text": f"text {id}"} for id in "ab"]
    ).cast_column("audio", datasets.Audio())
    dataset = featcache.utterances(table)
    assert dataset.annotation("text") == ["text a", "text b"]
    with pytest.raises(ConfigError, match="no column 'txt'; did you mean 'text'"):
        dataset.annotation("txt")


def test_a_list_of_dicts_is_taken_as_it_is() -> None:
    rows = [{"id": "a", "audio": "a.wav", "text": "one"}]
    assert featcache.utterances(rows).annotation("text") == ["one"]


def test_annotations_of_another_kind_than_stored_are_refused_before_computing(
    storage: FeatureStorage,
) -> None:
    brain = make_brain(storage)
    brain.cache_features(described(3), progressbar=False, annotations=["duration"])
    dataset = described(5)
    for entry in dataset.data.values():
        entry["duration"] = str(entry["duration"])
    with pytest.raises(FeatureError, match="'duration' of the data set is str, but float in cache"):
        brain.cache_features(dataset, progressbar=False, annotations=["duration"])
    assert len(storage.cache("train")) == 3
    for entry in dataset.data.values():
        entry["duration"] = 3  # integers are floats there
    brain.cache_features(dataset, progressbar=False, annotations=["duration"])
    assert [*storage.cache("train").annotation("duration")] == [3.0] * 5
