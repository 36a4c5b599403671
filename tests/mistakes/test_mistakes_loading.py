"""Mistakes of first users with data sets, loaders, samplers, and caches put together.

The numbers are those of a list of 135 mistakes that were tried on an early version.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import featcache
from featcache.errors import (
    ConfigError,
    FeatcacheError,
    FeatureError,
    IncompleteError,
    KeyNotFoundError,
    RowError,
    UnknownNameError,
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


UNPROVEN = ["list of lengths", "make the sampler from the cache", "ids=[...]"]

MISTAKES: list[tuple[str, Callable[[Path], object], type[FeatcacheError], list[str]]] = [
    ("123-some", lambda path: of_some(made(path)), ConfigError, UNPROVEN),
    ("123-another-order", lambda path: in_another_order(made(path)), ConfigError, UNPROVEN),
    ("123-torch", lambda path: of_some_in_torchs_loader(made(path)), ConfigError, UNPROVEN),
    (
        "124-limit-too-small",
        lambda path: Bucket(made(path), max_frames=3),
        ConfigError,
        ["20 of 20 utterances are longer than max_frames=3", "'u19'", "too_long=skip"],
    ),
    ("124-no-limit", lambda path: Bucket(made(path)), ConfigError, ["a limit: max_frames, max_el"]),
    (
        "124-rank",
        lambda path: Bucket(made(path), max_frames=40, rank=3, world_size=2),
        ConfigError,
        ["rank must be below world_size=2, not 3"],
    ),
    ("125-nothing", lambda path: Loader(made(path)), ConfigError, ["batch_sampler, or a batch_s"]),
    (
        "125-num-workers",
        lambda path: Loader(made(path), batch_size=2, num_workers=4),
        UnknownNameError,
        ["no setting 'num_workers'", "'threads'"],
    ),
    (
        "128-tensors-of-other-lengths",
        lambda path: all_of(Loader(made(path), batch_size=2, transform=tokens)),
        FeatureError,
        ["'tokens' of items 'u00' and 'u01'", "give tokens_lengths, too"],
    ),
    (
        "127-nothing-returned",
        lambda path: all_of(Loader(made(path), batch_size=2, transform=lambda item, rng: None)),
        FeatureError,
        ["an item is a dict", "transform returned None"],
    ),
    (
        "129-no-collate",
        lambda path: all_of(DataLoader(Dataset(made(path)), batch_size=2)),
        ConfigError,
        ["collate_fn=FeatureDataset.collate"],
    ),
    (
        "130-id",
        lambda path: all_of(Loader(made(path), batch_sampler=[["u33"]])),
        KeyNotFoundError,
        ["no utterance 'u33'", "nearest ids: "],
    ),
    (
        "130-row",
        lambda path: all_of(Loader(made(path), batch_sampler=[[99]])),
        RowError,
        ["no row 99", "20 utterances"],
    ),
    (
        "130-rows-for-batches",
        lambda path: all_of(Loader(made(path), batch_sampler=[0, 1])),
        ConfigError,
        ["a batch is a list of row numbers or ids, not 0"],
    ),
    (
        "130-ids-for-batches",
        lambda path: all_of(Loader(made(path), batch_sampler=["u01"])),
        ConfigError,
        ["a batch is a list of row numbers or ids, not 'u01'"],
    ),
    ("131-cuda", lambda path: cuda(made(path)), ConfigError, ["device='cuda' cannot be used"]),
    ("131-pinned", lambda path: pinned(made(path)), ConfigError, ["pin_memory=True cannot be"]),
    ("132-other-ids", joined, ConfigError, ["the same ids, but 'v' is in", "and not in"]),
    ("132-other-features", concatenated, ConfigError, ["different features: f and g"]),
    ("132-the-same-id", twice, ConfigError, ["utterance 'u' is in", "/a' and in", "/b'"]),
    (
        "14-dtype",
        lambda path: Loader(made(path), batch_size=2, dtypes={"f": float}),
        UnknownNameError,
        ["feature 'f'", "did you mean 'float64' or 'float32'"],
    ),
    (
        "dtypes-for-all",
        lambda path: Loader(made(path), batch_size=2, dtypes="float32"),
        ConfigError,
        ["dtypes is a mapping", "{'f': 'float32'}", "not 'float32'"],
    ),
    (
        "78-79-incomplete",
        lambda path: Loader(made(path, complete=False), batch_size=2),
        IncompleteError,
        ["is incomplete: 20 utterances are there", "allow_incomplete=True"],
    ),
]


@pytest.mark.parametrize(
    ("mistake", "kind", "words"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES]
)
def test_a_mistake_is_answered_by_name_and_remedy(
    tmp_path: Path, mistake: Callable[[Path], object], kind: type[FeatcacheError], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        mistake(tmp_path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message


def test_78_an_unfinished_cache_says_who_writes_it(tmp_path: Path) -> None:
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


def test_123_a_sampler_of_named_utterances_serves_these(tmp_path: Path) -> None:
    cache = made(tmp_path)
    wanted = ["u07", "u03", "u11"]
    sampler = BucketBatchSampler(cache.lengths("f", ids=wanted), ids=wanted, max_frames=40)
    served = [id for batch in Loader(cache, batch_sampler=sampler) for id in batch["id"]]
    assert sorted(served) == sorted(wanted)


def test_125_126_batches_of_a_size_come_in_another_order_each_epoch(tmp_path: Path) -> None:
    loader = Loader(made(tmp_path), batch_size=4, shuffle=True)
    epochs = [[id for batch in loader for id in batch["id"]] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1


def test_126_a_bucket_samplers_batches_come_in_another_order_each_epoch(tmp_path: Path) -> None:
    sampler = BucketBatchSampler(made(tmp_path), max_frames=40)
    assert len({tuple(map(tuple, sampler)) for _ in range(3)}) == 3


def test_127_an_error_of_transform_keeps_its_kind_and_names_the_utterance(tmp_path: Path) -> None:
    loader = Loader(made(tmp_path, "u"), batch_size=2, transform=lambda item, rng: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        all_of(loader)
    assert caught.value.__notes__ == ["in the transform of utterance 'u'"]
