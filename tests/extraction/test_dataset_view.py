"""`cache_features` and `extract` return the view of the data set's utterances."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brain_helpers import assert_holds, expected, make_brain, make_dataset
from torch.utils.data import Subset

import featcache
from featcache import FeatureLoader, FeatureStorage, FeatureStorageConfig
from featcache.extraction.destination import RowsOfIds
from featcache.interop.speechbrain import with_items
from featcache.samplers import BucketBatchSampler


def without(dataset: Any, *ids: str) -> Any:
    return dataset.filtered_sorted(key_test={"id": lambda id: id not in ids})


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "featcache" and record.levelno >= logging.WARNING
    ]


def test_utterances_that_left_the_data_set_come_back_neither_in_training_nor_in_statistics(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(10), check=None)
    assert lines(caplog) == []
    dataset = without(make_dataset(10), "spk/utt-3", "spk/utt-8")
    view = brain.cache_features(dataset, check=None)
    (line,) = lines(caplog)
    assert "holds 10 utterances, 2 of them not in this data set: 'spk/utt-3', 'spk/utt-8'" in line
    sampler = BucketBatchSampler(view, max_frames=12)
    loader = FeatureLoader(view, batch_sampler=sampler, transform=with_items(dataset, ["frames"]))
    served = [id for batch in loader for id in batch["id"]]
    assert sorted(served) == sorted(dataset.data_ids)
    frames = np.concatenate([featcache.open(view.path).read(id, "ssl") for id in dataset.data_ids])
    mvn = featcache.GlobalMVN.from_cache(view, "ssl")
    np.testing.assert_allclose(mvn.mean.numpy(), frames.mean(axis=0), rtol=1e-5)
    assert len(featcache.open(view.path)) == 10


def test_rows_are_in_the_order_of_the_cache_whatever_that_of_the_data_set(
    storage: FeatureStorage,
) -> None:
    brain = make_brain(storage)
    some = without(make_dataset(10), "spk/utt-3")
    first = brain.cache_features(some, check=None)
    brain.cache_features(make_dataset(10), check=None)
    turned = some.filtered_sorted(sort_key="frames", reverse=True)
    again = brain.cache_features(turned, check=None)
    assert list(first) == list(again) == sorted(some.data_ids)
    assert list(brain.cache_features(make_dataset(10), check=None)) == list(
        featcache.open(again.path)
    )


def test_who_appends_needs_no_warning(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(3), check=None)
    more = without(make_dataset(5), *make_dataset(3).data_ids)
    view = brain.cache_features(more, append=True, check=None)
    assert (list(view), len(featcache.open(view.path)), lines(caplog)) == (more.data_ids, 5, [])


def test_what_failed_is_in_no_view(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(["spk/utt-1"])
    view = brain.cache_features(make_dataset(3), on_error="skip", check=None)
    assert (list(view), featcache.open(view.path).failed) == (
        ["spk/utt-0", "spk/utt-2"],
        ("spk/utt-1",),
    )


class Provider(featcache.EnvironmentProvider):
    def __init__(self, dataset: Any, ids: list[str]) -> None:
        self.dataset, self.ids = dataset, ids

    def build_env_local(self) -> dict[str, object]:
        return {"dataset": self.dataset, "ids": self.ids, "compute_features": ones}


def ones(items: Any) -> list[dict[str, object]]:
    return [{"id": id, "x": np.ones((2, 1), np.float32)} for id in items]


def test_extract_returns_the_view_too(tmp_path: Path) -> None:
    declared = [FeatureStorageConfig("x")]
    for ids in (["a", "b", "c"], ["c", "a"]):
        provider = Provider(list(ids), ids)
        view = featcache.extract(provider, tmp_path / "x", declared, progressbar=False, check=None)
        assert list(view) == sorted(ids)
        assert len(featcache.open(view.path)) == 3


def test_a_subset_of_torch_is_a_data_set_like_another(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    dataset: Any = Subset(make_dataset(6), [4, 1])
    view = brain.cache_features(dataset, loader_kwargs={"collate_fn": collated}, check=None)
    assert list(view) == ["spk/utt-1", "spk/utt-4"]
    assert_holds(featcache.open(view.path), expected(brain, dataset))


def collated(items: Any) -> Any:
    from speechbrain.dataio.batch import PaddedBatch

    return PaddedBatch(items)


def test_rows_of_ids_are_looked_up_again_only_where_the_utterances_are_others(
    tmp_path: Path,
) -> None:
    features = [FeatureStorageConfig("ssl")]

    def append(*ids: str) -> featcache.Cache:
        with featcache.CacheWriter(tmp_path, features) as writer:
            for id in ids:
                writer.write(id, {"ssl": np.zeros((3, 2), np.float32)})
        return featcache.open(tmp_path)

    ids, found = ["c", "a", "x"], RowsOfIds()
    rows = found.of(append("a", "c"), ids)
    assert rows.tolist() == [1, 0, -1]
    assert found.of(featcache.open(tmp_path), ids) is rows
    assert found.of(featcache.open(tmp_path), ["a"]).tolist() == [0]
    assert found.of(append("b"), ids).tolist() == [2, 0, -1]
