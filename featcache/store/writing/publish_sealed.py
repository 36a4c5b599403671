"""Publishing by whoever writes parts and happens to get the cache's lock: the others go on."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import CacheLockedError
from featcache.store.format.disk_errors import explained
from featcache.store.format.lock import WriterLock
from featcache.store.format.manifest import Manifest, check_writable, read_manifest
from featcache.store.writing.compact import merge_small
from featcache.store.writing.completeness import Outcome
from featcache.store.writing.publish import publish, sealed_parts
from featcache.store.writing.recover import recover_parts

_PAUSE_S = 0.02


def publish_sealed(
    cache: Path,
    *,
    complete: bool | None = None,
    expected: Collection[str] | None = None,
    patience_s: float = 0.0,
) -> bool:
    """Publish what writers of parts have sealed, and what dead ones had committed.

    Parts that are being written stay as they are. Returns False, having done nothing, if another
    process held the cache's lock for `patience_s`: it publishes, or the next one does.

    Args:
        cache: the cache directory, or that of a feature set.
        complete: whether the cache is, where no ids are expected; None: as it was.
        expected: the ids that the cache is to hold in the end; None: nobody says.
        patience_s: seconds to wait for the lock.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            lock = WriterLock(cache)
            break
        except CacheLockedError:
            if time.monotonic() >= until:
                return False
        time.sleep(_PAUSE_S)
    try:
        with explained(cache, lambda: "all that was committed before is kept"):
            _publish(cache, complete, expected)
    finally:
        lock.release()
    return True


def _publish(cache: Path, complete: bool | None, expected: Collection[str] | None) -> None:
    manifest = read_manifest(cache)
    check_writable(cache, manifest)
    declared = manifest.features.items()
    features = {name: FeatureStorageConfig.from_json(each) for name, each in declared}
    recover_parts(cache, features, manifest, pass_live=True)
    if manifest.building != manifest.build:  # an overwrite is published by its own writer
        return
    if complete is None:
        complete = manifest.complete
    if _is_news(cache, manifest, complete, expected):
        manifest = publish(cache, manifest, Outcome(complete, expected))
        merge_small(cache, features, manifest)


def _is_news(
    cache: Path, manifest: Manifest, complete: bool, expected: Collection[str] | None
) -> bool:
    sealed = {part.entry.name for part in sealed_parts(cache, manifest)}
    if sealed != {entry.name for entry in manifest.parts}:
        return True
    if expected is None:
        return complete != manifest.complete
    told = manifest.expected is not None and manifest.expected.count == len(expected)
    return not (told and manifest.complete)
