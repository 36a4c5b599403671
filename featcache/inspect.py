"""A look at caches: what they were made from, how two of them differ, how large one will be.

Plain data, for people and for tools.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from featcache._checks import directory
from featcache._loading import load
from featcache.format.files import reading
from featcache.format.fingerprint import Difference as Difference
from featcache.format.fingerprint import differences as differences
from featcache.reading.generation import Generation
from featcache.reading.opening import (
    CachePath,
    joined_mapping,
    made_at,
    open_generation,
    witnesses,
)
from featcache.store import Cache

if TYPE_CHECKING:
    from featcache.extraction.estimating.estimate import Estimate as Estimate
    from featcache.extraction.estimating.estimate import estimate as estimate
    from featcache.staleness.provenance import provenance as provenance

_HOMES = {  # loaded when first used: a look at a cache needs no torch
    "Estimate": "featcache.extraction.estimating.estimate",
    "estimate": "featcache.extraction.estimating.estimate",
    "provenance": "featcache.staleness.provenance",
}
_SOURCES = "sources"  # of the witnesses: the text of each function, by file and name


def __getattr__(name: str) -> object:
    value = globals()[name] = load("featcache.inspect", _HOMES, name)
    return value


def made_from(cache: Cache | CachePath) -> dict[str, object]:
    """Return what a cache was made from, and what was recorded of the run that made it, as JSON.

    "path", "generation", "utterances", "complete"; "made": when, in ISO 8601, that of the last
    publish where it was not recorded; "fingerprint": what is compared when the cache is written or
    opened, its declarations under "features"; "recorded": what explains it and is compared by
    nobody, such as the versions of libraries and the source of functions; empty where nothing was.
    Of features that were added later, the keys of both that differ are under "sets".

    >>> import tempfile, featcache
    >>> path = tempfile.mkdtemp()
    >>> featcache.CacheWriter(path, [featcache.FeatureStorageConfig("fbank")], {"gain": 3}).close()
    >>> featcache.inspect.made_from(path)["fingerprint"]["gain"]
    3
    """
    opened = _opened(cache)
    with reading(opened.path):
        recorded = _recorded(opened)
        sets = opened.sets.values() or [opened]
        made = max(made_at(each, witnesses(each)) for each in sets)
    return {
        "path": str(opened.path),
        "generation": opened.manifest.generation,
        "utterances": opened.manifest.rows,
        "complete": opened.manifest.complete,
        "made": made.isoformat(timespec="seconds"),
        "fingerprint": dict(opened.manifest.fingerprint),
        "recorded": recorded,
    }


def diff(a: Cache | CachePath, b: Cache | CachePath) -> dict[str, list[str]]:
    """Return in what the makings of two caches differ, in lines: "was" of `a`, "now" of `b`.

    "fingerprint": what makes one cache refuse the other's features; "recorded": what else was
    recorded of the runs that made them; "sources": the code that changed, as `diff -u` prints it.
    Each is empty where nothing differs.

    >>> import tempfile, featcache
    >>> paths = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> for gain, path in enumerate(paths):
    ...     features = [featcache.FeatureStorageConfig("fbank")]
    ...     featcache.CacheWriter(path, features, {"gain": gain}).close()
    >>> featcache.inspect.diff(*paths)["fingerprint"]
    ['gain: was 0, now 1']
    """
    first, second = _opened(a), _opened(b)
    with reading(first.path):
        was = _recorded(first)
    with reading(second.path):
        now = _recorded(second)
    sources = was.pop(_SOURCES, {}), now.pop(_SOURCES, {})
    return {
        "fingerprint": [
            *map(str, differences(first.manifest.fingerprint, second.manifest.fingerprint))
        ],
        "recorded": [*map(str, differences(was, now))] if was and now else [],
        "sources": list(_changed_code(*sources)),
    }


def _opened(cache: Cache | CachePath) -> Generation:
    if isinstance(cache, Cache):
        return cache.opened
    path = directory(cache, "a cache").absolute()
    return open_generation(path, None)  # to look at it, nothing has to be expected


def _recorded(opened: Generation) -> dict[str, object]:
    sets = {name: witnesses(each) for name, each in opened.sets.items()}
    return joined_mapping(sets) if sets else witnesses(opened)


def _changed_code(was: object, now: object) -> Iterator[str]:
    """Yield the lines that differ, function by function."""
    if not (isinstance(was, Mapping) and isinstance(now, Mapping) and was and now):
        return
    for name in sorted({*was, *now}):
        old, new = (str(code.get(name, "")).splitlines() for code in (was, now))
        yield from difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")
