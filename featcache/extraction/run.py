"""`Run`: fills a cache with the utterances it lacks, whichever processes compute them.

Opening, progress, publishing, failures and resuming are here; computing is an `Executor`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from featcache._checks import whole_number
from featcache._closing import close_after
from featcache._interval import Interval
from featcache.errors import ConfigError, IncompleteError, StaleCacheError, describe
from featcache.extraction.checking import Checking
from featcache.extraction.dataset_annotations import DatasetAnnotations
from featcache.extraction.datasets import counted
from featcache.extraction.destination import Destination
from featcache.extraction.failures import Failure
from featcache.extraction.id_numbers import IdNumbers
from featcache.extraction.outcome import Outcome
from featcache.extraction.patience import retry_while_locked
from featcache.extraction.progress import ProgressBar
from featcache.extraction.torchrun import Ranks
from featcache.extraction.unfinished import add_resume_note, is_overwriting
from featcache.extraction.workers.plan import remove_runs
from featcache.interface import Ints
from featcache.store.writing.cache_writer import CacheWriter
from featcache.tables.table import FeatureTable

Publish = Callable[[Callable[[], object]], None]
_Opened = tuple[Mapping[str, object], bool, frozenset[str], int | None]
_log = logging.getLogger("featcache")


class Executor(Protocol):
    """The processes that compute: this one, the ranks of torchrun, or workers."""

    @property
    def by_number(self) -> bool:
        """True if utterances of the dataset can be picked by number."""

    @property
    def size(self) -> int | None:
        """Number of utterances of the dataset; None if unknown."""

    def learn_ids(self) -> Sequence[str] | None:
        """Return the ids of a dataset that shows none, by loading all of it; None if in vain."""

    def compute(self, missing: Ints | None, bar: ProgressBar, publish_if_due: Publish) -> Outcome:
        """Compute and store utterances; whatever happens, all parts are sealed in the end.

        Args:
            missing: their numbers in the dataset; None: whatever comes of the dataset.
            bar: progress and failures are reported to it.
            publish_if_due: to be called often, with what seals the parts of this process.
        """


@dataclass
class Run:
    """Computes the utterances that a cache lacks, and publishes them.

    Args:
        destination: the cache.
        executor: computes.
        ranks: the processes that make this run together.
        checking: computes utterances again, to compare them.
        publish_every_s: how often readers get what is there; None: at the end.
        progressbar: whether there is a bar.
        colour: of the bar.
        annotations: values of the data set that the cache is to have beside features.
    """

    destination: Destination
    executor: Executor
    checking: Checking
    publish_every_s: float | None
    progressbar: bool
    colour: str | None = None
    annotations: DatasetAnnotations | None = None
    ranks: Ranks = field(default_factory=partial(Ranks, alone=True))

    def __post_init__(self) -> None:
        self._publisher: CacheWriter | None = None  # on rank 0
        self._failures: list[Failure] = []
        self._outcome = Outcome()
        self._numbers: IdNumbers | None = None  # on rank 0, where utterances have ids and numbers
        self._publishing = Interval(self.publish_every_s)

    def run(
        self, fingerprint: Callable[[], Mapping[str, object]], *, resume: bool, overwrite: bool
    ) -> FeatureTable:
        """Fill the cache; return its view of the data set.

        `fingerprint` says what the features are made from.
        """
        learnt, opened = self.ranks.together(partial(self._open, fingerprint, resume, overwrite))[0]
        to = self.destination
        to.ids = to.ids if learnt is None else learnt
        if opened is not None:
            to.fingerprint, to.full, to.accepted, to.seed = opened
            try:
                self._fill()
            except BaseException as error:
                if self.ranks.rank == 0:
                    add_resume_note(error, to.path, to.ids)
                raise
        first = self.ranks.rank == 0
        if first and not is_overwriting(to.path):
            self.checking.end(to.cache())
        if self.annotations is not None:
            self.ranks.together(self._annotate)
        return to.view(tell=first)

    def _annotate(self) -> None:
        """On rank 0, store the annotations that the cache lacks, or has others of."""
        to = self.destination
        if self.ranks.rank or self.annotations is None or is_overwriting(to.path):
            return
        cache = to.cache()
        if unlike := self.annotations.unlike(cache):
            cache.annotate(unlike)

    def _fill(self) -> None:
        error: BaseException | None = None
        try:
            self._compute(self.ranks.together(self._find_missing)[0])
        except BaseException as failure:
            error = failure
            raise
        finally:
            close_after(error, partial(self._finish, error))

    def _open(
        self, fingerprint: Callable[[], Mapping[str, object]], resume: bool, overwrite: bool
    ) -> tuple[Sequence[str] | None, _Opened | None]:
        """On rank 0, open the cache for writing.

        Returns what the other ranks need to know: ids that had to be learnt, and, unless nothing is
        missing, the fingerprint, whether the cache was complete, the ids that failed before and are
        left out, and the seed.
        """
        if self.ranks.rank:
            return None, None
        to, checking = self.destination, self.checking
        if not overwrite:
            to.refuse_another()
        if self.annotations is not None:
            self.annotations.read(to.ids)
            self.annotations.refuse_other_kinds(to.storage.path(to.split))
        made_from = checking.begin(fingerprint(), resume=resume, overwrite=overwrite)
        learnt = None if overwrite else self._learn(made_from)
        if to.ids is not None and self.executor.by_number:
            self._numbers = checking.numbers or IdNumbers(to.ids)
        try:
            self._publisher = to.open(made_from, checking, resume=resume, overwrite=overwrite)
        except StaleCacheError as error:
            raise checking.explained(error, made_from) from error
        if self._publisher is None:
            return learnt, None
        return learnt, (made_from, to.full, to.accepted, to.seed)

    def _learn(self, fingerprint: Mapping[str, object]) -> Sequence[str] | None:
        """Load all of a dataset that shows no ids, to compare it with a complete cache."""
        to = self.destination
        cache = to.current(fingerprint) if to.ids is None else None
        if cache is None or not cache.complete:
            return None
        _log.warning(
            "the data set shows no ids: all of it is loaded, to see whether it is what cache %r "
            "holds; give it an attribute `ids`, a list of strings, and this takes no time",
            str(to.path),
        )
        to.ids = self.executor.learn_ids()
        to.refuse_another()
        return to.ids

    def _find_missing(self) -> Ints | None:
        """On rank 0, return the utterances to be computed; None if they have no numbers.

        They are not committed, nor left out because they failed before.
        """
        if self.ranks.rank or not self.executor.by_number:
            return None
        if self._numbers is None:
            return np.arange(self.executor.size or 0)
        missing = ~self._numbers.committed(self.destination.path)
        missing[self._numbers.find(self.destination.accepted)] = False
        return np.flatnonzero(missing)

    def _compute(self, missing: Ints | None) -> None:
        """Have this rank's share computed."""
        ranks, total, known = self.ranks, self.executor.size, 0
        if missing is not None:
            known = (total or 0) - len(missing)
            missing = missing[ranks.rank :: ranks.size]
            total = known + len(missing)
        of_ranks = f", rank 0 of {ranks.size}" if ranks.size > 1 else ""
        text = f"caching {self.destination.name}{of_ranks}"
        shown = self.progressbar and ranks.rank == 0
        bar = ProgressBar(text, total, known, self._failures, shown=shown, colour=self.colour)
        with bar.bar:
            self._outcome = self.executor.compute(missing, bar, self._publish_if_due)

    def _publish_if_due(self, seal: Callable[[], object]) -> None:
        """Publish what is sealed, on rank 0 that of all ranks."""
        if self._publishing.due():
            seal()
            if self._publisher is not None:
                self.destination.publish_early(self._publisher)

    def _finish(self, error: BaseException | None) -> None:
        """Wait for all ranks, and publish what they have written."""
        text = None if error is None else describe(error)
        ends = self.ranks.gather((text, self._failures, self._outcome))
        failures = [failure for _, failed, _ in ends for failure in failed]
        outcome = Outcome.of_all([outcome for _, _, outcome in ends])
        interrupted = isinstance(error, KeyboardInterrupt)
        self.ranks.together(partial(self._publish, failures, outcome, interrupted))
        if self.destination.ids is None and outcome.seen is not None:
            self.destination.ids = sorted(outcome.seen)  # of a stream; now they are known
        self.ranks.refuse_failures(text for text, _, _ in ends)

    def _publish(self, failures: Sequence[Failure], outcome: Outcome, interrupted: bool) -> None:
        """On rank 0, gather what all have written, those that died included, and publish it.

        After Ctrl-C nobody waits for those that still write: the next run gathers that.
        """
        writer, to = self._publisher, self.destination
        if writer is None:
            return
        try:
            retry_while_locked(writer.recover, unless=lambda: interrupted)
            remove_runs(to.path)
            lost = 0 if outcome.stopped else self._lost(outcome.left_out, failures)
            to.publish(writer, failures, outcome._replace(stopped=outcome.stopped or lost > 0))
        except BaseException:
            writer.abort()  # of nothing: what is sealed stays
            raise
        if lost:
            raise IncompleteError(
                f"{counted(lost)} of {str(to.path)!r} are neither stored nor reported as failures: "
                "were parts of it removed? The cache is not complete; the same call computes them"
            )

    def _lost(self, left_out: int, failures: Sequence[Failure]) -> int:
        """Count utterances that are neither stored, nor failed, nor left out."""
        missing = None if self._numbers is None else self._find_missing()
        if missing is None:
            return 0
        return len(missing) - left_out - len({failure["id"] for failure in failures})


def check_settings(
    on_error: str, on_changed: str, retries: int, publish_every_s: float | None
) -> None:
    """Raise `ConfigError` for settings of an extraction that cannot work."""
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error is 'raise' or 'skip', not {on_error!r}")
    if on_changed not in ("raise", "recompute"):
        raise ConfigError(f"on_changed is 'raise' or 'recompute', not {on_changed!r}")
    whole_number("retries", retries, 0)
    if publish_every_s is not None and not (
        isinstance(publish_every_s, int | float) and publish_every_s > 0
    ):
        raise ConfigError(
            f"publish_every_s is a number of seconds, above 0, or None, not {publish_every_s!r}"
        )
