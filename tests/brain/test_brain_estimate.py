"""`estimate_features` of a Brain: within 3 % of the bytes that `cache_features` then writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import speechbrain as sb
import torch
from brain_helpers import Audio, Recipe, make_brain, make_dataset
from speechbrain.dataio.dataset import DynamicItemDataset

from featcache import FeatureStorage, FeatureStorageConfig
from featcache.errors import ComputeError, ConfigError, FeatureError

WAYS = [
    ("memmap", "raw"),
    ("hdf5", "gzip"),
    ("webdataset", "raw"),
    ("zarr", "zstd"),
]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def storage_of(path: Path, backend: str, codec: str) -> FeatureStorage:
    ssl = FeatureStorageConfig("ssl", backend=backend, codec=codec)
    units = FeatureStorageConfig("units", "int64", backend=backend, codec=codec)
    return FeatureStorage(path, [ssl, units])


def long_dataset(utterances: int, audio: Audio, *, durations: bool) -> Any:
    """Return utterances of 30 to 400 frames, whose durations a data set may show."""
    data: dict[str, dict[str, Any]] = {}
    for number in range(utterances):
        frames = 30 + (number * 7919) % 371
        shown = {"duration": frames / 100} if durations else {}
        data[f"utt-{number}"] = {"frames": frames, **shown}
    items = [{"func": audio, "takes": ["id", "frames"], "provides": "sig"}]
    return DynamicItemDataset(data, items, ["id", "sig", "frames"])


@pytest.mark.parametrize(("backend", "codec"), WAYS)
def test_bytes_are_those_that_are_then_written(tmp_path: Path, backend: str, codec: str) -> None:
    brain = make_brain(storage_of(tmp_path, backend, codec))
    audio = Audio()
    dataset = long_dataset(600, audio, durations=True)
    told = brain.estimate_features(dataset, sb.Stage.TRAIN, utterances=32)
    assert len(audio.loaded) == 32
    assert list(tmp_path.iterdir()) == []
    table = brain.cache_features(dataset, sb.Stage.TRAIN, loader_kwargs={"batch_size": 8})
    written = size_of(table.path)
    filling = 2**17 * 2 if backend == "zarr" else 0
    assert told.nbytes == pytest.approx(written, rel=0.03, abs=filling)
    assert told.frames["ssl"] == table.lengths("ssl").sum()
    assert told.utterances == 600


def test_without_durations_the_uncertainty_is_told(tmp_path: Path) -> None:
    brain = make_brain(storage_of(tmp_path, "memmap", "raw"))
    told = brain.estimate_features(long_dataset(600, Audio(), durations=False))
    assert 0.02 < told.uncertainty < 0.2
    assert "give or take" in repr(told)


def test_modules_and_random_numbers_are_left_as_they_were(tmp_path: Path) -> None:
    brain = make_brain(storage_of(tmp_path, "memmap", "raw"))
    brain.modules.train()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    brain.estimate_features(make_dataset(6), sb.Stage.VALID)
    assert torch.equal(torch.rand(4), expected)
    assert all(module.training for module in brain.modules.modules())
    assert not hasattr(brain, "stages")


def test_mistakes_are_told_as_for_caching(tmp_path: Path) -> None:
    storage = storage_of(tmp_path, "memmap", "raw")
    brain = make_brain(storage)
    brain.bad = frozenset({"spk/utt-2"})
    with pytest.raises(ComputeError, match=r"'spk/utt-2'.*cannot compute"):
        brain.estimate_features(make_dataset(5))
    with pytest.raises(ConfigError, match="batch_size"):
        brain.estimate_features(make_dataset(5), loader_kwargs={"batch_sizes": 3})
    lacking = FeatureStorage(tmp_path, [*storage.features.values(), FeatureStorageConfig("mfcc")])
    with pytest.raises(FeatureError, match="'mfcc' is missing"):
        make_brain(storage, Recipe).estimate_features(make_dataset(5), storage=lacking)
