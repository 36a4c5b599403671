"""`push` and `pull`: a cache copied to an object store, or from there to a disk.

What never changes goes first and is skipped where it is there already, the manifest last: a reader
sees the generation before or the new one, and what was killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from featcache._checks import directory
from featcache._progress import bar
from featcache.container_files import sync_file, write_durably
from featcache.container_files.lock import FILES as LOCK_FILES
from featcache.container_files.lock import WriterLock
from featcache.errors import CacheError, CorruptCacheError, NotACacheError
from featcache.format.files import digest, make_directory, unpack_json, within
from featcache.format.index import container_digest, pages_of
from featcache.format.manifest import (
    MANIFESTS,
    NAME,
    PARTS,
    SETS,
    Manifest,
    manifest_file,
    read_manifest,
)
from featcache.reading.generation import Generation
from featcache.reading.opening import CachePath
from featcache.remote import DEFAULT, RemoteOptions, RemotePlace, Requests, requests_to

PUSHED = "work-pushed.json"  # in a cache: the generation that was last pushed to each URL
PULLED = "work-pull"  # in a cache, while one is pulled into it
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
    Of two at once, one is first and the other is refused. Nothing is deleted there. The bucket
    needs a lifecycle rule for uploads that were not finished.

    Args:
        cache: the cache directory.
        url: where to, `"s3://bucket/train"`.
        remote: how the store is asked.
        dry_run: only say what would be copied.

    Raises `CacheError` for a cache of adopted sources or of feature sets (convert it), and where
    the store has a generation that this cache does not come from.
    """
    place = RemotePlace.of(url, remote)
    path = directory(cache, "a cache").absolute()
    manifest = read_manifest(path)
    _require_own(path, manifest)
    requests = requests_to(place)
    there, etag = _manifest_there(requests)
    if there is not None:
        _require_ancestor(path, manifest, there, url)
    kept = requests.listed("")
    files = {name: (path / name).stat().st_size for name in _files_of(path, manifest)}
    lacking = {name: size for name, size in files.items() if kept.get(name) != size}
    is_new = there is None or there["write_id"] != manifest.write_id
    done = _transfer(files, lacking, int(is_new))
    if dry_run:
        return done
    with bar(f"push {path.name}", sum(lacking.values())) as shown:
        _upload(requests, path, lacking, shown)
    if is_new:
        _publish(requests, path, manifest, etag)
    pushed = _pushed(path) | {url: manifest.name}
    write_durably(path / PUSHED, json.dumps(pushed, indent=1).encode())
    return done


def pull(
    url: str, cache: CachePath, *, remote: RemoteOptions = DEFAULT, dry_run: bool = False
) -> Transfer:
    """Copy the current generation of a cache in an object store to a directory.

    All is compared with its checksums before it is published there. Killed at any moment, the
    directory has what it had before, or the new generation; the next pull goes on.

    Args:
        url: where from, `"s3://bucket/train"`.
        cache: the directory; new, or a cache that the one in the store comes from.
        remote: how the store is asked.
        dry_run: only say what would be copied.

    Raises `NotACacheError` where there is no cache, `CacheError` where the directory holds another
    one, `CorruptCacheError` for bytes that are not what was written, `CacheLockedError` while the
    directory's cache is written.
    """
    place = RemotePlace.of(url, remote)
    path = directory(cache, "a cache").absolute()
    requests = requests_to(place)
    content, _ = _manifest_there(requests)
    if content is None:
        raise NotACacheError(f"{place.url} holds no cache: there is no {NAME!r}")
    if SETS in content["requires"]:
        raise CacheError(f"{place.url} has feature sets, which are not pulled; open it by its URL")
    listed = requests.listed("")
    files = _files_there(requests, content, listed)
    make_directory(path)
    with WriterLock(path):
        _require_descendant(path, content, listed, place.url)
        work = path / PULLED
        lacking = {
            each: size
            for each, size in files.items()
            if _size(path / each) != size and _size(work / each) != size
        }
        done = _transfer(files, lacking, 1)
        if dry_run:
            return done
        with bar(f"pull {path.name}", done.nbytes) as shown:
            for each, size in lacking.items():
                _download(requests, each, size, work / each, shown)
        _move_in(work, path, files)
        _check(path, content)
        data = (path / manifest_file(_name_of(content))).read_bytes()
        write_durably(path / NAME, data)
    return done


