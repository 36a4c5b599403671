"""Manifests of a cache in a store, and whether one generation comes from another.

Generations have no names that tell it. So each push leaves beside the manifest, under its
`write_id`, those of the manifests that the cache had before when it was pushed or pulled; the cache
keeps the same list.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from featcache.container_files import write_durably
from featcache.errors import CacheError, CorruptCacheError
from featcache.format.files import NOT_AS_WRITTEN, natural, newer, read_as, unpack_json, within
from featcache.format.manifest import (
    FORMAT_VERSION,
    NAME,
    SETS,
    Manifest,
    manifest_file,
    read_manifest,
)
from featcache.remote import Requests

PUSHED = "work-pushed"  # the lists: in a store a directory, in a cache a file, `.json`
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
    """A manifest in a store."""

    manifest: Manifest
    data: bytes
    etag: str | None


def stored_at(requests: Requests, name: str = NAME) -> StoredManifest | None:
    """Return the manifest that a store has under a name; None where there is none.

    Raises `CorruptCacheError` for what is no manifest.
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
        within(manifest.write_id, 1)
        within(manifest.name, 1)
    except NOT_AS_WRITTEN as error:
        raise CorruptCacheError(f"{where} is damaged: {error!r}") from error
    return StoredManifest(manifest, found[0], found[1])


def require_own(what: str, manifest: Manifest) -> None:
    """Raise `CacheError` for a cache that lies elsewhere in part, or in several manifests."""
    if SETS in manifest.requires:
        raise CacheError(
            f"{what} has feature sets, which are not copied; make one cache of them first: "
            "featcache.convert"
        )
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
        found += read_as(tuple[str, ...], json.loads((path / f"{PUSHED}.json").read_bytes()))
    for name in sorted({manifest.previous, *manifest.tags.values()} - {None}, key=str):
        with suppress(CacheError, OSError):
            found.append(read_manifest(path, manifest_file(str(name))).write_id)
    return found


def note_history(path: Path, history: list[str]) -> None:
    """Keep, in a cache, the `write_id`s that it had."""
    write_durably(path / f"{PUSHED}.json", packed(history))


def history_there(requests: Requests, manifest: Manifest) -> list[str]:
    """Return the `write_id`s that a generation in a store is known to come from."""
    with suppress(FileNotFoundError, *NOT_AS_WRITTEN):
        found = requests.whole(history_file(manifest))
        return [*read_as(tuple[str, ...], json.loads(found[0]))] if found else []
    return []


def history_file(manifest: Manifest) -> str:
    """Return where a store keeps what a generation comes from."""
    return f"{PUSHED}/{manifest.write_id}.json"


def packed(history: list[str]) -> bytes:
    """Return the bytes of a list of `write_id`s."""
    return json.dumps([*dict.fromkeys(history)]).encode()


def is_ancestor_of_cache(path: Path, here: Manifest, there: Manifest) -> bool:
    """Whether the generation of a cache comes from one that a store has."""
    # a later one is none, though a copy of before may know it
    known = there.generation <= here.generation
    return known and there.write_id in history_here(path, here)
