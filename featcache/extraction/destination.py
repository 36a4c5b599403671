"""`Destination`: the cache that is filled, opened, waited for, and shown as the data set's view."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheError, CacheLockedError, NotACacheError, StaleCacheError, describe
from featcache.extraction.changed_inputs import rows_of
from featcache.extraction.datasets import named
from featcache.format.feature_sets import stored_sets
from featcache.format.fingerprint import cache_fingerprint, differences
from featcache.format.manifest import NAME
from featcache.interface import Ints
from featcache.reading.opening import note_compared
from featcache.storage import FeatureStorage, declared_cache
from featcache.store import Cache
from featcache.tables.table import FeatureTable
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.sets import directory_of, holds_any

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
    cache: Cache, ids: Sequence[str] | None, rows_of_ids: RowsOfIds, level: int
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


# `Destination`: the cache that an extraction fills.


@dataclass(frozen=True)
class Destination:
    """The cache of a split, or a set of features in it that are stored together.

    Args:
        storage: where its caches are.
        split: names the cache.
        path: the directory of the cache, or of the feature set in it.
        features: those that are stored there.
        has_splits: whether the other caches of the storage are splits of the same data.
        others_added: whether features were added to the declaration after these were stored, and
            the code with them.
    """

    storage: FeatureStorage
    split: str
    path: Path
    features: Mapping[str, FeatureStorageConfig]
    has_splits: bool
    others_added: bool = False

    @classmethod
    def of(cls, storage: FeatureStorage, split: str, *, has_splits: bool = True) -> Self:
        """Return the cache of a split, for all features of the storage."""
        return cls(storage, split, storage.path(split), storage.features, has_splits)

    def shares(self, *, overwrite: bool) -> list[Self]:
        """Cut the declared features into those of each set of the cache; new ones come last.

        A plain cache that is overwritten takes the new ones, too: all is computed anyway.
        """
        rest, shares, stored = dict(self.features), list[Self](), dict(stored_sets(self.path))
        for directory, manifest in stored.items():
            mine = {name: rest.pop(name) for name in [*rest] if name in manifest.features}
            if not mine:
                continue
            alone = directory == self.path and len(stored) == 1
            whole = alone and rest and manifest.features.keys() <= mine.keys()
            if whole and (overwrite or not holds_any(directory, manifest)):
                return [self]
            shares.append(replace(self, path=directory, features=mine))
        if rest:
            shares = [replace(share, others_added=True) for share in shares]
            new = directory_of(self.path, rest, stored)
            shares.append(replace(self, path=new, features=rest))
        return shares

    @property
    def beside(self) -> frozenset[str]:
        """Features of the storage that are stored apart from these."""
        return frozenset(self.storage.features.keys() - self.features.keys())

    @property
    def name(self) -> str:
        """The name of the cache in messages: the split, with the features where some are apart."""
        return f"{self.split} ({', '.join(self.features)})" if self.beside else self.split

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

    def current(self, fingerprint: Mapping[str, object]) -> Cache | None:
        """Return the cache that readers see, if it was made from the same."""
        try:
            cache = self.stored(expect=fingerprint)
        except (NotACacheError, StaleCacheError):  # the writer starts one, or says all that differs
            return None
        declared = cache_fingerprint(self.features, fingerprint)
        return None if differences(cache.fingerprint, declared) else cache

    def writer(self, fingerprint: Mapping[str, object], *, overwrite: bool = False) -> CacheWriter:
        """Open the cache for writing; see `CacheWriter`."""
        cache = self.storage.path(self.split)
        return CacheWriter(cache, self.features, fingerprint, overwrite=overwrite)
