"""Data sets that hold another one: a part of it, or a wrapper of the user's, is no loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import featcache
from featcache.errors import ConfigError
from featcache.extraction.datasets import dataset_of, size_of, visible_ids


class Items(Dataset[Any]):
    def __init__(self, begin: int = 0, end: int = 9) -> None:
        self.numbers = range(begin, end)
        self.ids = [f"u{n}" for n in self.numbers]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        n = self.numbers[index]
        return {"id": self.ids[index], "x": np.full((3 + n, 2), float(n))}


class Stream(IterableDataset[Any]):
    def __init__(self, dataset: Items) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return (self.dataset[n] for n in (1, 2))


class Provider(featcache.EnvironmentProvider):
    def __init__(self, dataset: Any) -> None:
        self.dataset, self.computed = dataset, list[str]()

    def build_env_local(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "compute_features": self.compute}

    def compute(self, items: Any) -> list[dict[str, Any]]:
        self.computed += [item["id"] for item in items]
        return [{"id": item["id"], "x": item["x"]} for item in items]


def extract(provider: Provider, path: Path, **settings: Any) -> featcache.Cache:
    declared = [featcache.FeatureStorageConfig("x")]
    return featcache.open(
        featcache.extract(provider, path, declared, progressbar=False, **settings).path
    )


def test_a_part_of_a_data_set_has_its_own_size_and_ids(tmp_path: Path) -> None:
    part = Subset(Subset(Items(), [1, 3, 5, 7]), [0, 2, 3])
    assert size_of(part) == 3
    assert visible_ids(part) == ["u1", "u5", "u7"]
    assert visible_ids(DataLoader(part)) == ["u1", "u5", "u7"]
    cache = extract(Provider(part), tmp_path / "cache")
    assert cache.complete
    assert sorted(cache.ids) == ["u1", "u5", "u7"]
    provider = Provider(part)
    extract(provider, tmp_path / "cache", check=None)
    assert provider.computed == []  # by its ids all are there


def test_only_a_loader_stands_for_its_data_set() -> None:
    items = Items()
    assert dataset_of(DataLoader(items)) is items
    stream = Stream(items)
    assert dataset_of(stream) is stream
    assert size_of(stream) is None
    assert visible_ids(stream) is None


def test_a_data_set_of_other_utterances_is_refused_before_any_is_computed(tmp_path: Path) -> None:
    extract(Provider(Items()), tmp_path / "cache")
    provider = Provider(Items(20, 29))
    with pytest.raises(ConfigError, match="shares no utterance with cache"):
        extract(provider, tmp_path / "cache")
    assert provider.computed == []
    torch.manual_seed(1)
    assert len(extract(provider, tmp_path / "cache", append=True)) == 18
