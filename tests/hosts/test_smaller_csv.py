"""Lines that were taken out of a CSV file stay out of training: a SpeechBrain user's session."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import speechbrain as sb
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from torch.utils.data import DataLoader, Subset, random_split

import featcache
from featcache import FeatureDataset, FeatureLoader, FeatureStorage, FeatureStorageConfig, GlobalMVN
from featcache.errors import ConfigError
from featcache.interop.speechbrain import padded_batch, with_items
from featcache.samplers import BucketBatchSampler

IDS = [f"utt-{number:02}" for number in range(14)]
REMOVED = {"utt-02", "utt-05", "utt-11", "utt-13"}
KEPT = sorted(set(IDS) - REMOVED)


class Recogniser(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
    def compute_features(self, batch: Any, stage: Any) -> Any:
        frames = batch.sig.data.unfold(1, 160, 160).square().mean(2)
        power = torch.stack([frames, frames + 1], dim=2)
        samples = (batch.sig.lengths * batch.sig.data.shape[1]).round().long()
        return featcache.unpad(batch.id, samples // 160, {"fbank": power})

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        self.seen.extend(zip(batch.id, batch.label.tolist(), strict=True))
        return self.modules.model(self.modules.mvn(batch.fbank.data, batch.fbank.lengths)).mean(1)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return torch.nn.functional.cross_entropy(predictions, batch.label)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings, a CSV file of all of them, and a smaller one in another order."""
    home = tmp_path_factory.mktemp("corpus")
    for number, id in enumerate(IDS):
        noise = np.random.default_rng(number).normal(size=1600 + 160 * number)
        soundfile.write(home / f"{id}.wav", 0.05 * (number + 1) * np.clip(noise, -1, 1), 16000)
    for name, ids in (("all.csv", IDS), ("smaller.csv", KEPT[::-1])):
        lines = [f"{id},{home / id}.wav,word {id[-2:]}" for id in ids]
        (home / name).write_text("\n".join(["ID,wav,words", *lines, ""]))
    return home


def dataset_of(path: Path) -> Any:
    def labels(words: str) -> torch.Tensor:
        return torch.tensor(int(words.split()[-1]) % 2)

    dataset = DynamicItemDataset.from_csv(path)
    dataset.add_dynamic_item(sb.dataio.dataio.read_audio, takes="wav", provides="sig")
    dataset.add_dynamic_item(labels, takes="words", provides="label")
    dataset.set_output_keys(["id", "sig"])
    return dataset


@pytest.fixture
def brain(folder: Path, tmp_path: Path) -> Recogniser:
    storage = FeatureStorage(tmp_path, [FeatureStorageConfig("fbank", frame_s=0.01)])
    hparams = {"feature_storage": storage}
    options = {"device": "cpu", "noprogressbar": True}
    modules = {"model": torch.nn.Linear(2, 2)}
    made = Recogniser(modules, torch.optim.SGD, hparams, options)
    made.seen = []
    whole = made.cache_features(dataset_of(folder / "all.csv"), sb.Stage.TRAIN)
    assert list(whole) == IDS
    return made


def ids_of(batches: Any) -> list[str]:
    return sorted(id for batch in batches for id in batch["id"])


def test_a_brain_trains_and_normalises_on_the_lines_that_are_left(
    brain: Recogniser, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = dataset_of(folder / "smaller.csv")
    with caplog.at_level(logging.INFO, "featcache"):
        view = brain.cache_features(dataset, sb.Stage.TRAIN, annotations=["words"])
    assert "holds 14 utterances, 4 of them not in this data set: 'utt-02'" in caplog.text
    assert list(view) == KEPT
    frames = np.concatenate([view.read(id, "fbank") for id in KEPT]).astype(np.float64)
    mvn = GlobalMVN.from_cache(view, "fbank")
    np.testing.assert_allclose(view.stats("fbank").mean, frames.mean(0), rtol=1e-9)
    np.testing.assert_allclose(mvn.mean.numpy(), frames.mean(0), rtol=1e-6)
    brain.modules["mvn"] = mvn
    loader = FeatureLoader(
        view,
        batch_sampler=BucketBatchSampler(view, max_frames=60, seed=1),
        transform=with_items(dataset, ["label"]),
        collate=padded_batch,
    )
    brain.fit(range(2), loader)
    assert sorted(brain.seen) == sorted([(id, int(id[-2:]) % 2) for id in KEPT] * 2)
    assert list(view.annotation("words")) == [f"word {id[-2:]}" for id in KEPT]


def test_no_way_of_feeding_brings_them_back(brain: Recogniser, folder: Path) -> None:
    dataset = dataset_of(folder / "smaller.csv")
    view = brain.cache_features(dataset, sb.Stage.TRAIN)
    assert ids_of(FeatureLoader(view, batch_size=3, shuffle=True)) == KEPT
    assert ids_of(FeatureLoader(FeatureDataset(view), batch_size=4)) == KEPT
    assert ids_of(FeatureLoader(Subset(FeatureDataset(view), range(7)), batch_size=2)) == KEPT[:7]
    parts = random_split(FeatureDataset(view), [6, 4], torch.Generator().manual_seed(1))
    loaders = [FeatureLoader(part, batch_size=2, shuffle=True) for part in parts]
    assert sorted(ids_of(loaders[0]) + ids_of(loaders[1])) == KEPT
    by_torch = DataLoader(FeatureDataset(view), 4, shuffle=True, collate_fn=FeatureDataset.collate)
    assert ids_of(by_torch) == KEPT
    sampler = BucketBatchSampler(view.lengths("fbank"), max_frames=60)
    batches = list(FeatureLoader(view, batch_sampler=sampler))
    assert ids_of(batches) == KEPT
    assert all(batch["fbank"].shape[:2].numel() <= 60 for batch in batches)
    with pytest.raises(ConfigError, match="10 utterances"):
        FeatureLoader(
            featcache.open(view.path), batch_sampler=sampler
        )  # rows of the view are no rows of it
    with pytest.raises(ConfigError, match="10 utterances"):
        FeatureLoader(
            featcache.open(view.path), batch_sampler=BucketBatchSampler(view, max_frames=60)
        )


def test_the_whole_cache_stays_and_is_one_attribute_away(brain: Recogniser, folder: Path) -> None:
    dataset = dataset_of(folder / "smaller.csv")
    view = brain.cache_features(dataset, sb.Stage.TRAIN)
    assert list(featcache.open(view.path)) == IDS
    brain.hparams.feature_storage.attach(dataset, "train")
    dataset.set_output_keys(["id", "fbank", "label"])
    assert sorted(item["id"] for item in dataset) == KEPT
    again = brain.cache_features(dataset_of(folder / "all.csv"), sb.Stage.TRAIN)
    assert list(again) == IDS
    featcache.open(view.path).delete(REMOVED)
    assert list(featcache.open(view.path)) == KEPT
