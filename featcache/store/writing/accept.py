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


def accept(
    cache: Path,
    features: Mapping[str, FeatureStorageConfig],
    fingerprint: Mapping[str, object],
) -> list[str]:
    """Take a fingerprint for what a cache was made from, and return in what it differs.

    Whoever calls this has seen that both compute the same. An overwrite that is under way is given
    up. Raises `StaleCacheError` for other declarations, which say how the bytes are to be read;
    `CacheLockedError` while the cache is written.
    """
    content = cache_fingerprint(features, fingerprint)
    with explained(cache, lambda: "the cache is as it was"):
        lock = WriterLock(cache)
        try:
            manifest = read_manifest(cache)
            check_writable(cache, manifest)
            changed = differences(manifest.fingerprint, content)
            if declared := differences(manifest.features, content["features"], "features"):
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
