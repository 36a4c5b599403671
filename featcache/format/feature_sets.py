"""Feature sets: caches in `sets/<name>/` of a cache whose `featcache.json` names them.

    {"format": "featcache", "version": 1, "kind": "sets", "sets": ["fbank", "energy"]}

A set that is not named yet is being computed: it is found by who asks for its features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from featcache.errors import NotACacheError
from featcache.format.files import check_own_directory, pack_json, write_durably
from featcache.format.lock import NAME as LOCK
from featcache.format.lock import SOFT_NAME as SOFT_LOCK
from featcache.format.manifest import (
    FORMAT_VERSION,
    KEY,
    NAME,
    SETS,
    FeatureSetsError,
    Manifest,
    last_pairs,
    read_content,
    read_manifest,
)

NEW = ".new-"  # begins the name of a directory in `sets` that is no set yet


def set_names(cache: Path) -> tuple[str, ...] | None:
    """Return the names of the sets of a cache; None for a plain one, or where there is none.

    Raises `CorruptCacheError` or `FormatVersionError`.
    """
    try:
        read_manifest(cache)
    except FeatureSetsError as found:
        return found.names
    except NotACacheError:
        return None
    return None


def _is_lost(cache: Path) -> bool:
    """Whether the manifest of a cache of sets is gone; the lock is left of it."""
    locks = (cache / LOCK, cache / SOFT_LOCK)
    return not (cache / NAME).exists() and any(lock.exists() for lock in locks)


def write_sets(cache: Path, names: Sequence[str]) -> None:
    """Name the sets of a cache, in one step; other keys stay as they are."""
    content: Mapping[str, Any] = read_content(cache) if (cache / NAME).exists() else {}
    others = content if content.get("kind") == SETS else {}
    fixed = {"format": "featcache", "version": FORMAT_VERSION, "kind": SETS, SETS: list(names)}
    write_durably(cache / NAME, pack_json({**others, **fixed}))


def name_following(cache: Path, pairs: Mapping[str, tuple[str, str]]) -> None:
    """Replace manifests of sets by others, all in one step: `write_id`s of both, by set.

    What is named stays there, and means nothing once another manifest has come to its place.
    """
    content = read_content(cache)
    write_durably(cache / NAME, pack_json({**content, KEY: {**last_pairs(content), **pairs}}))


def last_edits(cache: Path) -> Mapping[str, tuple[str, str]]:
    """Return what names the last edits of several sets of a cache: other edits, other names."""
    return last_pairs(read_content(cache))


def cache_of_set(directory: Path) -> Path | None:
    """Return the cache that a directory is a set of; None if of none."""
    cache = directory.parent.parent
    if directory.parent.name != SETS:
        return None
    return cache if _is_lost(cache) or set_names(cache) is not None else None


def set_directories(cache: Path, named: Iterable[str]) -> dict[str, Path]:
    """Return the directories of sets by name: first those that are named, then the others.

    Raises `CorruptCacheError` where a link leads to one.
    """
    check_own_directory(cache / SETS)
    found = {name: cache / SETS / name for name in named}
    for manifest in sorted((cache / SETS).glob(f"*/{NAME}")):
        if not manifest.parent.name.startswith(NEW):
            found.setdefault(manifest.parent.name, manifest.parent)
    for directory in found.values():
        check_own_directory(directory)
    return found


def stored_sets(cache: Path) -> Iterator[tuple[Path, Manifest]]:
    """Iterate over directory and manifest of each set of a cache, named or not.

    A plain cache is its own only one; where there is no cache, there is none. Passed over are a set
    that cannot be read, of which whoever opens it is told, and a set of features that one before
    it has.
    """
    try:
        yield cache, read_manifest(cache)
        return
    except FeatureSetsError as found:
        named = found.names
    except NotACacheError:
        if not _is_lost(cache):
            return
        named = ()
    except OSError:
        return
    seen: set[str] = set()
    for directory in set_directories(cache, named).values():
        with contextlib.suppress(OSError):
            manifest = read_manifest(directory)
            if seen.isdisjoint(manifest.features):
                seen.update(manifest.features)
                yield directory, manifest


def features_beside(directory: Path) -> set[str]:
    """Return the features of the other sets of the cache that a directory is a set of."""
    cache = cache_of_set(directory)
    others = () if cache is None else stored_sets(cache)
    return {name for other, each in others if other != directory for name in each.features}


def set_of(cache: Path, feature: str) -> Path:
    """Return the directory of the set that has a feature; the cache's own where none has."""
    with contextlib.suppress(OSError):  # told when it is opened
        for directory, manifest in stored_sets(cache) if (cache / SETS).is_dir() else ():
            if feature in manifest.features:
                return directory
    return cache
