"""Pushing: the files of a generation, those that a store lacks, then the manifest."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from featcache._cached import cached_property
from featcache._progress import bar
from featcache.container_files.lock import FILES as LOCK_FILES
from featcache.errors import CacheError, CorruptCacheError
from featcache.format.files import open_there, remedy, unpack_json
from featcache.format.index import container_digest, pages_of
from featcache.format.manifest import NAME, PARTS, Manifest, manifest_file, read_manifest
from featcache.reading.generation import Generation
from featcache.remote import PIECE_BYTES, PIECES_AT_ONCE, Requests
from featcache.transfer.lineage import (
    MANY,
    StoredManifest,
    Transfer,
    history_file,
    history_here,
    history_there,
    is_ancestor_of_cache,
    note_history,
    packed,
    require_own,
    stored_at,
)

MOST_AHEAD = 32  # files that are sent at a time
MOST_AHEAD_BYTES = 96 << 20  # of memory
MEMORY_BYTES = PIECES_AT_ONCE * PIECE_BYTES  # of one file
TRIES = 3  # to put a manifest, which a store does not try by itself
NO_PART = (*LOCK_FILES, "journal.jsonl")


class Push:
    """Push of the current generation of a cache.

    Args:
        path: the cache directory.
        requests: to where it is pushed.

    Raises `CacheError` for one that cannot be.
    """

    def __init__(self, path: Path, requests: Requests) -> None:
        self._path, self._requests = path, requests
        self._manifest = manifest = read_manifest(path)
        require_own(f"cache {str(path)!r}", manifest)
        if not manifest.index:
            raise CacheError(f"cache {str(path)!r} has published nothing yet")
        self._data = (path / NAME).read_bytes()
        content = unpack_json(self._data, repr(str(path / NAME)))
        if not isinstance(content, dict) or content["write_id"] != manifest.write_id:
            raise CacheError(f"cache {str(path)!r} was written meanwhile; push it again")
        self._kept = list(kept_manifests(path, manifest))

    def copy(self, there: StoredManifest | None, dry_run: bool) -> Transfer:
        """Copy it to where a manifest is, or none."""
        requests, manifest, path = self._requests, self._manifest, self._path
        is_new = there is None or there.manifest.write_id != manifest.write_id
        history = history_here(path, manifest)
        if there is not None and is_new:
            self._require_ancestor(there.manifest)
            history = [
                *history_there(requests, there.manifest),
                *history,
                there.manifest.write_id,
            ]
        listed = requests.listed("")
        files = {name: (path / name).stat().st_size for name in self._files()}
        same_size = [name for name, size in files.items() if listed.get(name) == size]
        lacking = {name: files[name] for name in files.keys() - {*self._skipped(same_size)}}
        asked = 1 + (is_new and there is not None) + pages_of_list(listed) + len(same_size)
        asked += sum(map(puts, lacking.values())) + 2 * is_new
        done = Transfer(
            "push",
            files=len(lacking) + is_new,
            nbytes=sum(lacking.values()),
            skipped=len(files) - len(lacking),
            requests=asked,
        )
        if dry_run:
            return done
        with suppress(OSError):  # a read-only disk, whose cache does not change: the store knows it
            note_history(path, [*history, manifest.write_id])
        with bar(f"push {path.name}", done.nbytes) as shown:
            self._upload(dict(sorted(lacking.items())), shown)
        if is_new:
            requests.put(history_file(manifest), packed(history)).result()
            self._publish(None if there is None else there.etag)
        return done

    def _require_ancestor(self, there: Manifest) -> None:
        if not is_ancestor_of_cache(self._path, self._manifest, there):
            raise CacheError(
                f"{self._requests.place.url} has generation {there.name!r}, as "
                f"{str(self._path)!r} never had it: the one does not come from the other; push it "
                "to another URL, or pull that one into another directory"
            )

    def _files(self) -> Iterator[str]:
        """Give the files of a generation, the one before and the tagged ones, within the cache.

        Not the manifest itself, which comes last.
        """
        path, kept = self._path, self._kept
        yield from dict.fromkeys(file for each in kept for file in (each.index, *each.files))
        yield from (manifest_file(each.name) for each in kept[1:])
        for part in dict.fromkeys(part.name for each in kept for part in each.parts):
            for found in sorted((path / PARTS / part).rglob("*")):
                if found.is_file() and not found.is_symlink() and is_stored(found.name):
                    yield found.relative_to(path).as_posix()

    def _skipped(self, names: list[str]) -> Iterator[str]:
        """Give those of some files that the store has with their digests."""
        answers = [(name, self._requests.digest(name)) for name in names]
        for name, answer in answers:
            if answer.result() == (self._container_digests.get(name) or self._digest(name)):
                yield name

    def _digest(self, name: str) -> str:
        """Return the digest of a file.

        Raises `CorruptCacheError` for a container that is not what the index says: it would be
        skipped for ever where the right one is to be sent.
        """
        with open(open_there(self._path, name), "rb") as file:  # noqa: PTH123 (a descriptor)
            size = os.fstat(file.fileno()).st_size
            found = container_digest(pages_of(file.fileno()), size).hex()
        if self._container_digests.get(name, found) != found:
            raise CorruptCacheError(
                f"container {str(self._path / name)!r} is damaged: it is not what was written, and "
                f"is not pushed; {remedy(self._path, name)}"
            )
        return found

    @cached_property
    def _container_digests(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for each in self._kept:
            name = None if each is self._manifest else each.name
            opened = Generation.at(self._path, name=name, current=self._manifest)
            columns = opened.index.containers
            for number in range(len(columns.sizes)):
                found[columns.path(number)] = columns.digest(number).hex()
        return found

    def _upload(self, files: Mapping[str, int], shown: Any) -> None:
        """Send files, some at a time; after an error no more are begun."""
        under_way: deque[tuple[int, int, Future[None]]] = deque()
        ahead = 0
        for name, size in files.items():
            memory = min(size, MEMORY_BYTES)
            while under_way and (len(under_way) == MOST_AHEAD or ahead + memory > MOST_AHEAD_BYTES):
                ahead -= _sent(under_way, shown)
            answer = self._requests.put(name, self._path / name, self._digest(name))
            under_way.append((size, memory, answer))
            ahead += memory
        while under_way:
            _sent(under_way, shown)

    def _publish(self, etag: str | None) -> None:
        """Put the manifest where the one with an ETag is; a lost answer is looked up."""
        requests = self._requests
        for tries_left in reversed(range(TRIES)):
            try:
                requests.replace(NAME, self._data, etag)
                return
            except (FileExistsError, CacheError) as error:
                there = stored_at(requests)
                if there is not None and there.manifest.write_id == self._manifest.write_id:
                    return
                if etag != (None if there is None else there.etag):
                    raise CacheError(
                        f"another push to {requests.place.url} was first; push again to see "
                        "whether this cache comes from what it has now"
                    ) from None
                if not tries_left:
                    raise CacheError(f"{requests.place.url}: nothing was published") from error


def _sent(under_way: deque[tuple[int, int, Future[None]]], shown: Any) -> int:
    size, memory, answer = under_way.popleft()
    answer.result()
    shown.update(size)
    return memory


def is_stored(name: str) -> bool:
    """Whether a file in a part is of its content, and none of who writes it."""
    own = name.rpartition("/")[2] not in NO_PART
    return own and not name.endswith((".tmp", ".damaged"))


def puts(size: int) -> int:
    """Return the requests that send a file: several pieces are begun and ended with one each."""
    pieces = -(-size // PIECE_BYTES)
    return pieces + 2 if pieces > 1 else 1


def pages_of_list(listed: Mapping[str, int]) -> int:
    """Return the requests that listed so many names."""
    return max(-(-len(listed) // MANY), 1)


def kept_manifests(path: Path, manifest: Manifest) -> Iterator[Manifest]:
    """Give the manifests of a generation, of the one before, and of the tagged ones."""
    yield manifest
    others = {manifest.previous, *manifest.tags.values()} - {None, manifest.name}
    for name in sorted(others, key=str):
        yield read_manifest(path, manifest_file(str(name)))
