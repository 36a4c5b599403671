"""A look at caches: what they were made from, how two of them differ, how large one will be.

Plain data, for people and for tools; and a page about a cache, for people alone.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from featcache._checks import directory, whole_number
from featcache._loading import load
from featcache.errors import ConfigError
from featcache.format.files import reading
from featcache.format.fingerprint import differences
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
    from featcache.report_page import Finding as Finding
    from featcache.report_page import Report as Report
    from featcache.staleness.provenance import provenance as provenance

_HOMES = {  # loaded when first used: a look at a cache needs no torch
    "Estimate": "featcache.extraction.estimating.estimate",
    "Finding": "featcache.report_page",
    "Report": "featcache.report_page",
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


def report(
    caches: Cache | CachePath | Sequence[Cache | CachePath],
    path: CachePath,
    *,
    pictures: int = 48,
    sample: int | Literal["all"] | None = None,
    seed: int = 0,
) -> Report:
    """Write a page about a cache, or about two side by side: one file that needs no network.

    Lengths, annotations and doubles are those of all utterances. Values are, too, of up to 100,000
    utterances and 5 GB; of more, those of 20,000 are read, and the page says so beside them: 16,000
    at random, 2,000 of the shortest and 2,000 of the longest. Nothing is written to the cache.

    Args:
        caches: a cache, or two that are compared; opened, or as paths.
        path: the file, "report.html"; one that is there is replaced.
        pictures: most pictures of utterances, half of them of odd ones.
        sample: utterances whose values are read: a number, or "all"; None: as above.
        seed: draws others. The same ids and seed give the same utterances.

    Raises `ConfigError` for more than two caches and for a file that cannot be there, and
    `CorruptCacheError` for a cache that cannot be opened; arrays that cannot be read are told on
    the page.

    >>> featcache.inspect.report("features/train", "report.html").sampled  # doctest: +SKIP
    1320
    """
    from featcache import report_page

    listed = [caches] if isinstance(caches, Cache | str | os.PathLike) else list(caches)
    if not 1 <= len(listed) <= 2:
        raise ConfigError(f"a report is about one cache or two, not about {len(listed)}")
    whole_number("pictures", pictures, 0)
    whole_number("seed", seed, 0)
    file = Path(path).expanduser()
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError(f"a report is a file in a directory that is there, not {str(file)!r}")
    opened = [_as_cache(each) for each in listed]
    facts = [report_page.facts_of(each, made_from(each), sample, seed) for each in opened]
    return report_page.write_page(
        facts,
        file,
        pictures=pictures,
        sample=sample,
        seed=seed,
        changed=diff(*opened) if len(opened) == 2 else {},
    )


def _as_cache(cache: Cache | CachePath) -> Cache:
    return cache if isinstance(cache, Cache) else Cache(_opened(cache))


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
