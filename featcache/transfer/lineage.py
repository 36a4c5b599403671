"""Manifests of a cache in a store, and whether one generation comes from another.

Generations have no names that tell it. So each push leaves beside the manifest, under its
`write_id`, those of the manifests that the cache had before when it was pushed or pulled; the cache
keeps the same list. Each feature set has its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from featcache.container_files import write_durably
from featcache.errors import CacheError, CorruptCacheError
from featcache.format.feature_sets import (
    PUSHED,
    last_edits,
    pushed_file,
    pushed_sets,
    set_directories,
    set_names,
    set_prefix,
)
from featcache.format.files import (
    NOT_AS_WRITTEN,
    natural,
    newer,
    pack_for_readers,
    read_as,
    unpack_json,
    within,
)
from featcache.format.manifest import (
    FORMAT_VERSION,
    NAME,
    OWN,
    SETS,
    Manifest,
    manifest_file,
    read_manifest,
)
from featcache.remote import Requests

PUSHED_LISTS = "work-pushed"  # the lists: in a store a directory, in a cache a file, `.json`
MANY = 1000  # names that a store lists in one answer


@dataclass(frozen=True)
class Transfer:
    """The files that a push or a pull copied, or would copy, and those that were there already.

    >>> print(Transfer("push", files=3, nbytes=2_000_000, skipped=1, requests=5))
    3 files of 2.0 MB in 5 requests; 1 was there already
    """

    verb: str  # "push" or "pull"
    files: int
    nbytes: int
    skipped: int
    requests: int

    def __str__(self) -> str:
        there = f"{self.skipped} {'was' if self.skipped == 1 else 'were'} there already"
        return (
            f"{self.files} file{'' if self.files == 1 else 's'} of {self.nbytes / 1e6:.1f} MB "
            f"in {self.requests} requests; {there}"
        )


@dataclass(frozen=True)
class StoredManifest:
    """A manifest in a store, of a cache or of a set of it.

    Args:
        manifest: what it says.
        data: as it stands in a directory, without the names of the manifests of sets.
        etag: of the object.
        sets: of a cache, the `write_id`s of the manifests of all sets, by name.
    """

    manifest: Manifest
    data: bytes
    etag: str | None
    sets: Mapping[str, str]


def stored_at(requests: Requests, name: str = NAME) -> StoredManifest | None:
    """Return the manifest that a store has under a name; None where there is none.

    Raises `CorruptCacheError` for what is no manifest, `CacheError` for one that does not name
    those of its sets.
    """
    try:
        found = requests.whole(name)
    except FileNotFoundError:
        return None
    if found is None:
        return None
    where = f"'{requests.place.url}/{name}'"
    content = unpack_json(found[0], where)
    try:
        if not isinstance(content, dict) or content["format"] != "featcache":
            raise ValueError("it is no manifest")
        if natural(content["version"]) > FORMAT_VERSION:
            raise newer(where, f"version {content['version']} of the format")
        manifest = read_as(Manifest, content | {"others": {}})
        sets = pushed_sets(content) if PUSHED in content else {}
        for each in (manifest.write_id, manifest.name):
            within(each, 1)
    except NOT_AS_WRITTEN as error:
        raise CorruptCacheError(f"{where} is damaged: {error!r}") from error
    if name == NAME and SETS in manifest.requires and PUSHED not in content:
        raise CacheError(
            f"{requests.place.url} has feature sets, and no push has put it there: read it by its "
            "URL, copy it as it came there, or push to another URL"
        )
    data = found[0]
    if PUSHED in content:
        data = pack_for_readers({key: each for key, each in content.items() if key != PUSHED})
    return StoredManifest(manifest, data, found[1], {OWN: manifest.write_id, **sets})


def stored_set(requests: Requests, there: StoredManifest, name: str) -> StoredManifest:
    """Return the manifest of a set of a cache in a store; of the cache's own, `there` itself."""
    if name == OWN:
        return there
    file = pushed_file(name, there.sets[name])
    found = stored_at(requests, file)
    if found is None or found.manifest.write_id != there.sets[name]:
        raise CorruptCacheError(f"{requests.place.url} lacks {file!r}; push it again")
    return found


