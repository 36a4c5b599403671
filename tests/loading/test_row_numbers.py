"""Row numbers of one data set are never taken for rows of another."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_helpers import ids_of
from store_helpers import id_of, make_cache
from torch.utils.data import DataLoader
from torch_loaders import read_all

import featcache
from featcache import FeatureDataset, FeatureLoader
from featcache.errors import ConfigError
from featcache.espnet import SequenceIterFactory, build_batch_sampler, build_category_batch_sampler
from featcache.samplers import BucketBatchSampler, PackedBatchSampler, ShuffledBatchSampler

NUMBERS = range(30)
REFUSED = "utterances of a list of lengths.*make the sampler from the cache, or .*ids="


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return featcache.open(make_cache(tmp_path_factory.mktemp("cache"), NUMBERS))


def some(cache: featcache.Cache) -> list[str]:
    return list(cache)[::2]


def shortest_first(cache: featcache.Cache) -> list[str]:
    return [id for _, id in sorted(zip(cache.lengths("fbank").tolist(), cache, strict=True))]


def bucket(lengths: Any) -> Any:
    return BucketBatchSampler(lengths, max_frames=60)


def fixed(lengths: Any) -> Any:
    return ShuffledBatchSampler(build_batch_sampler("sorted", batch_size=4, lengths=lengths))


def espnet(lengths: Any) -> Any:
    return build_batch_sampler("length", batch_bins=60, lengths=lengths)


def by_category(lengths: Any) -> Any:
    options: dict[str, Any] = {
        "batch_bins": 60,
        "categories": [row % 2 for row in range(len(lengths))],
    }
    return build_category_batch_sampler("catpow", lengths=lengths, **options)[0]


def read_with_torch(cache: featcache.Cache, sampler: Any, workers: int = 0) -> list[str]:
    loader = DataLoader(
        FeatureDataset(cache),
        batch_sampler=sampler,
        collate_fn=FeatureDataset.collate,
        num_workers=workers,
    )
    return [id for batch in read_all(loader) for id in batch["id"]]


@pytest.mark.parametrize("chosen", [some, shortest_first])
@pytest.mark.parametrize("make", [bucket, fixed, espnet, by_category])
def test_numbers_of_a_list_of_lengths_are_refused(
    make: Any, chosen: Any, cache: featcache.Cache
) -> None:
    sampler = make(cache.lengths("fbank", ids=chosen(cache)))
    with pytest.raises(ConfigError, match=REFUSED):
        FeatureLoader(cache, batch_sampler=sampler)
    with pytest.raises(ConfigError, match=REFUSED):
        read_with_torch(cache, sampler)
    with pytest.raises(ConfigError, match=REFUSED):
        list(FeatureLoader(cache, batch_sampler=[*sampler]))  # the batches still tell


def test_workers_of_a_data_loader_refuse_them_too(cache: featcache.Cache, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        read_with_torch(cache, bucket(cache.lengths("fbank", ids=some(cache))), workers=1)
    other = featcache.open(make_cache(tmp_path, range(10, 40)))
    with pytest.raises(ConfigError, match=r"30 utterances of a cache, which are not those of"):
        read_with_torch(cache, bucket(other), workers=1)
    assert sorted(read_with_torch(cache, bucket(cache), workers=1)) == sorted(cache)


def test_espnets_iterators_refuse_them(cache: featcache.Cache) -> None:
    dataset = FeatureDataset(cache)
    arguments = {"lengths": [1, 2, 3], "type": "unsorted", "batch_size": 1}
    for batches in (espnet(cache.lengths("fbank", ids=some(cache))), arguments):
        with pytest.raises(ConfigError, match=REFUSED):
            SequenceIterFactory(dataset, batches)
    assert SequenceIterFactory(dataset, {"type": "unsorted", "batch_size": 4})


@pytest.mark.parametrize("make", [bucket, fixed, espnet])
def test_numbers_of_all_rows_in_their_order_are_taken(make: Any, cache: featcache.Cache) -> None:
    for lengths in (cache, cache.lengths("fbank"), cache.lengths("units").tolist()):
        assert sorted(ids_of(FeatureLoader(cache, batch_sampler=make(lengths)))) == sorted(cache)
        assert sorted(read_with_torch(cache, make(lengths))) == sorted(cache)


@pytest.mark.parametrize("of_cache", [False, True])
@pytest.mark.parametrize("chosen", [some, shortest_first])
def test_a_sampler_that_names_its_utterances_serves_these(
    of_cache: bool, chosen: Any, cache: featcache.Cache
) -> None:
    ids = chosen(cache)
    sampler = BucketBatchSampler(
        cache if of_cache else cache.lengths("fbank", ids=ids), ids=ids, max_frames=60
    )
    for batch in FeatureLoader(cache, "fbank", batch_sampler=sampler):
        assert batch["fbank"].shape[0] * batch["fbank"].shape[1] <= 60
    sampler.set_epoch(0)
    assert sorted(ids_of(FeatureLoader(cache, batch_sampler=sampler))) == sorted(ids)
    other = BucketBatchSampler(cache, ids=ids[1:], max_frames=60)
    with pytest.raises(ConfigError, match="data="):
        other.load_state_dict(sampler.state_dict())


def test_ids_that_cannot_be_are_refused(cache: featcache.Cache) -> None:
    for ids, message in (
        (["a", "b"], "2 ids for 3 lengths"),
        (["a", "b", "a"], "names an utterance twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            BucketBatchSampler([1, 2, 3], ids=ids, batch_size=1)
    with pytest.raises(featcache.errors.KeyNotFoundError, match="no utterance 'nobody'"):
        BucketBatchSampler(cache, ids=["nobody"], batch_size=1)
    with pytest.raises(ConfigError, match="ids is empty"):
        BucketBatchSampler(cache, ids=[], batch_size=1)
    with pytest.raises(ConfigError, match="the longest is 'b' with 9 frames"):
        BucketBatchSampler([3, 9], ids=["a", "b"], max_frames=5)


def test_batches_are_lists_and_can_be_pickled(cache: featcache.Cache) -> None:
    sampler = bucket(cache)
    batch: Any = next(iter(sampler))
    assert issubclass(type(batch), list)
    assert batch == list(batch)
    assert np.asarray(batch).dtype == np.int64
    copied: Any = pickle.loads(pickle.dumps(batch))  # noqa: S301
    assert copied == batch
    assert copied.numbering.proof == batch.numbering.proof
    assert id_of(0) in cache


def test_batches_that_are_shuffled_again_keep_what_their_sampler_knew(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    other = featcache.open(make_cache(tmp_path / "other", range(50, 80)))
    for batches in (list(bucket(cache)), [*bucket(cache)][::2]):
        again = ShuffledBatchSampler(batches)
        assert ids_of(FeatureLoader(cache, batch_sampler=again))
        with pytest.raises(ConfigError, match="which are not those of"):
            FeatureLoader(other, batch_sampler=again)
    with pytest.raises(ConfigError, match="rows of several tables"):
        ShuffledBatchSampler([*bucket(cache), *bucket(other)])
    packed = ShuffledBatchSampler(list(PackedBatchSampler(cache, max_frames=60)))
    with pytest.raises(ConfigError, match="packed"):
        FeatureLoader(FeatureDataset(cache, layout="padded"), batch_sampler=packed)
    mixed = [list(batch) for batch in bucket(cache)] + list(bucket(cache))
    assert ShuffledBatchSampler(mixed).numbering is None
