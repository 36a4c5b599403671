"""Computing and writing of some utterances, batch by batch, whichever process does it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from featcache.errors import ComputeError, FeatureError, describe
from featcache.extraction.dataset_batches import (
    Batch,
    DatasetBatches,
    LoaderBatches,
    checked_utterances,
    to_device,
    worker_failed,
)
from featcache.extraction.datasets import named
from featcache.extraction.failures import Failure, failure_of
from featcache.extraction.left_padding import uncut
from featcache.store.writing.part_writer import PartWriter


class Computation:
    """Computes batches and writes what comes out; a batch that fails is taken again one by one.

    Args:
        compute: makes a list of dicts, "id" and arrays, of a batch's data.
        batches: where the batches come from.
        writer: takes what is computed.
        skip_failures: note failures and go on; otherwise they raise `ComputeError`.
        retries: how often an utterance that failed is tried again.
        only_missing: the batches hold nothing that is in the cache; otherwise it is looked up for
            each utterance.
        check_new: called with ids of the batches that are not in the cache, unless `only_missing`;
            may raise.
    """

    def __init__(
        self,
        compute: Callable[[Any], Any],
        batches: DatasetBatches | LoaderBatches,
        writer: PartWriter,
        *,
        skip_failures: bool,
        only_missing: bool,
        retries: int = 0,
        check_new: Callable[[Sequence[str]], object] = lambda ids: None,
    ) -> None:
        self.failures: list[Failure] = []
        self.processed = 0  # utterances that were written, failed, or were known already
        self.seen: set[str] = set()  # their ids, unless `only_missing`
        self._compute = compute
        self._batches = batches
        self._writer = writer
        self._skip_failures = skip_failures
        self._only_missing = only_missing
        self._retries = retries
        self._check_new = check_new
        self._warned = False  # of padding that was left in
        self._new: set[str] = set()  # ids written now, unless `only_missing`

    def process(self, batch: Batch, tried: int = 0) -> None:
        """Compute and write one batch, or what of it can be computed."""
        if batch.ids and all(map(self._was_known, batch.ids)):
            self._known(batch.ids)
            return
        self._admit(batch.ids or ())
        try:
            utterances = self._features(batch)
        except Exception as failure:
            if worker_failed(failure):
                raise
            error = failure
        else:
            if batch.ids is None:
                self._admit([id for id, _ in utterances])
            for id, arrays in utterances:
                self._write(id, arrays)
            return
        # out here, so that the next error does not come with this one
        self._failed(batch, error, tried)

    def _features(self, batch: Batch) -> list[tuple[str, dict[str, Any]]]:
        if batch.error is not None:
            raise batch.error
        utterances = checked_utterances(self._compute(batch.data), batch.ids)
        if not self._warned:
            timed = [f.name for f in self._writer.features.values() if f.time_axis == 0]
            sentence = uncut(batch.data, utterances, timed)
            self._warned = sentence is not None
            if sentence is not None:
                warnings.warn(sentence, stacklevel=2)
        return utterances

    def _failed(self, batch: Batch, error: Exception, tried: int) -> None:
        several = len(batch.indices) > 1  # perhaps it is one of them, perhaps they were too many
        # a result of the wrong form is a fault of the code, which another try does not mend
        may_pass = tried < self._retries and not isinstance(error, FeatureError)
        again = may_pass or (several and self._skip_failures)
        if again and isinstance(self._batches, DatasetBatches):
            for single in self._batches.singly(batch):
                self.process(single, tried if several else tried + 1)
        elif self._skip_failures:
            for id in batch.ids or (None,):
                self._note(id, error)
        else:
            which = named(batch.ids) if batch.ids else "a batch"
            text = f"computing the features of {which} failed with {describe(error)}"
            raise ComputeError(text) from error

    def _write(self, id: str, arrays: Mapping[str, Any]) -> None:
        if self._was_known(id):
            self._known([id])
            return
        try:
            self._writer.write(id, arrays)
        except FeatureError as error:
            if not self._skip_failures:
                raise
            self._note(id, error)
            return
        self.processed += 1
        if not self._only_missing:
            self._new.add(id)
            self.seen.add(id)

    def _known(self, ids: Sequence[str]) -> None:
        self.processed += len(ids)
        self.seen.update(ids)

    def _admit(self, ids: Sequence[str]) -> None:
        if not self._only_missing and (new := [id for id in ids if not self._was_known(id)]):
            self._check_new(new)

    def _was_known(self, id: str) -> bool:
        # one that was written in this run is not known: the writer says where it came from the
        # first time
        return not self._only_missing and id not in self._new and id in self._writer

    def _note(self, id: str | None, error: Exception) -> None:
        self.failures.append(failure_of(id, error))
        self.processed += 1
        if id is not None and not self._only_missing:
            self.seen.add(id)


def features_of(extractor: Any, stage: Any, data: Any) -> Any:
    """Call `compute_features` for a batch, on its device and in its evaluation precision."""
    with getattr(extractor, "evaluation_ctx", None) or contextlib.nullcontext():
        utterances = extractor.compute_features(to_device(data, extractor.device), stage)
        # in that precision, too
        return list(utterances) if isinstance(utterances, Iterator) else utterances
