"""`push` and `pull`: a cache copied to an object store, or from there to a disk.

What never changes goes first and is skipped where it is there already, the manifest last: a reader
sees the generation before or the new one, and what was killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from featcache._checks import directory
from featcache._progress import bar
from featcache.container_files import sync_directory, sync_file, write_durably
from featcache.container_files.lock import FILES as LOCK_FILES
from featcache.container_files.lock import WriterLock
from featcache.errors import CacheError, CorruptCacheError, NotACacheError
from featcache.format.files import make_directory, unpack_json, within
from featcache.format.manifest import (
    MANIFESTS,
    NAME,
    PARTS,
    SETS,
    Manifest,
    manifest_file,
    read_manifest,
    role_of,
)
from featcache.reading.opening import CachePath, damage_of, open_generation
from featcache.reading.verify import raise_damage
from featcache.remote import DEFAULT, RemoteOptions, RemotePlace, Requests, requests_to

PUSHED = "work-pushed.json"  # in a cache: the generation that was last pushed to each URL
PULLED = "work-pull"  # in a directory, while a cache is pulled into it
WHOLE = "whole"  # in that: the `write_id` of what is whole, and only to be moved
UNDER_WAY = 8  # uploads at a time; each has pieces of its own
PIECE_BYTES = 16 << 20
NO_PART = (*LOCK_FILES, "journal.jsonl")


@dataclass(frozen=True)
class Transfer:
    """The files that a push or a pull copied, or would copy, and those that were there already.

    >>> print(Transfer(files=3, nbytes=2_000_000, skipped=1, requests=5))
    3 files of 2.0 MB in 5 requests; 1 was there already
    """

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


def push(
    cache: CachePath, url: str, *, remote: RemoteOptions = DEFAULT, dry_run: bool = False
) -> Transfer:
    """Copy the current generation of a cache to an object store, where it is opened by its URL.

    Killed at any moment, the store has the generation before or the new one; the next push goes on.
    Of two at once, one is first and the other is refused. Nothing is deleted there, and what has
    its size there is not sent again. The bucket needs a lifecycle rule for uploads that were not
    finished.

    Args:
        cache: the cache directory.
        url: where to, `"s3://bucket/train"`.
        remote: how the store is asked.
        dry_run: only say what would be copied.

    Raises `CacheError` for a cache of adopted sources or of feature sets (convert it), and where
    the store has a manifest that is none of this cache.
    """
    place = RemotePlace.of(url, remote)
    path = directory(cache, "a cache").absolute()
    manifest = read_manifest(path)
    _require_own(path, manifest)
    data = (path / NAME).read_bytes()
    if _content(data, str(path))["write_id"] != manifest.write_id:
        raise CacheError(f"cache {str(path)!r} was written meanwhile; push it again")
    requests = requests_to(place)
    there, etag = _manifest_there(requests)
    is_new = there is None or there["write_id"] != manifest.write_id
    if there is not None and is_new:
        _require_ancestor(path, there, place.url)
    kept = requests.listed("")
    files = {name: (path / name).stat().st_size for name in _files_of(path, manifest)}
    # manifests of equal size may differ in a tag
    lacking = {
        name: size
        for name, size in files.items()
        if kept.get(name) != size or (is_new and name.startswith(f"{MANIFESTS}/"))
    }
    done = _transfer(files, lacking, int(is_new))
    if dry_run:
        return done
    with bar(f"push {path.name}", sum(lacking.values())) as shown:
        _upload(requests, path, lacking, shown)
    if is_new:
        _publish(requests, data, etag, manifest.write_id)
    pushed = _pushed(path) | {place.url: manifest.write_id}
    write_durably(path / PUSHED, json.dumps(pushed, indent=1).encode())
    return done


def pull(
    url: str, cache: CachePath, *, remote: RemoteOptions = DEFAULT, dry_run: bool = False
) -> Transfer:
    """Copy the current generation of a cache in an object store to a new directory.

    All is compared with its checksums before it counts. Killed at any moment, the directory holds
    no cache, or the whole one; the next pull goes on.

    Args:
        url: where from, `"s3://bucket/train"`.
        cache: the directory, which holds no cache, or the one that was pulled before.
        remote: how the store is asked.
        dry_run: only say what would be copied.

    Raises `NotACacheError` where there is no cache, `CacheError` where the directory holds another
    one, `CorruptCacheError` for bytes that are not what was written, `CacheLockedError` while
    somebody else pulls into the directory.
    """
    place = RemotePlace.of(url, remote)
    path = directory(cache, "a cache").absolute()
    requests = requests_to(place)
    try:
        data = cast(tuple[bytes, str | None], requests.whole(NAME))[0]
    except FileNotFoundError:
        raise NotACacheError(f"{place.url} holds no cache: there is no {NAME!r}") from None
    content = _content(data, place.url)
    if _holds_it_already(path, content, place.url):
        return Transfer(0, 0, 0, 1)
    files = _files_there(requests, content)
    work, whole = path / PULLED / content["write_id"], path / PULLED / WHOLE
    is_whole = whole.exists() and whole.read_text() == content["write_id"]
    lacking = {each: size for each, size in files.items() if _size(work / each) != size}
    done = _transfer(files, {} if is_whole else lacking, 1)
    if dry_run:
        return done
    make_directory(path)
    with WriterLock(path):
        if not is_whole:
            with bar(f"pull {path.name}", done.nbytes) as shown:
                for each, size in lacking.items():
                    _download(requests, each, size, work / each, shown)
            _end_pull(work, data, content, place.url)
            write_durably(whole, content["write_id"].encode())
        for each in sorted(work.iterdir(), key=lambda each: each.name == NAME):
            each.replace(path / each.name)
        sync_directory(path)
        shutil.rmtree(path / PULLED)
    return done


def _end_pull(work: Path, data: bytes, content: Mapping[str, Any], url: str) -> None:
    """Put the manifest to what was pulled, and compare all of it with its checksums."""
    (work / MANIFESTS).mkdir(exist_ok=True)
    write_durably(work / manifest_file(_name_of(content)), data)
    write_durably(work / NAME, data)
    try:
        raise_damage(damage_of(open_generation(work, None), arrays=True))
    except CorruptCacheError as error:
        shutil.rmtree(work)  # all of it is fetched anew
        raise CorruptCacheError(
            f"what was pulled from {url} is damaged; pull it again, or push it again: {error}"
        ) from error


def _holds_it_already(path: Path, content: Mapping[str, Any], url: str) -> bool:
    """Whether a directory has this very manifest; raises `CacheError` for another cache."""
    if not (path / NAME).exists():
        if (path / PARTS).exists() and not (path / PULLED / WHOLE).exists():
            raise CacheError(f"{str(path)!r} holds parts of a cache; pull into a new directory")
        return False
    here = read_manifest(path)
    if here.write_id != content["write_id"]:
        raise CacheError(
            f"{str(path)!r} has generation {here.name!r}, and {url} {_name_of(content)!r}; pull it "
            "into a new directory"
        )
    return True


def _transfer(files: Mapping[str, int], lacking: Mapping[str, int], manifests: int) -> Transfer:
    asked = sum(max(-(-size // PIECE_BYTES), 1) for size in lacking.values())
    copied, there = len(lacking) + manifests, len(files) - len(lacking)
    return Transfer(copied, sum(lacking.values()), there, asked + manifests + 2)


def _files_there(requests: Requests, content: Mapping[str, Any]) -> dict[str, int]:
    """Return the files of a generation in a store but its manifests, and their sizes."""
    url = requests.place.url
    if SETS in content["requires"]:
        raise CacheError(f"{url} has feature sets, which are not pulled; open it by its URL")
    others = dict(_others(requests, content))
    kept = [content, *others.values()]
    if any(part.get("adopted") for one in kept for part in one["parts"]):
        raise CacheError(f"{url} has adopted sources, which are not pulled")
    parts = [f"{PARTS}/{within(each['name'], 1)}/" for one in kept for each in one["parts"]]
    roles = {file for one in kept for file in one["files"] if role_of(file) is not None}
    wanted = {str(one["index"]) for one in kept} | roles | {manifest_file(name) for name in others}
    listed = requests.listed("")
    if lost := sorted(wanted - listed.keys()):
        raise CorruptCacheError(f"{url} lacks {', '.join(map(repr, lost))}; push it again")
    return {
        within(each): size
        for each, size in listed.items()
        if each in wanted or any(map(each.startswith, parts))
    }


def _require_own(path: Path, manifest: Manifest) -> None:
    if SETS in manifest.requires:
        raise CacheError(
            f"cache {str(path)!r} has feature sets, which are not pushed; make one cache of them "
            "first: featcache.convert"
        )
    if any(part.adopted is not None for part in manifest.parts):
        raise CacheError(
            f"cache {str(path)!r} has adopted sources, which stay where they are; copy them into "
            "a cache first: featcache.convert"
        )
    if not manifest.index:
        raise CacheError(f"cache {str(path)!r} has published nothing yet")


def _files_of(path: Path, manifest: Manifest) -> Iterator[str]:
    """Give the files of a generation, the one before and the tagged ones, relative to the cache.

    Not the manifest itself, which comes last.
    """
    names = {manifest.previous, *manifest.tags.values()} - {None, manifest.name}
    others = [
        read_manifest(path, manifest_file(cast(str, name))) for name in sorted(names, key=str)
    ]
    kept = [manifest, *others]
    yield from dict.fromkeys(file for each in kept for file in (each.index, *each.files))
    yield from (manifest_file(each.name) for each in others)
    for part in {part.name: part for each in kept for part in each.parts}.values():
        for found in sorted((path / PARTS / part.name).rglob("*")):
            skipped = found.name in NO_PART or found.suffix in (".tmp", ".damaged")
            if found.is_file() and not found.is_symlink() and not skipped:
                yield found.relative_to(path).as_posix()


def _manifest_there(requests: Requests) -> tuple[dict[str, Any] | None, str | None]:
    """Return the manifest that a store has, and its ETag; None where there is none."""
    try:
        data, etag = cast(tuple[bytes, str | None], requests.whole(NAME))
    except FileNotFoundError:
        return None, None
    return _content(data, requests.place.url), etag


def _content(data: bytes, url: str) -> dict[str, Any]:
    content = unpack_json(data, repr(f"{url}/{NAME}"))
    if not isinstance(content, dict) or not isinstance(content.get("write_id"), str):
        raise CorruptCacheError(f"'{url}/{NAME}' is damaged: it is no manifest")
    within(content["write_id"], 1)
    return content


def _name_of(content: Mapping[str, Any]) -> str:
    """Return the name of the generation of a manifest."""
    return within(str(content["index"]).removeprefix("index-").removesuffix(".columns"), 1)


def _others(requests: Requests, content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the manifests of the generation before and of those with tags, by name."""
    for name in dict.fromkeys((content["previous"], *content["tags"].values())):
        if name not in (None, _name_of(content)):
            data = cast(tuple[bytes, str], requests.whole(manifest_file(within(name, 1))))[0]
            yield name, _content(data, requests.place.url)


