"""Caches that were made from something else than is declared now: told, and accepted if wanted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import CacheLockedError, NotACacheError, StaleCacheError
from featcache.extraction.accepting import are_code_or_settings
from featcache.lazy.results import Features, Results, as_read_back
from featcache.store.format.disk_errors import reading
from featcache.store.format.feature_sets import set_of
from featcache.store.format.fingerprint import canonical, differences
from featcache.store.format.manifest import ADOPTED, FeatureSetsError, Manifest
from featcache.store.reading.generation import Generation
from featcache.store.writing.accept import accept
from featcache.store.writing.casts import check_features

_PAUSE_S, _PATIENCE_S = 0.05, 60.0  # for another process that has the lock
_log = logging.getLogger("featcache")


def changed_since(
    manifest: Manifest, features: Features | None, fingerprint: Mapping[str, object]
) -> list[str]:
    """Return in what a cache differs from what is declared now; without features, as they are."""
    expected = {**fingerprint, "features": manifest.fingerprint["features"]}
    if features is not None:
        expected["features"] = {name: each.to_json() for name, each in features.items()}
    if "results" in manifest.fingerprint:  # of the first result
        expected["results"] = manifest.fingerprint["results"]
    return differences(manifest.fingerprint, canonical(expected))


def stale(path: Path, manifest: Manifest, changed: Sequence[str], why: str = "") -> StaleCacheError:
    """Return the error of a cache that differs from what is declared now."""
    lines = "".join(f"\n  {line}" for line in changed)
    cure = "remove it to compute everything again, or give another directory"
    if not why and may_be_accepted(manifest, changed):
        why = "if its results are the same, accept=True keeps the cache"
    told = f"cache {str(path)!r} was made from something else than is declared now:{lines}\n{cure}"
    return StaleCacheError(f"{told}; {why}" if why else told)


def may_be_accepted(manifest: Manifest, changed: Sequence[str]) -> bool:
    """Tell whether differences are ones of code and settings, or the cache is an adopted one."""
    if ADOPTED in manifest.fingerprint:  # nothing is known of what made it
        return not any(line.startswith("features.") for line in changed)
    return are_code_or_settings(changed)


def accept_if_same(
    path: Path,
    names: Sequence[str],
    features: Features | None,
    fingerprint: Callable[[], Mapping[str, object]],
    id: str,
    compute: Callable[[], object],
) -> None:
    """Take a cache for one of the function of now, if that computes an utterance of it to the bit.

    Raises `StaleCacheError` if it does not, if the cache does not hold the utterance, and where
    more than code and settings has changed.
    """
    place = set_of(path, names[0])
    value: object = None
    until = time.monotonic() + _PATIENCE_S
    while True:
        with reading(place):
            try:
                generation = Generation(place)
            except (NotACacheError, FeatureSetsError):
                return
            manifest = generation.manifest
            changed = changed_since(manifest, features, fingerprint())
            if not (changed and manifest.rows):
                return
            if not may_be_accepted(manifest, changed):
                raise stale(place, manifest, changed, "accept=True is for code and settings alone")
            value = compute() if value is None else value
            results = _compared(place, generation, changed, id, value)
        declared = _declared(manifest)
        try:
            accept(place, declared, {**fingerprint(), "results": results.to_json()})
        except CacheLockedError:  # another one accepts it, or publishes
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)
            continue
        _log.warning("cache %r: accepted %s", str(place), "; ".join(changed))
        return


def _compared(
    place: Path, generation: Generation, changed: Sequence[str], id: str, value: object
) -> Results:
    manifest, declared = generation.manifest, _declared(generation.manifest)
    row = generation.index.find(id)
    if row < 0:
        other = generation.index.id(0)
        why = f"accept=True compares an utterance, and {id!r} is not stored; read {other!r} first"
        raise stale(place, manifest, changed, why)
    content = manifest.fingerprint.get("results")
    results = Results.from_json(content, list(declared))
    if content is None:
        results = Results.of(id, value, list(declared))
    arrays = results.arrays(id, value)
    check_features(id, arrays, declared)
    for name, feature in declared.items():
        stored = generation.features[name].read(row)
        now = as_read_back(id, arrays[name], feature)
        if stored.shape != now.shape or stored.tobytes() != now.tobytes():
            why = f"utterance {id!r}, feature {name!r}: computed now it is another one"
            raise stale(place, manifest, changed, why)
    return results


def _declared(manifest: Manifest) -> dict[str, FeatureStorageConfig]:
    declared = manifest.features.items()
    return {name: FeatureStorageConfig.from_json(each) for name, each in declared}
