"""The blocks of `docs/guides/speechbrain.md` run as they are printed, within a small recipe."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from places import ROOT
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.processing.features import InputNormalization

import featcache

RATE_HZ = 16000
TEXT = (ROOT / "docs" / "guides" / "speechbrain.md").read_text()
(STORAGE,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
BRAIN, USE, NORMALISER, LOADER = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
# what a recipe has before it hears of featcache
RECIPE = """
output_folder: {folder}
fbank: !new:speechbrain.lobes.features.Fbank
    sample_rate: 16000
    n_mels: 80
modules:
    model: !new:speechbrain.lobes.models.Xvector.Xvector
        in_channels: 80
        tdnn_channels: [8, 8, 8, 8, 16]
        lin_neurons: 2
epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: 1
opt_class: !name:torch.optim.SGD
    lr: 0.01
loader:
    batch_size: 4
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)  # where the module of the Brain is written
    yield
    sys.modules.pop("guide_train", None)


def make_dataset(folder: Path, split: str, utterances: int) -> Any:
    """Tones of different lengths in wav files, as a recipe reads them."""
    data = {}
    for number in range(utterances):
        samples = RATE_HZ // 4 + 1237 * number
        path = folder / f"{split}-{number}.wav"
        tone = np.sin(2 * np.pi * (200 + 50 * number) * np.arange(samples) / RATE_HZ)
        soundfile.write(path, 0.5 * tone, RATE_HZ)
        data[path.stem] = {"wav": str(path), "label": number % 2}
    read = {"func": sb.dataio.dataio.read_audio, "takes": ["wav"], "provides": "sig"}
    return DynamicItemDataset(data, [read], ["id", "sig", "label"])


def make_recipe(folder: Path) -> dict[str, Any]:
    """All names of a recipe that the blocks use."""
    (folder / "guide_train.py").write_text(f"import featcache\nimport speechbrain as sb\n\n{BRAIN}")
    train: Any = importlib.import_module("guide_train")

    class Recipe(train.ASR):  # type: ignore[misc]  # what the recipe had before
        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            return torch.nn.functional.cross_entropy(predictions.squeeze(1), batch.label)

        def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
            self.losses = {**getattr(self, "losses", {}), stage: stage_loss}

    recipe = RECIPE.format(folder=folder / "results") + STORAGE
    return {
        "sb": sb,
        "featcache": featcache,
        "ASR": Recipe,
        "hparams": load_hyperpyyaml(recipe),
        "run_opts": {"device": "cpu", "noprogressbar": True},
        "train_set": make_dataset(folder, "train", 9),
        "valid_set": make_dataset(folder, "valid", 3),
    }


def test_the_blocks_cache_both_splits_and_train_an_epoch_from_them(tmp_path: Path) -> None:
    names = make_recipe(tmp_path)
    exec(USE, names)
    assert set(names["brain"].losses) == {sb.Stage.TRAIN, sb.Stage.VALID}
    cache = featcache.open(names["train_view"].path)
    assert (len(cache), cache.complete, cache.features) == (9, True, ("energy", "fbank"))
    assert cache.dtype("fbank") == "float16"
    for number in range(9):  # of its own samples, whatever was in its batch
        samples = RATE_HZ // 4 + 1237 * number
        assert cache.read(f"train-{number}", "fbank").shape == (samples // 160 + 1, 80)
        assert cache.read(f"train-{number}", "energy").shape == (samples // 160 + 1,)


def test_the_normaliser_is_one_that_saw_the_training_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = make_recipe(tmp_path)
    names["hparams"]["normalize"] = norm = InputNormalization(update_until_epoch=-1)
    exec(USE, names)
    exec(NORMALISER, names)
    view = names["train_view"]
    frames = np.concatenate([view.read(id, "fbank") for id in view]).astype(np.float64)
    np.testing.assert_allclose(norm.glob_mean, frames.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm.glob_std, frames.std(0), rtol=1e-5)


def test_the_blocks_compute_nothing_a_second_time_and_need_no_audio_then(tmp_path: Path) -> None:
    exec(USE, make_recipe(tmp_path))
    again = make_recipe(tmp_path)
    for path in tmp_path.glob("*.wav"):
        path.unlink()
    exec(USE, again)
    assert set(again["brain"].losses) == {sb.Stage.TRAIN, sb.Stage.VALID}


def test_the_loader_of_the_block_trains_the_brain_with_labels(tmp_path: Path) -> None:
    names = make_recipe(tmp_path)
    exec(USE, names)
    counter = sb.utils.epoch_loop.EpochCounter(1)
    names["hparams"] = {**names["hparams"], "epoch_counter": counter}
    names["valid_set"] = None
    del names["brain"].losses
    exec(LOADER, names)
    assert names["brain"].losses[sb.Stage.TRAIN] > 0
