"""A small Brain with two features, its data, and what its cache must hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import speechbrain as sb
import torch
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataset import DynamicItemDataset
from torch.utils.data import IterableDataset

import featcache
from featcache import Cache, FeatureCacheMixin, FeatureStorage, FeatureTable, unpad

HOP = 10


class Recipe(FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
    """Computes two features with one module, and has a classifier beside it."""

    bad: frozenset[str]  # utterances that fail
    calls: list[list[str]]

    def compute_features(self, batch: Any, stage: Any) -> Any:
        self.calls = [*getattr(self, "calls", []), batch.id]
        # failures pass: what the code itself writes is none of what features are made from
        self.bad = getattr(self, "bad", frozenset())
        for id in batch.id:
            if id in self.bad:
                raise ValueError(f"cannot compute {id}")
        frames = batch.sig.data.unfold(1, HOP, HOP)
        return unpad(
            batch.id,
            batch.frames,
            {"ssl": self.modules.encoder(frames), "units": frames.sum(dim=2).long()},
        )

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.modules.classifier(self.modules.encoder(batch.sig.data.unfold(1, HOP, HOP)))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return predictions.mean()

    def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
        self.stages = [*getattr(self, "stages", []), stage]


class RecipeTheOtherWayRound(sb.Brain, FeatureCacheMixin):  # type: ignore[misc]
    compute_features = Recipe.compute_features


class Audio:
    """Gives the signal of an utterance, and remembers what was asked for."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.missing: set[str] = set()

    def __call__(self, id: str, frames: int) -> torch.Tensor:
        self.loaded.append(id)
        if id in self.missing:
            raise FileNotFoundError(f"no audio of {id}")
        number = int(id.rsplit("-", 1)[1])
        return torch.from_numpy(
            np.random.default_rng(number).normal(size=frames * HOP).astype(np.float32)
        )


def make_dataset(utterances: int = 10, audio: Audio | None = None) -> Any:
    data = {f"spk/utt-{number}": {"frames": 3 + number % 4} for number in range(utterances)}
    items = [{"func": audio or Audio(), "takes": ["id", "frames"], "provides": "sig"}]
    return DynamicItemDataset(data, items, ["id", "sig", "frames"])


def make_brain(storage: FeatureStorage, cls: Any = Recipe, seed: int = 0, **run_opts: Any) -> Any:
    torch.manual_seed(seed)
    encoder = torch.nn.Sequential(torch.nn.Linear(HOP, 4), torch.nn.Dropout(0.5))
    modules = {"encoder": encoder, "classifier": torch.nn.Linear(4, 2)}
    hparams = {"feature_storage": storage, "sample_rate": 8000}
    return cls(
        modules,
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        hparams=hparams,
        run_opts={"device": "cpu", "noprogressbar": True, **run_opts},
    )


def expected(brain: Any, dataset: Any) -> dict[str, dict[str, Any]]:
    """What each utterance's features are, computed one by one."""
    found = {}
    for item in dataset:
        frames = item["sig"].reshape(-1, HOP)
        weight = brain.modules.encoder[0]
        found[item["id"]] = {
            "ssl": torch.nn.functional.linear(frames, weight.weight, weight.bias).detach().numpy(),
            "units": frames.sum(dim=1).long().numpy(),
        }
    return found


def assert_holds(cache: Cache | FeatureTable, utterances: dict[str, dict[str, Any]]) -> None:
    assert sorted(cache) == sorted(utterances)
    for id, arrays in utterances.items():
        np.testing.assert_allclose(cache[id]["ssl"], arrays["ssl"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(cache[id]["units"], arrays["units"])


def failures(storage: FeatureStorage, split: str = "train") -> list[dict[str, Any]]:
    path = storage.path(split) / "work-failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def failed(view: FeatureTable) -> list[str]:
    return sorted(featcache.open(view.path).failed)


class Hidden:
    """A map-style data set that does not show its ids."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class Stream(IterableDataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter([self._dataset[index] for index in range(len(self._dataset))])


COLLATED: dict[str, Any] = {"collate_fn": PaddedBatch, "batch_size": 2}


class EnergyAlone(Recipe):
    """A second Brain over the same utterances."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        frames = batch.sig.data.unfold(1, HOP, HOP)
        return unpad(batch.id, batch.frames, {"energy": frames.square().sum(dim=2)})
