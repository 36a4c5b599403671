"""Feature sets as they are made: a plain cache becomes one, and all are edited in one step."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from featcache.container_files import sync_directory
from featcache.errors import CacheError, ConfigError, NotACacheError
from featcache.format.feature_sets import (
    NEW,
    cache_of_set,
    name_following,
    set_directories,
    set_names,
    stored_sets,
    write_sets,
)
from featcache.format.files import (
    check_own_directory,
    explained,
    make_directory,
    remove_unfinished,
)
from featcache.format.journal import read_journal
from featcache.format.lock import HOLDER, SOFT_NAME, WriterLock, is_locked
from featcache.format.lock import NAME as LOCK
from featcache.format.manifest import (
    INDEX,
    KEPT_FILE,
    MANIFESTS,
    NAME,
    NEXT,
    PARTS,
    SETS,
    FeatureSetsError,
    Manifest,
    read_manifest,
    refuse_other_formats,
    settle,
)
from featcache.format.part import (
    PART_NAME,
    SEAL,
    committed_builds,
    entries,
    list_parts,
    remove_part,
)
from featcache.writing.held import HeldCache, remove_superseded
from featcache.writing.recover import still_written

# The directory of a cache: made, or seen to be a cache or empty, before a writer begins.

OTHERS = "work-"  # names in a cache directory that begin so are those of whoever works there


def claim_directory(path: Path) -> None:
    """Make the directory, or see that it is a cache of a format that is known, or empty."""
    if path.exists() and not path.is_dir():
        raise NotACacheError(f"{str(path)!r} is a file; a cache is a directory")
    try:
        make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotACacheError(f"{str(path)!r} cannot be made a directory: {error}") from error
    refuse_other_formats(path)
    for directory in (PARTS, MANIFESTS):
        check_own_directory(path / directory)
    locks = r"writer\.(lock|lock\.soft|json)"
    files = rf"{NAME}(\.[0-9a-f]{{8}}\.tmp)?|{INDEX.pattern}|{PARTS}|{MANIFESTS}|{locks}"
    ours = re.compile(rf"{files}|{KEPT_FILE.pattern}|{OTHERS}.*")
    # once: another writer may be making the cache
    names = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in names if not ours.fullmatch(name)]
    if NAME not in names and foreign:
        raise NotACacheError(
            f"{str(path)!r} holds other files ({foreign[0]!r}); give a new or empty directory, or, "
            "if these are features, a cache that reads them where they lie: "
            f"featcache.adopt({str(path)!r}, {str(path) + '-cache'!r})"
        )


# Features of a cache that are written by themselves: which set they are, and how it comes to be.
#
# A plain cache becomes a set of its own first: its files get second names in `sets/<name>`, then
# `featcache.json` names that instead, in one step. No byte is written anew.

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
PATIENCE_S = 10.0  # that others name a set of theirs
_STAYS = {NAME, SETS, LOCK, SOFT_NAME, HOLDER}


def directory_of(cache: Path, features: Iterable[str]) -> Path:
    """Return the directory that features of a cache are, or are to be, stored in.

    That of the set that has any of them; a new one where what is stored has none. Raises
    `ConfigError` if several sets have some of them, and for one that is an annotation of another.
    """
    names = list(features)
    stored = dict(stored_sets(cache))
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
    if theirs or not stored or (cache in stored and not holds_any(cache)):
        return theirs[0] if theirs else cache
    return _free(cache, names)


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
    """Show readers of a cache a set, which is whole now; does nothing for a plain cache.

    A set without utterances stays aside, or the cache would have none, either.
    """
    cache = cache_of_set(directory)
    if cache is None:
        return
    if directory.name not in (set_names(cache) or ()):
        if not read_manifest(directory).rows:
            return
        with (
            explained(cache, lambda: "all that was committed is kept"),
            WriterLock(cache, PATIENCE_S),
        ):
            known = set_names(cache)
            if known is None:  # it was lost
                known = tuple(
                    found.name for found, each in stored_sets(cache) if each.complete and each.rows
                )
            write_sets(cache, list(dict.fromkeys((*known, directory.name))))


def clear_up(directory: Path) -> None:
    """Clear up around a cache or a set, as holder of its lock, before any part of it changes.

    Temporary names go that killed writers left, and first names of files that lie in a set now.
    Parts come home that were written to the plain cache while it became a set.
    """
    cache = cache_of_set(directory)
    if cache is None:
        _remove_half_made(directory)
        return
    if not (_left_beside_sets(cache) or (cache / HOLDER).exists()):
        return
    with WriterLock(cache, PATIENCE_S):
        remove_unfinished(cache)
        _remove_new(cache)
        _remove_first_names(cache, _left_beside_sets(cache))
        if (directory / NAME).exists():
            _take_home(cache, directory)
        for name in (PARTS, MANIFESTS):
            with contextlib.suppress(OSError):  # something else lies there
                (cache / name).rmdir()


def _left_beside_sets(cache: Path) -> list[Path]:
    """List what lies in the directory of a cache of sets and is neither theirs nor others'."""
    found = (each for each in cache.iterdir() if not each.name.startswith(OTHERS))
    return [*(each for each in found if each.name not in _STAYS), *(cache / SETS).glob(f"{NEW}*")]


