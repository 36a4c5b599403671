"""`Destination`: the cache that is filled, opened, waited for, and shown as the data set's view.

What of it does not belong to the data set: utterances whose inputs have changed, and utterances
that another split holds already.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from featcache._checks import listed_ids
from featcache.declaration import FeatureStorageConfig
from featcache.errors import (
    CacheError,
    CacheLockedError,
    ConfigError,
    NotACacheError,
    StaleCacheError,
    counted,
    describe,
)
from featcache.extraction.computation import DatasetBatches, Loading
from featcache.extraction.datasets import dataset_of, is_map_style, named
from featcache.extraction.job import Job
from featcache.extraction.stamping import Entries, InputsOnly
from featcache.format import (
    NAME,
    BuildState,
    Manifest,
    StampColumns,
    Stamps,
    cache_fingerprint,
    differences,
    read_manifest,
    stored_sets,
)
from featcache.interface import Ints
from featcache.reading import Generation, note_compared
from featcache.storage import FeatureStorage, declared_cache
from featcache.store import Cache
from featcache.tables import FeatureTable
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.session import stored_stamps
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


# A data set under the name of the wrong split: noticed by its ids, before anything is computed.

_SOME = 100_000  # ids that are looked up at once


def tell_other_splits(
    root: Path, split: str, features: Mapping[str, FeatureStorageConfig], ids: Sequence[str]
) -> None:
    """Log which of some new utterances of a split other ones have, with the same features."""
    declared = cache_fingerprint(features, None)["features"]
    others = (path.parent for path in sorted(root.glob(f"*/{NAME}")) if path.parent.name != split)
    for directory, manifest in (each for other in others for each in stored_sets(other)):
        # one of other features, or damaged: whoever reads it is told
        with contextlib.suppress(OSError):
            if differences(manifest.features, declared):
                continue
            there = rows_of(Generation.at(directory.absolute()), ids) >= 0
            if there.any():
                found = [ids[number] for number in np.flatnonzero(there).tolist()]
                text = "split %r gets utterances that %r has, too (%d of %d): %s; is it that split?"
                some = len(found), len(ids), named(found, 3)
                _log.warning(text, split, str(directory), *some)


def refuse_another(path: Path, manifest: Manifest, ids: Sequence[str], split: str) -> None:
    """Raise `ConfigError` for a complete cache that a data set has no utterance in common with.

    `manifest` is that of the cache.
    """
    if not manifest.complete or not manifest.rows or manifest.state is BuildState.ASIDE:
        return
    try:
        cache = Generation.at(path.absolute(), current=manifest)
    except OSError:  # damaged: whoever opens it says so
        return
    if not {*cache.failed}.isdisjoint(ids):
        return
    if any((rows >= 0).any() for rows in _rows_of_some(cache, ids)):
        return
    raise ConfigError(
        f"the data set shares no utterance with cache {str(path)!r}, which is complete: "
        f"{named(ids, 3)} here, {named([*islice(cache.index.ids, 3)], 3)} there. Is it another "
        f"split than {split!r}? Give its stage= or split=; or append=True to add its utterances, "
        "overwrite=True to replace those there"
    )


def is_overwriting(path: Path) -> bool:
    """Whether a cache that is to be overwritten is still the one that readers see."""
    return read_manifest(path).state is BuildState.ASIDE


def rows_of(cache: Generation, ids: Sequence[str]) -> NDArray[np.int64]:
    """Return the rows of ids in a cache, -1 where there is none."""
    return np.concatenate([np.empty(0, np.int64), *_rows_of_some(cache, ids)])


def _rows_of_some(cache: Generation, ids: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(ids), _SOME):
        yield cache.index.find_many(listed_ids(ids[start : start + _SOME]))


# Stored utterances against the data set of now: by a stat each, and by loading what looks new.

_LOADED_AT_ONCE = 16
_NOT_COMPARED = {"batch_size", "sampler", "batch_sampler", "collate_fn"}


class ChangedUtterances(NamedTuple):
    """Utterances that are unlike what their features were computed from, or only look so."""

    changed: Sequence[str] = ()
    alike: Mapping[str, Stamps] = {}  # their entries changed, but not their inputs

    def apply(self, writer: CacheWriter) -> None:
        """Delete what has changed, so that it is missing; restamp what only looks so."""
        if self.alike:
            writer.restamp(self.alike)
        if self.changed:
            number, some = counted(len(self.changed), "utterance"), named(self.changed, 3)
            text = "computing %s of cache %r again, whose input has changed: %s"
            _log.warning(text, number, str(writer.path), some)
            writer.delete(self.changed)


class ChangedInputs:
    """Compares the utterances that a cache holds with the data set of a job.

    Args:
        job: knows the data set.
        refuses: refuses a cache of which utterances have changed; else they are computed again.
    """

    def __init__(self, job: Job, *, refuses: bool) -> None:
        dataset = dataset_of(job.source)
        self._dataset: Any = dataset if is_map_style(dataset) else None
        self._entries = Entries(self._dataset)
        self._job, self._refuses = job, refuses

    def find_in(
        self, cache: Cache, ids: Sequence[str] | None, seed: int | None
    ) -> ChangedUtterances:
        """Find the utterances of a cache that have changed.

        Args:
            cache: the cache.
            ids: of the data set; None: none are known, and nothing is compared.
            seed: of random data, whose items are loaded from generators of their own.

        Raises `StaleCacheError`, which names the utterances, unless they are to be computed again.
        """
        return self._find(cache.path, ids, partial(stamps_in, cache), seed)

    def find_sealed(
        self, path: Path, ids: Sequence[str] | None, seed: int | None
    ) -> ChangedUtterances:
        """Find those of the build of cache `path` that is being written, as `find_in` does."""
        return self._find(path, ids, partial(stored_stamps, path), seed)

    def _find(
        self,
        path: Path,
        ids: Sequence[str] | None,
        stamps: Callable[[Sequence[str]], StampColumns | None],
        seed: int | None,
    ) -> ChangedUtterances:
        """Compare what `stamps` returns for ids with the data set of now."""
        if ids is None or not self._entries or (stored := stamps(ids)) is None:
            return ChangedUtterances()
        there = np.flatnonzero(stored.entry)
        now = self._entries.stamps(there.tolist())
        suspects = np.flatnonzero((now != stored.entry[there]) & (now != 0))
        entries = dict(zip(there[suspects].tolist(), now[suspects].tolist(), strict=True))
        load = partial(self._inputs, ids, seed)
        found = _look(path, ids, stored.input, entries, load)
        if found.changed and self._refuses:
            raise _refusal(path, found.changed)
        return found

    def _inputs(
        self, ids: Sequence[str], seed: int | None, numbers: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Iterate over numbers and the stamps of their inputs of now, 0 where there is none."""
        given = self._job.loader_kwargs
        single = given.get("batch_size", 1) is None
        kwargs = {k: v for k, v in given.items() if k not in _NOT_COMPARED}
        kwargs["collate_fn"] = InputsOnly(self._job.mentioned, batched=not single)
        kwargs["batch_size"] = None if single else _LOADED_AT_ONCE
        batches = DatasetBatches(self._dataset, numbers, kwargs, ids, Loading(seed=seed))
        for batch in batches:
            singles = [batch] if batch.error is None else batches.singly(batch)
            for each in singles:
                inputs = [0] * len(each.indices) if each.data is None else each.data
                for number, input in zip(each.indices, inputs, strict=True):
                    failed = each.error is not None
                    yield number, 0 if failed else input or self._entries.input_of(number)


