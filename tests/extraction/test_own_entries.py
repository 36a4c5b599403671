"""A data set of any class: what its own rows and files tell of a change."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featcache
from featcache.errors import StaleCacheError
from featcache.extraction.stamping import entry_of_rows

FEATURES = [featcache.FeatureStorageConfig("power"), featcache.FeatureStorageConfig("letters")]
UTTERANCES = 12  # more than a probe computes


def write(path: Path, loudness: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.full(2000, loudness, "<i2").tobytes())


class Recordings:
    """Waves of a folder, by a list of rows."""

    def __init__(self, folder: Path, texts: dict[str, str]) -> None:
        self.folder = folder
        self.rows = [{"id": id, "wav": f"{id}.wav", "text": texts[id]} for id in texts]
        self.ids = list(texts)
        self.loaded: list[str] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[number]
        self.loaded.append(row["id"])
        with wave.open(str(self.folder / row["wav"])) as file:
            wav = np.frombuffer(file.readframes(2000), "<i2").astype(np.float32)
        return {"id": row["id"], "wav": wav, "text": row["text"]}


def compute(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "id": item["id"],
            "power": item["wav"].reshape(-1, 100) ** 2,
            "letters": np.array([[ord(each)] for each in item["text"]], np.float32),
        }
        for item in items
    ]


class Provider(featcache.EnvironmentProvider):
    def __init__(self, dataset: Recordings) -> None:
        self.dataset = dataset

    def build_env_local(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "compute_features": compute}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    texts = {f"u{number:02}": "yes" * (number + 1) for number in range(UTTERANCES)}
    (tmp_path / "waves").mkdir()
    for number, id in enumerate(texts):
        write(tmp_path / "waves" / f"{id}.wav", number)
    return texts


def extract(tmp_path: Path, texts: dict[str, str], **kwargs: Any) -> Recordings:
    dataset = Recordings(tmp_path / "waves", texts)
    path = tmp_path / "cache"
    featcache.extract(Provider(dataset), path, FEATURES, progressbar=False, **kwargs)
    return dataset


def test_each_changed_utterance_is_named(tmp_path: Path, texts: dict[str, str]) -> None:
    extract(tmp_path, texts)
    extract(tmp_path, texts)
    for number in range(UTTERANCES):  # whether the probe computes it or not
        id = f"u{number:02}"
        with pytest.raises(StaleCacheError, match=rf"'{id}'"):
            extract(tmp_path, {**texts, id: "no"})
    write(tmp_path / "waves" / "u05.wav", 77)
    with pytest.raises(StaleCacheError, match=r"1 utterance.*'u05'"):
        extract(tmp_path, texts)
    extract(tmp_path, texts, on_changed="recompute")
    with featcache.open(tmp_path / "cache") as cache:
        assert float(cache.read("u05", "power").max()) == 77.0**2


def test_a_touched_file_is_loaded_once(tmp_path: Path, texts: dict[str, str]) -> None:
    extract(tmp_path, texts)
    untouched = extract(tmp_path, texts, check=None)
    assert untouched.loaded == []
    write(tmp_path / "waves" / "u05.wav", 5)
    assert extract(tmp_path, texts, check=None).loaded == ["u05"]
    assert extract(tmp_path, texts, check=None).loaded == []


def test_samples_that_a_data_set_holds_are_no_entries() -> None:
    class InMemory:
        def __init__(self) -> None:
            self.waves = [np.zeros(9)] * 3
            self.all = np.zeros((3, 9))
            self.filled_later: list[object] = [None] * 3

        def __len__(self) -> int:
            return 3

    assert entry_of_rows(InMemory()) is None
    assert entry_of_rows(object()) is None