def _remove_first_names(cache: Path, left: Iterable[Path]) -> None:
    sets = set_directories(cache, set_names(cache) or ()).values()
    for entry in left:
        inside = entry.is_dir() and not entry.is_symlink()
        for each in sorted(entry.iterdir()) if inside else [entry]:
            if each.is_symlink():  # of somebody else
                continue
            if each.exists() and any((own / each.relative_to(cache)).exists() for own in sets):
                shutil.rmtree(each) if each.is_dir() else each.unlink()


def _take_home(cache: Path, directory: Path) -> None:
    """Move parts into the set that has their features; those that are being written stay."""
    features = read_manifest(directory).features.keys()
    check_own_directory(cache / PARTS)
    for name, sealed in list(list_parts(cache)):
        part, home = cache / PARTS / name, directory / PARTS / name
        found = sealed or read_journal(cache, f"{PARTS}/{name}")
        if found is not None and found.header.dims.keys() != features:
            continue
        with contextlib.suppress(FileNotFoundError):  # its writer has removed it
            if is_locked(part):
                continue
            make_directory(home.parent)
            # a power cut may undo half of a rename: its name here goes when that there is durable
            new = _new_directory(cache)
            _link_all(part, new)
            new.rename(home)
            sync_directory(home.parent)
            remove_part(part)


def check_none_left(cache: Path) -> None:
    """Raise `CacheError` for parts beside the sets of a cache, which may hold what was deleted."""
    left = entries(cache / PARTS)
    for part in left:
        with contextlib.suppress(FileNotFoundError):  # its writer has removed it
            if is_locked(part):
                raise still_written(part)
    if left := [part for part in left if os.path.lexists(part)]:
        raise CacheError(
            f"cache {str(cache)!r} is compacted, but {', '.join(map(repr, map(str, left)))} belong "
            "to none of its feature sets, and may hold what was deleted; remove them"
        )


def holds_any(cache: Path) -> bool:
    """Whether anything is stored in a plain cache."""
    return read_manifest(cache).rows > 0 or bool(committed_builds(cache))


def _become_a_set(cache: Path) -> None:
    """Make a plain cache the only set of itself."""
    with WriterLock(cache):
        try:
            manifest = read_manifest(cache)
        except FeatureSetsError:  # another writer was faster
            return
        _check_sealed(cache)
        _remove_half_made(cache)
        new = _new_directory(cache)
        _link_all(cache, new)
        name = _free(cache, manifest.features).name
        new.rename(cache / SETS / name)
        sync_directory(cache / SETS)
        write_sets(cache, [name])


def _new_directory(cache: Path) -> Path:
    new = cache / SETS / f"{NEW}{secrets.token_hex(4)}"
    new.mkdir(parents=True)
    return new


def _remove_half_made(cache: Path) -> None:
    """Remove what who was killed left in `sets` of a plain cache that was to become one of them."""
    if (cache / SETS).is_symlink():  # not ours
        return
    for left in (each.parent for each in sorted((cache / SETS).glob(f"*/{NAME}"))):
        if not left.name.startswith(NEW) and not left.is_symlink() and _is_copied(left, cache):
            # what is left of it must not be taken for a set, wherever this ends
            left.rename(left.with_name(f"{NEW}{secrets.token_hex(4)}"))
    _remove_new(cache)
    with contextlib.suppress(OSError):  # there is none, or something else lies there
        (cache / SETS).rmdir()


def _remove_new(cache: Path) -> None:
    for left in (cache / SETS).glob(f"{NEW}*"):
        shutil.rmtree(left)


def _is_copied(directory: Path, cache: Path) -> bool:
    """Whether a plain cache has all parts of a set."""
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
        if PART_NAME.fullmatch(entry.name) and not (entry / SEAL).exists():
            continue  # it was begun just now: it comes home later
        place = target / entry.name
        if entry.is_file():
            _link(entry, place)
        elif entry.is_dir() and not entry.name.startswith(OTHERS):
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


# Manifests of several feature sets, which readers see all at once or not at all.


def write_together(cache: Path, after: Mapping[HeldCache, Manifest]) -> None:
    """Show readers other manifests of a cache's feature sets, or of a plain cache; durably.

    What is superseded is removed.

    Args:
        cache: the outer directory.
        after: their next manifests; what they name is durable.
    """
    pairs: dict[str, tuple[str, str]] = {}
    for held, manifest in after.items():
        before, file = held.manifest.write_id, NEXT if len(after) > 1 else NAME
        written = held.write(manifest, keep=True, file=file)
        pairs[held.path.name] = (before, written.write_id)
    if len(after) > 1:
        with WriterLock(cache, PATIENCE_S):
            name_following(cache, pairs)
        for held in after:
            settle(held.path)
    for held in after:
        remove_superseded(held)
