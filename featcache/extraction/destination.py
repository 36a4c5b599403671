"""`Destination`: the cache that is filled, opened, waited for, and shown as the data set's view."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np

from featcache.declaration import FeatureStorageConfig
from featcache.errors import (
    CacheError,
    CacheLockedError,
    ConfigError,
    NotACacheError,
    StaleCacheError,
    describe,
)
from featcache.extraction.changed_inputs import (
    ChangedInputs,
    ChangedUtterances,
    OtherSplits,
    refuse_another,
    remember,
    remembered,
    rows_of,
    stamps_in,
)
from featcache.extraction.dataset_batches import Loading
from featcache.extraction.datasets import counted, named
from featcache.extraction.outcomes import Failure, Outcome
from featcache.extraction.unfinished import is_overwriting, note_failures, tell_left_out
from featcache.format.feature_sets import stored_sets
from featcache.format.fingerprint import cache_fingerprint, differences
from featcache.format.index import StampColumns
from featcache.format.lock import is_locked
from featcache.format.manifest import NAME
from featcache.interface import Ints
from featcache.reading.opening import note_compared
from featcache.reading.verify import container_damage, own_containers, raise_damage
from featcache.storage import FeatureStorage, declared_cache
from featcache.store import Cache
from featcache.store import open as open_cache
from featcache.tables.table import FeatureTable
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.session import stored_stamps
from featcache.writing.sets import directory_of, holds_any, name_set

# `Admission`: what a destination asks whoever compares its cache with what is computed now.


class Admission(Protocol):
    """Whatever looks at a cache before it is filled."""

    def admit(
        self, changed: Sequence[str], stored: Cache | CacheWriter, *, overwrite: bool = False
    ) -> bool:
        """Raise `StaleCacheError` unless a cache, less its changed utterances, is still right.

        With `overwrite` return False instead.
        """

    def keep(self, writer: CacheWriter) -> None:
        """Keep files with a cache that is begun."""


# The utterances of a data set as a view of the cache that holds them.

_log = logging.getLogger("featcache")


class RowsOfIds:
    """Rows of a data set's ids in a cache, looked up once while it holds the same utterances."""

    def __init__(self) -> None:
        self._known: tuple[str, Sequence[str], Ints] | None = None

    def of(self, cache: Cache, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, read-only, -1 where there is none."""
        digest = cache.opened.index.ids_digest
        if self._known is not None and digest and self._known[0] == digest:
            _, known_ids, rows = self._known
            if known_ids is ids:
                return rows
        rows = rows_of(cache.opened, ids)
        rows.flags.writeable = False
        self._known = (digest, ids, rows)
        return rows


def view_of(
    cache: Cache,
    ids: Sequence[str] | None,
    *,
    rows_of_ids: RowsOfIds,
    level: int = logging.INFO,
) -> FeatureTable:
    """Return the view of those utterances that a cache holds, in the order of its rows.

    Args:
        cache: the cache.
        ids: of the data set; None: not known, all of the cache is returned.
        rows_of_ids: looks the ids up, or knows their rows.
        level: that of the line in the log where the cache holds others, too.
    """
    table = cache.table
    if ids is None:
        return table
    mine = np.zeros(len(cache), bool)
    rows = rows_of_ids.of(cache, ids)
    mine[rows[rows >= 0]] = True
    if mine.all():
        return table
    others = np.flatnonzero(~mine)
    text = "cache %r holds %d utterances, %d of them not in this data set: %s; what is returned is "
    text += "the view of the others; featcache.open(path) gives all"
    some = named([cache.ids[row] for row in others[:3].tolist()])
    _log.log(level, text, str(cache.path), len(cache), len(others), some)
    return table.select(np.flatnonzero(mine))


# Shares of a declaration: the features of each set that a cache has, and those to be added.


class FeatureShare(NamedTuple):
    """Features that are stored together."""

    path: Path
    features: Mapping[str, FeatureStorageConfig]
    # whether features were added to the declaration after these were stored, and the code with them
    others_added: bool = False


def shares_of(storage: FeatureStorage, split: str, *, overwrite: bool) -> list[FeatureShare]:
    """Cut the declared features of a split into those of each set; new ones come last.

    A plain cache that is overwritten takes the new ones, too: all is computed anyway.
    """
    cache, rest = storage.path(split), dict(storage.features)
    shares: list[FeatureShare] = []
    for directory, manifest in stored_sets(cache):
        mine = {name: rest.pop(name) for name in [*rest] if name in manifest.features}
        if not mine:
            continue
        whole = directory == cache and rest and manifest.features.keys() <= mine.keys()
        if whole and (overwrite or not holds_any(cache)):
            return [FeatureShare(cache, storage.features)]
        shares.append(FeatureShare(directory, mine))
    if rest:
        shares = [share._replace(others_added=True) for share in shares]
        shares.append(FeatureShare(directory_of(cache, rest), rest))
    return shares


def note_sets_compared(cache: Path, features: Collection[str]) -> None:
    """Note that the sets of some features were compared with what these are made from."""
    for directory, manifest in stored_sets(cache):
        if not manifest.features.keys().isdisjoint(features):
            note_compared(directory, manifest)


# Caches that cannot be written to: locked ones are waited for, refused ones are told apart.

T = TypeVar("T")
# how long workers of a killed run, or of this one at its end, may take to finish their batch
PATIENCE_S = 60.0


def retry_while_locked(do: Callable[[], T], unless: Callable[[], bool] = lambda: False) -> T:
    """Call `do` again and again for up to `PATIENCE_S` while it raises `CacheLockedError`.

    Raises the last of these errors after that time, and at once if `unless()` is true.
    """
    until, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return do()
        except CacheLockedError as error:
            if time.monotonic() >= until or unless():
                raise
            if not told:
                _log.warning("waiting up to %.0f s: %s", PATIENCE_S, error)
                told = True
        time.sleep(0.2)


@contextlib.contextmanager
def refusal_explained(path: Path, missing: Sequence[str] | None) -> Iterator[None]:
    """Return what a cache lacks that cannot be written to."""
    try:
        yield
    except OSError as error:
        if not is_refused(error):
            raise
        if not (path / NAME).exists():
            text = "cannot be made; give another directory, or ask for the right to write there"
        elif missing is None:
            text = (
                "cannot be written to, and the data set shows no ids to compare; give it an "
                "attribute `ids`"
            )
        else:
            text = (
                f"lacks {named(missing, 3)} and cannot be written to: copy it to where you may "
                "write, or leave what it lacks out of the data set"
            )
        raise CacheError(f"cache {str(path)!r} {text} ({describe(error)})") from error


@contextlib.contextmanager
def refusal_passed_over() -> Iterator[None]:
    """Do without writing where this user may not, or somebody else is at it."""
    try:
        yield
    except OSError as error:
        if not (isinstance(error, CacheLockedError) or is_refused(error)):
            raise


def is_refused(error: OSError) -> bool:
    """Whether an error means that this user may not write there, or nobody may."""
    refused = (errno.EACCES, errno.EPERM, errno.EROFS)
    return any(getattr(cause, "errno", None) in refused for cause in (error, error.__cause__))


# `Destination`: the cache that an extraction fills, opened, published, and reported on.

EMPTY = "the data set is empty: not one utterance came of it; look at what filters or feeds it"


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
    share: FeatureShare | None = None

    def __post_init__(self) -> None:
        self.fingerprint: Mapping[str, object] = {}  # of the run, from `open` on
        self.full = False  # whether the cache was complete before
        self.accepted: frozenset[str] = frozenset()  # failed before, and are left out now
        self.seed: int | None = None  # of random features
        share = self.share or FeatureShare(self.storage.path(self.split), self.storage.features)
        self.path, self.features = share.path, share.features
        self._rows_of_ids = RowsOfIds()
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
        cache = self.cache() if self.beside and not of_all else self.whole()
        return view_of(cache, self.ids, rows_of_ids=self._rows_of_ids, level=level)

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
        missing, found = self.ids, ChangedUtterances()
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
        self, writer: CacheWriter, found: ChangedUtterances, checks: Admission, *, overwrite: bool
    ) -> None:
        """Check what a cache holds, and make way for what is computed again."""
        with contextlib.ExitStack() as stack:
            stack.push(writer)
            if self.ids is not None:
                writer.expect(self.ids)
            if not self.full:  # what a killed run left has been recovered, and is compared, too
                found = self.compared(None, overwrite=overwrite)
                if not checks.admit(found.changed, writer, overwrite=overwrite):
                    found = ChangedUtterances([id for id in self.ids or () if id in writer])
            # first: of utterances that are gone nobody could tell that they had changed
            checks.keep(writer)
            found.apply(writer)
            stack.pop_all()  # it stays open

    def compared(self, cache: Cache | None, *, overwrite: bool = False) -> ChangedUtterances:
        """Find what has changed of the utterances of a cache, or of the build that is written.

        With `overwrite` nothing is refused: all is to be computed anew.
        """
        if self.ids is None:
            return ChangedUtterances()
        if cache is None:
            stored: StampColumns | None = stored_stamps(self.path, self.ids)
        else:
            stored = stamps_in(cache, self.ids)
        known = None if cache is None else remembered(cache)
        inputs = replace(self.inputs, on_changed="recompute") if overwrite else self.inputs
        return inputs.find(self.path, self.ids, stored, known, seed=self.seed)

    def _restamp(self, cache: Cache, found: ChangedUtterances) -> None:
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
        """Show all readers a set that is whole, if its writer was killed before."""
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
        note_failures(open_cache(self.path), failures)

    def publish_early(self, writer: CacheWriter) -> None:
        """Show readers what is there so far, unless they still have the old cache, complete."""
        if not is_overwriting(self.path):
            writer.publish()

    def _missing_from(self, cache: Cache) -> Sequence[str] | None:
        """Return the ids that are to be computed; None if they are not known."""
        if self.ids is None:
            return None
        rows = self._rows_of_ids.of(cache, self.ids)
        lacking = [self.ids[number] for number in np.flatnonzero(rows < 0).tolist()]
        failed = {*cache.failed}.intersection(lacking)
        tell_left_out(self.path, sorted(failed & self.accepted))
        return [id for id in lacking if id not in self.accepted]

    def _writer(self, *, overwrite: bool) -> CacheWriter:
        make = partial(self.writer, self.fingerprint, overwrite=overwrite)
        # a part's writer that has lost its run ends soon; another run of the cache does not
        there = self.path if self.path.exists() else self.storage.path(self.split)
        return retry_while_locked(make, unless=partial(is_locked, there))
