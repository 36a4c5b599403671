import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from places import ROOT

import featcache

RECIPE = ROOT / "recipes" / "digits"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE / "train.py"), str(RECIPE / "hparams.yaml"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Say of every file that holds data its size and when it was written."""
    files = (path for path in folder.rglob("*") if path.is_file() and "lock" not in path.name)
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack three recordings for testing, two for validation and six for training, of each digit
    by one speaker.
    """
    folder = tmp_path_factory.mktemp("few")
    with zipfile.ZipFile(RECIPE / "corpus.zip") as corpus:
        for digit in range(10):
            for index in (0, 1, 2, 5, 6, *range(8, 14)):
                corpus.extract(f"{digit}_dora_{index}.flac", folder)
    return folder


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", RECIPE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_trains_from_the_cache_and_a_second_run_computes_nothing(
    few: Path, tmp_path: Path
) -> None:
    options = (
        "--data_folder",
        str(few),
        "--output_folder",
        str(tmp_path),
        "--number_of_epochs",
        "1",
    )
    first = run(*options)
    accuracy = first.stdout.splitlines()[-1]
    assert re.fullmatch(r"test accuracy: [01]\.\d{3}", accuracy)
    assert re.search(r"^epoch 1: .* [\d.]+ s waited for data$", first.stdout, re.MULTILINE)
    compared = (
        r"^seconds per epoch: [\d.]+ waiting for the cache, "
        r"[\d.]+ computing features on the fly \([\d.]+%\)$"
    )
    assert re.search(compared, first.stdout, re.MULTILINE)
    assert "caching train" in first.stderr
    storage = {
        split: featcache.open(tmp_path / "features" / split) for split in ("train", "valid", "test")
    }
    assert {split: len(cache) for split, cache in storage.items()} == {
        "train": 60,
        "valid": 20,
        "test": 30,
    }
    assert storage["test"]["7_dora_2"].keys() == {"fbank", "units"}

    before = written(tmp_path / "features")
    second = run(*options)
    assert second.stdout.splitlines()[-1] == accuracy
    assert "caching" not in second.stderr
    assert written(tmp_path / "features") == before


def test_features_do_not_depend_on_what_else_is_in_a_batch(
    train: ModuleType, few: Path, tmp_path: Path
) -> None:
    from speechbrain.dataio.dataloader import make_dataloader
    from speechbrain.lobes.features import Fbank

    def compute(batch_size: int) -> dict[str, dict[str, Any]]:
        batches = make_dataloader(dataset, batch_size=batch_size)
        return {
            features["id"]: features
            for batch in batches
            for features in brain.compute_features(batch, None)
        }

    train.prepare(str(few), tmp_path, 8000)
    dataset = train.open_dataset(tmp_path / "train.json")
    fbank = Fbank(sample_rate=8000, f_max=4000, n_fft=512, n_mels=80)
    train.fit_units(tmp_path / "centroids.npy", dataset, fbank, 16, seed=1)
    brain = train.DigitsBrain(
        {"fbank": fbank, "units": train.Units(np.load(tmp_path / "centroids.npy"))}
    )
    alone, together = compute(1), compute(17)
    for id, utterance in alone.items():
        assert (
            len(utterance["fbank"])
            == len(utterance["units"])
            == dataset.data[id]["num_samples"] // 80 + 1
        )
        assert torch.equal(utterance["fbank"], together[id]["fbank"])
        assert torch.equal(utterance["units"], together[id]["units"])


def test_a_recording_of_another_rate_is_refused_by_name(train: ModuleType, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "3_dora_0.wav", np.zeros(1600), 16000)
    with pytest.raises(
        SystemExit, match=r"3_dora_0\.wav' has 16000 samples a second; the recipe needs 8000"
    ):
        train.prepare(str(tmp_path), tmp_path, 8000)


def test_a_folder_without_recordings_is_refused(train: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"no recordings \{digit\}_\{speaker\}_\{index\}\.wav for the train set in"
    ):
        train.prepare(str(tmp_path), tmp_path, 8000)


def test_a_folder_that_does_not_exist_is_refused_by_name(train: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no folder '.*/nowhere': data_folder names the folder"):
        train.prepare(str(tmp_path / "nowhere"), tmp_path, 8000)


def test_the_corpus_holds_every_digit_of_every_speaker(train: ModuleType) -> None:
    assert train.CORPUS.stat().st_size < 4_000_000
    with zipfile.ZipFile(train.CORPUS) as corpus:
        names = [train.RECORDING.fullmatch(name) for name in corpus.namelist()]
    recordings = {(name["digit"], name["speaker"], int(name["index"])) for name in names}
    assert len(recordings) == len(names) == 10 * 6 * 30
    assert sum(train.split_of(index) == "test" for _, _, index in recordings) == 300
