"""Inputs of the factories: ESPnet's kind of data set or a `FeatureDataset`, and its batches."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from featcache.errors import ConfigError, nearest
from featcache.iterators.epoch_order import BatchList
from featcache.loading.collate import ArrayOrTensor, CommonCollateFn, PaddedBatch
from featcache.loading.dataset import FeatureDataset
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.build import build_batch_sampler
from featcache.tables.numbering import require_rows_of

Collate = Callable[[Any], Any]


class ItemDataset(Protocol):
    """A data set: indexed by an id or a row, gives `(id, {name: array})`; or a `FeatureDataset`."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return an utterance."""
        ...


class _Pairs:
    """The utterances of a `FeatureDataset` as ESPnet's collate functions expect them: in numpy."""

    def __init__(self, dataset: FeatureDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> tuple[str, dict[str, ArrayOrTensor]]:
        item = self._dataset[index]
        values = {name: value for name, value in item.items() if not name.endswith("_lengths")}
        return values.pop("id"), as_arrays(values)


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, ArrayOrTensor]:
    """Return tensors as numpy arrays, but for those of a dtype that numpy does not have."""
    return {
        name: value if value.dtype == torch.bfloat16 else value.numpy()
        for name, value in tensors.items()
    }


def batch_list(
    batches: BatchList | Mapping[str, object] | Iterable[Any], dataset: ItemDataset
) -> BatchList:
    """Return the batches; made by `build_batch_sampler` where its arguments are given.

    Raises `ConfigError` for what is no list of batches.
    """
    if isinstance(batches, Mapping):
        check_names("batches", batches, build_batch_sampler)
        batches = build_batch_sampler(**with_lengths(batches, dataset))
    if isinstance(batches, Batches) and batches.numbering and isinstance(dataset, FeatureDataset):
        require_rows_of(dataset.table, batches.numbering)
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise ConfigError(
            "batches are lists of ids or rows, or the arguments of build_batch_sampler, not "
            f"{batches!r}"
        )
    listed = batches if isinstance(batches, Sequence) else list(batches)
    if len(listed) and (isinstance(listed[0], str) or not isinstance(listed[0], Sized)):
        raise ConfigError(f"batches are lists of ids or rows, but the first one is {listed[0]!r}")
    return listed


def check_names(argument: str, given: Mapping[str, object], builder: Callable[..., object]) -> None:
    """Raise `ConfigError` for an argument that a builder does not have."""
    known = inspect.signature(builder).parameters
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{argument}: {builder.__name__} has no argument {name!r}; {nearest(name, known)}"
            )


def with_lengths(arguments: Mapping[str, object], dataset: ItemDataset) -> dict[str, Any]:
    """Return a builder's arguments; a `FeatureDataset` gives lengths where shape files do not."""
    given = dict(arguments)
    if not given.get("shape_files") and given.get("lengths") is None:
        given |= {"lengths": dataset} if isinstance(dataset, FeatureDataset) else {}
    return given


def epoch_loader(
    dataset: ItemDataset,
    collate_fn: Collate | None,
    num_workers: int,
    pin_memory: bool,
    batches: Iterable[Any],
    seed: int,
) -> DataLoader[PaddedBatch]:
    """Return a DataLoader over `batches`, whose workers are seeded as ESPnet's."""
    source = dataset
    if isinstance(dataset, FeatureDataset):
        # it pads batches itself; a collate function of the user's own takes them one by one
        collate_fn = CommonCollateFn(int_pad_value=0) if collate_fn is None else collate_fn
        source = dataset if isinstance(collate_fn, CommonCollateFn) else _Pairs(dataset)
    return DataLoader(
        source,  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        worker_init_fn=partial(_seed_worker, seed),
    )


def _seed_worker(seed: int, worker: int) -> None:
    random.seed(seed + worker)
    np.random.seed((seed + worker) % 2**32)
