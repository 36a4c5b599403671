"""One pass over a dataset that computes and writes what a cache lacks, on one or several ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from featcache._closing import close_after
from featcache._interval import Interval
from featcache.errors import ConfigError, IncompleteError, describe
from featcache.extraction.computation import Computation, features_of
from featcache.extraction.dataset_batches import (
    DatasetBatches,
    LoaderBatches,
    batches_of_stream,
    learnt_ids,
)
from featcache.extraction.datasets import is_map_style
from featcache.extraction.destination import Destination
from featcache.extraction.failures import Failure
from featcache.extraction.progress import ProgressBar, TaskProgress
from featcache.extraction.ranks import Ranks
from featcache.store.reading.cache import Cache
from featcache.store.writing.cache_writer import CacheWriter
from featcache.store.writing.part_writer import PartWriter

_log = logging.getLogger("featcache")


class _Start(NamedTuple):
    """The findings of rank 0, before anything is computed."""

    complete: bool
    fingerprint: Mapping[str, object] = {}
    learnt: Sequence[str] | None = None  # ids of a data set that does not show them
    full: bool = False
    accepted: frozenset[str] = frozenset()


class _Report(NamedTuple):
    """The end of a rank's share."""

    error: str | None
    failures: list[Failure]
    cut_short: bool
    left_out: int
    seen: set[str] | None


