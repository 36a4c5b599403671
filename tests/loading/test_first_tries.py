"""Settings and indices that everybody tries first, and mistakes that are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_helpers import ids_of
from speechbrain.core import Brain
from speechbrain.dataio.sampler import DistributedSamplerWrapper
from store_helpers import FINGERPRINT, id_of, make_cache, two_features, write
from torch.utils.data import DataLoader
from torch_loaders import read_all

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.errors import (
    ConfigError,
    IncompleteError,
    RowError,
)
from featcache.espnet import CategoryChunkIterFactory, ChunkIterFactory
from featcache.samplers import BucketBatchSampler


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return featcache.open(make_cache(tmp_path_factory.mktemp("cache"), range(22)))


@pytest.mark.parametrize(("size", "batches"), [(4, 5), (11, 2), (22, 1), (1, 22)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_leaves_out_the_smaller_batch(
    cache: featcache.Cache, size: int, batches: int, shuffle: bool
) -> None:
    def make() -> FeatureLoader:
        return FeatureLoader(cache, batch_size=size, shuffle=shuffle, drop_last=True)

    loader = make()
    epochs = [[batch["id"] for batch in loader] for _ in range(2)]
    assert [[*map(len, epoch)] for epoch in epochs] == [[size] * batches] * 2
    assert len(loader) == batches
    whole = FeatureLoader(cache, batch_size=size, shuffle=shuffle)
    assert epochs[0] == [batch["id"] for batch in whole][:batches]  # of the same order
    for steps in range(batches + 1):
        running = make()
        seen = [batch["id"] for _, batch in zip(range(steps), running, strict=False)]
        resumed = make()
        resumed.load_state_dict(running.state_dict())
        assert seen + [batch["id"] for batch in resumed] == epochs[0]
        assert [batch["id"] for batch in resumed] == epochs[1]


def test_the_length_is_that_of_a_whole_epoch_also_after_a_resume(cache: featcache.Cache) -> None:
    loader = FeatureLoader(cache, batch_size=4)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(loader) == 6  # Lightning counts on from the first one
    assert len(list(loader)) == 5


def test_batches_of_a_size_come_in_order_or_shuffled_anew_in_each_epoch(
    cache: featcache.Cache,
) -> None:
    loader = FeatureLoader(cache, batch_size=4)
    assert [len(batch["id"]) for batch in loader] == [4, 4, 4, 4, 4, 2]
    assert len(loader) == 6
    assert ids_of(loader) == list(cache)
    loader = FeatureLoader(cache, batch_size=4, shuffle=True, seed=3)
    epochs = [ids_of(loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(cache)] * 3
    assert len({tuple(epoch) for epoch in [*epochs, list(cache)]}) == 4
    again = FeatureLoader(cache, batch_size=4, shuffle=True, seed=3)
    again.set_epoch(1)
    assert ids_of(again) == epochs[1]
    next(batches := iter(again))
    resumed = FeatureLoader(cache, batch_size=4, shuffle=True, seed=3)
    resumed.load_state_dict(again.state_dict())
    assert ids_of(resumed) == [id for batch in batches for id in batch["id"]]


def test_dtypes_are_named_or_torchs_own(cache: featcache.Cache) -> None:
    loader = FeatureLoader(cache, batch_size=2, dtypes={"fbank": torch.float64, "units": "int64"})
    batch = next(iter(loader))
    assert (batch["fbank"].dtype, batch["units"].dtype) == (torch.float64, torch.int64)


def test_a_data_set_is_indexed_like_a_list(cache: featcache.Cache) -> None:
    dataset, ids = FeatureDataset(cache), list(cache)
    assert dataset[-1]["id"] == ids[-1]
    assert dataset[-22]["id"] == ids[0]
    assert torch.equal(dataset[-1, 1:2]["fbank"], dataset[21, 1:2]["fbank"])
    for cut in (slice(0, 3), slice(-3, None), slice(None, None, -5), slice(30, 40)):
        assert [item["id"] for item in dataset[cut]] == ids[cut]
    some: list[Any] = [[0, -1, ids[3]], np.array([0, -1, 3]), torch.tensor([0, -1, 3])]
    for rows in some:
        assert [item["id"] for item in dataset[rows]] == [ids[0], ids[-1], ids[3]]
    one: Any = torch.tensor(1)
    assert dataset[one]["id"] == ids[1]
    for row in (22, -23):
        with pytest.raises(RowError, match=f"no row {row}: there are 22"):
            dataset[row]
    with pytest.raises(RowError, match="no row -1"):
        dataset.__getitems__([-1])  # a sampler's mistake
    assert len(list(iter(dataset))) == 22


class MineError(Exception):
    pass


def failing(item: dict[str, Any], rng: object) -> dict[str, Any]:
    if item.pop("id") == id_of(5):
        raise MineError("mine")
    return item


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_transform_names_the_utterance(threads: int, cache: featcache.Cache) -> None:
    loader = FeatureLoader(cache, batch_size=4, transform=failing, threads=threads)
    with pytest.raises(MineError) as caught:
        list(loader)
    assert caught.value.__notes__ == [f"in the transform of utterance {id_of(5)!r}"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_transform_names_the_utterance_in_torchs_loader(
    workers: int, cache: featcache.Cache
) -> None:
    dataset = FeatureDataset(cache, transform=failing)
    loader = DataLoader(dataset, batch_size=4, collate_fn=dataset.collate, num_workers=workers)
    with pytest.raises(MineError) as caught:
        read_all(loader)
    text = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert "in the transform of utterance" in text
    assert id_of(5) in text


def test_an_unfinished_cache_is_read_only_on_request(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path / "cache", two_features(), FINGERPRINT)
    write(writer, range(7))
    writer.close(complete=False)
    done = make_cache(tmp_path / "done", range(20, 25))
    for source in (tmp_path / "cache", featcache.concat(done, tmp_path / "cache")):
        for make in (FeatureDataset, lambda source: FeatureLoader(source, batch_size=2)):
            with pytest.raises(
                IncompleteError, match=r"cache' is incomplete: 7 utterances.*allow_incomplete=True"
            ):
                make(source)
    assert len(FeatureDataset(tmp_path / "cache", allow_incomplete=True)) == 7
    assert len(ids_of(FeatureLoader(tmp_path / "cache", batch_size=2, allow_incomplete=True))) == 7
    assert len(BucketBatchSampler(tmp_path / "cache", batch_size=2))  # it only counts
    dataset = FeatureDataset(tmp_path / "cache", allow_incomplete=True)
    assert len(ids_of(FeatureLoader(dataset, batch_size=2))) == 7
    with pytest.raises(ConfigError, match="allow_incomplete are those of the FeatureDataset"):
        FeatureLoader(dataset, batch_size=2, allow_incomplete=True)


def test_it_is_told_how_many_utterances_an_unfinished_cache_lacks(
    tmp_path: Path,
) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        writer.expect(map(str, range(8)))
        for number in range(3):
            writer.write(str(number), {"fbank": np.ones((3, 2), np.float32)})
        writer.close(complete=False)
    cache = featcache.open(tmp_path)
    with pytest.raises(IncompleteError, match="is incomplete: 3 of 8 utterances are there"):
        FeatureDataset(cache)


def test_a_brain_without_the_mixin_is_told_of_it(cache: featcache.Cache) -> None:
    brain = Brain({"model": torch.nn.Linear(1, 1)}, run_opts={"device": "cpu"})
    with pytest.raises(TypeError, match=r"FeatureCacheMixin"):
        brain.fit(range(1), FeatureLoader(cache, batch_size=2), progressbar=False)


def test_speechbrain_may_not_share_a_samplers_batches_again(cache: featcache.Cache) -> None:
    def wrapped(world_size: int) -> Any:
        sampler = BucketBatchSampler(cache, batch_size=2, rank=0, world_size=world_size)
        return DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)

    with pytest.raises(ConfigError, match=r"DistributedSamplerWrapper would .* over 2 processes"):
        list(wrapped(2))
    assert len(list(wrapped(1))) == 6  # of 11 batches, as asked for


@pytest.mark.parametrize("factory", [ChunkIterFactory, CategoryChunkIterFactory])
def test_the_pattern_of_excluded_names_is_espnets(factory: Any, cache: featcache.Cache) -> None:
    def pattern(prefixes: list[str] | None) -> str:
        made = factory(FeatureDataset(cache), 2, [[0]], 4, excluded_key_prefixes=prefixes)
        return str(made.excluded_key_pattern)

    assert pattern(None) == "(utt2category[0-9]*)|(utt2fs[0-9]*)"
    assert pattern(["utt2fs", "spk"]) == "(utt2fs[0-9]*)|(spk[0-9]*)|(utt2category[0-9]*)"
