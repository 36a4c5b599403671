"""Data sets, loaders, samplers and caches put together that cannot work are answered by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import check_refused, refusals
from torch.utils.data import DataLoader

import featcache
from featcache.errors import (
    IncompleteError,
    KeyNotFoundError,
)
from featcache.samplers import BucketBatchSampler

# mistakes are of a wrong type more often than not
Bucket: Any = BucketBatchSampler
Dataset: Any = featcache.FeatureDataset
Feature: Any = featcache.FeatureStorageConfig
Loader: Any = featcache.FeatureLoader
join: Any = featcache.join
concat: Any = featcache.concat


def made(path: Path, *ids: str, feature: str = "f", complete: bool = True) -> Any:
    """Write a cache of 20 utterances, or of some ids, of 5 to 24 frames."""
    writer = featcache.CacheWriter(path, [Feature(feature)])
    for number, id in enumerate(ids or [f"u{number:02}" for number in range(20)]):
        writer.write(id, {feature: np.ones((5 + number, 3))})
    writer.close(complete)
    return featcache.open(path)


def all_of(loader: Any) -> list[Any]:
    return list(loader)


def sampled(cache: Any, ids: list[str]) -> Any:
    """Make a sampler of bare lengths, as everybody tries first."""
    return Bucket(cache.lengths("f", ids=ids), max_frames=40)


def in_another_order(cache: Any) -> Any:
    return Loader(cache, batch_sampler=sampled(cache, sorted(cache, reverse=True)))


def of_some(cache: Any) -> Any:
    return Loader(cache, batch_sampler=sampled(cache, ["u03", "u01"]))


def of_some_in_torchs_loader(cache: Any) -> Any:
    sampler = sampled(cache, ["u03", "u01"])
    return all_of(DataLoader(Dataset(cache), batch_sampler=sampler, collate_fn=Dataset.collate))


def cuda(cache: Any) -> Any:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    return Loader(cache, batch_size=2, device="cuda")


def pinned(cache: Any) -> Any:
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    return Loader(cache, batch_size=2, pin_memory=True)


def joined(path: Path) -> Any:
    return join(made(path / "a", "u", "v"), made(path / "b", "u", feature="g"))


def concatenated(path: Path) -> Any:
    return concat(made(path / "a", "u"), made(path / "b", "v", feature="g"))


def twice(path: Path) -> Any:
    return concat(made(path / "a", "u"), made(path / "b", "u"))


def tokens(item: dict[str, Any], rng: object) -> dict[str, Any]:
    return item | {"tokens": torch.ones(int(item["id"][1:]))}


@refusals(Path(__file__).with_name("refused.txt"))
def test_it_is_refused_by_name_with_what_to_do(tmp_path: Path, mistake: list[str]) -> None:
    check_refused(mistake, tmp_path, globals())


def test_an_unfinished_cache_says_who_writes_it(tmp_path: Path) -> None:
    with featcache.CacheWriter(tmp_path, [Feature("f")]) as writer:
        writer.write("u", {"f": np.ones((3, 2))})
        writer.publish()
        for read in (
            lambda: Loader(tmp_path, batch_size=1),
            lambda: featcache.GlobalMVN.from_cache(tmp_path, "f"),
        ):
            with pytest.raises(IncompleteError, match=r"is being written by process \d+ on "):
                read()
        with pytest.raises(KeyNotFoundError, match=r"no utterance 'v' in .*it is incomplete"):
            featcache.open(tmp_path)["v"]
    assert len(Loader(tmp_path, batch_size=1)) == 1
