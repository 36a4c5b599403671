"""Batches of utterances that a cache lacks, and the computation of their features.

Batches come with their ids where the data set shows them. They go through the user's function, and
its results come back without padding.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from featcache._tensors import ArrayLike
from featcache.errors import ComputeError, ConfigError, FeatureError, describe, nearest
from featcache.extraction.datasets import (
    COMPUTING,
    DataSet,
    SeededItems,
    ids_of_batch,
    is_map_style,
    named,
    seed_generators,
)
from featcache.extraction.job import Failure, TaskProgress, failure_of
from featcache.extraction.process_part import WhileFilling
from featcache.extraction.stamping import (
    BatchStamps,
    StreamStamps,
    iterate_stamping,
    stamp_items,
    unstamped,
)
from featcache.format import UNKNOWN, Stamps, as_id
from featcache.interface import Ints
from featcache.loading.memory import to_device
from featcache.samplers.batches import Batches
from featcache.writing.part_writer import PartWriter

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


def _options(loader_kwargs: Mapping[str, object], less: Iterable[str] = ()) -> dict[str, object]:
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


# Padding left in what `compute_features` returns: noticed by the lengths in its batch.


def uncut(
    data: object, utterances: Sequence[tuple[str, Mapping[str, object]]], features: Iterable[str]
) -> str | None:
    """Return a warning if the utterances of a batch have equal frames though they differ in length.

    Args:
        data: the batch. Only one with relative lengths, as SpeechBrain's `PaddedBatch`, can tell,
            and only in the processor's memory.
        utterances: ids and arrays that were computed of it.
        features: names of the features with a time axis.
    """
    shortest = min(_relative_lengths(data), default=1.0)
    if len(utterances) < 2:
        return None
    for name in features:
        arrays: list[Any] = [computed.get(name) for _, computed in utterances]
        frames = {len(array) for array in arrays if getattr(array, "shape", ())}
        if len(frames) == 1 and (count := frames.pop()) - shortest * count > 2:  # rounding aside
            return (
                f"all utterances of the batch of {utterances[0][0]!r} have {count} frames of "
                f"feature {name!r}, though the shortest is {shortest:.0%} of the longest; is the "
                "padding still there? cut it with featcache.unpad, or declare time_axis: null if "
                "each utterance does have as many"
            )
    return None


def _relative_lengths(data: object) -> list[float]:
    """Return the lengths of a batch, relative to its longest utterance, as far as it shows any."""
    values = data.values() if isinstance(data, Mapping) else getattr(data, "__dict__", {}).values()
    padded: list[Any] = [getattr(part, "lengths", None) for part in values if hasattr(part, "data")]
    found = [float(length) for each in padded if _is_here(each) for length in each.tolist()]
    return found if all(0 < length <= 1 for length in found) else []


def _is_here(lengths: object) -> bool:
    """Whether these are numbers in memory: on a GPU they would have to be waited for."""
    device = getattr(lengths, "device", None)
    return hasattr(lengths, "tolist") and getattr(device, "type", "cpu") == "cpu"


# Computing and writing of some utterances, batch by batch, whichever process does it.

Utterances = list[tuple[str, dict[str, ArrayLike]]]  # ids, and their arrays by feature


@dataclass
class Computation:
    """Computes batches and writes what comes out; a batch that fails is taken again one by one.

    Args:
        compute: makes a list of dicts, "id" and arrays, of a batch's data.
        batches: loads utterances of a batch again; None: they cannot be loaded again.
        writer: takes what is computed.
        skip_failures: note failures and go on; otherwise they raise `ComputeError`.
        only_missing: the batches hold nothing that is in the cache; otherwise it is looked up for
            each utterance.
        retries: how often an utterance that failed is tried again.
        check_new: called with ids of the batches that are not in the cache, unless `only_missing`;
            may raise.
        seed: of random features: each utterance, a batch of its own, has generators of its own.
        beside: features that are computed with the others and stored elsewhere.
        filling: compares what they are made with, before and after each batch.
    """

    compute: Callable[[object], object]
    batches: DatasetBatches | None
    writer: PartWriter
    skip_failures: bool
    only_missing: bool
    retries: int = 0
    check_new: Callable[[Sequence[str]], object] = lambda ids: None
    seed: int | None = None
    beside: frozenset[str] = frozenset()
    filling: WhileFilling | None = None

    def __post_init__(self) -> None:
        self.failures: list[Failure] = []
        self.processed = 0  # utterances that were written, failed, or were known already
        self.seen: set[str] = set()  # their ids, unless `only_missing`
        self._bytes_before = self.writer.bytes_written
        self._warned = False  # of padding that was left in
        self._new: set[str] = set()  # ids written now, unless `only_missing`

    def progress(self, task: int = 0) -> TaskProgress:
        """Return what has been done of a task so far."""
        nbytes = self.writer.bytes_written - self._bytes_before
        return TaskProgress(task, self.processed, nbytes, len(self.failures))

    def process(self, batch: LoadedBatch, tried: int = 0) -> None:
        """Compute and write one batch, or what of it can be computed."""
        if batch.ids and all(map(self._was_known, batch.ids)):
            self._count(batch.ids)
            return
        self._admit(batch.ids or ())
        try:
            utterances = self._compared(batch)
        except Exception as failure:
            if worker_failed(failure) or (self.filling is not None and self.filling.is_over):
                raise
            error = failure
        else:
            if batch.ids is None:
                self._admit([id for id, _ in utterances])
            for id, arrays in utterances:
                self._write(id, arrays, batch.stamps.get(id, UNKNOWN))
            return
        # out here, so that the next error does not come with this one
        self._failed(batch, error, tried)

    def _compared(self, batch: LoadedBatch) -> Utterances:
        if self.filling is None:
            return self._features(batch)
        which = named(batch.ids) if batch.ids else "a batch"
        return self.filling.compute(which, partial(self._features, batch))

    def _features(self, batch: LoadedBatch) -> Utterances:
        if batch.error is not None:
            raise batch.error
        if self.seed is not None and batch.ids:
            seed_generators(self.seed, batch.ids[0], COMPUTING)
        utterances = checked_result(self.compute(batch.data), batch.ids)
        for name, (_, arrays) in product(self.beside, utterances):
            arrays.pop(name, None)
        if not self._warned:
            timed = [f.name for f in self.writer.features.values() if f.time_axis == 0]
            if sentence := uncut(batch.data, utterances, timed):
                self._warned = True
                warnings.warn(sentence, stacklevel=2)
        return utterances

    def _failed(self, batch: LoadedBatch, error: Exception, tried: int) -> None:
        several = len(batch.indices) > 1  # perhaps it is one of them, perhaps they were too many
        # a result of the wrong form is a fault of the code, which another try does not mend
        may_pass = tried < self.retries and not isinstance(error, FeatureError)
        if self.batches is not None and (may_pass or (several and self.skip_failures)):
            for single in self.batches.singly(batch):
                self.process(single, tried if several else tried + 1)
        elif self.skip_failures:
            for id in batch.ids or (None,):
                self._note(id, error)
        else:
            which = named(batch.ids) if batch.ids else "a batch"
            text = f"computing the features of {which} failed with {describe(error)}"
            raise ComputeError(text) from error

    def _write(self, id: str, arrays: Mapping[str, ArrayLike], stamps: Stamps) -> None:
        if not self._was_known(id):
            try:
                self.writer.write(id, arrays, stamps=stamps)
            except FeatureError as error:
                if not self.skip_failures:
                    raise
                self._note(id, error)
                return
            if not self.only_missing:
                self._new.add(id)
        self._count([id])

    def _note(self, id: str | None, error: Exception) -> None:
        self.failures.append(failure_of(id, error))
        self._count([id])

    def _count(self, ids: Sequence[str | None]) -> None:
        self.processed += len(ids)
        if not self.only_missing:
            self.seen.update(id for id in ids if id is not None)

    def _admit(self, ids: Sequence[str]) -> None:
        if not self.only_missing and (new := [id for id in ids if not self._was_known(id)]):
            self.check_new(new)

    def _was_known(self, id: str) -> bool:
        # one that was written in this run is not known: the writer says where it came from the
        # first time
        return not self.only_missing and id not in self._new and id in self.writer


def features_of(extractor: Any, stage: object, data: object) -> Any:
    """Call `compute_features` for a batch, on its device and in its evaluation precision."""
    with getattr(extractor, "evaluation_ctx", None) or contextlib.nullcontext():
        utterances = extractor.compute_features(to_device(data, extractor.device), stage)
        # in that precision, too
        return list(utterances) if isinstance(utterances, Iterator) else utterances


def checked_result(result: object, ids: list[str] | None) -> Utterances:
    """Return (id, arrays) of what `compute_features` returned.

    Raises `FeatureError` unless it fits the batch.
    """
    must = "compute_features must return"
    if not isinstance(result, Iterable):
        raise FeatureError(f"{must} a list of dicts, one per utterance, not {result!r}")
    utterances: Utterances = []
    for utterance in result:
        if not isinstance(utterance, Mapping) or "id" not in utterance:
            given = list(utterance) if isinstance(utterance, Mapping) else type(utterance).__name__
            raise FeatureError(f"{must} dicts with the key 'id', not of {given!r}")
        arrays = {key: value for key, value in utterance.items() if key != "id"}
        utterances.append((cast(str, as_id(utterance["id"])), arrays))
    if ids is not None:
        _check_ids([id for id, _ in utterances], ids)
    return utterances


def _check_ids(returned: list[str], ids: list[str]) -> None:
    for id in dict.fromkeys((*returned, *ids)):
        if id not in ids:
            raise FeatureError(
                f"compute_features returned {id!r}, which is not in the batch: {nearest(id, ids)}"
            )
        if (times := returned.count(id)) != 1:
            raise FeatureError(f"compute_features returned {times} dicts for {id!r} instead of one")
