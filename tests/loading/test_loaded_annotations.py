"""Annotations in items and batches of data sets and loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from annotation_helpers import annotations_of, make_annotated
from torch.utils.data import DataLoader

import featcache
from featcache import FeatureDataset, FeatureLoader
from featcache.errors import ConfigError, KeyNotFoundError

NAMES = ["text", "speaker", "channel", "duration", "clean", "units_of"]


@pytest.fixture
def cache(tmp_path: Path) -> featcache.Cache:
    return featcache.open(make_annotated(tmp_path, range(20)))


def expected(id: str) -> dict[str, Any]:
    return annotations_of(int(id.rpartition("-")[2]))


def test_no_annotation_is_read_by_default(cache: featcache.Cache) -> None:
    assert FeatureDataset(cache)[0].keys() == {
        *("id", "fbank", "fbank_lengths", "units", "units_lengths")
    }


def test_an_item_has_plain_values(cache: featcache.Cache) -> None:
    dataset = FeatureDataset(cache, "fbank", annotations=NAMES)
    for row in range(20):
        item = dataset[row]
        for name in NAMES:
            value, wanted = item[name], expected(item["id"])[name]
            assert value == wanted
            assert wanted is None or name == "duration" or type(value) is type(wanted)


@pytest.mark.parametrize("transform", [None, lambda item, rng: item])
def test_a_batch_lists_values_and_stacks_numbers_that_all_have(
    cache: featcache.Cache, transform: Any
) -> None:
    dataset = FeatureDataset(cache, "fbank", annotations=NAMES, transform=transform)
    for batch in FeatureLoader(dataset, batch_size=3):
        of_ids = [expected(id) for id in batch["id"]]
        for name in NAMES:
            if name != "duration":
                assert batch[name] == [values[name] for values in of_ids]
        durations = torch.tensor([float(values["duration"]) for values in of_ids])
        assert torch.equal(batch["duration"], durations)


def test_loaders_and_their_transforms_have_annotations(cache: featcache.Cache) -> None:
    def transform(item: dict[str, Any], rng: object) -> dict[str, Any]:
        return item | {
            "tokens": torch.tensor([*item["text"].encode()], dtype=torch.uint8),
            "tokens_lengths": 0,
        }

    loader = FeatureLoader(cache, annotations="text", transform=transform, batch_size=4)
    for batch in loader:
        for text, tokens, length in zip(
            batch["text"], batch["tokens"], batch["tokens_lengths"], strict=True
        ):
            assert bytes(tokens[:length].tolist()).decode() == text


def test_an_annotation_that_a_transform_makes_a_tensor_is_laid_out(cache: featcache.Cache) -> None:
    def encoded(item: dict[str, Any], rng: object) -> dict[str, Any]:
        tokens = torch.tensor([*item["text"].encode()], dtype=torch.uint8)
        return item | {"text": tokens, "text_lengths": len(tokens)}

    plain = FeatureLoader(cache, annotations="text", batch_size=4)
    for batch, texts in zip(
        FeatureLoader(cache, annotations="text", transform=encoded, batch_size=4),
        [batch["text"] for batch in plain],
        strict=True,
    ):
        found = zip(batch["text"], batch["text_lengths"], strict=True)
        assert [bytes(row[:length].tolist()).decode() for row, length in found] == texts


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_read_annotations(cache: featcache.Cache, context: str) -> None:
    dataset = FeatureDataset(cache.table.select([7, 3, 11]), annotations=NAMES)
    loader = DataLoader(
        dataset,
        batch_size=2,
        num_workers=1,
        multiprocessing_context=context,
        collate_fn=FeatureDataset.collate,
    )
    rows = [
        (id, text) for batch in loader for id, text in zip(batch["id"], batch["text"], strict=True)
    ]
    assert rows == [(cache.ids[row], expected(cache.ids[row])["text"]) for row in (7, 3, 11)]


def test_names_that_cannot_be_read_are_refused(cache: featcache.Cache) -> None:
    with pytest.raises(KeyNotFoundError, match=r"no annotation 'texts'.*'text'"):
        FeatureDataset(cache, annotations=["texts"])
    with pytest.raises(ConfigError, match="other uses for these names"):
        FeatureDataset(cache, annotations=["text", "text"])
    with pytest.raises(ConfigError, match=r"features, annotations, .* are those of the"):
        FeatureLoader(FeatureDataset(cache), annotations=["text"], batch_size=2)
