"""Pulling: the files of a generation beside the cache, compared, and only then moved into it.

work-pull/<digest>/    laid out like the cache: files that were fetched, links to those here
work-pull/whole        once all of these are whole: what is moved, and what goes then

The digest is of the `write_id`s of all sets. What is whole is moved in by the next pull, whatever
the store has by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from featcache._progress import bar
from featcache.container_files import sync_directory, sync_file, write_durably
from featcache.container_files.lock import WriterLock
from featcache.errors import CacheError, CorruptCacheError, RemoteError
from featcache.format import (
    KEY,
    MANIFESTS,
    NAME,
    NEXT,
    NOT_AS_WRITTEN,
    OWN,
    PARTS,
    SETS,
    Manifest,
    Name,
    check_own_directory,
    digest,
    last_edits,
    make_directory,
    manifest_file,
    part_directories,
    read_as,
    read_manifest,
    read_part,
    remove_part,
    role_of,
    sealed_parts,
    set_prefix,
    settle,
    within,
    write_outer,
)
from featcache.reading import (
    ContainerPages,
    Containers,
    Damage,
    Generation,
    damage_of,
    page_damage,
    raise_damage,
)
from featcache.remote import PIECE_BYTES, Requests
from featcache.transfer.to_store import (
    StoredManifest,
    Transfer,
    history_there,
    is_stored,
    kept_manifests,
    manifests_at,
    note_history,
    pages_of_list,
    require_own,
    stored_at,
    stored_set,
    way_out,
)
from featcache.writing.held import HeldCache, remove_superseded, write_readme
from featcache.writing.sets import PATIENCE_S

PULLED = "work-pull"
WHOLE = "whole"
MOST_AHEAD = 64  # pieces that are asked for at a time
MOST_AHEAD_BYTES = 96 << 20


@dataclass(frozen=True)
class _Moved:
    """A set that a pull moves in."""

    name: str
    before: str  # the `write_id` of the manifest that is here; "": none is
    after: str
    history: tuple[str, ...]
    parts: tuple[str, ...]  # of all generations that are kept
    gone: tuple[str, ...]  # parts that none of these has


@dataclass(frozen=True)
class _Whole:
    """A pull of which all is fetched and compared: what remains needs no store."""

    directory: Name  # in `work-pull`
    names: tuple[Name, ...]  # of all sets but the cache's own
    sets: tuple[_Moved, ...]  # those that are changed


@dataclass(frozen=True)
class _Set:
    """A set of which the store has another generation."""

    name: str
    there: StoredManifest
    kept: tuple[Manifest, ...]  # that generation, the one before and those with tags
    history: tuple[str, ...]


class Pull:
    """Pull of a generation in a store into a directory.

    Args:
        path: the directory.
        requests: to the store.
        there: the manifest of the generation.

    Attributes:
        here: the manifests of the sets of the cache that it holds; none where it holds none.

    Raises `CacheError` where it holds parts of a cache and no manifest.
    """

    def __init__(self, path: Path, requests: Requests, there: StoredManifest) -> None:
        self._path, self._requests, self._there = path, requests, there
        self._work = path / PULLED / digest(json.dumps(there.sets).encode())
        self.here = self._manifests_here()

    def _manifests_here(self) -> dict[str, Manifest]:
        """Return the manifests of sets that are named here, or lie where the store has one."""
        path = self._path
        found = manifests_at(path) if (path / NAME).exists() else {}
        for name in self._there.sets.keys() - found.keys():
            directory = path / set_prefix(name)
            check_own_directory(directory.parent if name != OWN else directory)
            check_own_directory(directory)
            if (directory / NAME).exists():
                found[name] = read_manifest(directory)
            elif (directory / PARTS).exists() and self._noted() is None:
                raise CacheError(f"{str(directory)!r} holds parts of a cache; pull into a new one")
        return found

    def copy(self, dry_run: bool) -> Transfer:
        """Copy it; what an earlier pull has only to move in is moved in first."""
        there, noted = self._there, self._noted()
        if noted is not None and not dry_run:
            self._finish(noted)
            noted, self.here = None, self._manifests_here()
        here = {name: each.write_id for name, each in self.here.items()}
        here |= {} if noted is None else {each.name: each.after for each in noted.sets}
        if here == there.sets:
            return Transfer("pull", files=0, nbytes=0, skipped=0, requests=1)
        sets = [self._set(name) for name, each in there.sets.items() if here.get(name) != each]
        known = {each.name: each.history for each in sets}
        for name, write_id in here.items():
            if write_id not in (there.sets.get(name), *known.get(name, ())):
                raise CacheError(
                    f"{str(self._path / set_prefix(name))!r} has a generation, which "
                    f"{there.manifest.name!r} of {self._requests.place.url} does not come from; "
                    "push it where it comes from that one (`featcache sync` tells); if not, "
                    f"{way_out(self._path, self.here, self._requests, there)}"
                )
        files, asked = self._files(sets)
        fetched = {name for name, size in files.items() if _size(self._work / name) == size}
        have = fetched | self._kept(files, noted)
        lacking = {name: files[name] for name in sorted(files.keys() - have)}
        asked += 1 + sum(len(each.kept) + (each.name != OWN) for each in sets)
        asked += sum(len(_pieces(size)) for size in lacking.values())
        skipped = len(files) - len(lacking)
        nbytes = sum(lacking.values())
        done = Transfer("pull", len(lacking) + len(sets), nbytes, skipped, asked)
        if not dry_run:
            make_directory(self._path)
            with self._held([each.name for each in sets]) as held:
                for each in sets:
                    self._check_published(each.name, _parts_of(each.kept))
                self._fetch(lacking, nbytes)
                self._link(files.keys() - lacking.keys())
                self._compare(sets, fetched | lacking.keys())
                self._move_in(self._note(sets), held)
        return done

    def _set(self, name: str) -> _Set:
        there = stored_set(self._requests, self._there, name)
        url, prefix = self._requests.place.url, set_prefix(name)
        require_own(url, there.manifest)
        names = {there.manifest.previous, *there.manifest.tags.values()} - {
            None,
            there.manifest.name,
        }
        kept = [there.manifest]
        for each in sorted(names, key=str):
            file = prefix + manifest_file(str(each))
            found = stored_at(self._requests, file)
            if found is None:
                raise CorruptCacheError(f"{url} lacks {file!r}; push it again")
            require_own(url, found.manifest)
            kept.append(found.manifest)
        history = history_there(self._requests, name, there.manifest.write_id)
        return _Set(name, there, tuple(kept), tuple(history))

    def _files(self, sets: Collection[_Set]) -> tuple[dict[str, int], int]:
        """Return the files of sets in the store, and their sizes; and the requests."""
        wanted: set[str] = set()
        parts: set[str] = set()
        for each in sets:
            prefix = set_prefix(each.name)
            parts |= {f"{prefix}{PARTS}/{name}/" for name in _parts_of(each.kept)}
            roles = {file for kept in each.kept for file in kept.files if role_of(file) is not None}
            wanted |= {prefix + kept.index for kept in each.kept if kept.index}
            wanted |= {prefix + file for file in roles}
            wanted |= {prefix + manifest_file(kept.name) for kept in each.kept[1:]}
        url = self._requests.place.url
        try:
            listed = self._requests.listed("")
        except RemoteError as error:
            raise RemoteError(
                f"{error}; a pull lists what is there: `featcache convert {quote(url)} "
                f"{quote(str(self._path))}` copies a cache that may only be read"
            ) from error
        if lost := sorted(wanted - listed.keys()):
            lacks = ", ".join(map(repr, lost))
            raise CorruptCacheError(f"{url} lacks {lacks}; push it again")
        files = {
            name: size
            for name, size in listed.items()
            if name in wanted or (_part_of(name) in parts and is_stored(name))
        }
        try:
            return {within(name): size for name, size in files.items()}, pages_of_list(listed)
        except NOT_AS_WRITTEN as error:
            raise CorruptCacheError(f"{url} is damaged: {error}") from error

    def _kept(self, files: Mapping[str, int], noted: _Whole | None) -> set[str]:
        """Return those of some files that the cache has, or will have by what is noted."""
        places = [self._path]
        places += [] if noted is None else [self._path / PULLED / noted.directory]
        return {
            name
            for name, size in files.items()
            # manifests of equal size may differ in a tag
            if Path(name).parent.name != MANIFESTS
            and any(_size(place / name) == size for place in places)
        }

    @contextlib.contextmanager
    def _held(self, names: Collection[str]) -> Iterator[Mapping[str, HeldCache]]:
        """Hold sets, and the cache's own always."""
        with contextlib.ExitStack() as stack:
            held: dict[str, HeldCache] = {}
            for name in dict.fromkeys((OWN, *names)):
                directory = self._path / set_prefix(name)
                make_directory(directory)
                held[name] = stack.enter_context(HeldCache(directory))
            now = {name: self._write_id(name) for name in self.here}
            if now != {name: each.write_id for name, each in self.here.items()}:
                raise CacheError(f"cache {str(self._path)!r} was written meanwhile; try again")
            yield held

    def _write_id(self, name: str) -> str:
        """Return the `write_id` of the manifest of a set that counts here; "" without one."""
        directory = self._path / set_prefix(name)
        return read_manifest(directory).write_id if (directory / NAME).exists() else ""

    def _check_published(self, name: str, parts: Collection[str]) -> None:
        """Raise `CacheError` for parts that are here and in no generation: they would be lost."""
        if name not in self.here:
            return
        directory = self._path / set_prefix(name)
        known = {*parts, *_parts_of(self._kept_here(name)), *self.here[name].replaced}
        others = [each.name for each in part_directories(directory) if each.name not in known]
        if others:
            raise CacheError(
                f"{str(directory)!r} holds parts that are not published ({others[0]!r}), and that "
                "a later generation does not have; publish them (open a CacheWriter and close it) "
                "and push them to another URL, or pull into a new directory"
            )

    def _kept_here(self, name: str) -> Iterator[Manifest]:
        if name in self.here and self.here[name].index:
            yield from kept_manifests(self._path / set_prefix(name), self.here[name])

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
                        nbytes_ahead -= _write_first(ahead, shown.update)
            while ahead:
                _write_first(ahead, shown.update)

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

    def _compare(self, sets: Collection[_Set], fetched: Collection[str]) -> None:
        """Put the manifests to what was fetched, now or before a stop, and compare all of that."""
        work = self._work
        try:
            for each in sets:
                prefix, there = set_prefix(each.name), each.there
                (work / prefix / MANIFESTS).mkdir(parents=True, exist_ok=True)
                write_durably(work / prefix / manifest_file(there.manifest.name), there.data)
                write_durably(work / prefix / NAME, there.data)
                mine = {name.removeprefix(prefix) for name in fetched if name.startswith(prefix)}
                raise_damage(_damage(work / prefix, mine))
        except CorruptCacheError as error:
            shutil.rmtree(work)  # all of it is fetched anew
            raise CorruptCacheError(
                f"what was pulled from {self._requests.place.url} is damaged; pull it again, or "
                f"push it again: {error}"
            ) from error

    def _note(self, sets: Collection[_Set]) -> _Whole:
        """Note that all is there, durably."""
        moved = tuple(map(self._moved, sets))
        for directory, _, _ in os.walk(self._work):
            sync_directory(Path(directory))
        names = tuple(name for name in self._there.sets if name != OWN)
        whole = _Whole(self._work.name, names, moved)
        write_durably(self._path / PULLED / WHOLE, json.dumps(asdict(whole)).encode())
        return whole

    def _moved(self, each: _Set) -> _Moved:
        """Return what is moved of a set; raises `CacheError` where what goes would come back."""
        there, prefix, names = each.there.manifest, set_prefix(each.name), _parts_of(each.kept)
        gone = sorted(_parts_of(self._kept_here(each.name)) - names)
        parts = [*(read_part(self._path / prefix, name) for name in gone)]
        parts += [read_part(self._work / prefix, part.name) for part in there.parts]
        counting = {part.entry.name for part in sealed_parts(parts, there)}
        if not counting.isdisjoint(gone):
            raise CacheError(
                f"between the generations of {str(self._path / prefix)!r} and "
                f"{self._requests.place.url} parts were merged several times, and a writer would "
                "take up those here; pull it into a new directory"
            )
        before, history = self._write_id(each.name), (*each.history, there.write_id)
        return _Moved(each.name, before, there.write_id, history, tuple(names), tuple(gone))

    def _noted(self) -> _Whole | None:
        """Return what is noted of a pull that only is to be moved in."""
        try:
            found = json.loads((self._path / PULLED / WHOLE).read_bytes())
            whole = read_as(_Whole, found)
            if {each.name for each in whole.sets} <= {OWN, *whole.names}:
                return whole
        except (OSError, *NOT_AS_WRITTEN):
            pass
        return None

    def _finish(self, whole: _Whole) -> None:
        """Move in what was stopped; what has been written to meanwhile stays as it is."""
        with self._held([each.name for each in whole.sets]) as held:
            if all(self._write_id(each.name) in (each.before, each.after) for each in whole.sets):
                self._move_in(whole, held)
            else:
                shutil.rmtree(self._path / PULLED)

    def _move_in(self, whole: _Whole, held: Mapping[str, HeldCache]) -> None:
        """Move sets in, the manifests last, and all of them at once."""
        path, work = self._path, self._path / PULLED / whole.directory
        if any(self._write_id(each.name) != each.after for each in whole.sets):
            for each in whole.sets:
                self._check_published(each.name, [*each.parts, *each.gone])
            for each in whole.sets:
                _move(work / set_prefix(each.name), path / set_prefix(each.name), but=(NAME, SETS))
            data = {each: (work / set_prefix(each.name) / NAME).read_bytes() for each in whole.sets}
            if (path / NAME).exists() and SETS in read_manifest(path).requires:
                self._publish_together(whole, data)
            else:
                self._publish_first(whole, data)
        self._clear_up(whole, held)

    def _publish_first(self, whole: _Whole, data: Mapping[_Moved, bytes]) -> None:
        """Publish sets where no reader looks at any before the cache's own manifest is there."""
        path = self._path
        for each in sorted(data, key=lambda each: each.name == OWN):
            if each.name == OWN and whole.names:
                with WriterLock(path / SETS, PATIENCE_S):
                    write_outer(path, **{SETS: whole.names})
            write_durably(path / set_prefix(each.name) / NAME, data[each])

    def _publish_together(self, whole: _Whole, data: Mapping[_Moved, bytes]) -> None:
        """Publish sets where readers look at some: as an edit of several is."""
        path = self._path
        pairs: dict[str, tuple[str, str]] = {}
        for each, manifest in data.items():
            write_durably(path / set_prefix(each.name) / (NEXT if each.before else NAME), manifest)
            if each.before:
                pairs[each.name] = each.before, each.after
        with WriterLock(path / SETS, PATIENCE_S):
            write_outer(path, **{SETS: whole.names, KEY: {**last_edits(path), **pairs}})
        for name in pairs:
            settle(path / set_prefix(name))

    def _clear_up(self, whole: _Whole, held: Mapping[str, HeldCache]) -> None:
        """Remove what no reader of the generations needs, which are out now."""
        for each in whole.sets:
            directory = self._path / set_prefix(each.name)
            manifest = read_manifest(directory)
            note_history(directory, [*each.history])
            for name in each.gone:
                remove_part(directory / PARTS / within(name, 1))
            held[each.name].begin(manifest)
            remove_superseded(held[each.name])
            write_readme(directory, manifest)
        shutil.rmtree(self._path / PULLED)


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


def _write_first(ahead: _Ahead, written: Callable[[int], object]) -> int:
    """Write the piece that was asked for first, and return its size."""
    file, begin, end, answer = ahead.popleft()
    file.write(begin, answer.result())
    written(end - begin)
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


def _parts_of(manifests: Iterable[Manifest]) -> set[str]:
    return {part.name for each in manifests for part in each.parts}


def _part_of(name: str) -> str:
    """Return the directory of the part that a file within the cache would be of."""
    steps = name.split("/")
    return "/".join(steps[: 4 if steps[0] == SETS else 2]) + "/"


def _move(source: Path, target: Path, but: Collection[str] = ()) -> None:
    """Move all that lies in a directory into another.

    A directory that is not there yet appears whole.
    """
    for each in sorted(source.iterdir()):
        there = target / each.name
        if each.name in but:
            continue
        if each.is_dir() and there.is_dir() and not there.is_symlink():
            _move(each, there)
        else:
            each.replace(there)
    sync_directory(target)
