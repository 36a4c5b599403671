"""Pushing, and what a store holds of a cache: its manifests, and which generation comes from which.

Of a generation, the files that a store lacks are sent, then the manifest. Generations have no names
that tell where they come from. So each push leaves beside the manifest, under its `write_id`, those
of the manifests that the cache had before when it was pushed or pulled; the cache keeps the same
list. Each feature set has its own.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

from featcache._cached import cached_property
from featcache._progress import bar
from featcache.container_files import write_durably
from featcache.container_files.lock import FILES as LOCK_FILES
from featcache.errors import CacheError, CorruptCacheError, bytes_text, counted
from featcache.format import (
    FORMAT_VERSION,
    JOURNAL,
    NAME,
    NOT_AS_WRITTEN,
    OWN,
    PARTS,
    PUSHED,
    SETS,
    Manifest,
    container_digest,
    in_force,
    last_edits,
    manifest_file,
    natural,
    newer,
    open_there,
    pack_for_readers,
    pages_of,
    pushed_file,
    pushed_sets,
    read_as,
    read_content,
    read_manifest,
    remedy,
    set_directories,
    set_names,
    set_prefix,
    unpack_json,
    within,
)
from featcache.reading import Generation
from featcache.remote import PIECE_BYTES, PIECES_AT_ONCE, RemoteOptions, Requests

PUSHED_LISTS = "work-pushed"  # the lists: in a store a directory, in a cache a file, `.json`
MANY = 1000  # names that a store lists in one answer


@dataclass(frozen=True)
class Transfer:
    """The files that a push or a pull copied, or would copy, and those that were there already.

    >>> print(Transfer("push", files=3, nbytes=2_000_000, skipped=1, requests=5))
    3 files of 2 MB in 5 requests; 1 was there already
    """

    verb: str  # "push" or "pull"
    files: int
    nbytes: int
    skipped: int
    requests: int

    def __str__(self) -> str:
        there = f"{self.skipped} {'was' if self.skipped == 1 else 'were'} there already"
        return (
            f"{counted(self.files, 'file')} of {bytes_text(self.nbytes)} "
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
    store = _flags(requests.place.options)
    said = f"`featcache pull {url} {beside}{store}` copies the one there beside the one here"
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
            f"here alone, and `featcache push {beside} {url}{store}` brings them there"
        )
    # beside a whole bucket there is another one, maybe of others
    is_bucket = not urlsplit(requests.place.url).path
    here_too = "URL" if is_bucket else quote(f"{requests.place.url}-here")
    push = f"featcache push {quote(str(path))} {here_too}{store}"
    return f"{said}; `{push}` keeps the one here beside it"


def _flags(options: RemoteOptions) -> str:
    """Return how a store is reached, as `featcache push` and `pull` take it behind their places."""
    given = {"--endpoint": options.endpoint, "--region": options.region}
    flags = [f" {flag} {quote(value)}" for flag, value in given.items() if value is not None]
    return "".join(flags) + " --anonymous" * options.anonymous


def _named(name: str, generation: str) -> str:
    return f"{generation!r}" if name == OWN else f"{generation!r} of feature set {name!r}"


# Pushing: the files of a generation, those that a store lacks, then the manifest.

MOST_AHEAD = 32  # files that are sent at a time
MOST_AHEAD_BYTES = 96 << 20  # of memory
MEMORY_BYTES = PIECES_AT_ONCE * PIECE_BYTES  # of one file
TRIES = 3  # to put a manifest, which a store does not try by itself
NO_PART = (*LOCK_FILES, JOURNAL)


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
            self._upload(files, shown.update)
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

    def _upload(self, files: Mapping[str, int], sent: Callable[[int], object]) -> None:
        """Send files, some at a time, and tell their sizes; after an error no more are begun."""
        under_way: deque[tuple[int, int, Future[None]]] = deque()
        ahead = 0
        for name, size in files.items():
            memory = min(size, MEMORY_BYTES)
            while under_way and (len(under_way) == MOST_AHEAD or ahead + memory > MOST_AHEAD_BYTES):
                ahead -= _send_first(under_way, sent)
            answer = self._requests.put(name, self._path / name, self._digest(name))
            under_way.append((size, memory, answer))
            ahead += memory
        while under_way:
            _send_first(under_way, sent)

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


def _send_first(
    under_way: deque[tuple[int, int, Future[None]]], sent: Callable[[int], object]
) -> int:
    """Wait for the file that was begun first, and return its bytes in memory."""
    size, memory, answer = under_way.popleft()
    answer.result()
    sent(size)
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
