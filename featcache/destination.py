"""The cache that an extraction fills: opened, published, and what is said about it at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TypeVar

from featcache.compute import Failure
from featcache.config import FeatureStorage
from featcache.errors import (
    CacheLockedError,
    ComputeError,
    ConfigError,
    KeyNotFoundError,
    MissingDependencyError,
    NotACacheError,
    StaleCacheError,
)
from featcache.store.cache import Cache
from featcache.store.files import write_durably
from featcache.store.fingerprint import cache_fingerprint, differences
from featcache.store.lock import is_locked
from featcache.store.manifest import read_manifest
from featcache.store.recover import committed
from featcache.store.verify import container_damage, raise_damage
from featcache.store.writer import CacheWriter

T = TypeVar("T")
PATIENCE_S = 60.0  # for workers of a killed run, or of this one at its end, to be through with their batch
FAILURES = "work-failures.jsonl"
_log = logging.getLogger("featcache")


@dataclass(frozen=True)
class Destination:
    """The cache of a split, to be filled with the utterances of a dataset."""

    storage: FeatureStorage
    split: str
    ids: Sequence[str] | None  # of all utterances, if the dataset shows them
    size: int | None  # their number, if the dataset tells

    @property
    def path(self) -> Path:
        """The cache directory."""
        return self.storage.path(self.split)

    def open(self, fingerprint: Mapping[str, object], *, resume: bool, overwrite: bool) -> CacheWriter | None:
        """Open the cache for writing; None if nothing is missing."""
        if not overwrite and self._is_complete(fingerprint):
            return None
        if not resume and not overwrite:
            # what a killed run left becomes part of the cache, which is then built anew beside it
            self._writer(fingerprint, False).close(complete=False)
            overwrite = True
        return self._writer(fingerprint, overwrite)

    def publish(
        self, writer: CacheWriter, failures: Sequence[Failure], *, left_out: int, stopped: bool
    ) -> None:
        """Publish what was written, and say what could not be computed."""
        if stopped and builds_aside(self.path):
            writer.abort()  # the old cache stays; the parts of the new one wait for the same call
            return
        writer.close(complete=not (failures or left_out or stopped))
        if left_out:
            _log.warning("%d utterances were not in the given sampler: %r stays incomplete", left_out, str(self.path))
        self._record(failures)

    def publish_early(self, writer: CacheWriter) -> None:
        """Let readers see what is there so far, unless they still have the complete cache that is computed anew."""
        if not builds_aside(self.path):
            writer.publish()

    def say_how_to_go_on(self, error: BaseException) -> None:
        """Note on an error what is kept."""
        if isinstance(error, ConfigError | MissingDependencyError):  # the same call would end in the same way
            return
        with contextlib.suppress(OSError):  # a cache that cannot be read says nothing of how to go on
            if builds_aside(self.path):
                text = f"cache {str(self.path)!r} is as it was; what was computed anew waits beside it"
            else:
                of_all = "" if self.ids is None else f" of {len(self.ids)}"
                text = f"{sum(1 for _ in committed(self.path))}{of_all} utterances are in cache {str(self.path)!r}"
            text += "; the same call goes on from there"
            error.add_note(text)
            if isinstance(error, KeyboardInterrupt):
                _log.warning("stopped: %s", text)

    def _writer(self, fingerprint: Mapping[str, object], overwrite: bool) -> CacheWriter:
        make = partial(self.storage.writer, self.split, fingerprint, overwrite=overwrite)
        # a part's writer that has lost its run ends soon; another run of the cache does not
        return patiently(make, unless=partial(is_locked, self.path))

    def _is_complete(self, fingerprint: Mapping[str, object]) -> bool:
        try:
            cache = self.storage.cache(self.split)
        except (NotACacheError, StaleCacheError):  # the writer starts one, or says all that differs
            return False
        declared = cache_fingerprint(self.storage.features, fingerprint)
        if not cache.complete or differences(cache.fingerprint, declared):
            return False
        raise_damage(container_damage(cache.path, cache._index.containers))
        if self.ids is not None:
            return _holds_all(cache, self.ids)
        return len(cache) >= (self.size or 0)

    def _record(self, failures: Sequence[Failure]) -> None:
        path = self.path / FAILURES
        if not failures:
            path.unlink(missing_ok=True)
            return
        lines = [json.dumps(failure, ensure_ascii=False) + "\n" for failure in failures]
        write_durably(path, "".join(lines).encode("utf-8", "backslashreplace"))
        first = f"{failures[0]['id']!r} with {failures[0]['type']}: {failures[0]['error']}"
        if not len(Cache(self.path)):
            raise ComputeError(f"all {len(failures)} utterances failed, see {str(path)!r}; the first, {first}")
        _log.warning("%d utterances failed, see %r; the first, %s", len(failures), str(path), first)


def check_settings(on_error: str, retries: int, publish_every_s: float | None) -> None:
    """Raise `ConfigError` for settings of an extraction that cannot work."""
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error is 'raise' or 'skip', not {on_error!r}")
    if not isinstance(retries, Integral) or retries < 0:
        raise ConfigError(f"retries is a whole number from 0 on, not {retries!r}")
    if publish_every_s is not None and not (isinstance(publish_every_s, int | float) and publish_every_s > 0):
        raise ConfigError(f"publish_every_s is a number of seconds, above 0, or None, not {publish_every_s!r}")


def patiently(do: Callable[[], T], unless: Callable[[], bool] = lambda: False) -> T:
    """Do something once the writers of parts that are in its way have ended; waits for them up to a minute.

    Raises the `CacheLockedError` that names one of them when that was in vain, and at once if `unless` says so.
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


def builds_aside(path: Path) -> bool:
    """Say whether a cache that is to be overwritten is still the one that readers see."""
    manifest = read_manifest(path)
    return manifest.building > manifest.build


def _holds_all(cache: Cache, ids: Sequence[str]) -> bool:
    feature = cache.features[0]
    try:
        for start in range(0, len(ids), 100_000):
            cache.lengths(feature, ids[start : start + 100_000])
    except KeyNotFoundError:
        return False
    return True
