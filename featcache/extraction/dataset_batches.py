"""Batches of the utterances that a cache lacks, with their ids where the dataset shows them."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from featcache.errors import ConfigError, FeatureError, nearest
from featcache.extraction.datasets import ids_of_batch, is_map_style, size_of
from featcache.store.format.ids import as_id

# of a loader for training; here each utterance comes once, in the order of the dataset or of a
# given sampler
_NOT_FOR_CACHING = ("shuffle", "drop_last", "ckpt_prefix", "looped_nominal_epoch", "in_order")


@dataclass(frozen=True)
class Batch:
    """One batch, or the error that loading it ended in."""

    data: Any
    ids: list[str] | None  # None: neither dataset nor batch shows them
    error: Exception | None = None
    indices: list[int] = field(default_factory=list)  # in the dataset; empty: unknown


class LoaderBatches:
    """The batches of a given loader, as they come."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.total = size_of(loader)

    def __iter__(self) -> Iterator[Batch]:
        for data in self.loader:
            yield Batch(data, ids_of_batch(data))


def worker_failed(error: Exception) -> bool:
    """Say whether a loader's worker died or hangs.

    PyTorch raises the first from a signal handler, at any moment.
    """
    return isinstance(error, RuntimeError) and str(error).startswith(
        ("DataLoader worker", "DataLoader timed out")
    )


class DatasetBatches:
    """Batches of some utterances of a map-style dataset.

    Args:
        dataset: the dataset; untouched, also where only some of it is asked for.
        indices: the utterances wanted.
        loader_kwargs: arguments of a DataLoader. A sampler or batch sampler stays, less what is not
            wanted.
        ids: the ids of the whole dataset, if it shows them.
    """

    def __init__(
        self,
        dataset: Any,
        indices: Sequence[int],
        loader_kwargs: Mapping[str, Any],
        ids: Sequence[str] | None,
    ) -> None:
        self.total = len(indices)
        self._dataset = dataset
        self._ids = ids
        self._sampler = _Recorded(indices, len(dataset), loader_kwargs)
        given = ("batch_size", "sampler", "batch_sampler", *_NOT_FOR_CACHING)
        options = {key: value for key, value in loader_kwargs.items() if key not in given}
        if self._sampler.batched:
            options["batch_sampler"] = self._sampler
        else:
            options |= {"batch_size": None, "sampler": self._sampler}
        self._loader = _make_loader(dataset, options)

    def __iter__(self) -> Iterator[Batch]:
        loaded = iter(self._loader)
        while True:
            try:
                data, error = next(loaded), None
            except StopIteration:
                return
            except Exception as failure:
                if not self._sampler.taken or worker_failed(failure):
                    raise  # not the failure of one batch
                data, error = None, failure
            yield self._batch(data, self._sampler.taken.popleft(), error)

    def singly(self, batch: Batch) -> Iterator[Batch]:
        """Load the utterances of a batch that failed one by one."""
        collate = self._loader.collate_fn
        for index in batch.indices:
            try:
                item = self._dataset[index]
                data, error = collate([item] if self._sampler.batched else item), None
            except Exception as failure:
                data, error = None, failure
            yield self._batch(data, [index], error)

    def _batch(self, data: Any, indices: list[int], error: Exception | None) -> Batch:
        ids = (
            [self._ids[index] for index in indices] if self._ids is not None else ids_of_batch(data)
        )
        return Batch(data, ids, error, indices)


class _Recorded:
    """Yields the indices of each batch and keeps them in `taken`.

    A loader does not say what it failed on.
    """

    def __init__(self, indices: Sequence[int], size: int, loader_kwargs: Mapping[str, Any]) -> None:
        self.taken: deque[list[int]] = deque()
        self._batches = loader_kwargs.get("batch_sampler")
        self._order = loader_kwargs.get("sampler")
        self._batch_size = loader_kwargs.get("batch_size", 1)
        self.batched = self._batches is not None or self._batch_size is not None
        self._indices = np.asarray(indices, np.int64)
        self._wanted = np.zeros(size, bool)
        self._wanted[self._indices] = True

    def __iter__(self) -> Iterator[Any]:
        self.taken.clear()
        for batch in self.wanted_batches():
            self.taken.append(batch)
            yield batch if self.batched else batch[0]

    def wanted_batches(self) -> Iterator[list[int]]:
        """Iterate over the batches to be loaded."""
        if self._batches is not None:
            for batch in self._batches:
                if wanted := [int(index) for index in batch if self._wanted[index]]:
                    yield wanted
            return
        if self._order is not None:
            self._indices = np.array(
                [index for index in self._order if self._wanted[index]], np.int64
            )
        size = self._batch_size or 1
        for start in range(0, len(self._indices), size):
            yield self._indices[start : start + size].tolist()


