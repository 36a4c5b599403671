"""Expectations: the fingerprint that a reader demands of a cache, compared when it is opened.

A cache that nothing compared in this process is told of once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from featcache.errors import ConfigError, StaleCacheError
from featcache.store.format.fingerprint import (
    ABSENT,
    canonical,
    differences,
    digest_of_canonical,
)
from featcache.store.format.manifest import ADOPTED, Manifest, read_manifest
from featcache.store.reading.generation import Generation
from featcache.store.reading.origin import origin

_log = logging.getLogger("featcache")
# caches that were compared in this process, and those that were told of: digest of the fingerprint
_compared: dict[Path, str] = {}
_told: dict[Path, str] = {}


@dataclass(frozen=True)
class Expectation:
    """The fingerprint that a reader demands.

    Args:
        keys: each is compared with that of the cache; of "features" those that it names.
        same: digest of the whole fingerprint of a cache that was open before.
        seen: digest of what was there before anything was opened; what this process compared since
            may take its place.
    """

    keys: Mapping[str, object] = field(default_factory=dict)
    same: str | None = None
    seen: str | None = None

    @classmethod
    def of(cls, expect: Mapping[str, object] | None) -> Expectation:
        """Return what a user demands; raises `ConfigError` for what is no fingerprint."""
        if not isinstance(expect, Mapping | None):
            raise ConfigError(
                "expect is a fingerprint, a dict such as brain.expectation() returns, not "
                f"{expect!r:.100}"
            )
        return cls(canonical(expect or {}))

    @classmethod
    def of_opened(cls, opened: Generation) -> Expectation:
        """Demand the fingerprint of a cache that is open."""
        return cls(same=digest_of_canonical(opened.manifest.fingerprint))

    def with_what_is_there(self, path: Path) -> Expectation:
        """Demand also what is there now, if anything is."""
        with contextlib.suppress(OSError):  # told when the cache is opened
            return replace(self, seen=digest_of_canonical(read_manifest(path).fingerprint))
        return self

    def as_of_now(self, path: Path) -> Expectation:
        """Return what a copy, perhaps in another process, is to demand."""
        return replace(self, seen=_compared.get(path, self.seen)) if self.same is None else self

    def check(self, opened: Generation) -> None:
        """Raise `StaleCacheError`, with the differences, for a cache made from something else."""
        path, made_from = opened.path, opened.manifest.fingerprint
        if changed := [line for key in self.keys for line in self._differences(made_from, key)]:
            lines = "".join(f"\n  {line}" for line in changed)
            raise StaleCacheError(
                f"cache {str(path)!r}, {origin(opened)}, was made from something else than is "
                f"expected:{lines}\n"
                "compute it again (cache_features or extract with overwrite=True), or expect what "
                "it was made from: featcache.made_from(path) tells"
            )
        found = digest_of_canonical(made_from)
        changed_since_seen = self.seen not in (None, found) and _compared.get(path) != found
        if self.same not in (None, found) or changed_since_seen:
            raise StaleCacheError(
                f"cache {str(path)!r} was made anew from something else since it was opened or its "
                f"reader was made; the one there now was {origin(opened)}. Open it again to read "
                "that"
            )
        if self.keys.keys() - {"features"}:
            _compared[path] = found
        elif self.same is None:
            _tell(opened, found)

    def _differences(self, made_from: Mapping[str, object], key: str) -> list[str]:
        expected, found = self.keys[key], made_from.get(key, ABSENT)
        if key == "features" and isinstance(expected, Mapping) and isinstance(found, Mapping):
            found = {name: found[name] for name in expected if name in found}
        return differences(found, expected, key)


def note_compared(path: Path, manifest: Manifest) -> None:
    """Note that the fingerprint of a cache was compared with what its features are made from."""
    _compared[path.absolute()] = digest_of_canonical(manifest.fingerprint)


def _tell(opened: Generation, found: str) -> None:
    """Say once that nothing has compared a cache, if its fingerprint holds anything to compare."""
    path = opened.path
    if not opened.manifest.fingerprint.keys() - {"features", ADOPTED}:
        return
    if found not in (_compared.get(path), _told.get(path)):
        _told[path] = found
        _log.warning(
            "cache %r: %s, not checked: give expect= when you open it, brain.expectation() or the "
            "fingerprint that it should have",
            str(path),
            origin(opened),
        )