def _require_ancestor(path: Path, there: Mapping[str, Any], url: str) -> None:
    """Raise `CacheError` unless what a store has is a manifest that this cache had."""
    name = _name_of(there)
    mine = {_pushed(path).get(url)}
    with suppress(CacheError, OSError):
        mine.add(read_manifest(path, manifest_file(name)).write_id)
    if there["write_id"] not in mine:
        raise CacheError(
            f"{url} has generation {name!r}, as {str(path)!r} never had it: the one does not come "
            "from the other; push it to another URL, or pull that one into another directory"
        )


def _upload(requests: Requests, path: Path, files: Mapping[str, int], shown: Any) -> None:
    """Send files, some at a time; after an error no more are begun."""
    under_way: deque[tuple[int, Future[None]]] = deque()
    for name, size in files.items():
        if len(under_way) == UNDER_WAY:
            _sent(under_way, shown)
        under_way.append((size, requests.put(name, path / name)))
    while under_way:
        _sent(under_way, shown)


def _sent(under_way: deque[tuple[int, Future[None]]], shown: Any) -> None:
    size, answer = under_way.popleft()
    answer.result()
    shown.update(size)


def _publish(requests: Requests, data: bytes, etag: str | None, write_id: str) -> None:
    """Put the manifest where the one with an ETag is; a lost answer is looked up."""
    try:
        requests.replace(NAME, data, etag)
    except (FileExistsError, CacheError) as error:
        there, _ = _manifest_there(requests)
        if there is None or there["write_id"] != write_id:
            if isinstance(error, CacheError):
                raise
            raise CacheError(
                f"another push to {requests.place.url} was first; push again to see whether this "
                "cache comes from what it has now"
            ) from None


def _pushed(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        return cast(dict[str, str], json.loads((path / PUSHED).read_bytes()))
    return {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _download(requests: Requests, name: str, size: int, path: Path, shown: Any) -> None:
    """Fetch a file in pieces, several at a time; it has its name only once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb", buffering=0) as file:
        begins = range(0, size, PIECE_BYTES)
        etags: dict[str, str] = {}  # of one object are all pieces
        for at in range(0, len(begins), UNDER_WAY):
            asked = [
                (begin, requests.some(name, begin, min(begin + PIECE_BYTES, size), size, etags))
                for begin in begins[at : at + UNDER_WAY]
            ]
            for begin, answer in asked:
                data = answer.result()
                os.pwrite(file.fileno(), data, begin)
                shown.update(len(data))
        sync_file(file)
    unfinished.replace(path)
