"""Computation of a batch's features: the user's function, and its results without padding."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, cast

from featcache._tensors import ArrayLike
from featcache.errors import ComputeError, FeatureError, describe, nearest
from featcache.extraction.dataset_batches import DatasetBatches, LoadedBatch, worker_failed
from featcache.extraction.datasets import named
from featcache.extraction.job import Failure, TaskProgress, failure_of
from featcache.extraction.process_part import WhileFilling
from featcache.extraction.random_state import COMPUTING, seed_generators
from featcache.format.files import as_id
from featcache.format.index import UNKNOWN, Stamps
from featcache.loading.memory import to_device
from featcache.writing.part_writer import PartWriter

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


def features_of(extractor: Any, stage: Any, data: Any) -> Any:
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
