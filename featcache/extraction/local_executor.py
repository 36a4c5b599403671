"""`LocalExecutor`: one pass over a dataset in this process, on one or several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from featcache._closing import close_after
from featcache.errors import ConfigError
from featcache.extraction.computation import Computation
from featcache.extraction.dataset_batches import (
    DatasetBatches,
    LoadedBatch,
    batches_of_stream,
    learnt_ids,
)
from featcache.extraction.datasets import is_map_style, size_of
from featcache.extraction.destination import Destination
from featcache.extraction.outcomes import Outcome, ProgressBar
from featcache.extraction.run import Publish, Ranks, check_lengths, longest_first
from featcache.extraction.while_filling import WhileFilling
from featcache.interface import Ints
from featcache.staleness.watch import Watch
from featcache.writing.part_writer import PartWriter


@dataclass
class LocalExecutor:
    """Computes in this process, which may be one of several ranks.

    Args:
        destination: the cache.
        source: a dataset or loader.
        compute_batch: makes a list of dicts, "id" and arrays, of a batch's data.
        loader_kwargs: arguments of a DataLoader.
        retries: how often an utterance that failed is tried again.
        watch: compares what features are made with while they are computed.
        lengths: of all utterances: the longest come first; None keeps the dataset's order.
        most_batches: a run ends after these, as incomplete.
        ranks: the processes that make the run together.
    """

    destination: Destination
    source: Any
    compute_batch: Callable[[Any], Any]
    loader_kwargs: Mapping[str, Any]
    retries: int
    watch: Watch
    lengths: Sequence[float] | None = None
    most_batches: int | None = None
    ranks: Ranks = field(default_factory=partial(Ranks, alone=True))

    def __post_init__(self) -> None:
        self._filling = WhileFilling(self.destination.path, self.watch)
        self.by_number, self.size = is_map_style(self.source), size_of(self.source)

    def learn_ids(self) -> Sequence[str] | None:
        """Return the ids of a dataset that shows none, by loading all of it."""
        return learnt_ids(self.source, self.loader_kwargs)

    def compute(self, missing: Ints | None, bar: ProgressBar, publish_if_due: Publish) -> Outcome:
        """Compute utterances in one pass, and seal them."""
        wanted = self.size or 0 if missing is None else len(missing)
        with contextlib.ExitStack() as stack:
            # nobody writes before all ranks can
            self.ranks.together(partial(self._open, missing, stack))
            # not inference_mode, as in `FeatureCacheMixin`
            stack.enter_context(torch.no_grad())
            return self._compute(wanted, bar, publish_if_due)

    def _open(self, missing: Ints | None, stack: contextlib.ExitStack) -> None:
        """Prepare the batches of this rank, and open a part of the cache for them."""
        to = self.destination
        if missing is None and self.ranks.size > 1:
            raise ConfigError(
                "under torchrun cache_features needs a map-style dataset, to share it out to ranks"
            )
        self._filling.begin()
        self._writer = stack.enter_context(PartWriter(to.path, to.features, to.fingerprint))
        filling = self._filling
        self._writer.ask_before(commits=filling.vouch, seals=filling.may_seal)
        stack.push(self._check_after)
        self._batches: DatasetBatches | Generator[LoadedBatch, None, None]
        if missing is None:
            self._batches = batches_of_stream(self.source, self.loader_kwargs, to.loading.mentioned)
            return
        lengths = None if self.lengths is None else check_lengths(self.lengths, len(self.source))
        self._writer.expect_more(len(missing))
        order = longest_first(missing, lengths)
        self._batches = DatasetBatches(self.source, order, self.loader_kwargs, to.ids, to.loading)

    def _compute(self, wanted: int, bar: ProgressBar, publish_if_due: Publish) -> Outcome:
        to, batches = self.destination, self._batches
        computation = Computation(
            self.compute_batch,
            batches if isinstance(batches, DatasetBatches) else None,
            self._writer,
            skip_failures=to.skip_failures,
            # what is known is not even loaded
            only_missing=to.ids is not None and self.by_number,
            retries=self.retries,
            check_new=to.check_new,
            seed=to.seed,
            beside=to.beside,
            filling=self._filling,
        )
        try:
            with contextlib.closing(iter(batches)) as loaded:
                for number, batch in enumerate(loaded, start=1):
                    computation.process(batch)
                    publish_if_due(self._seal)
                    bar.update(computation.progress())
                    if number == self.most_batches:
                        return Outcome()
        finally:
            bar.end(computation.progress(), computation.failures)
        left_out = max(wanted - computation.processed, 0)
        return Outcome(left_out, stopped=False, seen=computation.seen if to.ids is None else None)

    def _seal(self) -> None:
        self._check()
        self._writer.seal()
        self._writer.published()  # from now on that is not ours to remove

    def _check(self) -> None:
        self._filling.check(self._drop)

    def _drop(self) -> None:
        """Remove what is not sealed."""
        self._writer.published()
        self._writer.abort()

    def _check_after(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            close_after(error, self._check)
        finally:
            if self._filling.is_in_doubt or self._filling.is_undecided:
                self._writer.leave()
