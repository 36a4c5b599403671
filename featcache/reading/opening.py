"""Opening a cache: a plain one, or feature sets, of which a stale one refuses its features only.

A cache is compared with the fingerprint that its reader demands, and refused where it lacks
utterances, unless that is wanted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np

from featcache._checks import directory
from featcache.container_files.lock import holder, holder_text, is_locked
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    IncompleteError,
    NotACacheError,
    StaleCacheError,
    UnknownNameError,
    nearest,
)
from featcache.format import (
    OWN,
    SETS,
    Expected,
    Index,
    Manifest,
    Strings,
    canonical,
    common_rows,
    files_of,
    have_same_ids,
    is_of_current_build,
    last_edits,
    manifest_file,
    name_of,
    read_manifest,
    reading,
    role_of,
    rows_of_ids,
    set_directories,
    set_name,
    set_names,
    some_rows,
    stored_sets,
    tags_of,
)
from featcache.interface import Ints
from featcache.reading.feature_arrays import Checks, FeatureArrays, arrays_of
from featcache.reading.generation import ALL, Contents, Generation, OpenSettings
from featcache.reading.roots import check_roots
from featcache.reading.shell import RemoteCache
from featcache.reading.stale import Expectation
from featcache.reading.verify import Damage, Tell, all_damage, nobody
from featcache.remote import DEFAULT, RemoteOptions, RemotePlace, is_url, with_pages

_log = logging.getLogger("featcache")

# Feature sets of a cache as one generation: the utterances that all of them have.

FEATURES = "features"


def join_sets(sets: Mapping[str, Generation]) -> Contents:
    """Put the feature sets of a cache side by side, row by row.

    Columns are copied only where the sets have not the same utterances.
    """
    opened = list(sets.values())
    rows = common_rows([each.index for each in opened])
    pairs = zip(opened, rows, strict=True)
    indexes = [each.index if some is None else some_rows(each.index, some) for each, some in pairs]
    features: dict[str, FeatureArrays] = {}
    for each, index, some in zip(opened, indexes, rows, strict=True):
        features |= each.features if some is None else _arrays(each, index)
    index = replace(
        indexes[0],
        features={name: columns for each in indexes for name, columns in each.features.items()},
        containers=Index.empty({}).containers,
        stats={name: stats for each in indexes for name, stats in each.stats.items()},
        stamps=None,
        annotations={},  # which are those of the sets
    )
    failed = sorted({id for each in opened for id in each.failed}, key=str.encode)
    set_rows = dict(zip(sets, rows, strict=True))
    return Contents(_manifest(sets, len(index)), index, Strings.of(failed), features, set_rows)


def missing_from(opened: Generation, feature: str) -> list[str]:
    """Return the ids of other sets that the set of a feature lacks, in order."""
    mine = opened.of_feature(feature)
    return _missing(mine, opened.sets)


def joined_mapping(mappings: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Join objects of several sets: keys that are alike in all as they are, others by set.

    >>> joined_mapping({"a": {"gain": 1, "rate": 8}, "b": {"gain": 2, "rate": 8}})
    {'rate': 8, 'sets': {'a': {'gain': 1}, 'b': {'gain': 2}}}
    """
    first = next(iter(mappings.values()), {})
    alike = {
        key: value
        for key, value in first.items()
        if all(key in each and canonical({key: each[key]}) == canonical({key: value})
               for each in mappings.values())
    }  # fmt: skip
    apart = {
        name: {key: value for key, value in each.items() if key not in alike}
        for name, each in mappings.items()
    }
    return {**alike, SETS: apart} if any(apart.values()) else alike


def damage_of(
    opened: Generation, *, arrays: bool, alone: bool = False, tell: Tell = nobody
) -> Iterator[Damage]:
    """Compare all files of a cache, of each of its sets, with what their parents say of them.

    With `alone`, those of the generation that is open, and of no other one, as always of a cache
    behind a URL. `tell` is called with the bytes of containers that were read, again and again.
    """
    remote = opened.settings.remote
    for each in opened.sets.values() or (opened,):
        manifest, roots = each.manifest, each.settings.roots
        if alone or remote is not None:
            manifest = replace(manifest, previous=None, tags={})
        if remote is not None:  # what is being built is not pushed
            manifest = replace(manifest, building_files={}, building_parts=())
            # others of later versions might bear the names of files that the shell has for itself
            files = {path: each for path, each in manifest.files.items() if role_of(path)}
            manifest = replace(manifest, files=files)
        found = all_damage(
            each.path, manifest, each.index, arrays=arrays, roots=roots, tell=tell, remote=remote
        )
        yield from found if remote is None else _in_store(each.path, manifest, found, remote)


