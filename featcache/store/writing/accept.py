"""Accepts another fingerprint for a cache: what it holds stays, and counts as made from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import StaleCacheError
from featcache.store.format.disk_errors import explained
from featcache.store.format.fingerprint import cache_fingerprint, differences, fingerprint_digest
from featcache.store.format.lock import WriterLock
from featcache.store.format.manifest import check_writable, read_manifest, write_manifest


def says_when(difference: str) -> bool:
    """Tell whether a line of `differences` is about times of frames: they change no byte.

    >>> says_when("features.fbank.frame_s: was (absent), now 0.01")
    True
    """
    field = difference.partition(": was ")[0].split(".")
    return len(field) == 3 and field[0] == "features" and field[2] in ("frame_s", "offset_s")


def accept(
    cache: Path,
    features: Mapping[str, FeatureStorageConfig],
    fingerprint: Mapping[str, object],
) -> list[str]:
    """Take a fingerprint for what a cache was made from, and return in what it differs.

    Whoever calls this has seen that both compute the same. An overwrite that is under way is given
    up. Raises `StaleCacheError` for declarations that read the bytes in another way (other times of
    frames do not), `CacheLockedError` while the cache is written.
    """
    content = cache_fingerprint(features, fingerprint)
    with explained(cache, lambda: "the cache is as it was"):
        lock = WriterLock(cache)
        try:
            manifest = read_manifest(cache)
            check_writable(cache, manifest)
            changed = differences(manifest.fingerprint, content)
            declared = differences(manifest.features, content["features"], "features")
            if declared := [line for line in declared if not says_when(line)]:
                lines = "".join(f"\n  {line}" for line in declared)
                raise StaleCacheError(
                    f"cache {str(cache)!r} was declared in another way, which cannot be "
                    f"accepted:{lines}\ndeclare it as it was, or overwrite it (overwrite=True)"
                )
            if changed:
                before = fingerprint_digest(manifest.fingerprint)
                if manifest.building > manifest.build:
                    manifest = replace(manifest, building_files={}, building_parts=())
                manifest = replace(
                    manifest,
                    fingerprint=content,
                    building=manifest.build,
                    building_fingerprint=fingerprint_digest(content),
                    accepted=tuple(dict.fromkeys((*manifest.accepted, before))),
                )
                write_manifest(cache, manifest)
        finally:
            lock.release()
    return changed
