"""Features of a cache that are written by themselves: which set they are, and how it comes to be.

A plain cache becomes a set of its own first: its files get second names in `sets/<name>`, then
`featcache.json` names that instead, in one step. No byte is written anew.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from featcache.container_files import sync_directory
from featcache.errors import CacheError, CacheLockedError, ConfigError
from featcache.store.format.committed import committed_builds
from featcache.store.format.disk_errors import explained
from featcache.store.format.feature_sets import (
    NEW,
    cache_of_set,
    set_directories,
    set_names,
    stored_sets,
    write_sets,
)
from featcache.store.format.files import check_own_directory, remove_unfinished
from featcache.store.format.lock import HOLDER, SOFT_NAME, WriterLock
from featcache.store.format.lock import NAME as LOCK
from featcache.store.format.manifest import (
    MANIFESTS,
    NAME,
    PARTS,
    SETS,
    FeatureSetsError,
    read_manifest,
)
from featcache.store.format.part import SEAL, list_parts

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
PATIENCE_S = 10.0  # that others name a set of theirs
_STAYS = {NAME, SETS, LOCK, SOFT_NAME, HOLDER}


def directory_of(cache: Path, features: Iterable[str]) -> Path:
    """Return the directory that features of a cache are, or are to be, stored in.

    That of the set that has any of them; a new one where what is stored has none. Raises
    `ConfigError` if several sets have some of them.
    """
    names = list(features)
    stored = {directory: {*manifest.features} for directory, manifest in stored_sets(cache)}
    theirs = [directory for directory, found in stored.items() if not found.isdisjoint(names)]
    if len(theirs) > 1:
        paths = " and ".join(repr(str(directory)) for directory in theirs)
        raise ConfigError(
            f"the features {', '.join(map(repr, names))} of cache {str(cache)!r} are in several "
            f"feature sets, {paths}: write those of each set by themselves"
        )
    _refuse_annotations(cache, theirs, names)
    if theirs or not stored or (cache in stored and not holds_any(cache)):
        return theirs[0] if theirs else cache
    return _free(cache, names)


def _refuse_annotations(cache: Path, theirs: Collection[Path], features: Iterable[str]) -> None:
    """Raise `ConfigError` for a feature that is an annotation of another set."""
    for directory, manifest in stored_sets(cache):
        if directory not in theirs and (both := manifest.annotations.keys() & set(features)):
            raise ConfigError(
                f"cache {str(cache)!r} has an annotation {min(both)!r}, so no feature can have "
                "this name: rename the feature"
            )


def _free(cache: Path, features: Iterable[str]) -> Path:
    """Return a directory for a new set, named after its first feature."""
    first = next(iter(features))
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    check_own_directory(cache / SETS)
    places = (cache / SETS / name for name in names)
    return next(each for each in places if not ((each / NAME).exists() or each.is_symlink()))


def directory_to_write(cache: Path, features: Iterable[str]) -> Path:
    """Return the directory to store features of a cache in, which may now have become a set."""
    directory = directory_of(cache, features)
    if directory != cache and set_names(cache) is None and (cache / NAME).exists():
        with explained(cache, lambda: "the cache is as it was"):
            _become_a_set(cache)
    return directory


def name_set(directory: Path) -> None:
    """Let readers of a cache see a set, which is whole now; does nothing for a plain cache.

    A set without utterances stays aside, or the cache would have none, either. What is left of the
    plain cache that it once was goes.
    """
    cache = cache_of_set(directory)
    if cache is None:
        return
    if directory.name not in (set_names(cache) or ()):
        if not read_manifest(directory).rows:
            return
        with explained(cache, lambda: "all that was committed is kept"), locked_sets(cache):
            known = set_names(cache)
            if known is None:  # it was lost
                known = tuple(
                    found.name for found, each in stored_sets(cache) if each.complete and each.rows
                )
            remove_unfinished(cache)
            write_sets(cache, list(dict.fromkeys((*known, directory.name))))
    remove_left(cache)


def remove_left(cache: Path) -> None:
    """Remove the first names of files that lie in a set now."""
    left = [entry for entry in cache.iterdir() if entry.name not in _STAYS]
    if not left:
        return
    sets = set_directories(cache, set_names(cache) or ()).values()
    for entry in left:
        inner = [entry] if entry.is_file() else sorted(entry.iterdir())
        for each in inner:
            if any((found / each.relative_to(cache)).exists() for found in sets):
                shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)
        if entry.name in (PARTS, MANIFESTS):
            with contextlib.suppress(OSError):  # something else lies there
                entry.rmdir()


def holds_any(cache: Path) -> bool:
    """Tell whether anything is stored in a plain cache."""
    return read_manifest(cache).rows > 0 or bool(committed_builds(cache))


@contextlib.contextmanager
def locked_sets(cache: Path) -> Iterator[None]:
    """Hold the lock of a cache of sets, which nobody holds for long."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            lock = WriterLock(cache)
            break
        except CacheLockedError:
            if time.monotonic() >= until:
                raise
    try:
        yield
    finally:
        lock.release()


def _become_a_set(cache: Path) -> None:
    """Make a plain cache the only set of itself."""
    lock = WriterLock(cache)
    try:
        try:
            manifest = read_manifest(cache)
        except FeatureSetsError:  # another writer was faster
            return
        _check_sealed(cache)
        for left in (cache / SETS).glob("*"):
            if left.name.startswith(NEW) or _is_copied(left, cache):  # of who was killed here
                shutil.rmtree(left)
        new = cache / SETS / f"{NEW}{secrets.token_hex(4)}"
        new.mkdir(parents=True)
        _link_all(cache, new)
        name = _free(cache, manifest.features).name
        new.rename(cache / SETS / name)
        sync_directory(cache / SETS)
        write_sets(cache, [name])
    finally:
        lock.release()


def _is_copied(directory: Path, cache: Path) -> bool:
    """Tell whether a plain cache has all parts of a set."""
    seals = [*directory.glob(f"{PARTS}/*/{SEAL}")]
    first = [cache / seal.relative_to(directory) for seal in seals]
    pairs = zip(seals, first, strict=True)
    return all(there.exists() and there.read_bytes() == seal.read_bytes() for seal, there in pairs)


def _check_sealed(cache: Path) -> None:
    for name, sealed in list_parts(cache):
        if sealed is None:
            raise CacheError(
                f"part {name!r} of cache {str(cache)!r} is not sealed ({SEAL!r} is missing): it is "
                "being written, or its writer died; end that, or go on with it, before further "
                "features are added"
            )


def _link_all(source: Path, target: Path) -> None:
    """Give all files of a cache second names, durably; locks and others' directories aside."""
    for entry in sorted(source.iterdir()):
        skipped = _STAYS - {NAME} if source.name != PARTS else set()
        if entry.name in skipped or entry.name.endswith(".tmp") or entry.is_symlink():
            continue
        place = target / entry.name
        if entry.is_file():
            _link(entry, place)
        elif entry.is_dir() and not entry.name.startswith("work-"):
            place.mkdir()
            _link_all(entry, place)
    sync_directory(target)


def _link(entry: Path, place: Path) -> None:
    try:
        os.link(entry, place, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise CacheError(
            f"{str(entry)!r} cannot get a second name, {str(place)!r} ({error.strerror}), as is "
            "needed to add features to a cache: store them in another directory, and "
            "featcache.join reads both"
        ) from error
