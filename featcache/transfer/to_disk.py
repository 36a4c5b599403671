"""Pulling: the files of a generation beside the cache, compared, and only then moved into it.

work-pull/<write_id>/    laid out like the cache: files that were fetched, links to those here
work-pull/whole          once all of these are whole: what is moved, and what goes then
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from featcache._progress import bar
from featcache.container_files import sync_directory, sync_file, write_durably
from featcache.errors import CacheError, CorruptCacheError
from featcache.format.files import NOT_AS_WRITTEN, make_directory, read_as, within
from featcache.format.manifest import (
    MANIFESTS,
    NAME,
    PARTS,
    Manifest,
    manifest_file,
    read_manifest,
    role_of,
)
from featcache.format.part import part_directories, read_part, remove_part, sealed_parts
from featcache.reading.containers import Containers
from featcache.reading.generation import Generation
from featcache.reading.opening import damage_of
from featcache.reading.verify import ContainerPages, Damage, page_damage, raise_damage
from featcache.remote import PIECE_BYTES, Requests
from featcache.transfer.lineage import (
    StoredManifest,
    Transfer,
    history_there,
    note_history,
    require_own,
    stored_at,
)
from featcache.transfer.to_store import is_stored, kept_manifests, pages_of_list
from featcache.writing.held import HeldCache, remove_superseded, write_readme

PULLED = "work-pull"
WHOLE = "whole"
MOST_AHEAD = 64  # pieces that are asked for at a time
MOST_AHEAD_BYTES = 96 << 20


@dataclass(frozen=True)
class _Whole:
    """A pull of which all is fetched and compared."""

    write_id: str
    history: tuple[str, ...]
    gone: tuple[str, ...]  # parts that no generation has which is kept


class Pull:
    """Pull of a generation in a store into a directory.

    Args:
        path: the directory.
        requests: to the store.
        there: the manifest of the generation.

    Attributes:
        here: the manifest of the cache that it holds; None where it holds none.

    Raises `CacheError` where it holds parts of a cache and no manifest.
    """

    def __init__(self, path: Path, requests: Requests, there: StoredManifest) -> None:
        self._path, self._requests, self._there = path, requests, there
        self._work = path / PULLED / there.manifest.write_id
        self.here = self._manifest_here()

    def _manifest_here(self) -> Manifest | None:
        if (self._path / NAME).exists():
            return read_manifest(self._path)
        if (self._path / PARTS).exists() and self._whole() is None:
            raise CacheError(f"{str(self._path)!r} holds parts of a cache; pull into a new one")
        return None

    def copy(self, dry_run: bool) -> Transfer:
        """Copy it."""
        there, here = self._there.manifest, self.here
        url = self._requests.place.url
        if here is not None and here.write_id == there.write_id:
            self._end(dry_run)
            return Transfer("pull", files=0, nbytes=0, skipped=0, requests=1)
        require_own(url, there)
        history = history_there(self._requests, there)
        if here is not None and here.write_id not in history:
            raise CacheError(
                f"{str(self._path)!r} has generation {here.name!r}, which {there.name!r} of {url} "
                "does not come from; pull it into a new directory, or push the one here, where "
                "that comes from the other"
            )
        kept = [each.manifest for each in self._others()]
        files, asked = self._files([there, *kept])
        fetched = {name for name, size in files.items() if _size(self._work / name) == size}
        have = fetched | self._kept(files)
        lacking = {} if self._whole() else {n: files[n] for n in sorted(files.keys() - have)}
        asked += 2 + len(kept) + sum(len(_pieces(size)) for size in lacking.values())
        skipped = len(files) - len(lacking)
        done = Transfer("pull", len(lacking) + 1, sum(lacking.values()), skipped, asked)
        if not dry_run:
            make_directory(self._path)
            with HeldCache(self._path) as held:
                self._check_published([there, *kept])
                if self._whole() is None:
                    self._fetch(lacking, done.nbytes)
                    self._link(files.keys() - lacking.keys())
                    self._compare(fetched | lacking.keys())
                    self._note_whole(history, [there, *kept])
                self._check_published([there, *kept])
                _move(self._work, self._path)
                self._clear_up(held)
        return done

    def _others(self) -> Iterator[StoredManifest]:
        """Give the manifests of the generation before and of those with tags."""
        manifest = self._there.manifest
        names = {manifest.previous, *manifest.tags.values()} - {None, manifest.name}
        for name in sorted(names, key=str):
            file = manifest_file(str(name))
            found = stored_at(self._requests, file)
            if found is None:
                raise CorruptCacheError(f"{self._requests.place.url} lacks {file!r}; push it again")
            yield found

    def _files(self, kept: Collection[Manifest]) -> tuple[dict[str, int], int]:
        """Return the files of a generation in the store, and their sizes; and the requests."""
        for each in kept:
            require_own(self._requests.place.url, each)
        parts = {f"{PARTS}/{part.name}/" for each in kept for part in each.parts}
        roles = {file for each in kept for file in each.files if role_of(file) is not None}
        wanted = {each.index for each in kept if each.index} | roles
        wanted |= {manifest_file(each.name) for each in kept if each is not self._there.manifest}
        listed = self._requests.listed("")
        if lost := sorted(wanted - listed.keys()):
            lacks = ", ".join(map(repr, lost))
            raise CorruptCacheError(f"{self._requests.place.url} lacks {lacks}; push it again")
        files = {
            name: size
            for name, size in listed.items()
            if name in wanted or ("/".join(name.split("/")[:2]) + "/" in parts and is_stored(name))
        }
        try:
            return {within(name): size for name, size in files.items()}, pages_of_list(listed)
        except NOT_AS_WRITTEN as error:
            raise CorruptCacheError(f"{self._requests.place.url} is damaged: {error}") from error

    def _kept(self, files: Mapping[str, int]) -> set[str]:
        """Return those of some files that the cache has, of generations that are here."""
        if self.here is None:
            return set()
        return {
            name
            for name, size in files.items()
            # manifests of equal size may differ in a tag
            if not name.startswith(f"{MANIFESTS}/") and _size(self._path / name) == size
        }

    def _check_published(self, kept: Collection[Manifest]) -> None:
        """Raise `CacheError` for parts that are here and in no generation: they would be lost."""
        if self.here is None:
            return
        if read_manifest(self._path).write_id != self.here.write_id:
            raise CacheError(f"cache {str(self._path)!r} was written meanwhile; try again")
        known = {part.name for each in self._kept_here() for part in each.parts}
        known |= {part.name for each in kept for part in each.parts} | {*self.here.replaced}
        others = [each.name for each in part_directories(self._path) if each.name not in known]
        if others:
            raise CacheError(
                f"{str(self._path)!r} holds parts that are not published ({others[0]!r}), and that "
                "a later generation does not have; publish them (open a CacheWriter and close it) "
                "and push them to another URL, or pull into a new directory"
            )

    def _kept_here(self) -> Iterator[Manifest]:
        if self.here is not None and self.here.index:
            yield from kept_manifests(self._path, self.here)

    def _fetch(self, files: Mapping[str, int], nbytes: int) -> None:
        """Fetch files in pieces, several at a time; each has its name only once it is whole."""
        ahead: _Ahead = deque()
        nbytes_ahead = 0
        with bar(f"pull {self._path.name}", nbytes) as shown, contextlib.ExitStack() as files_open:
            for name, size in files.items():
                file = files_open.enter_context(contextlib.closing(_File(self._work / name, size)))
                for begin, end in _pieces(size):
                    answer = self._requests.some(name, begin, end, size, file.etags)
                    ahead.append((file, begin, end, answer))
                    nbytes_ahead += end - begin
                    while len(ahead) == MOST_AHEAD or nbytes_ahead > MOST_AHEAD_BYTES:
                        nbytes_ahead -= _write_first(ahead, shown)
            while ahead:
                _write_first(ahead, shown)

    def _link(self, names: Collection[str]) -> None:
        """Give files of the cache a second name beside those that were fetched."""
        for name in sorted(names):
            target = self._work / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(self._path / name, target, follow_symlinks=False)
                except OSError:  # file systems where a file has one name
                    shutil.copyfile(self._path / name, target, follow_symlinks=False)
                    with target.open("rb") as file:
                        sync_file(file)

    def _compare(self, fetched: Collection[str]) -> None:
        """Put the manifest to what was fetched, now or before a stop, and compare all of that."""
        work, there = self._work, self._there
        (work / MANIFESTS).mkdir(parents=True, exist_ok=True)
        write_durably(work / manifest_file(there.manifest.name), there.data)
        write_durably(work / NAME, there.data)
        try:
            raise_damage(_damage(work, fetched))
        except CorruptCacheError as error:
            shutil.rmtree(work)  # all of it is fetched anew
            raise CorruptCacheError(
                f"what was pulled from {self._requests.place.url} is damaged; pull it again, or "
                f"push it again: {error}"
            ) from error

    def _note_whole(self, history: Collection[str], kept: Collection[Manifest]) -> None:
        """Note that all is there; raises `CacheError` where what goes would come back."""
        there, names = self._there.manifest, {part.name for each in kept for part in each.parts}
        before = {part.name for each in self._kept_here() for part in each.parts}
        gone = sorted(before - names)
        parts = [*(read_part(self._path, name) for name in gone)]
        parts += [read_part(self._work, part.name) for part in there.parts]
        counting = {part.entry.name for part in sealed_parts(parts, there)}
        if not counting.isdisjoint(gone):
            raise CacheError(
                f"between the generations of {str(self._path)!r} and "
                f"{self._requests.place.url} parts were merged several times, and a writer would "
                "take up those here; pull it into a new directory"
            )
        for directory, _, _ in os.walk(self._work):
            sync_directory(Path(directory))
        whole = _Whole(there.write_id, (*history, there.write_id), tuple(gone))
        write_durably(self._path / PULLED / WHOLE, json.dumps(asdict(whole)).encode())

    def _whole(self) -> _Whole | None:
        """Return what is noted of this generation, once it only is to be moved."""
        try:
            found = json.loads((self._path / PULLED / WHOLE).read_bytes())
            whole = read_as(_Whole, found)
        except (OSError, *NOT_AS_WRITTEN):
            return None
        return whole if whole.write_id == self._there.manifest.write_id else None

    def _end(self, dry_run: bool) -> None:
        """End a pull that was stopped behind its manifest."""
        if not dry_run and self._whole() is not None:
            with HeldCache(self._path) as held:
                self._clear_up(held)

    def _clear_up(self, held: HeldCache) -> None:
        """Remove what no reader of the generation needs, which is out now."""
        path, whole = self._path, self._whole()
        manifest = read_manifest(path)
        if whole is not None:
            note_history(path, [*whole.history])
            for name in whole.gone:
                remove_part(path / PARTS / within(name, 1))
        held.begin(manifest)
        remove_superseded(held)
        write_readme(path, manifest)
        shutil.rmtree(path / PULLED)


class _File:
    """A file that is fetched in pieces; it has its name only once it is whole."""

    def __init__(self, path: Path, size: int) -> None:
        self.etags: dict[str, str] = {}  # of one object are all pieces
        self._path, self._unfinished = path, path.with_name(f"{path.name}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._unfinished.open("wb", buffering=0)
        self._lacking = size
        self.write(0, memoryview(b""))

    def write(self, begin: int, data: memoryview) -> None:
        """Write a piece."""
        done = 0
        while done < len(data):  # a full disk takes some of it first
            done += os.pwrite(self._file.fileno(), data[done:], begin + done)
        self._lacking -= len(data)
        if not self._lacking:
            sync_file(self._file)
            self._file.close()
            self._unfinished.replace(self._path)

    def close(self) -> None:
        """Close it, whole or not."""
        self._file.close()


_Ahead = deque[tuple[_File, int, int, Future[memoryview]]]


def _write_first(ahead: _Ahead, shown: Any) -> int:
    """Write the piece that was asked for first, and return its size."""
    file, begin, end, answer = ahead.popleft()
    file.write(begin, answer.result())
    shown.update(end - begin)
    return end - begin


def _pieces(size: int) -> list[tuple[int, int]]:
    return [(at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES)]


def _size(path: Path) -> int:
    """Return the size of a regular file; -1 for all else."""
    try:
        found = path.lstat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _damage(cache: Path, fetched: Collection[str]) -> Iterator[Damage]:
    """Compare all files with what their parents say of them, and the bytes of some containers."""
    opened = Generation.at(cache)
    yield from damage_of(opened, arrays=False)
    seen: set[str] = set()
    for each in kept_manifests(cache, opened.manifest):
        of = opened if each is opened.manifest else Generation.at(cache, name=each.name)
        columns = of.index.containers
        known = ContainerPages(cache, each, columns, None)
        containers = Containers(cache, columns, mapped=False)
        for number in range(len(columns.sizes)):
            if columns.path(number) in fetched and columns.path(number) not in seen:
                seen.add(columns.path(number))
                yield from page_damage(of.index, number, known, containers)


def _move(source: Path, target: Path) -> None:
    """Move all that lies in a directory into another, a manifest last.

    A directory that is not there yet appears whole.
    """
    for each in sorted(source.iterdir(), key=lambda each: (each.name == NAME, each.name)):
        there = target / each.name
        if each.name == NAME:  # what it names is durable first
            sync_directory(target)
        if each.is_dir() and there.is_dir() and not there.is_symlink():
            _move(each, there)
        else:
            each.replace(there)
    sync_directory(target)