def _in_store(
    path: Path, manifest: Manifest, found: Iterable[Damage], remote: RemoteCache
) -> Iterator[Damage]:
    """Fetch all but the containers; then give what is `found` of the shell as of the store."""
    told = remote.damage_of(path, manifest, (name for name, _ in files_of(manifest)))
    yield from told.values()
    here, there = str(remote.directory), remote.place.url
    for damage in found:
        if not isinstance(damage, str):
            yield replace(damage, container=damage.container.replace(here, there))
        elif not any(url in damage.replace(here, there) for url in told):
            yield damage.replace(
                here, there
            )  # the others are not here, as they are not right there


def _manifest(sets: Mapping[str, Generation], rows: int) -> Manifest:
    """Return for several sets what a manifest says of one."""
    all_ = {name: each.manifest for name, each in sets.items()}
    manifests = list(all_.values())
    declared = {name: each for one in manifests for name, each in one.features.items()}
    made_from = {
        name: {key: value for key, value in one.fingerprint.items() if key != FEATURES}
        for name, one in all_.items()
    }
    expected = [one.expected.count for one in manifests if one.expected is not None]
    whole = all(one.complete for one in manifests)
    return Manifest(
        {**joined_mapping(made_from), FEATURES: declared},
        generation=sum(one.generation for one in manifests),
        write_id="".join(one.write_id for one in manifests),
        # nor have other sets utterances that one neither has nor says have failed
        complete=whole and all({*_missing(each, sets)} <= {*each.failed} for each in sets.values()),
        expected=Expected(max(expected), "") if len(expected) == len(manifests) else None,
        rows=rows,
        by=next(filter(None, (one.by for one in manifests)), ""),
        dims={name: dims for one in manifests for name, dims in one.dims.items()},
        # the first set that has an annotation counts
        annotations={
            name: each for one in manifests[::-1] for name, each in one.annotations.items()
        },
    )


def _missing(opened: Generation, sets: Mapping[str, Generation]) -> list[str]:
    found: set[str] = set()
    for each in sets.values():
        if each is not opened and not have_same_ids(each.index, opened.index):
            lacking: Ints = np.flatnonzero(rows_of_ids(opened.index, each.index) < 0)
            found.update(each.index.id(row) for row in lacking.tolist())
    return sorted(found, key=str.encode)


def _arrays(opened: Generation, index: Index) -> dict[str, FeatureArrays]:
    """Return what reads the features of some rows of a set."""
    manifest, containers = opened.manifest, opened.containers
    checks = None
    if opened.settings.check_reads:
        remote = opened.settings.remote
        checks = Checks(opened.path, manifest, index.containers, containers, remote)
    return arrays_of(manifest, index, containers, checks)


# Opening a cache: a plain one, or feature sets, of which a stale one refuses its features only.


CachePath = str | PathLike[str]


def located(
    path: CachePath, settings: OpenSettings = ALL, remote: RemoteOptions = DEFAULT
) -> tuple[Path, OpenSettings]:
    """Return the directory of a cache, of a URL its shell's, and settings to open it with."""
    if not is_url(path):
        return directory(path, "a cache").absolute(), settings
    there = RemoteCache(with_pages(RemotePlace.of(cast(str, path), remote)))
    return there.directory, settings._replace(remote=there)


def open_generation(
    path: Path, expectation: Expectation | None, settings: OpenSettings = ALL
) -> Generation:
    """Open the current generation of a cache, or a version, compared with what is expected of it.

    Raises `StaleCacheError` if nothing of it was made from that.
    """
    if settings.remote is not None:
        path = settings.remote.directory
        with reading(path):
            settings.remote.refresh(settings.version)
    with reading(path):
        manifest = read_manifest(path)
        if SETS in manifest.requires:
            sets = _open_at_once(path, settings)
        else:
            sets = {OWN: _open(path, path, settings, manifest)}
        _check_roots(path, sets.values(), settings)
        if len(sets) > 1:
            return _joined(path, sets, expectation)
        (opened,) = sets.values()
        if expectation is not None:
            expectation.check(opened)
        return opened


def open_again(opened: Generation, **changed: Any) -> Generation:
    """Open the same generation anew, or the current one where it is gone, with other settings.

    Raises `StaleCacheError` for a cache that was made from something else meanwhile.
    """
    settings = OpenSettings.of(opened)._replace(**changed)
    return open_generation(opened.cache_path, Expectation.of_opened(opened), settings)


def _check_roots(path: Path, opened: Iterable[Generation], settings: OpenSettings) -> None:
    parts = [part for each in opened for part in each.manifest.parts]
    check_roots(path, parts, settings.roots)


