"""One pass over a dataset that computes and writes what a cache lacks, on one or several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from featcache.account import Account, Progress
from featcache.batches import DatasetBatches, LoaderBatches, batches_of_stream, is_map_style, size_of, visible_ids
from featcache.compute import Computation, Failure, features_of
from featcache.config import FeatureStorage
from featcache.destination import Destination
from featcache.errors import ConfigError, IncompleteError, describe
from featcache.every import Every
from featcache.ranks import Ranks
from featcache.store.cache import Cache
from featcache.store.closing import close_after
from featcache.store.part_writer import PartWriter
from featcache.store.writer import CacheWriter


@dataclass
class Extraction:
    """Computes the features of a dataset with `owner.compute_features` and writes them."""

    owner: Any
    source: Any  # a dataset or loader
    stage: Any
    storage: FeatureStorage
    split: str
    loader_kwargs: Mapping[str, Any]
    skip_failures: bool
    progressbar: bool
    ranks: Ranks
    retries: int
    publish_every_s: float | None

    def __post_init__(self) -> None:
        self._ids = visible_ids(self.source)
        self._to = Destination(self.storage, self.split, self._ids, size_of(self.source))
        self._publisher: CacheWriter | None = None  # on rank 0
        self._fingerprint: Mapping[str, object] = {}
        self._failures: list[Failure] = []
        self._known = 0  # utterances that were in the cache before, as far as can be told
        self._left_out = 0  # utterances that a given sampler did not ask for
        self._cut_short = False  # by --debug
        self._publishing = Every(self.publish_every_s)

    def run(self, fingerprint: Callable[[], Mapping[str, object]], *, resume: bool, overwrite: bool) -> Cache:
        """Do it, and open the cache; see `FeatureCacheMixin.cache_features`."""
        start = partial(self._start, fingerprint, resume, overwrite)
        complete, self._fingerprint = self.ranks.together(start)[0]
        if not complete:
            error = self._work()
            close_after(error, self._finish if error is None else partial(self._finish, error))
            if error is not None:
                if self.ranks.rank == 0:
                    self._to.say_how_to_go_on(error)
                raise error
        return self.storage.cache(self.split)

    def _start(
        self, fingerprint: Callable[[], Mapping[str, object]], resume: bool, overwrite: bool
    ) -> tuple[bool, Mapping[str, object]]:
        """On rank 0, open the cache for writing unless nothing is missing; returns whether, and the fingerprint."""
        if self.ranks.rank:
            return False, {}
        made_from = fingerprint()
        self._publisher = self._to.open(made_from, resume=resume, overwrite=overwrite)
        return self._publisher is None, made_from

    def _work(self) -> BaseException | None:
        """Compute this rank's share; returns the error that ended it."""
        try:
            with contextlib.ExitStack() as stack:
                self.ranks.together(partial(self._join, stack))  # nobody writes before all know what is missing
                self._compute()
        except BaseException as error:
            return error
        return None

    def _join(self, stack: contextlib.ExitStack) -> None:
        """Find this rank's share, and open a part of the cache for it."""
        self._writer = stack.enter_context(PartWriter(self._to.path, self.storage.features, self._fingerprint))
        if is_map_style(self.source):
            missing: Sequence[int] = range(len(self.source))
            if self._ids is not None:
                missing = [number for number, id in enumerate(self._ids) if id not in self._writer]
            self._known = len(self.source) - len(missing)
            share = missing[self.ranks.rank :: self.ranks.size]
            self._batches: DatasetBatches | LoaderBatches = DatasetBatches(
                self.source, share, self.loader_kwargs, self._ids
            )
            self._writer.expect_more(len(share))
        elif self.ranks.size > 1:
            raise ConfigError(
                "under torchrun cache_features needs a map-style dataset, to give each rank its share of it"
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
            only_missing=self._ids is not None and is_map_style(self.source),  # what is known is not even loaded
        )
        self._failures = computation.failures
        ranks = f", rank 0 of {self.ranks.size}" if self.ranks.size > 1 else ""
        account = Account(
            f"caching {self.split}{ranks}",
            None if self._batches.total is None else self._known + self._batches.total,
            self._known,
            self._failures,
            shown=self.progressbar and self.ranks.rank == 0,
            colour=colours.get(str(getattr(self.stage, "name", self.stage)).lower()),
        )
        with account.bar:
            for number, batch in enumerate(self._batches, start=1):
                computation.process(batch)
                self._publish_now_and_then()
                done = Progress(0, computation.behind, self._writer.bytes_written, len(computation.failures))
                account.update(done)
                if debug and number == getattr(self.owner, "debug_batches", 2):
                    self._cut_short = True
                    return
        if isinstance(self._batches, DatasetBatches):
            self._left_out = self._batches.total - computation.behind

    def _publish_now_and_then(self) -> None:
        """Seal what this rank has written; rank 0 publishes it, and what the others have sealed before."""
        if self._publishing.due():
            self._writer.seal()
            if self._publisher is not None:
                self._to.publish_early(self._publisher)

    def _finish(self, error: BaseException | None = None) -> None:
        """Wait for all ranks, and publish what they have written."""
        text = None if error is None else describe(error)
        reports = self.ranks.gather((text, self._failures, self._cut_short, self._left_out))
        self.ranks.together(partial(self._publish, reports))
        for rank, (text, *_) in enumerate(reports):
            if text is not None and rank != self.ranks.rank:
                raise IncompleteError(f"rank {rank} failed with {text}; what was computed is kept")

    def _publish(self, reports: Sequence[tuple[str | None, list[Failure], bool, int]]) -> None:
        if self._publisher is None:
            return
        self._to.publish(
            self._publisher,
            [failure for _, failed, _, _ in reports for failure in failed],
            left_out=sum(number for *_, number in reports),
            stopped=any(text is not None or cut_short for text, _, cut_short, _ in reports),
        )
