"""Feature sets: the features that a cache began with, and caches in `sets/<name>/` beside them.

A set that is not named yet is being computed: it is found by who asks for its features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from featcache.container_files import write_durably
from featcache.errors import CorruptCacheError
from featcache.format.files import (
    NOT_AS_WRITTEN,
    Name,
    check_own_directory,
    pack_json,
    read_as,
    reading,
    remove_unfinished,
)
from featcache.format.manifest import (
    FORMAT_VERSION,
    KEY,
    NAME,
    NAME_SETS,
    OUTER,
    OWN,
    SETS,
    Manifest,
    cache_of_set,
    generation_number,
    last_pairs,
    read_manifest,
    read_outer,
    tags_of,
)

_FIXED = {"format": "featcache", "version": FORMAT_VERSION, "kind": SETS}


def set_names(cache: Path, manifest: Manifest | None = None) -> tuple[str, ...] | None:
    """Return the names of the sets that were added to a cache; None if none was ever begun.

    `manifest` is that of the cache, where it was read. Raises what `read_manifest` raises, and
    `CorruptCacheError` where what names the sets is lost.
    """
    if SETS not in (manifest or read_manifest(cache)).requires:
        return None
    outer = read_outer(cache)
    try:
        return read_as(tuple[Name, ...], (outer or {})[SETS])
    except NOT_AS_WRITTEN as error:
        raise CorruptCacheError(
            f"{str(cache / OUTER)!r} is lost or damaged, with the names of the feature sets; "
            f"{NAME_SETS}"
        ) from error


def write_outer(cache: Path, **changed: object) -> None:
    """Change keys of what names the sets of a cache, in one step, as holder of the lock of `sets`.

    What a killed writer left half written goes.
    """
    remove_unfinished(cache / SETS)
    write_durably(
        cache / OUTER, pack_json({**_FIXED, SETS: (), **(read_outer(cache) or {}), **changed})
    )


def last_edits(cache: Path) -> Mapping[str, tuple[str, str]]:
    """Return what names the last edits of several sets of a cache: other edits, other names."""
    return last_pairs(read_outer(cache) or {})


def outer_of(write_ids: Mapping[str, str]) -> bytes:
    """Return what names sets, and the manifests of all, which lie in their places."""
    pairs = {name: ["", write_id] for name, write_id in write_ids.items()}
    return pack_json({**_FIXED, SETS: [name for name in write_ids if name != OWN], KEY: pairs})


# In an object store one file is replaced when anything changes, the cache's manifest. So it names
# the manifests of the sets, which have names that no other write gives:
#
#     {..., "pushed_sets": {"energy": <write_id of sets/energy/featcache-<write_id>.json>}}

PUSHED = "pushed_sets"  # key of a manifest in a store


def pushed_sets(content: Mapping[str, object]) -> dict[str, str]:
    """Return the `write_id`s, by set, of the manifests that one in a store names.

    Raises an error of `NOT_AS_WRITTEN` for one that names none.
    """
    return read_as(dict[Name, Name], content[PUSHED])


def pushed_file(name: str, write_id: str) -> str:
    """Return where a store has the manifest of a set, relative to the cache."""
    return f"{SETS}/{name}/featcache-{write_id}.json"


def set_prefix(name: str) -> str:
    """Return the path of a set's directory in the cache, with a slash at its end."""
    return "" if name == OWN else f"{SETS}/{name}/"


def set_directories(cache: Path, named: Iterable[str]) -> dict[str, Path]:
    """Return the directories of sets by name: the cache's own, those that are named, the others.

    Raises `CorruptCacheError` where a link leads to one.
    """
    check_own_directory(cache / SETS)
    found = {OWN: cache} | {name: cache / SETS / name for name in named}
    if (cache / SETS).is_dir():
        for manifest in sorted((cache / SETS).glob(f"*/{NAME}")):
            found.setdefault(manifest.parent.name, manifest.parent)
    for name in found.keys() - {OWN}:
        check_own_directory(found[name])
    return found


def every_directory(cache: Path) -> list[Path]:
    """Return the directories of all feature sets, also of those that are not complete."""
    with reading(cache):
        return [*set_directories(cache, set_names(cache) or ()).values()]


def tags_of_sets(cache: Path) -> dict[str, int]:
    """Return the tags of a cache, and the numbers of the generations that they name."""
    numbers: dict[str, int] = {}
    for directory in every_directory(cache):
        for tag, name in tags_of(directory).items():
            numbers[tag] = numbers.get(tag, 0) + generation_number(name)
    return numbers


def stored_sets(cache: Path) -> Iterator[tuple[Path, Manifest]]:
    """Iterate over directory and manifest of each set of a cache, named or not.

    Passed over are a set that cannot be read, of which whoever opens it is told, and a set of
    features that one before it has.
    """
    named: tuple[str, ...] = ()
    read: dict[Path, Manifest] = {}
    with contextlib.suppress(OSError):
        read[cache] = read_manifest(cache)
        named = set_names(cache, read[cache]) or ()
    try:
        directories = set_directories(cache, named).values()
    except PermissionError:
        return
    seen: set[str] = set()
    for directory in directories:
        if directory != cache:
            with contextlib.suppress(OSError):
                read[directory] = read_manifest(directory)
        if directory in read and seen.isdisjoint(read[directory].features):
            seen.update(read[directory].features)
            yield directory, read[directory]


def features_beside(directory: Path) -> set[str]:
    """Return the features of the other sets of the cache that a directory is a set of."""
    cache = cache_of_set(directory) or directory
    others = stored_sets(cache) if (cache / SETS).is_dir() else ()
    return {name for other, each in others if other != directory for name in each.features}


def set_of(cache: Path, feature: str) -> Path:
    """Return the directory of the set that has a feature; the cache's own where none has."""
    with contextlib.suppress(OSError):  # told when it is opened
        for directory, manifest in stored_sets(cache) if (cache / SETS).is_dir() else ():
            if feature in manifest.features:
                return directory
    return cache
