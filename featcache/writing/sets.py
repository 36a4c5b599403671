"""Feature sets as they are added to a cache, and edited in one step; the directory of a cache."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from featcache.container_files.lock import HOLDER, WriterLock
from featcache.errors import ConfigError, NotACacheError
from featcache.format.feature_sets import last_edits, set_names, stored_sets, write_outer
from featcache.format.files import (
    check_own_directory,
    entries,
    explained,
    make_directory,
    remove_unfinished,
)
from featcache.format.index import Hashes
from featcache.format.manifest import (
    INDEX,
    KEPT_FILE,
    KEY,
    MANIFESTS,
    NAME,
    NEXT,
    OUTER,
    PARTS,
    SETS,
    Manifest,
    cache_of_set,
    read_manifest,
    refuse_other_formats,
    set_name,
    settle,
)
from featcache.format.part import committed_builds
from featcache.reading.generation import Generation
from featcache.writing.held import (
    README,
    HeldCache,
    check_writable,
    remove_superseded,
    write_readme,
)

# The directory of a cache: made, or seen to be a cache or empty, before a writer begins.

_log = logging.getLogger("featcache")
MOST_TRIED = 1000  # utterances that are looked for in another set before all are
OTHERS = "work-"  # names in a cache directory that begin so are those of whoever works there
_LOCKS = r"writer\.(lock|lock\.soft|json)"
_FILES = rf"{NAME}(\.[0-9a-f]{{8}}\.tmp)?|{INDEX.pattern}|{PARTS}|{MANIFESTS}|{README}|{_LOCKS}"
_OURS = re.compile(rf"{_FILES}|{KEPT_FILE.pattern}|{OTHERS}.*")


def claim_directory(path: Path) -> None:
    """Make the directory, or see that it is a cache of a format that is known, or empty."""
    if path.exists() and not path.is_dir():
        raise NotACacheError(f"{str(path)!r} is a file; a cache is a directory")
    try:
        make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotACacheError(f"{str(path)!r} cannot be made a directory: {error}") from error
    # once: another writer may be making the cache
    names = [entry.name for entry in entries(path)]
    if NAME in names:
        refuse_other_formats(path)
    for directory in {PARTS, MANIFESTS}.intersection(names):
        check_own_directory(path / directory)
    sets = SETS if SETS in names and (path / OUTER).exists() else ""
    foreign = [name for name in names if name != sets and not _OURS.fullmatch(name)]
    if NAME not in names and foreign:
        raise NotACacheError(
            f"{str(path)!r} holds other files ({foreign[0]!r}); give a new or empty directory, or, "
            "if these are features, a cache that reads them where they lie: "
            f"featcache.adopt({str(path)!r}, {str(path) + '-cache'!r})"
        )


# Features of a cache that are written by themselves: which set they are, and how it comes to be.

PATIENCE_S = 10.0  # that others name a set of theirs


def directory_of(cache: Path, features: Iterable[str], stored: Mapping[Path, Manifest]) -> Path:
    """Return the directory that features of a cache are, or are to be, stored in.

    That of the set that has any of them; a new one where what is stored has none. `stored` are the
    sets of the cache and their manifests. Raises
    `ConfigError` if several sets have some of them, and for one that is an annotation of another.
    """
    names = list(features)
    theirs = [each for each, found in stored.items() if not {*found.features}.isdisjoint(names)]
    if len(theirs) > 1:
        paths = " and ".join(repr(str(directory)) for directory in theirs)
        raise ConfigError(
            f"the features {', '.join(map(repr, names))} of cache {str(cache)!r} are in several "
            f"feature sets, {paths}: write those of each set by themselves"
        )
    for directory, manifest in stored.items():
        if directory not in theirs and (both := manifest.annotations.keys() & {*names}):
            raise ConfigError(
                f"cache {str(cache)!r} has an annotation {min(both)!r}, so no feature can have "
                "this name: rename the feature"
            )
    if theirs or cache not in stored or (len(stored) == 1 and not holds_any(cache, stored[cache])):
        return theirs[0] if theirs else cache
    first = next(iter(names))
    check_own_directory(cache / SETS)
    free = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    places = (cache / SETS / name for name in free)
    return next(each for each in places if not ((each / NAME).exists() or each.is_symlink()))


def directory_to_write(cache: Path, features: Iterable[str]) -> Path:
    """Return the directory to store features of a cache in, where sets may be added now."""
    directory = directory_of(cache, features, dict(stored_sets(cache)))
    if directory != cache:
        with explained(cache, lambda: "the cache is as it was"):
            _begin_sets(cache)
    return directory


def _begin_sets(cache: Path) -> None:
    """Make sure that something names the sets of a cache, and that its manifest says so."""
    if not (cache / OUTER).exists():
        make_directory(cache / SETS)
        with WriterLock(cache / SETS, PATIENCE_S):
            if not (cache / OUTER).exists():
                name_whole_sets(cache)
    if SETS not in read_manifest(cache).requires:
        with HeldCache(cache, PATIENCE_S) as held:
            check_writable(cache, held.manifest)
            requires = tuple(sorted({*held.manifest.requires, SETS}))
            # with a copy, or a damaged one could not be restored
            after, keep = replace(held.manifest, requires=requires), bool(held.manifest.index)
            held.write(after, keep=keep)


def name_whole_sets(cache: Path) -> None:
    """Name the sets of a cache that are whole, where what named them is lost.

    Only the holder of the lock of `sets` may call this.
    """
    stored = [each for each in stored_sets(cache) if each[0] != cache]
    whole = [path.name for path, each in stored if each.complete and each.rows]
    write_outer(cache, **{SETS: whole})


def name_set(directory: Path) -> None:
    """Show readers of a cache a set that was added, which is whole now.

    A set without utterances stays aside, or the cache would have none, either; so does one that has
    none in common with another set, which a warning tells.
    """
    cache = cache_of_set(directory)
    if cache is None or directory.name in (set_names(cache) or ()):
        return
    manifest = read_manifest(directory)
    if not manifest.rows:
        return
    if other := has_none_of(cache, Generation.at(directory, current=manifest).index.hashes):
        _log.warning(
            "%s of cache %r: stored, and not shown, since %r and they have no utterance in common; "
            "store features of the same ids, or those of others in a cache of their own",
            ", ".join(map(repr, manifest.features)),
            str(cache),
            str(other),
        )
    else:
        with (
            explained(cache, lambda: "all that was committed is kept"),
            WriterLock(cache / SETS, PATIENCE_S),
        ):
            names = dict.fromkeys((*(set_names(cache) or ()), directory.name))
            write_outer(cache, **{SETS: [*names]})


def has_none_of(cache: Path, hashes: Hashes) -> Path | None:
    """Return the feature set that readers see and that has none of some utterances, by hash.

    None where all have some, and where there are no utterances.
    """
    names = set_names(cache) or ()
    for path, manifest in stored_sets(cache):
        if manifest.rows and len(hashes) and (path == cache or path.name in names):
            theirs = Generation.at(path, current=manifest).index.hashes
            if not np.isin(hashes[:MOST_TRIED], theirs).any() and not np.isin(hashes, theirs).any():
                return path
    return None


def clear_up(directory: Path) -> None:
    """Remove what killed writers left half written of what names the sets of a cache."""
    sets = (cache_of_set(directory) or directory) / SETS
    names = [entry.name for entry in entries(sets)]
    if HOLDER in names or any(name.endswith(".tmp") for name in names):
        with WriterLock(sets, PATIENCE_S):
            remove_unfinished(sets)


def holds_any(cache: Path, manifest: Manifest) -> bool:
    """Whether anything is stored in a cache, or a set, of this manifest."""
    return manifest.rows > 0 or bool(committed_builds(cache))


# Manifests of several feature sets, which readers see all at once or not at all.


def write_together(cache: Path, after: Mapping[HeldCache, Manifest]) -> None:
    """Show readers other manifests of a cache's feature sets; durably.

    What is superseded is removed.

    Args:
        cache: the cache directory.
        after: their next manifests; what they name is durable.
    """
    pairs: dict[str, tuple[str, str]] = {}
    for held, manifest in after.items():
        before, file = held.manifest.write_id, NEXT if len(after) > 1 else NAME
        written = held.write(manifest, keep=True, file=file)
        pairs[set_name(cache, held.path)] = (before, written.write_id)
    if len(after) > 1:
        with WriterLock(cache / SETS, PATIENCE_S):
            write_outer(cache, **{KEY: {**last_edits(cache), **pairs}})
        for held in after:
            settle(held.path)
    for held in after:
        write_readme(held.path, held.manifest)
        remove_superseded(held)
