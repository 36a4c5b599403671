"""Pushing: the files of a generation, those that a store lacks, then the manifest."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcache._cached import cached_property
from featcache._progress import bar
from featcache.container_files.lock import FILES as LOCK_FILES
from featcache.errors import CacheError, CorruptCacheError
from featcache.format.feature_sets import PUSHED, pushed_file, set_prefix
from featcache.format.files import open_there, pack_for_readers, remedy
from featcache.format.index import container_digest, pages_of
from featcache.format.manifest import (
    NAME,
    OWN,
    PARTS,
    SETS,
    Manifest,
    in_force,
    manifest_file,
    read_content,
    read_manifest,
)
from featcache.reading.generation import Generation
from featcache.remote import PIECE_BYTES, PIECES_AT_ONCE, Requests
from featcache.transfer.lineage import (
    MANY,
    StoredManifest,
    Transfer,
    history_file,
    history_here,
    history_there,
    manifests_at,
    note_history,
    packed,
    require_own,
    stored_at,
    strange_to_cache,
    way_out,
)

MOST_AHEAD = 32  # files that are sent at a time
MOST_AHEAD_BYTES = 96 << 20  # of memory
MEMORY_BYTES = PIECES_AT_ONCE * PIECE_BYTES  # of one file
TRIES = 3  # to put a manifest, which a store does not try by itself
NO_PART = (*LOCK_FILES, "journal.jsonl")


@dataclass(frozen=True)
class _Set:
    """A set of the cache as it is pushed: its manifest, and those that are kept with it."""

    name: str
    directory: Path
    manifest: Manifest
    content: Mapping[str, object]  # of the manifest
    kept: tuple[Manifest, ...]

    @classmethod
    def of(cls, cache: Path, name: str, manifest: Manifest) -> _Set:
        """Return a set of a cache, whose manifest was read; refuses one that has moved on."""
        directory = cache / set_prefix(name)
        require_own(f"cache {str(directory)!r}", manifest)
        if not manifest.index:
            raise CacheError(f"cache {str(directory)!r} has published nothing yet")
        content = in_force(directory, read_content(directory))
        if content["write_id"] != manifest.write_id:
            raise CacheError(f"cache {str(cache)!r} was written meanwhile; push it again")
        kept = tuple(kept_manifests(directory, manifest))
        return cls(name, directory, manifest, content, kept)

    def files(self) -> Iterator[str]:
        """Give the files of a generation, the one before and the tagged ones, within the cache.

        Not the manifest itself, which comes last.
        """
        kept, prefix = self.kept, set_prefix(self.name)
        named = dict.fromkeys(file for each in kept for file in (each.index, *each.files))
        yield from (prefix + file for file in named)
        yield from (prefix + manifest_file(each.name) for each in kept[1:])
        for part in dict.fromkeys(part.name for each in kept for part in each.parts):
            for found in sorted((self.directory / PARTS / part).rglob("*")):
                if found.is_file() and not found.is_symlink() and is_stored(found.name):
                    yield prefix + found.relative_to(self.directory).as_posix()

    def digests(self) -> Iterator[tuple[str, str]]:
        """Give the containers, within the cache, and their digests."""
        for each in self.kept:
            name = None if each is self.manifest else each.name
            opened = Generation.at(self.directory, name=name, current=self.manifest)
            columns = opened.index.containers
            for number in range(len(columns.sizes)):
                yield set_prefix(self.name) + columns.path(number), columns.digest(number).hex()


class Push:
    """Push of the current generation of a cache, with its feature sets.

    Args:
        path: the cache directory.
        requests: to where it is pushed.

    Raises `CacheError` for one that cannot be.
    """

    def __init__(self, path: Path, requests: Requests) -> None:
        self._path, self._requests = path, requests
        self._here = manifests_at(path)
        self._sets = [_Set.of(path, name, each) for name, each in self._here.items()]
        self._write_ids = {name: each.write_id for name, each in self._here.items()}

    def copy(self, there: StoredManifest | None, dry_run: bool) -> Transfer:
        """Copy it to where a manifest is, or none."""
        before = {} if there is None else {**there.sets}
        is_new = before != self._write_ids
        if there is not None and is_new:
            self._require_ancestor(there)
        histories = {each.name: self._history(each, before.get(each.name)) for each in self._sets}
        listed = self._requests.listed("")
        files, asked = self._lacking(listed)
        small = dict(self._small(before, histories, listed))
        known = [name for name, each in before.items() if self._write_ids[name] != each]
        asked += 1 + len(known) + sum(name != OWN for name in known) + pages_of_list(listed)
        done = Transfer(
            "push",
            files=len(files) + is_new,
            nbytes=sum(files.values()),
            skipped=sum(1 for each in self._sets for _ in each.files()) - len(files),
            requests=asked + len(small) + is_new,
        )
        if dry_run:
            return done
        for each in self._sets:
            with suppress(OSError):  # a read-only disk, whose cache does not change
                note_history(each.directory, [*histories[each.name], each.manifest.write_id])
        with bar(f"push {self._path.name}", done.nbytes) as shown:
            self._upload(files, shown)
        for answer in [self._requests.put(file, data) for file, data in small.items()]:
            answer.result()
        if is_new:
            self._publish(None if there is None else there.etag)
        return done

    def _lacking(self, listed: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Return the files that a store lacks, and the requests that find and send them."""
        names = (name for each in self._sets for name in each.files())
        files = {name: (self._path / name).stat().st_size for name in names}
        same_size = [name for name, size in files.items() if listed.get(name) == size]
        lacking = {name: files[name] for name in sorted(files.keys() - {*self._skipped(same_size)})}
        return lacking, len(same_size) + sum(map(puts, lacking.values()))

    def _small(
        self,
        before: Mapping[str, str],
        histories: Mapping[str, list[str]],
        listed: Collection[str],
    ) -> Iterator[tuple[str, bytes]]:
        """Give what else a store gets of each set that is changed, under names of this write."""
        for each in self._sets:
            write_id = each.manifest.write_id
            if before.get(each.name) != write_id:
                yield history_file(each.name, write_id), packed(histories[each.name])
                file = pushed_file(each.name, write_id)
                if each.name != OWN and file not in listed:
                    yield file, pack_for_readers(each.content)

    def _history(self, each: _Set, before: str | None) -> list[str]:
        """Return what a set comes from, as it is known here and there."""
        found = history_here(each.directory, each.manifest)
        if before in (None, each.manifest.write_id):
            return found
        return [*history_there(self._requests, each.name, str(before)), *found, str(before)]

    def _require_ancestor(self, there: StoredManifest) -> None:
        strange = strange_to_cache(self._path, self._here, self._requests, there)
        if strange is not None:
            raise CacheError(
                f"{self._requests.place.url} has generation {strange}, as "
                f"{str(self._path)!r} never had it, so the one here does not come from it; if it "
                "comes from the one here, `featcache sync` pulls it; if not, "
                f"{way_out(self._path, self._here, self._requests, there)}"
            )

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
        return {name: digest for each in self._sets for name, digest in each.digests()}

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
        """Put the manifest where the one with an ETag is; a lost answer is looked up.

        It names those of all sets, so they come into force together.
        """
        requests, (own, *sets) = self._requests, self._sets
        named = {PUSHED: {each.name: each.manifest.write_id for each in sets}}
        data = pack_for_readers({**own.content, **(named if SETS in own.manifest.requires else {})})
        for tries_left in reversed(range(TRIES)):
            try:
                requests.replace(NAME, data, etag)
                return
            except (FileExistsError, CacheError) as error:
                there = stored_at(requests)
                if there is not None and there.sets == self._write_ids:
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
