"""A small cache, a Brain that notes what it trains on and can be stopped, and ways to feed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import speechbrain as sb
import torch
from numpy.typing import NDArray
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.epoch_loop import EpochCounter

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.interop.speechbrain import padded_batch
from featcache.samplers import BucketBatchSampler

UTTERANCES = 23
DIMS = 3


def make_training_cache(path: Path) -> featcache.Cache:
    features = [
        FeatureStorageConfig("fbank"),
        FeatureStorageConfig("units", dtype="int16"),
        FeatureStorageConfig("speaker", time_axis=None),
    ]
    with CacheWriter(path, features) as writer:
        for number in range(UTTERANCES):
            frames = 1 + number * 7 % 11
            arrays: dict[str, NDArray[Any]] = {
                "fbank": np.full((frames, DIMS), number, np.float32),
                "units": np.arange(2 * frames, dtype=np.int16),
                "speaker": np.full(DIMS, number, np.float32),
            }
            writer.write(f"utt-{number:02}", arrays)
    return featcache.open(path)


class StoppedError(Exception):
    """The training is stopped here."""


class Training(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
    """Notes which utterances it has seen in which epoch, and can be stopped."""

    stop_at: tuple[int, int] | None = None  # epoch, number of batches that have been trained on

    def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
        self.stage, self.epoch, self.batches = stage, epoch, 0

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        if stage == sb.Stage.TRAIN and (self.epoch, self.batches) == self.stop_at:
            raise StoppedError
        self.batches += 1
        self.seen[stage.name, self.epoch] += batch.id
        predictions: torch.Tensor = self.modules.model(batch.fbank.data)
        return predictions

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
        return predictions.square().mean()

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
        if stage == sb.Stage.TRAIN:
            self.checkpointer.save_checkpoint()


class BrainComesFirst(sb.Brain, featcache.FeatureCacheMixin):  # type: ignore[misc]
    stop_at: tuple[int, int] | None = None
    on_stage_start = Training.on_stage_start
    compute_forward = Training.compute_forward
    compute_objectives = Training.compute_objectives
    on_stage_end = Training.on_stage_end


class Seen(dict[tuple[str, int | None], list[str]]):
    def __missing__(self, key: tuple[str, int | None]) -> list[str]:
        return self.setdefault(key, [])


def make_brain(save: Path, cls: Any = Training, **run_opts: Any) -> Any:
    model, counter = torch.nn.Linear(DIMS, 1), EpochCounter(3)
    brain = cls(
        {"model": model},
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        run_opts={"device": "cpu", "noprogressbar": True, "ckpt_interval_minutes": 0, **run_opts},
        checkpointer=Checkpointer(save, {"model": model, "counter": counter}),
    )
    brain.counter, brain.seen = counter, Seen()
    return brain


def sampler_of(cache: featcache.Cache) -> BucketBatchSampler:
    return BucketBatchSampler(cache, max_frames=40, seed=5)


def feature_loader(brain: Any, cache: featcache.Cache) -> Any:
    return FeatureLoader(cache, batch_sampler=sampler_of(cache), collate=padded_batch)


def list_of_batches(brain: Any, cache: featcache.Cache) -> Any:
    batches = [list(range(start, min(start + 2, UTTERANCES))) for start in range(0, UTTERANCES, 2)]
    return FeatureLoader(cache, batch_sampler=batches, collate=padded_batch)


def saveable_loader(brain: Any, cache: featcache.Cache, workers: int = 0) -> Any:
    sampler = brain.train_sampler = sampler_of(cache)
    loader = SaveableDataLoader(
        FeatureDataset(cache), batch_sampler=sampler, collate_fn=padded_batch, num_workers=workers
    )
    brain.checkpointer.add_recoverable("dataloader-TRAIN", loader)
    return loader


def saveable_loader_with_workers(brain: Any, cache: featcache.Cache) -> Any:
    return saveable_loader(brain, cache, workers=2)