def _look(
    path: Path,
    ids: Sequence[str],
    before: NDArray[np.uint64],
    entries: Mapping[int, int],
    load: Callable[[Sequence[int]], Iterator[tuple[int, int]]],
) -> ChangedUtterances:
    """Load the utterances whose entries have changed, by number, and compare their inputs."""
    alike: dict[str, Stamps] = {}
    changed: list[int] = []
    unknown: list[str] = []
    for number, now in load([*entries]):
        if not now or not before[number]:
            unknown.append(ids[number])
        elif now == before[number]:
            alike[ids[number]] = Stamps(now, entries[number])
        else:
            changed.append(number)
    if changed:
        (first,), (second,) = (list(load(changed[:1])) for _ in range(2))
        if first != second:  # random: another one each time that it is loaded
            unknown += [ids[number] for number in changed]
            changed = []
    if unknown:
        text = (
            "the entries of %s of cache %r have changed since (%s), and their items cannot be "
            "compared: they cannot be loaded, are random, or hold what has no digest; the "
            "features stay as they are"
        )
        _log.warning(text, counted(len(unknown), "utterance"), str(path), named(unknown, 3))
    return ChangedUtterances([ids[number] for number in changed], alike)


def _refusal(path: Path, changed: Sequence[str]) -> StaleCacheError:
    have, these = ("has", "it") if len(changed) == 1 else ("have", "these")
    return StaleCacheError(
        f"the input of {counted(len(changed), 'utterance')} of cache {str(path)!r} {have} changed "
        f"since the features were computed: {named(changed)}; on_changed='recompute' computes "
        f"{these} again, overwrite=True all"
    )


def stamps_in(cache: Cache, ids: Sequence[str]) -> StampColumns | None:
    """Return the stamps of utterances in a cache, 0 for those that it lacks; None: it has none."""
    stamps = cache.opened.index.stamps
    if stamps is None:
        return None
    rows = rows_of(cache.opened, ids)
    there = rows >= 0
    found = StampColumns.unknown(len(ids))
    for column, stored in zip(found, stamps, strict=True):
        column[there] = stored[rows[there]]
    return found