def wanted_batches(
    indices: Sequence[int], size: int, loader_kwargs: Mapping[str, Any]
) -> list[list[int]]:
    """Return the batches that a sampler or batch sampler makes, less what is not wanted.

    They are of a dataset of `size`.
    """
    return list(_Recorded(indices, size, loader_kwargs).wanted_batches())


def batches_of_stream(source: Any, loader_kwargs: Mapping[str, Any]) -> LoaderBatches:
    """Return the batches of a loader as it is, or of an iterable dataset."""
    if isinstance(source, IterableDataset):
        source = _make_loader(
            source, {k: v for k, v in loader_kwargs.items() if k not in _NOT_FOR_CACHING}
        )
    return LoaderBatches(source)


def _make_loader(dataset: Any, options: Mapping[str, Any]) -> Any:
    """Make a DataLoader, with SpeechBrain's defaults where it is in use.

    Its checkpointer does not get to know it.
    """
    if "speechbrain" in sys.modules:
        from speechbrain.dataio.dataloader import make_dataloader

        return make_dataloader(dataset, **options)
    return DataLoader(dataset, **options)


def learnt_ids(source: Any, loader_kwargs: Mapping[str, Any]) -> list[str] | None:
    """Return the ids of a data set or loader that does not show them, by loading all of it once.

    None if its batches do not show them either, or some of it cannot be loaded.
    """
    batches: LoaderBatches | DatasetBatches = batches_of_stream(source, loader_kwargs)
    if is_map_style(source):
        options = {key: value for key, value in loader_kwargs.items() if "sampler" not in key}
        batches = DatasetBatches(source, range(len(source)), options, None)
    found: list[str] = []
    for batch in batches:
        if batch.ids is None or batch.error is not None:
            return None
        found += batch.ids
    return found


def check_loader_kwargs(loader_kwargs: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what is no argument of a DataLoader.

    This comes before one is made in the middle of a run.
    """
    known = {*inspect.signature(DataLoader).parameters, *_NOT_FOR_CACHING} - {"dataset"}
    for key in loader_kwargs:
        if key not in known:
            raise ConfigError(
                f"loader_kwargs has {key!r}, which is no argument of a DataLoader; "
                f"{nearest(key, known)}"
            )


def to_device(data: Any, device: Any) -> Any:
    """Move all tensors of a batch."""
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    return data


def checked_utterances(result: Any, ids: list[str] | None) -> list[tuple[str, dict[str, Any]]]:
    """Return (id, arrays) of what `compute_features` returned.

    Raises `FeatureError` unless it fits the batch.
    """
    if not isinstance(result, Iterable):
        raise FeatureError(
            f"compute_features must return a list of dicts, one per utterance, not {result!r}"
        )
    checked: list[tuple[str, dict[str, Any]]] = []
    for utterance in result:
        if not isinstance(utterance, Mapping) or "id" not in utterance:
            given = list(utterance) if isinstance(utterance, Mapping) else type(utterance).__name__
            raise FeatureError(
                f"compute_features must return dicts with the key 'id', not of {given!r}"
            )
        arrays = {key: value for key, value in utterance.items() if key != "id"}
        checked.append((cast(str, as_id(utterance["id"])), arrays))
    if ids is not None:
        returned = [id for id, _ in checked]
        for id in returned:
            if id not in ids:
                raise FeatureError(
                    f"compute_features returned {id!r}, which is not in the batch: "
                    f"{nearest(id, ids)}"
                )
        for id in ids:
            if returned.count(id) != 1:
                raise FeatureError(
                    f"compute_features returned {returned.count(id)} dicts for {id!r} instead of "
                    "one"
                )
    return checked