def _joined(path: Path, sets: dict[str, Generation], expectation: Expectation | None) -> Generation:
    if expectation is None or expectation.same is not None:  # of a cache that was open before
        opened = Generation.of_sets(path, sets, join_sets(sets), {})
        if expectation is not None:
            expectation.check(opened)
        return opened
    stale: dict[str, StaleCacheError] = {}
    for name, each in sets.items():
        try:
            expectation.check(each)
        except StaleCacheError as error:
            stale[name] = error
    served = {name: each for name, each in sets.items() if name not in stale}
    if not served:
        raise StaleCacheError("\n".join(map(str, stale.values())))
    for why in stale.values():
        _log.warning("the other features of cache %r can be read, but %s", str(path), why)
    refused = {feature: why for name, why in stale.items() for feature in sets[name].features}
    return Generation.of_sets(path, served, join_sets(served), refused)


def _open_at_once(path: Path, settings: OpenSettings) -> dict[str, Generation]:
    """Open sets as they are at one moment: an edit of several is seen in all of them or in none."""
    remote = settings.remote
    while True:
        edits = last_edits(path)
        sets = _open_sets(path, set_names(path) or (), settings)
        if last_edits(path) == edits:
            if remote is None or remote.holds(edits):
                return sets
            remote.refresh(settings.version)  # other processes write the same shell


def _open_sets(path: Path, named: tuple[str, ...], settings: OpenSettings) -> dict[str, Generation]:
    """Open the sets of some features, or all that are named."""
    wanted = set(settings.features or ())
    found = {
        set_name(path, directory): directory
        for directory, manifest in stored_sets(path)
        if not wanted.isdisjoint(manifest.features)
    }
    every = set_directories(path, named)
    sets = found or {name: every[name] for name in (OWN, *named)}
    try:
        return _of_version(path, sets, settings)
    except NotACacheError as error:
        raise CorruptCacheError(
            f"cache {str(path)!r} lacks one of its feature sets: {error}; put it back, or compute "
            "its features again"
        ) from error


def _of_version(path: Path, sets: dict[str, Path], settings: OpenSettings) -> dict[str, Generation]:
    """Open sets; of a version, those that have the tag: others were added later."""
    if settings.version is not None:
        tags = {name: tags_of(directory) for name, directory in sets.items()}
        sets = {name: each for name, each in sets.items() if settings.version in tags[name]}
        if not sets:
            known = {tag for each in tags.values() for tag in each}
            raise UnknownNameError(
                f"cache {str(path)!r} has no version {settings.version!r}; "
                f"{nearest(settings.version, known)}"
            )
    opened = {name: _open(directory, path, settings) for name, directory in sets.items()}
    # the cache's own are named after their first, too
    return {next(iter(o.features)) if n == OWN else n: o for n, o in opened.items()}


def _open(
    path: Path, cache_path: Path, settings: OpenSettings, current: Manifest | None = None
) -> Generation:
    name = _generation_of(path, settings)
    try:
        return Generation.at(path, settings, name=name, cache_path=cache_path, current=current)
    except CacheError:
        if name is None or settings.version is not None or is_of_current_build(path, name):
            raise
        # that of before has gone meanwhile
        return Generation.at(path, settings, cache_path=cache_path)


def _generation_of(path: Path, settings: OpenSettings) -> str | None:
    """Return the name of the generation to open; None: the current one."""
    if settings.version is None:
        return next((name for name in settings.names if is_of_current_build(path, name)), None)
    there = (name for name in settings.names if (path / manifest_file(name)).exists())
    return next(there, None) or name_of(path, settings.version)


# Refusing to read a cache that lacks utterances, unless that is wanted.


def check_complete(opened: Generation, *, allow_incomplete: bool = False) -> None:
    """Raise `IncompleteError` for a cache that its writer has not finished; say who writes it."""
    manifest, path = opened.manifest, opened.cache_path
    if allow_incomplete or manifest.complete:
        return
    of = "" if manifest.expected is None else f" of {manifest.expected.count}"
    count = manifest.rows
    there = f"{count}{of} {'utterance is' if count == 1 and not of else 'utterances are'} there"
    there += "".join(_lacking(opened))
    with contextlib.suppress(OSError):  # a cache that only others can write to
        if holder(path) is not None and is_locked(path):
            there += f"; it is being written by {holder_text(path)}"
    raise IncompleteError(
        f"cache {str(path)!r} is incomplete: {there}; go on with what fills it "
        "(cache_features, extract, CacheWriter; publish(complete=True) of a read-through), or "
        "take what is there: FeatureDataset, FeatureLoader, FeatureStorage.attach and "
        "GlobalMVN.from_cache have allow_incomplete=True, and featcache.open reads it as it is"
    )


def _lacking(opened: Generation) -> Iterator[str]:
    """Give, for each feature set of a cache, what it lacks of the others."""
    for each in opened.sets.values():
        feature = next(iter(each.features))
        if missing := len(missing_from(opened, feature)):
            have = "has" if missing == 1 else "have"
            them = f"cache.missing({feature!r})"
            yield f"; {missing} more {have} no {feature!r}: compute or delete them, {them}"