@dataclass
class Extraction:
    """Computes the features of a dataset with `owner.compute_features` and writes them."""

    owner: Any
    source: Any  # a dataset or loader
    stage: Any
    to: Destination
    loader_kwargs: Mapping[str, Any]
    skip_failures: bool
    progressbar: bool
    ranks: Ranks
    retries: int
    publish_every_s: float | None

    def __post_init__(self) -> None:
        self._publisher: CacheWriter | None = None  # on rank 0
        self._fingerprint: Mapping[str, object] = {}
        self._failures: list[Failure] = []
        # ids that came of a data set that does not show them, once all have come
        self._seen: set[str] | None = None
        self._known = 0  # utterances that were in the cache before, as far as can be told
        self._left_out = 0  # utterances that a given sampler did not ask for
        self._cut_short = False  # by --debug
        self._publishing = Interval(self.publish_every_s)

    def run(
        self, fingerprint: Callable[[], Mapping[str, object]], *, resume: bool, overwrite: bool
    ) -> Cache:
        """Do it, and open the cache; see `FeatureCacheMixin.cache_features`."""
        start = self.ranks.together(partial(self._start, fingerprint, resume, overwrite))[0]
        self._fingerprint = start.fingerprint
        if not start.complete:
            if start.learnt is not None:
                self.to.ids = start.learnt
            self.to.full, self.to.accepted = start.full, start.accepted
            error = self._work()
            close_after(error, self._finish if error is None else partial(self._finish, error))
            if error is not None:
                if self.ranks.rank == 0:
                    self.to.add_resume_note(error)
                raise error
        return self.to.storage.cache(self.to.split)

    def _start(
        self, fingerprint: Callable[[], Mapping[str, object]], resume: bool, overwrite: bool
    ) -> _Start:
        """On rank 0, open the cache for writing unless nothing is missing."""
        if self.ranks.rank:
            return _Start(complete=False)
        made_from = fingerprint()
        learnt = None if overwrite else self._learn(made_from)
        self._publisher = self.to.open(made_from, resume=resume, overwrite=overwrite)
        return _Start(self._publisher is None, made_from, learnt, self.to.full, self.to.accepted)

    def _learn(self, fingerprint: Mapping[str, object]) -> Sequence[str] | None:
        """Load all of a data set that shows no ids, to compare it with a complete cache."""
        cache = self.to.current(fingerprint) if self.to.ids is None else None
        if cache is None or not cache.complete:
            return None
        _log.warning(
            "the data set shows no ids: all of it is loaded, to see whether it is what cache %r "
            "holds; give it an "
            "attribute `ids`, a list of strings, and this takes no time",
            str(self.to.path),
        )
        self.to.ids = learnt_ids(self.source, self.loader_kwargs)
        return self.to.ids

    def _work(self) -> BaseException | None:
        """Compute this rank's share; returns the error that ended it."""
        try:
            with contextlib.ExitStack() as stack:
                # nobody writes before all know what is missing
                self.ranks.together(partial(self._join, stack))
                self._compute()
        except BaseException as error:
            return error
        return None

    def _join(self, stack: contextlib.ExitStack) -> None:
        """Find this rank's share, and open a part of the cache for it."""
        self._writer = stack.enter_context(
            PartWriter(self.to.path, self.to.storage.features, self._fingerprint)
        )
        if is_map_style(self.source):
            missing: Sequence[int] = range(len(self.source))
            if self.to.ids is not None:
                behind = self.to.accepted
                missing = [
                    number
                    for number, id in enumerate(self.to.ids)
                    if id not in behind and id not in self._writer
                ]
            self._known = len(self.source) - len(missing)
            share = missing[self.ranks.rank :: self.ranks.size]
            self._batches: DatasetBatches | LoaderBatches = DatasetBatches(
                self.source, share, self.loader_kwargs, self.to.ids
            )
            self._writer.expect_more(len(share))
        elif self.ranks.size > 1:
            raise ConfigError(
                "under torchrun cache_features needs a map-style dataset, to give each rank its "
                "share of it"
            )
        else:
            self._batches = batches_of_stream(self.source, self.loader_kwargs)

    def _compute(self) -> None:
        debug = getattr(self.owner, "debug", False)
        colours = getattr(self.owner, "tqdm_barcolor", {})
        computation = Computation(
            partial(features_of, self.owner, self.stage),
            self._batches,
            self._writer,
            skip_failures=self.skip_failures,
            retries=self.retries,
            # what is known is not even loaded
            only_missing=self.to.ids is not None and is_map_style(self.source),
            check_new=self.to.check_new,
        )
        self._failures = computation.failures
        ranks = f", rank 0 of {self.ranks.size}" if self.ranks.size > 1 else ""
        bar = ProgressBar(
            f"caching {self.to.split}{ranks}",
            None if self._batches.total is None else self._known + self._batches.total,
            self._known,
            self._failures,
            shown=self.progressbar and self.ranks.rank == 0,
            colour=colours.get(str(getattr(self.stage, "name", self.stage)).lower()),
        )
        with bar.bar:
            for number, batch in enumerate(self._batches, start=1):
                computation.process(batch)
                self._publish_if_due()
                done = TaskProgress(
                    0, computation.processed, self._writer.bytes_written, len(computation.failures)
                )
                bar.update(done)
                if debug and number == getattr(self.owner, "debug_batches", 2):
                    self._cut_short = True
                    return
        if self._batches.total is not None:
            self._left_out = max(self._batches.total - computation.processed, 0)
        if self.to.ids is None:
            self._seen = computation.seen

    def _publish_if_due(self) -> None:
        """Seal what this rank has written.

        Rank 0 publishes it, and what the others have sealed before.
        """
        if self._publishing.due():
            self._writer.seal()
            if self._publisher is not None:
                self.to.publish_early(self._publisher)

    def _finish(self, error: BaseException | None = None) -> None:
        """Wait for all ranks, and publish what they have written."""
        text = None if error is None else describe(error)
        reports = self.ranks.gather(
            _Report(text, self._failures, self._cut_short, self._left_out, self._seen)
        )
        self.ranks.together(partial(self._publish, reports))
        for rank, report in enumerate(reports):
            if report.error is not None and rank != self.ranks.rank:
                raise IncompleteError(
                    f"rank {rank} failed with {report.error}; what was computed is kept"
                )

    def _publish(self, reports: Sequence[_Report]) -> None:
        if self._publisher is None:
            return
        seen = [report.seen for report in reports if report.seen is not None]
        self.to.publish(
            self._publisher,
            [failure for report in reports for failure in report.failures],
            seen=set().union(*seen) if len(seen) == len(reports) else None,
            left_out=sum(report.left_out for report in reports),
            stopped=any(report.error is not None or report.cut_short for report in reports),
        )
