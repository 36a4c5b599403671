"""Opening a cache: a plain one, or feature sets, of which a stale one refuses its features only."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from featcache.errors import (
    CacheError,
    CorruptCacheError,
    NotACacheError,
    StaleCacheError,
    UnknownNameError,
    nearest,
)
from featcache.store.format.feature_sets import last_edits, set_directories, stored_sets
from featcache.store.format.manifest import FeatureSetsError, manifest_file
from featcache.store.format.named_generations import is_of_current_build, name_of, tags_of
from featcache.store.format.roots import NO_ROOTS, Roots, check_roots
from featcache.store.reading.expectation import Expectation
from featcache.store.reading.generation import Generation
from featcache.store.reading.joined_sets import join_sets

_log = logging.getLogger("featcache")


class OpenSettings(NamedTuple):
    """Settings of an opened cache, with which a copy opens it again."""

    mapped: bool = True
    check_reads: bool = False
    features: tuple[str, ...] | None = None  # of the sets that are wanted; None: all that are named
    version: str | None = None  # a tag; None: the current generation
    names: tuple[str, ...] = ()  # generations that were open before, where they are still there
    roots: Roots = NO_ROOTS  # places of adopted sources, by key


ALL = OpenSettings()


def settings_of(opened: Generation, version: str | None) -> OpenSettings:
    """Return with what the same generation is opened again."""
    return OpenSettings(
        mapped=opened.mapped,
        check_reads=opened.check_reads,
        version=version,
        names=opened.names,
        roots=opened.roots,
    )


def open_generation(
    path: Path, expectation: Expectation | None, settings: OpenSettings = ALL
) -> Generation:
    """Open the current generation of a cache, or a version, compared with what is expected of it.

    Raises `StaleCacheError` if nothing of it was made from that.
    """
    try:
        opened = _open(path, settings)
    except FeatureSetsError as found:
        sets = _open_at_once(path, found.names, settings)
        _check_roots(path, sets.values(), settings)
        if len(sets) > 1:
            return _joined(path, sets, expectation)
        (opened,) = sets.values()
    else:
        _check_roots(path, (opened,), settings)
    if expectation is not None:
        expectation.check(opened)
    return opened


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


def _open_at_once(
    path: Path, named: tuple[str, ...], settings: OpenSettings
) -> dict[str, Generation]:
    """Open sets as they are at one moment: an edit of several is seen in all of them or in none."""
    while True:
        edits = last_edits(path)
        sets = _open_sets(path, named, settings)
        if last_edits(path) == edits:
            return sets


def _open_sets(path: Path, named: tuple[str, ...], settings: OpenSettings) -> dict[str, Generation]:
    """Open the sets of some features, or all that are named."""
    wanted = set(settings.features or ())
    found = {
        directory.name: directory
        for directory, manifest in stored_sets(path)
        if not wanted.isdisjoint(manifest.features)
    }
    every = set_directories(path, named)
    sets = found or {name: every[name] for name in named}
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
    return {name: _open(directory, settings) for name, directory in sets.items()}


def _open(path: Path, settings: OpenSettings) -> Generation:
    name = _generation_of(path, settings)
    opened = partial(
        Generation,
        path,
        mapped=settings.mapped,
        check_reads=settings.check_reads,
        roots=settings.roots,
    )
    try:
        return opened(name=name)
    except CacheError:
        if name is None or settings.version is not None or is_of_current_build(path, name):
            raise
        return opened()  # that of before has gone meanwhile


def _generation_of(path: Path, settings: OpenSettings) -> str | None:
    """Return the name of the generation to open; None: the current one."""
    if settings.version is None:
        return next((name for name in settings.names if is_of_current_build(path, name)), None)
    there = (name for name in settings.names if (path / manifest_file(name)).exists())
    return next(there, None) or name_of(path, settings.version)
