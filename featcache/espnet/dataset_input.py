"""Data sets that ESPnet's iterators read, and the order of their batches in an epoch."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from featcache import FeatureDataset
from featcache.errors import ConfigError, nearest
from featcache.espnet.arrays import Ints
from featcache.espnet.batch_samplers import build_batch_sampler
from featcache.espnet.collate import ArrayOrTensor, CommonCollateFn, PaddedBatch
from featcache.samplers import Batches

# Batches of an epoch and their order: ESPnet's rules, by index.

Utterance = int | str
BatchList = Sequence[Sequence[Utterance]]


def random_state(epoch: int, seed: int) -> np.random.RandomState:
    """Return ESPnet's generator of an epoch; raises `ConfigError` where there is none."""
    if not 0 <= epoch + seed < 2**32:
        raise ConfigError(
            f"the sum of epoch and seed, {epoch + seed}, is not within 0 to 2**32 - 1; epochs "
            "count from 1"
        )
    return np.random.RandomState(epoch + seed)


def epoch_order(batches: int, epoch: int, seed: int, shuffle: bool, per_epoch: int | None) -> Ints:
    """Return the numbers of the batches that epoch `epoch` (from 1 on) takes out of `batches`.

    Without `per_epoch` all of them. Otherwise that many: passes over all batches follow each other,
    each with an order of its own, and each epoch goes on where the one before it ended.

    >>> epoch_order(3, epoch=2, seed=0, shuffle=False, per_epoch=2)
    array([2, 0])
    """
    if per_epoch is None:
        return _pass(batches, epoch, seed, shuffle)
    if not batches:
        raise ConfigError(f"there are no batches of which to take {per_epoch} per epoch")
    start = per_epoch * (epoch - 1)
    stop = start + per_epoch
    taken = [
        _pass(batches, begin // batches, seed, shuffle)[max(start - begin, 0) : stop - begin]
        for begin in range(start // batches * batches, stop, batches)
    ]
    return np.concatenate(taken)


@dataclass(frozen=True)
class EpochRule:
    """The batches that epochs take; `per_epoch` None: all of them."""

    per_epoch: int | None
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.per_epoch is not None and self.per_epoch < 1:
            raise ConfigError(f"an epoch takes at least 1 batch, not {self.per_epoch!r}")

    def batches(self, batches: BatchList, epoch: int, shuffle: bool | None) -> BatchList:
        """Return those of `batches` that an epoch takes; `shuffle` overrides that of the rule."""
        shuffled = self.shuffle if shuffle is None else shuffle
        order = epoch_order(len(batches), epoch, self.seed, shuffled, self.per_epoch)
        if isinstance(batches, Batches):
            return batches.take(order)
        return [batches[number] for number in order.tolist()]


def mixed(batches: BatchList, epoch: int, seed: int) -> BatchList:
    """Shuffle the utterances of all batches into batches of the size of the first.

    Raises `ConfigError` if the first batch is empty.
    """
    if not len(batches):
        return batches
    size = len(batches[0])
    if not size:
        raise ConfigError(
            "the first batch is empty, and with shuffle_within_batch it gives the size of all"
        )
    if isinstance(batches, Batches):
        items = batches.items[batches.ends[0] : batches.ends[-1]]
        shuffled = items[random_state(epoch, seed).permutation(len(items))]
        return Batches(
            shuffled,
            np.append(np.arange(0, len(items), size), len(items)),
            keys=batches.keys,
            numbering=batches.numbering,
        )
    flat = [utterance for batch in batches for utterance in batch]
    flat = [flat[place] for place in random_state(epoch, seed).permutation(len(flat)).tolist()]
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def _pass(batches: int, number: int, seed: int, shuffle: bool) -> Ints:
    # shuffling a list and permuting its numbers take the same draws
    return random_state(number, seed).permutation(batches) if shuffle else np.arange(batches)


# Inputs of the factories: ESPnet's kind of data set or a `FeatureDataset`, and its batches.

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
    if isinstance(batches, Batches) and isinstance(dataset, FeatureDataset):
        dataset.require_rows(batches)
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