def _transfer(files: Mapping[str, int], lacking: Mapping[str, int], manifests: int) -> Transfer:
    asked = sum(max(-(-size // PIECE_BYTES), 1) for size in lacking.values())
    copied, there = len(lacking) + manifests, len(files) - len(lacking)
    return Transfer(copied, sum(lacking.values()), there, asked + manifests + 2)


def _files_there(
    requests: Requests, content: Mapping[str, Any], listed: Mapping[str, int]
) -> dict[str, int]:
    """Return the files of a generation in a store, and their sizes."""
    kept = [content, *_others(requests, content, _name_of(content))]
    parts = [f"{PARTS}/{within(each['name'], 1)}/" for one in kept for each in one["parts"]]
    wanted = {str(one["index"]) for one in kept} | {file for one in kept for file in one["files"]}
    wanted |= {manifest_file(_name_of(one)) for one in kept}
    if lost := sorted(wanted - listed.keys()):
        lacking = ", ".join(map(repr, lost))
        raise CorruptCacheError(f"{requests.place.url} lacks {lacking}; push it again")
    return {
        within(each): size
        for each, size in listed.items()
        if each in wanted or any(map(each.startswith, parts))
    }


def _require_descendant(
    path: Path, content: Mapping[str, Any], listed: Mapping[str, int], url: str
) -> None:
    """Raise `CacheError` unless what a store has comes from what a directory has."""
    here = read_manifest(path) if (path / NAME).exists() else None
    name = _name_of(content)
    if here is not None and here.name != name and manifest_file(here.name) not in listed:
        raise CacheError(
            f"{str(path)!r} has generation {here.name!r}, which {url} does not come from: it has "
            f"{name!r}; pull it into another directory"
        )


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
    """Give the files of a generation, the one before and the tagged ones, relative to the cache."""
    names = dict.fromkeys((manifest.name, manifest.previous, *manifest.tags.values()))
    kept = [read_manifest(path, manifest_file(name)) for name in names if name is not None]
    yield from dict.fromkeys(file for each in kept for file in (each.index, *each.files))
    yield from (manifest_file(each.name) for each in kept)
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
    content = unpack_json(data, repr(f"{requests.place.url}/{NAME}"))
    return cast(dict[str, Any], content), etag


def _name_of(content: Mapping[str, Any]) -> str:
    """Return the name of the generation of a manifest."""
    return within(str(content["index"]).removeprefix("index-").removesuffix(".columns"), 1)


def _others(requests: Requests, content: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Give the manifests of the generation before and of those with tags."""
    for other in dict.fromkeys((content["previous"], *content["tags"].values())):
        if other not in (None, name):
            file = manifest_file(within(other, 1))
            data, _ = cast(tuple[bytes, str | None], requests.whole(file))
            yield cast(dict[str, Any], unpack_json(data, repr(f"{requests.place.url}/{file}")))


def _require_ancestor(path: Path, manifest: Manifest, there: Mapping[str, Any], url: str) -> None:
    """Raise `CacheError` unless the generation that a store has is one of this cache's own."""
    name = _name_of(there)
    mine = {manifest.name, manifest.previous, _pushed(path).get(url)}
    if name not in mine and not (path / MANIFESTS / f"{name}.json").exists():
        raise CacheError(
            f"{url} has generation {name!r}, which {str(path)!r} does not come from: its own is "
            f"{manifest.name!r}; push it to another URL, or pull that one into another directory"
        )


def _upload(requests: Requests, path: Path, files: Mapping[str, int], shown: Any) -> None:
    room = threading.Semaphore(UNDER_WAY)
    begun: list[Future[None]] = []

    def done(size: int, _: object) -> None:
        room.release()
        shown.update(size)

    for name, size in files.items():
        room.acquire()
        begun.append(requests.put(name, path / name))
        begun[-1].add_done_callback(partial(done, size))
        if (failed := next((f for f in begun if f.done() and f.exception()), None)) is not None:
            failed.result()
    for each in begun:
        each.result()


def _publish(requests: Requests, path: Path, manifest: Manifest, etag: str | None) -> None:
    """Put the manifest where the one with an ETag is; a lost answer is looked up."""
    data = (path / manifest_file(manifest.name)).read_bytes()
    if unpack_json(data, repr(str(path))) is None:
        raise CorruptCacheError(f"cache {str(path)!r} lacks the manifest of its generation")
    try:
        requests.replace(NAME, data, etag)
    except (FileExistsError, CacheError) as error:
        there, _ = _manifest_there(requests)
        if there is None or there.get("write_id") != json.loads(data)[1]["write_id"]:
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
        for at in range(0, len(begins), UNDER_WAY):
            asked = [
                (begin, requests.some(name, begin, min(begin + PIECE_BYTES, size), size))
                for begin in begins[at : at + UNDER_WAY]
            ]
            for begin, answer in asked:
                data = answer.result()
                os.pwrite(file.fileno(), data, begin)
                shown.update(len(data))
        sync_file(file)
    unfinished.replace(path)


def _move_in(work: Path, path: Path, files: Mapping[str, int]) -> None:
    """Move what was pulled to its place; the seal of a part comes last."""
    for name in sorted(files, key=lambda name: name.endswith("/part.json")):
        if (work / name).exists():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).replace(path / name)
    for directory_, _, _ in os.walk(work, topdown=False):
        Path(directory_).rmdir()


def _check(path: Path, content: Mapping[str, Any]) -> None:
    """Compare what a manifest names with its checksums, before it counts."""
    name = _name_of(content)
    manifest = read_manifest(path, manifest_file(name))
    opened = Generation.at(path, current=manifest)
    for part in manifest.parts:
        if digest((path / PARTS / part.name / "part.json").read_bytes()) != part.digest:
            raise CorruptCacheError(f"part {part.name!r} that was pulled is damaged; pull it again")
    columns = opened.index.containers
    for number in range(len(columns)):
        file = path / columns.path(number)
        with file.open("rb") as container:
            found = container_digest(pages_of(container.fileno()), int(columns.sizes[number]))
        if found != columns.digest(number):
            file.unlink()
            raise CorruptCacheError(f"{str(file)!r} that was pulled is damaged; pull it again")
