"""Batches of the utterances that a cache lacks, with their ids where the dataset shows them."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from featcache.errors import ConfigError, nearest
from featcache.extraction.datasets import DataSet, ids_of_batch, is_map_style
from featcache.extraction.random_state import SeededItems
from featcache.extraction.stamping import (
    BatchStamps,
    StreamStamps,
    iterate_stamping,
    stamp_items,
    unstamped,
)
from featcache.format.index import Stamps
from featcache.interface import Ints
from featcache.samplers.batches import Batches

# of a loader for training; here each utterance comes once, in the order of the dataset or of a
# given sampler
_NOT_FOR_CACHING = {"shuffle", "drop_last", "ckpt_prefix", "looped_nominal_epoch", "in_order"}
_OF_BATCHES = {"batch_size", "sampler", "batch_sampler"}
_SINGLE = -1  # the number of a batch that is none of the plan


@dataclass(frozen=True)
class LoadedBatch:
    """One batch, or the error that loading it ended in."""

    data: Any
    ids: list[str] | None  # None: neither dataset nor batch shows them
    error: Exception | None = None
    indices: Sequence[int] = ()  # in the dataset; empty: unknown
    stamps: Mapping[str, Stamps] = field(default_factory=dict)  # as far as known


class Loading(NamedTuple):
    """Treatment of items while they are loaded.

    Args:
        mentioned: the keys of an item that count as its input; None: batches have no stamps.
        seed: of random data: utterances come one by one, from generators of their own.
    """

    mentioned: frozenset[str] | None = None
    seed: int | None = None


AS_THEY_ARE = Loading()


def worker_failed(error: Exception) -> bool:
    """Whether a loader's worker died or hangs.

    Of a death PyTorch tells from a signal handler, at any moment.
    """
    return isinstance(error, RuntimeError) and str(error).startswith(
        ("DataLoader worker", "DataLoader timed out")
    )


def end_workers(loaded: Iterator[object]) -> None:
    """End the processes of a DataLoader's iterator now, as it does itself when it is let go.

    Let go in a cycle, by the garbage collector, it closes descriptors twice: its queues have closed
    theirs already, and the second time they are those of other files.
    """
    end: Callable[[], object] | None = getattr(loaded, "_shutdown_workers", None)
    if end is not None:
        end()


class DatasetBatches:
    """Batches of some utterances of a map-style dataset, to be gone through once.

    Args:
        dataset: the dataset; untouched, also where only some of it is asked for.
        indices: the utterances wanted.
        loader_kwargs: arguments of a DataLoader. A sampler or batch sampler stays, less what is not
            wanted.
        ids: the ids of the whole dataset, if it shows them.
        loading: stamps and seed of the items.
    """

    def __init__(
        self,
        dataset: DataSet,
        indices: Ints | Sequence[int],
        loader_kwargs: Mapping[str, object],
        ids: Sequence[str] | None,
        loading: Loading = AS_THEY_ARE,
    ) -> None:
        self._dataset: DataSet = dataset
        self._ids = ids
        self._stamps = None if loading.mentioned is None else BatchStamps(dataset, ids)
        if loading.seed is not None and ids is not None:
            self._dataset = SeededItems(dataset, ids, loading.seed)
        singly = self._dataset is not dataset
        self._batches = wanted_batches(indices, len(dataset), loader_kwargs, singly=singly)
        options = _options(loader_kwargs, _OF_BATCHES)
        batch_sampler = loader_kwargs.get("batch_sampler")
        self._batched = batch_sampler is not None or loader_kwargs.get("batch_size", 1) is not None
        begin = partial(_begin, self._batches, self._stamps)
        asked = map(begin, range(len(self._batches)))
        if self._batched:
            # not the batches themselves: to iterate over them makes a list of all that they hold
            options["batch_sampler"] = asked
        else:
            options |= {"batch_size": None, "sampler": map(itemgetter(0), asked)}
        self._loader = _make_loader(self._dataset, options)
        if loading.mentioned is not None:
            stamp_items(self._loader, loading.mentioned)

    def __iter__(self) -> Generator[LoadedBatch, None, None]:
        loaded = iter(self._loader)
        try:
            # a loader does not say what it failed on, but it keeps the order
            for number in range(len(self._batches)):
                try:
                    data, error = next(loaded), None
                except Exception as failure:
                    if worker_failed(failure):
                        raise
                    data, error = None, failure
                yield self._batch(number, _indices(self._batches, number), data, error)
        finally:
            end_workers(loaded)

    def collated(self, items: list[Any]) -> object:
        """Return the batch of these items."""
        return self._loader.collate_fn(items if self._batched else items[0])

    def singly(self, batch: LoadedBatch) -> Iterator[LoadedBatch]:
        """Load the utterances of a batch that failed one by one."""
        for index in batch.indices:
            if self._stamps is not None:
                self._stamps.begin(_SINGLE, [index])
            try:
                data, error = self.collated([self._dataset[index]]), None
            except Exception as failure:
                data, error = None, failure
            yield self._batch(_SINGLE, [index], data, error)

    def _batch(
        self, number: int, indices: Sequence[int], data: object, error: Exception | None
    ) -> LoadedBatch:
        stamps = {} if self._stamps is None else self._stamps.end(number, indices, data)
        data, shown = unstamped(data), self._ids
        ids = ids_of_batch(data) if shown is None else [shown[index] for index in indices]
        return LoadedBatch(data, ids, error, indices, stamps)


def _begin(batches: Batches, stamps: BatchStamps | None, number: int) -> list[int]:
    """Return what a loader is to load next."""
    indices = _indices(batches, number)
    if stamps is not None:
        stamps.begin(number, indices)
    return indices


def _indices(batches: Batches, number: int) -> list[int]:
    return cast(list[int], batches.batch(number))


def wanted_batches(
    indices: Ints | Sequence[int],
    size: int,
    loader_kwargs: Mapping[str, Any],
    *,
    singly: bool = False,
) -> Batches:
    """Return the batches that a loader makes of some utterances of a dataset of `size`.

    A batch sampler or sampler keeps its order, less what is not in `indices`; without one, the
    order is that of `indices`. With `singly`, each utterance is a batch.
    """
    if singly:
        items = wanted_batches(indices, size, loader_kwargs).items
        return Batches(items, np.arange(len(items) + 1))
    indices = np.asarray(indices, np.int64)
    sampler: Any = loader_kwargs.get("sampler")
    batch_sampler = loader_kwargs.get("batch_sampler")
    if sampler is not None or batch_sampler is not None:
        wanted = np.zeros(size, bool)
        wanted[indices] = True
        if batch_sampler is not None:
            kept = ([int(index) for index in batch if wanted[index]] for batch in batch_sampler)
            return Batches.of([batch for batch in kept if batch])
        indices = np.array([index for index in sampler if wanted[index]], np.int64)
    batch_size = loader_kwargs.get("batch_size", 1) or 1
    return Batches(indices, np.append(np.arange(0, len(indices), batch_size), len(indices)))


def batches_of_stream(
    source: Iterable[object],
    loader_kwargs: Mapping[str, object],
    mentioned: frozenset[str] | None = None,
) -> Generator[LoadedBatch, None, None]:
    """Iterate over the batches of a loader as it is, or of an iterable dataset.

    They have stamps where `mentioned` keys are given and the loader lets its items be seen.
    """
    is_ours = isinstance(source, IterableDataset)
    if is_ours:
        source = _make_loader(source, _options(loader_kwargs))
    stamps = None if mentioned is None else StreamStamps(source)
    loaded = iter(source) if mentioned is None else iterate_stamping(source, mentioned)
    try:
        for data in loaded:
            found = {} if stamps is None else stamps.of(data)
            yield LoadedBatch(unstamped(data), ids_of_batch(unstamped(data)), stamps=found)
    finally:
        if is_ours or not getattr(source, "persistent_workers", False):
            end_workers(loaded)


def _options(loader_kwargs: Mapping[str, object], less: Iterable[str] = ()) -> dict[str, Any]:
    """Return the arguments that count in an extraction."""
    left_out = _NOT_FOR_CACHING.union(less)
    return {key: value for key, value in loader_kwargs.items() if key not in left_out}


def _make_loader(dataset: Any, options: Mapping[str, Any]) -> DataLoader[object]:
    """Make a DataLoader, with SpeechBrain's defaults where it is in use, but no checkpoints."""
    if "speechbrain" in sys.modules:
        from speechbrain.dataio.batch import PaddedBatch
        from speechbrain.dataio.dataloader import make_dataloader
        from speechbrain.dataio.dataset import DynamicItemDataset

        if isinstance(getattr(dataset, "seeded", None), DynamicItemDataset):
            options = {"collate_fn": PaddedBatch, **options}  # its default for these
        return cast("DataLoader[object]", make_dataloader(dataset, **options))
    return DataLoader(dataset, **options)


def learnt_ids(source: Any, loader_kwargs: Mapping[str, object]) -> list[str] | None:
    """Return the ids of a data set or loader that does not show them, by loading all of it once.

    None if its batches do not show them either, or some of it cannot be loaded.
    """
    if is_map_style(source):
        options = {key: value for key, value in loader_kwargs.items() if "sampler" not in key}
        batches = iter(DatasetBatches(source, range(len(source)), options, None))
    else:
        batches = batches_of_stream(source, loader_kwargs)
    found: list[str] = []
    with contextlib.closing(batches):
        for batch in batches:
            if batch.ids is None or batch.error is not None:
                return None
            found += batch.ids
    return found


def check_loader_kwargs(loader_kwargs: Mapping[str, object]) -> None:
    """Raise `ConfigError` for what is no argument of a DataLoader, before the run has begun."""
    known = _NOT_FOR_CACHING.union(inspect.signature(DataLoader).parameters) - {"dataset"}
    for key in loader_kwargs:
        if key not in known:
            raise ConfigError(
                f"loader_kwargs has {key!r}, which is no argument of a DataLoader; "
                f"{nearest(key, known)}"
            )