def manifests_at(path: Path) -> dict[str, Manifest]:
    """Return the manifests of a cache's sets, by name, as they are at one moment."""
    while True:
        own = read_manifest(path)
        names = set_names(path, own)
        if names is None:
            return {OWN: own}
        edits, directories = last_edits(path), set_directories(path, names)
        found = {name: read_manifest(directories[name]) for name in (OWN, *names)}
        if last_edits(path) == edits:
            return found


def require_own(what: str, manifest: Manifest) -> None:
    """Raise `CacheError` for a cache that lies elsewhere in part."""
    if any(part.adopted is not None for part in manifest.parts):
        raise CacheError(
            f"{what} has adopted sources, which stay where they are; copy them into a cache first: "
            "featcache.convert"
        )


# Which generation comes from which.


def history_here(path: Path, manifest: Manifest) -> list[str]:
    """Return the `write_id`s that a cache is known to have had before, the first one first."""
    found: list[str] = []
    with suppress(OSError, *NOT_AS_WRITTEN):
        found += read_as(tuple[str, ...], json.loads((path / f"{PUSHED_LISTS}.json").read_bytes()))
    for name in sorted({manifest.previous, *manifest.tags.values()} - {None}, key=str):
        with suppress(CacheError, OSError):
            found.append(read_manifest(path, manifest_file(str(name))).write_id)
    return found


def note_history(path: Path, history: list[str]) -> None:
    """Keep, in a cache, the `write_id`s that it had."""
    write_durably(path / f"{PUSHED_LISTS}.json", packed(history))


def history_there(requests: Requests, name: str, write_id: str) -> list[str]:
    """Return the `write_id`s that a generation of a set in a store is known to come from."""
    with suppress(FileNotFoundError, *NOT_AS_WRITTEN):
        found = requests.whole(history_file(name, write_id))
        return [*read_as(tuple[str, ...], json.loads(found[0]))] if found else []
    return []


def history_file(name: str, write_id: str) -> str:
    """Return where a store keeps what a generation of a set comes from."""
    return f"{set_prefix(name)}{PUSHED_LISTS}/{write_id}.json"


def packed(history: list[str]) -> bytes:
    """Return the bytes of a list of `write_id`s."""
    return json.dumps([*dict.fromkeys(history)]).encode()


def strange_to_cache(
    path: Path, here: Mapping[str, Manifest], requests: Requests, there: StoredManifest
) -> str | None:
    """Return a generation in a store that the cache does not come from; None if from all."""
    for name, write_id in there.sets.items():
        mine = here.get(name)
        if mine is None or mine.write_id != write_id:
            theirs = stored_set(requests, there, name).manifest
            # a later one is none, though a copy of before may know it
            known = mine is not None and theirs.generation <= mine.generation
            if (
                mine is None
                or not known
                or write_id not in history_here(path / set_prefix(name), mine)
            ):
                return _named(name, theirs.name)
    return None


def strange_to_store(
    here: Mapping[str, Manifest], requests: Requests, there: StoredManifest
) -> str | None:
    """Return a generation of a cache that the store does not come from; None if from all."""
    for name, each in here.items():
        theirs = there.sets.get(name)
        if theirs is None or (
            theirs != each.write_id and each.write_id not in history_there(requests, name, theirs)
        ):
            return _named(name, each.name)
    return None


def way_out(
    path: Path, here: Mapping[str, Manifest], requests: Requests, there: StoredManifest
) -> str:
    """Return what to type where a cache and one in a store do not come from each other."""
    url, beside = quote(requests.place.url), quote(f"{path}-there")
    said = f"`featcache pull {url} {beside}` copies the one there beside the one here"
    new = [
        feature
        for name, each in here.items()
        if name not in there.sets
        for feature in each.features
    ]
    if new:
        flags = "".join(f" -f {quote(feature)}" for feature in new)
        said += (
            f", `featcache convert {quote(str(path))} {beside}{flags}` adds the features that are "
            f"here alone, and `featcache push {beside} {url}` brings them there"
        )
    here_too = quote(f"{requests.place.url}-here")
    return f"{said}; `featcache push {quote(str(path))} {here_too}` keeps the one here beside it"


def _named(name: str, generation: str) -> str:
    return f"{generation!r}" if name == OWN else f"{generation!r} of feature set {name!r}"
