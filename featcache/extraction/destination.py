"""`Destination`: the cache that an extraction fills, opened, published, and reported on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np

from featcache.errors import CacheLockedError, ConfigError, NotACacheError, StaleCacheError
from featcache.extraction.admission import Admission
from featcache.extraction.changed_inputs import (
    ChangedInputs,
    Found,
    remember,
    remembered,
    stamps_in,
)
from featcache.extraction.dataset_batches import Loading
from featcache.extraction.dataset_view import view_of
from featcache.extraction.datasets import counted, named
from featcache.extraction.failure_notes import note_failures, tell_left_out
from featcache.extraction.failures import Failure
from featcache.extraction.other_splits import OtherSplits, refuse_another, rows_of
from featcache.extraction.outcome import Outcome
from featcache.extraction.patience import (
    is_refused,
    refusal_explained,
    refusal_passed_over,
    retry_while_locked,
)
from featcache.extraction.shares import Share, note_sets_compared
from featcache.extraction.unfinished import is_overwriting
from featcache.storage import FeatureStorage, declared_cache
from featcache.store.cache import Cache
from featcache.store.format.fingerprint import cache_fingerprint, differences
from featcache.store.format.lock import is_locked
from featcache.store.format.stamps import StampColumns
from featcache.store.reading.verify import container_damage, own_containers, raise_damage
from featcache.store.writing.cache_writer import CacheWriter
from featcache.store.writing.new_sets import name_set
from featcache.store.writing.stored_stamps import stored_stamps
from featcache.tables.table import FeatureTable

EMPTY = "the data set is empty: not one utterance came of it; look at what filters or feeds it"
_log = logging.getLogger("featcache")


@dataclass
class Destination:
    """The cache of a split, to be filled with the utterances of a data set.

    Args:
        storage: where its caches are.
        split: which of them is meant.
        ids: of all utterances, if the data set shows them.
        skip_failures: utterances that failed in an earlier run are left out; otherwise they are
            tried again.
        append: a complete cache may be given utterances of another data set.
        shared: other splits of the storage may hold the same utterances.
        inputs: compares stored utterances with the data set.
        share: the features that are stored here, where others of the storage are stored apart.
    """

    storage: FeatureStorage
    split: str
    ids: Sequence[str] | None
    skip_failures: bool
    append: bool
    shared: bool
    inputs: ChangedInputs = field(default_factory=partial(ChangedInputs, None))
    share: Share | None = None

    def __post_init__(self) -> None:
        self.fingerprint: Mapping[str, object] = {}  # of the run, from `open` on
        self.full = False  # whether the cache was complete before
        self.accepted: frozenset[str] = frozenset()  # failed before, and are left out now
        self.seed: int | None = None  # of random features
        share = self.share or Share(self.storage.path(self.split), self.storage.features)
        self.path, self.features = share.path, share.features
        self._others = OtherSplits(self.storage.root, self.split, self.features)

    @property
    def loading(self) -> Loading:
        """Treatment of the items that are loaded."""
        return Loading(self.inputs.mentioned, self.seed)

    @property
    def beside(self) -> frozenset[str]:
        """Features of the storage that are stored apart from these."""
        return frozenset(self.storage.features.keys() - self.features.keys())

    @property
    def name(self) -> str:
        """The name of the cache in messages: the split, with the features where some are apart."""
        return f"{self.split} ({', '.join(self.features)})" if self.beside else self.split

    def view(self, *, of_all: bool = False, tell: bool = True) -> FeatureTable:
        """Return the utterances of the data set as the cache holds them; a warning of others.

        With these features, or with all of the storage.
        """
        # who appends knows of them; where others are stored apart, the view of all tells
        loud = tell and not self.append and (of_all or not self.beside)
        level = logging.WARNING if loud else logging.DEBUG
        return view_of(
            self.cache() if self.beside and not of_all else self.whole(), self.ids, level=level
        )

    def cache(self) -> Cache:
        """Open the cache, which the run has compared with what its features are made from."""
        note_sets_compared(self.path, self.features)
        return self.stored()

    def whole(self) -> Cache:
        """Open the cache with all features of the storage."""
        note_sets_compared(self.storage.path(self.split), self.storage.features)
        return self.storage.cache(self.split)

    def stored(self, *, expect: Mapping[str, object] | None = None) -> Cache:
        """Open the cache as `FeatureStorage.cache` does."""
        if self.path == self.storage.path(self.split) and not self.beside:
            return self.storage.cache(self.split, expect=expect)
        return declared_cache(self.path, self.features, expect)

    def writer(self, fingerprint: Mapping[str, object], *, overwrite: bool = False) -> CacheWriter:
        """Open the cache for writing; see `CacheWriter`."""
        cache = self.storage.path(self.split)
        return CacheWriter(cache, self.features, fingerprint, overwrite=overwrite)

    def current(self, fingerprint: Mapping[str, object]) -> Cache | None:
        """Return the cache that readers see, if it was made from the same."""
        try:
            cache = self.stored(expect=fingerprint)
        except (NotACacheError, StaleCacheError):  # the writer starts one, or says all that differs
            return None
        declared = cache_fingerprint(self.features, fingerprint)
        return None if differences(cache.fingerprint, declared) else cache

    def open(
        self, fingerprint: Mapping[str, object], checks: Admission, *, resume: bool, overwrite: bool
    ) -> CacheWriter | None:
        """Open the cache for writing, with what `checks` keep in it; None if nothing is missing.

        Raises `ConfigError` for a data set that seems to belong to another split, `CacheError` for
        a cache that lacks something and cannot be written to, `StaleCacheError` for utterances that
        have changed.
        """
        self.fingerprint = fingerprint
        # of a stream; others have been looked at before
        if self.ids is not None and not len(self.ids):
            raise ConfigError(EMPTY)
        missing, found = self.ids, Found()
        if not overwrite and (cache := self.current(fingerprint)) is not None:
            self.full = cache.complete
            if self.skip_failures and len(cache) and (resume or self.full):
                self.accepted = frozenset(cache.failed)
            missing = self._missing_from(cache)
            if self.full:
                found = self.compared(cache)
                checks.admit(found.changed, cache)
            if self.full and missing is not None and not len(missing) and not found.changed:
                opened = cache.opened
                own = own_containers(opened.index.containers, opened.manifest.parts)
                raise_damage(container_damage(cache.path, opened.index.containers, own))
                self._restamp(cache, found)
                self._name_set()
                return None
        if missing is not None and not self.shared:
            self._others.refuse(missing)
        if self.ids is not None and missing is self.ids and not self.append:
            self._others.refuse_strangers(self.ids)
        lacking = None if missing is None else [*missing, *found.changed]
        with refusal_explained(self.path, lacking):
            if not resume and not overwrite:
                # what a killed run left is published; the cache is then built anew beside that
                self._writer(overwrite=False).close(complete=False)
            writer = self._writer(overwrite=overwrite or not resume)
        self._begin(writer, found, checks, overwrite=overwrite)
        return writer

    def refuse_another(self) -> None:
        """Raise `ConfigError` for ids of which a complete cache has none; nothing is computed."""
        if self.ids is not None and len(self.ids) and not self.append:
            refuse_another(self.path, self.ids, self.split)

    def _begin(
        self, writer: CacheWriter, found: Found, checks: Admission, *, overwrite: bool
    ) -> None:
        """Check what a cache holds, and make way for what is computed again."""
        with contextlib.ExitStack() as stack:
            stack.push(writer)
            if self.ids is not None:
                writer.expect(self.ids)
            if not self.full:  # what a killed run left has been recovered, and is compared, too
                found = self.compared(None, overwrite=overwrite)
                if not checks.admit(found.changed, writer, overwrite=overwrite):
                    found = Found([id for id in self.ids or () if id in writer])
            # first: of utterances that are gone nobody could tell that they had changed
            checks.keep(writer)
            found.apply(writer)
            stack.pop_all()  # it stays open

    def compared(self, cache: Cache | None, *, overwrite: bool = False) -> Found:
        """Find what has changed of the utterances of a cache, or of the build that is written.

        With `overwrite` nothing is refused: all is to be computed anew.
        """
        if self.ids is None:
            return Found()
        if cache is None:
            stored: StampColumns | None = stored_stamps(self.path, self.ids)
        else:
            stored = stamps_in(cache, self.ids)
        known = None if cache is None else remembered(cache)
        inputs = replace(self.inputs, on_changed="recompute") if overwrite else self.inputs
        return inputs.find(self.path, self.ids, stored, known, seed=self.seed)

    def _restamp(self, cache: Cache, found: Found) -> None:
        """Store new stamps of utterances that only look changed; remember them if that is refused.

        A cache in which nothing is missing may well be one that nobody here can write to.
        """
        if not found.alike:
            return
        try:
            with self.writer(self.fingerprint) as writer:
                if self.ids is not None:
                    writer.expect(self.ids)
                found.apply(writer)
        except OSError as error:
            if not (isinstance(error, CacheLockedError) or is_refused(error)):
                raise
            remember(cache, found.alike)

    def _name_set(self) -> None:
        """Let all readers see a set that is whole, if its writer was killed before."""
        with refusal_passed_over():  # who declares its features sees it anyway
            name_set(self.path)

    def check_new(self, ids: Sequence[str]) -> None:
        """Raise `ConfigError` if the cache must not be given a data set that shows no ids."""
        if self.ids is not None:  # compared when the cache was opened
            return
        if self.full and not self.append:
            raise ConfigError(
                f"cache {str(self.path)!r} is complete without {named(ids, 3)}, and this data set "
                "shows no ids by which the two could be compared; give it an attribute `ids`, or "
                "append=True to add what is new"
            )
        if not self.shared:
            self._others.refuse(ids)

    def publish(self, writer: CacheWriter, failures: Sequence[Failure], outcome: Outcome) -> None:
        """Publish what was written, and say what could not be computed in this run."""
        left_out, stopped, seen = outcome
        if stopped and (is_overwriting(self.path) or (self.full and self.ids is None)):
            # the old cache stays as it is; the parts of the new one wait for the same call
            writer.abort()
            return
        if seen is not None and not stopped:
            if not seen:
                writer.abort()
                raise ConfigError(EMPTY)
            writer.expect(seen)
        failed = {failure["id"] for failure in failures}
        for id in self.accepted | failed - {None}:
            writer.fail(cast(str, id))
        writer.close(complete=not (None in failed or left_out or stopped))
        if left_out:
            text = f"{counted(left_out)} were not in the given sampler"
            _log.warning("%s: %r stays incomplete", text, str(self.path))
        note_failures(Cache(self.path), failures)

    def publish_early(self, writer: CacheWriter) -> None:
        """Let readers see what is there so far, unless they still have the old cache, complete."""
        if not is_overwriting(self.path):
            writer.publish()

    def _missing_from(self, cache: Cache) -> Sequence[str] | None:
        """Return the ids that are to be computed; None if they are not known."""
        if self.ids is None:
            return None
        rows = rows_of(cache.opened, self.ids)
        lacking = [self.ids[number] for number in np.flatnonzero(rows < 0).tolist()]
        failed = {*cache.failed}.intersection(lacking)
        tell_left_out(self.path, sorted(failed & self.accepted))
        return [id for id in lacking if id not in self.accepted]

    def _writer(self, *, overwrite: bool) -> CacheWriter:
        make = partial(self.writer, self.fingerprint, overwrite=overwrite)
        # a part's writer that has lost its run ends soon; another run of the cache does not
        there = self.path if self.path.exists() else self.storage.path(self.split)
        return retry_while_locked(make, unless=partial(is_locked, there))
