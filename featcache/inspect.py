"""A look at caches: what they were made from, how two of them differ, how large one will be.

Plain data, for people and for tools; and a page about a cache, for people alone.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, cast

import numpy as np

from featcache._checks import whole_number
from featcache._loading import load
from featcache.errors import ConfigError, CorruptCacheError
from featcache.format import Difference as Difference
from featcache.format import differences as differences
from featcache.format import reading, rows_of_ids, tags_of_sets
from featcache.interface import Ints
from featcache.reading import (
    CachePath,
    Generation,
    joined_mapping,
    located,
    made_at,
    made_by,
    open_generation,
    pending_of,
    roots_of,
    witnesses,
)

if TYPE_CHECKING:
    from featcache.extraction.estimate import Estimate as Estimate
    from featcache.extraction.estimate import estimate as estimate
    from featcache.report_page import Finding as Finding
    from featcache.report_page import Report as Report
    from featcache.staleness.provenance import provenance as provenance
    from featcache.store import Cache

_HOMES = {  # loaded when first used: a look at a cache needs no torch
    "Estimate": "featcache.extraction.estimate",
    "Finding": "featcache.report_page",
    "Report": "featcache.report_page",
    "estimate": "featcache.extraction.estimate",
    "provenance": "featcache.staleness.provenance",
}
_SOURCES = "sources"  # of the witnesses: the text of each function, by file and name


def __getattr__(name: str) -> object:
    value = globals()[name] = load("featcache.inspect", _HOMES, name)
    return value


def info(cache: Cache | CachePath) -> dict[str, object]:
    """Return what a cache holds, and how far it is, as JSON: no array is read, no lock taken.

    "path"; "kind": "cache", "sets" (features that were added later) or "adopted"; "state":
    "complete", "incomplete", "being written" or "damaged"; "error": why it is damaged;
    "utterances", "expected" and "failed" are numbers; "hours" of the first feature that has
    `frame_s`; "bytes" of all arrays as they are stored; "generation", "tags"; "made": {"when",
    "by"}; "writer": {"host", "pid", "since", "utterances"}; "unpublished": the utterances, these,
    that are durable and in no generation yet, also where their writer was killed;
    "features": [{"name", "frames", "dims", "dtype", "backend", "codec", "bytes", "frame_s"}];
    "annotations": their kinds by name; "adopted": the directories of adopted sources by their keys.
    None stands for what is not known.

    Raises `NotACacheError` where there is no cache.

    >>> import tempfile, featcache
    >>> path = tempfile.mkdtemp()
    >>> featcache.CacheWriter(path, [featcache.FeatureStorageConfig("fbank")]).close()
    >>> found = featcache.inspect.info(path)
    >>> found["state"], found["utterances"]
    ('complete', 0)
    """
    try:
        opened = _opened(cache)
        with reading(opened.path):
            return _info(opened)
    except CorruptCacheError as error:
        unknown = dict.fromkeys(_INFO)
        known = {"path": _place(cache), "state": "damaged", "error": str(error)}
        return {
            **unknown, **known, "tags": {}, "features": [], "annotations": {}, "adopted": {},
        }  # fmt: skip


_INFO = (
    *("path", "kind", "state", "error", "utterances", "expected", "failed", "hours", "bytes"),
    *("generation", "tags", "made", "writer", "unpublished", "features", "annotations", "adopted"),
)


def _info(opened: Generation) -> dict[str, object]:
    manifest, sets = opened.manifest, list(opened.sets.values()) or [opened]
    recorded, manifests = [witnesses(each) for each in sets], [each.manifest for each in sets]
    made, by = max(map(made_at, sets, recorded)), map(made_by, manifests, recorded)
    features = [_feature(opened, name) for name in opened.features]
    unpublished, holder = pending_of(opened)
    writer = holder and {**holder._asdict(), "since": _in_iso(holder.since)}
    parts = ((each, each.manifest.parts) for each in sets)
    roots = (
        root for each, some in parts for root in roots_of(each.path, some, each.settings.roots)
    )
    adopted = {root.key: root.path and str(root.path) for root in roots if root is not None}
    return {
        "path": opened.place,
        "kind": "sets" if opened.sets else "adopted" if adopted else "cache",
        "state": "being written" if writer else "complete" if manifest.complete else "incomplete",
        "error": None,
        "utterances": manifest.rows,
        "expected": None if manifest.expected is None else manifest.expected.count,
        "failed": len(opened.failed),
        "hours": next((each["hours"] for each in features if each["hours"] is not None), None),
        "bytes": sum(int(columns.nbytes.sum()) for columns in opened.index.features.values()),
        "generation": manifest.generation,
        "tags": tags_of_sets(opened.cache_path),
        "made": {"when": _iso(made), "by": next(filter(None, by), None)},
        "writer": writer and {**writer, "utterances": unpublished},
        "unpublished": unpublished,
        "features": features,
        "annotations": {name: each.kind for name, each in manifest.annotations.items()},
        "adopted": adopted,
    }


def _feature(opened: Generation, name: str) -> dict[str, object]:
    declared, columns = opened.manifest.features[name], opened.index.features[name]
    frame_s = declared.get("frame_s")
    frames = None
    if declared["time_axis"] is not None:
        frames = int(opened.arrays(name).all_lengths.sum())
    return {
        "name": name,
        "frames": frames,
        "dims": list(opened.manifest.dims[name]) if name in opened.manifest.dims else None,
        "dtype": declared["dtype"],
        "backend": declared["backend"],
        "codec": declared["codec"],
        "bytes": int(columns.nbytes.sum()),
        "frame_s": frame_s,
        "hours": None if frame_s is None or frames is None else frames * frame_s / 3600,
    }


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="seconds")


def _in_iso(time: object) -> str | None:
    """Return a time of a lock in UTC; None where it says none, or not of which zone."""
    try:
        since = datetime.fromisoformat(str(time))
    except ValueError:
        return None
    return None if since.tzinfo is None else _iso(since.astimezone(UTC))


def made_from(cache: Cache | CachePath) -> dict[str, object]:
    """Return what a cache was made from, and what was recorded of the run that made it, as JSON.

    "path", "generation", "utterances", "complete"; "made": when, in ISO 8601, that of the last
    publish where it was not recorded; "by": the script or program; "fingerprint": what is compared
    when the cache is written or opened, its declarations under "features"; "recorded": what
    explains it and is compared by nobody, such as the versions of libraries and the source of
    functions; empty where nothing was. Of features that were added later, the keys of both that
    differ are under "sets".

    >>> import tempfile, featcache
    >>> path = tempfile.mkdtemp()
    >>> featcache.CacheWriter(path, [featcache.FeatureStorageConfig("fbank")], {"gain": 3}).close()
    >>> featcache.inspect.made_from(path)["fingerprint"]["gain"]
    3
    """
    opened = _opened(cache)
    with reading(opened.path):
        recorded = _recorded(opened)
        sets = {each: witnesses(each) for each in opened.sets.values() or [opened]}
        made = max(map(made_at, sets, sets.values()))
        by = filter(None, (made_by(each.manifest, told) for each, told in sets.items()))
    return {
        "path": opened.place,
        "generation": opened.manifest.generation,
        "utterances": opened.manifest.rows,
        "complete": opened.manifest.complete,
        "made": _iso(made),
        "by": next(by, None),
        "fingerprint": dict(opened.manifest.fingerprint),
        "recorded": recorded,
    }


class IdCounts(TypedDict):
    """Numbers of the utterances of two caches."""

    only_a: int
    only_b: int
    both: int


class LargestDifference(TypedDict):
    """The largest difference of a number of a feature, and where it is; `dim` counts all dims."""

    largest: float | None  # None: one of the two is not finite
    id: str
    frame: int
    dim: int
    utterances: int  # that differ


class Diff(TypedDict):
    """Differences of two caches, as `diff` returns them."""

    fingerprint: list[str]
    recorded: list[str]
    sources: list[str]
    ids: IdCounts
    features: dict[str, dict[str, list[object]]]
    values: dict[str, LargestDifference] | None


def diff(
    a: Cache | CachePath, b: Cache | CachePath, *, values: bool = False, atol: float = 0.0
) -> Diff:
    """Return in what two caches differ: in their making as lines, "was" of `a`, "now" of `b`.

    "fingerprint": what makes one cache refuse the other's features; "recorded": what else was
    recorded of the runs that made them; "sources": the code that changed, as `diff -u` prints it.
    "ids": numbers of those that only one has, and both. "features": what is declared and stored of
    each, `[a's, b's]` by name; "lengths" are the numbers of utterances that are longer in `a`, and
    in `b`. "values": with `values`, which reads all arrays that both have, the largest difference
    of each feature that has one above `atol`. Each is empty where nothing differs.

    >>> import tempfile, featcache
    >>> paths = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> for gain, path in enumerate(paths):
    ...     features = [featcache.FeatureStorageConfig("fbank")]
    ...     featcache.CacheWriter(path, features, {"gain": gain}).close()
    >>> featcache.inspect.diff(*paths)["fingerprint"]
    ['gain: was 0, now 1']
    """
    from featcache.store import Cache

    first, second = _opened(a), _opened(b)
    with reading(first.path):
        was = _recorded(first)
    with reading(second.path):
        now = _recorded(second)
    sources = was.pop(_SOURCES, {}), now.pop(_SOURCES, {})
    rows = rows_of_ids(second.index, first.index)  # in b, by those in a
    both = np.flatnonzero(rows >= 0)
    shared = [name for name in first.features if name in second.features]
    return {
        "fingerprint": [
            *map(str, differences(first.manifest.fingerprint, second.manifest.fingerprint))
        ],
        "recorded": [*map(str, differences(was, now))] if was and now else [],
        "sources": list(_changed_code(*sources)),
        "ids": {
            "only_a": len(first.index) - len(both),
            "only_b": len(second.index) - len(both),
            "both": len(both),
        },
        "features": {
            name: changed
            for name in dict.fromkeys((*first.features, *second.features))
            if (changed := _unlike(first, second, name, both, rows[both]))
        },
        "values": {
            name: found
            for name in shared
            if (found := _largest_difference(Cache(first), Cache(second), name, both, atol))
        }
        if values
        else None,
    }


def _unlike(
    first: Generation, second: Generation, name: str, mine: Ints, others: Ints
) -> dict[str, list[object]]:
    """Return in what a feature differs: what is declared and stored of it, and its lengths."""
    one, two = (_feature(each, name) if name in each.features else {} for each in (first, second))
    told = [key for key in {**one, **two} if key not in ("frames", "hours", "bytes")]
    found = {key: [one.get(key), two.get(key)] for key in told if one.get(key) != two.get(key)}
    if one and two:
        lengths = first.index.features[name].rows[mine], second.index.features[name].rows[others]
        longer = [int((lengths[0] > lengths[1]).sum()), int((lengths[1] > lengths[0]).sum())]
        found |= {"lengths": [*longer]} if any(longer) else {}
    return found | ({"bytes": [one.get("bytes"), two.get("bytes")]} if found else {})


def _largest_difference(
    first: Cache, second: Cache, name: str, rows: Ints, atol: float
) -> LargestDifference | None:
    """Compare the arrays of a feature that have one shape."""
    found: LargestDifference | None = None
    for row in rows.tolist():
        id = first.id(row)
        one, two = (each.read(id, name, copy=False) for each in (first, second))
        if one.shape != two.shape or not one.size or np.array_equal(one, two):
            continue
        numbers = one.astype(np.float64), two.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.abs(numbers[0] - numbers[1])
        apart[(numbers[0] == numbers[1]) | (np.isnan(numbers[0]) & np.isnan(numbers[1]))] = 0
        apart[np.isnan(apart)] = np.inf
        place = int(apart.argmax())
        largest = float(apart.ravel()[place])
        if largest <= atol:
            continue
        count = 1 if found is None else found["utterances"] + 1
        before = 0.0 if found is None else _or_infinite(found["largest"])
        if found is None or largest > before:
            frame, dim = divmod(place, apart[0].size if apart.ndim else 1)
            finite = largest if np.isfinite(largest) else None
            found = {"largest": finite, "id": id, "frame": frame, "dim": dim, "utterances": count}
        found["utterances"] = count
    return found


def _or_infinite(number: float | None) -> float:
    return np.inf if number is None else number


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
    from featcache.store import Cache

    listed = [caches] if isinstance(caches, Cache | str | os.PathLike) else list(caches)
    if not 1 <= len(listed) <= 2:
        raise ConfigError(f"a report is about one cache or two, not about {len(listed)}")
    whole_number("pictures", pictures, 0)
    whole_number("seed", seed, 0)
    file = Path(path).expanduser()
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError(f"a report is a file in a directory that is there, not {str(file)!r}")
    opened = [each if isinstance(each, Cache) else Cache(_opened(each)) for each in listed]
    facts = [report_page.facts_of(each, made_from(each), sample, seed) for each in opened]
    return report_page.write_page(
        facts,
        file,
        pictures=pictures,
        sample=sample,
        seed=seed,
        changed=_making(*opened) if len(opened) == 2 else {},
    )


def _making(a: Cache, b: Cache) -> dict[str, list[str]]:
    """Return in what the makings of two caches differ."""
    found = diff(a, b)
    made = found["fingerprint"], found["recorded"], found["sources"]
    return dict(zip(("fingerprint", "recorded", "sources"), made, strict=True))


def _place(cache: Cache | CachePath) -> str:
    opened = getattr(cache, "opened", None)
    if isinstance(opened, Generation):
        return opened.place
    place, settings = located(cast(CachePath, cache))
    return str(place) if settings.remote is None else settings.remote.place.url


def _opened(cache: Cache | CachePath) -> Generation:
    opened = getattr(cache, "opened", None)  # to look at a path needs no tables
    if isinstance(opened, Generation):
        return opened
    place, settings = located(cast(CachePath, cache))
    return open_generation(place, None, settings)  # to look at it, nothing has to be expected


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
