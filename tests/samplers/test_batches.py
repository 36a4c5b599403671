from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from featcache.extraction.datasets import ids_of_batch, size_of, visible_ids
from featcache.loading.memory import to_device

Padded = namedtuple("Padded", ["data", "lengths"])  # as SpeechBrain's


class Dataset:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("attributes", "ids"),
    [
        ({"data_ids": ["a", "b"]}, ["a", "b"]),
        ({"ids": ("a", "b")}, ("a", "b")),
        ({"ids": np.array(["a", "b"])}, ["a", "b"]),
        ({"data_ids": ["a", "b"], "ids": [1, 2]}, ["a", "b"]),
        ({"ids": ["of", "three", "speakers"]}, None),
        ({"ids": lambda: ["a", "b"]}, None),
        ({"data_ids": [0, 1]}, ["0", "1"]),
        ({"ids": np.arange(2)}, ["0", "1"]),
        ({"ids": torch.arange(2)}, ["0", "1"]),
        ({"ids": ["a", 1]}, ["a", "1"]),
        ({"ids": [0.5, 1.5]}, None),
        ({"ids": torch.rand(2)}, None),
        ({}, None),
    ],
)
def test_ids_are_visible_as_strings_one_for_each_utterance(
    attributes: dict[str, Any], ids: Any
) -> None:
    for source in (Dataset(**attributes), SimpleNamespace(dataset=Dataset(**attributes))):
        found = visible_ids(source)
        assert (found is None) if ids is None else (found is not None and list(found) == list(ids))


def test_a_source_without_a_length_shows_no_ids() -> None:
    assert visible_ids(SimpleNamespace(ids=["a", "b"])) is None


def test_the_size_is_that_of_the_dataset_if_it_tells() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([])

    assert size_of([1, 2, 3]) == 3
    assert size_of(torch.utils.data.DataLoader([1, 2, 3], batch_size=2)) == 3  # type: ignore[arg-type]
    assert size_of(torch.utils.data.DataLoader(Stream())) is None
    assert size_of(iter([])) is None


@pytest.mark.parametrize(
    ("batch", "ids"),
    [
        (SimpleNamespace(id=["a", "b"]), ["a", "b"]),
        ({"id": ("a", "b")}, ["a", "b"]),
        ({"id": "a"}, ["a"]),
        ({"id": torch.tensor([1, 2])}, ["1", "2"]),
        ({"id": torch.tensor(3)}, ["3"]),
        ({"id": np.int64(3)}, ["3"]),
        ({"id": torch.tensor([1.5])}, None),
        ({"id": [1, 2]}, ["1", "2"]),
        ({}, None),
        ([torch.zeros(1)], None),
    ],
)
def test_a_batch_shows_its_ids_under_id(batch: Any, ids: list[str] | None) -> None:
    assert ids_of_batch(batch) == ids


def test_all_tensors_of_a_batch_are_moved() -> None:
    tensor = torch.zeros(1)
    moved: Any = to_device(
        {"a": [tensor, "text"], "b": (3, tensor), "c": Padded(tensor, None)}, "meta"
    )
    assert moved["a"][0].is_meta
    assert moved["b"][1].is_meta
    assert moved["c"].data.is_meta
    assert (moved["a"][1], moved["b"][0], moved["c"].lengths) == ("text", 3, None)
    assert isinstance(moved["c"], Padded)
