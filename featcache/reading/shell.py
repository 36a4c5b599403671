"""The shell of a cache in an object store: its manifest and index here, its containers there.

A shell is a directory laid out like the cache, with the files that tell what is where and none of
those that hold arrays. It lies among the pages, so other processes and the next run find it. The
manifest tells the size of each file, so nothing is listed or asked for its head.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import xxhash

from featcache.container_files import sync_directory, sync_file, write_all, write_durably
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    FeatcacheError,
    NotACacheError,
    StorageFullError,
)
from featcache.format import (
    INDEX,
    MOST_BYTES,
    NAME,
    NEXT,
    NOT_AS_WRITTEN,
    OUTER,
    OWN,
    PUSHED,
    SETS,
    ColumnFile,
    ContainerColumns,
    FilePath,
    FileSize,
    Json,
    Manifest,
    Name,
    Size,
    digest,
    files_of,
    kept_manifests,
    last_pairs,
    manifest_file,
    outer_of,
    pushed_file,
    pushed_sets,
    read_as,
    read_manifest,
    role_of,
    set_prefix,
    unpack_json,
    within,
)
from featcache.remote import RemoteFiles, RemotePlace, download, pages_at, requests_to

T = TypeVar("T")
_Seen = dict[str, tuple[bytes, str | None]]  # objects by name, and ETags to be noted
ETAGS = "etags.json"  # in a shell, of the files that may change
TRIES = 10  # while others publish
NEVER_CHANGE = (
    "featcache-*.json*",
    "index-*.columns*",
    "probe-*",
    "made-from-*",
    "parts/*/*",
)  # in a shell
UNFINISHED_S = 3600.0  # a file that nobody has written to for so long was left by a kill


@dataclass(frozen=True)
class RemoteCache:
    """A cache in an object store, and its shell; may be pickled, and holds no secret."""

    place: RemotePlace

    @property
    def directory(self) -> Path:
        """The shell's directory; its name is the URL's."""
        parts, endpoint = urlsplit(self.place.url), self.place.options.endpoint
        pages = cast(str, self.place.options.pages)
        store = parts.netloc if endpoint is None else f"{parts.netloc}@{self.place.digest}"
        return Path(pages, f"{parts.scheme}:", store, parts.path.strip("/"))

    def refresh(self, version: str | None = None) -> None:
        """Bring the shell up to date: one conditional request, if the cache has not changed.

        Raises `NotACacheError` where the URL holds no cache, `CacheError` for one with adopted
        sources.

        Args:
            version: a tag, whose generation is fetched, too.
        """
        for _ in range(TRIES):
            try:
                self._refresh(version)
                return
            except FeatcacheError:  # some are ValueErrors, too
                raise
            except NOT_AS_WRITTEN as error:
                raise CorruptCacheError(f"{self.place.url} is damaged: {error!r}") from error
            except FileNotFoundError as error:  # others have published meanwhile
                gone = error
        raise CacheError(
            f"{self.place.url}: {gone} is named and not there, again and again; was the cache "
            "copied while it was written?"
        )

    def files(self, directory: Path, columns: ContainerColumns) -> RemoteFiles:
        """Return the containers of a generation, read by ranges.

        Args:
            directory: the shell's, or that of a feature set in it.
            columns: the containers, as its index names them.
        """
        prefix, options = self._prefix(directory), self.place.options
        pages = pages_at(cast(str, options.pages), options.budget_bytes, options.floor_bytes)
        return RemoteFiles(
            requests_to(self.place),
            pages,
            name=lambda number: prefix + columns.path(number),
            # of another store or of other bytes another one: nobody else's pages are read
            key=lambda number: xxhash.xxh3_128_hexdigest(
                f"{self.place.digest} {prefix}{columns.path(number)} {columns.sizes[number]} "
                f"{columns.digest(number).hex()}".encode()
            ),
            size=lambda number: int(columns.sizes[number]),
        )

    def fetch(self, directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
        """Fetch files that a generation leads to unless they are here, all at once.

        Args: as of `damage_of`.

        Raises `CorruptCacheError` for what is gone, or not what was written.
        """
        for damage in self.damage_of(directory, manifest, names).values():
            raise CorruptCacheError(damage)

    def damage_of(
        self, directory: Path, manifest: Manifest, names: Iterable[str]
    ) -> Mapping[str, str]:
        """Fetch files as `fetch` does; return what is wrong with any of them, by URL.

        Args:
            directory: the shell's, or that of a feature set in it.
            manifest: of the generation.
            names: of the files, relative to the directory.
        """
        prefix, digests = self._prefix(directory), dict(files_of(manifest))

        def fetch(name: str) -> tuple[str, str] | None:
            try:
                self._fetch(prefix + name, manifest.sizes.get(name), digests[name])
            except CorruptCacheError as error:
                return f"{self.place.url}/{prefix}{name}", str(error)
            return None

        lacking = [name for name in names if not (directory / name).exists()]
        return dict(filter(None, self._at_once(fetch, lacking)))

    def _at_once(self, work: Callable[[str], T], names: Collection[str]) -> list[T]:
        if not names:
            return []
        with ThreadPoolExecutor(min(len(names), self.place.options.concurrency)) as pool:
            return list(pool.map(work, names))

    def _prefix(self, directory: Path) -> str:
        below = directory.relative_to(self.directory).as_posix()
        return "" if below == "." else f"{below}/"

    def holds(self, edits: Mapping[str, tuple[str, str]]) -> bool:
        """Whether the shell's manifests are those that it says are of one moment.

        Another process may be between writing one of them and the next.
        """
        pairs = ((set_prefix(name), after) for name, (_, after) in edits.items())
        return all(read_manifest(self.directory / pre).write_id == after for pre, after in pairs)

    def _refresh(self, version: str | None) -> None:
        """Fetch the manifest of a cache, those of its sets, and what they name."""
        data, etag = self._manifest(NAME)
        content = self._content(NAME, data)
        sets, seen = {OWN: data}, {NAME: (data, etag)}
        if SETS in content["requires"]:
            if PUSHED in content:
                sets |= self._pushed(content)
            else:
                sets, seen = self._copied()
        contents = {name: self._content(set_prefix(name) + NAME, sets[name]) for name in sets}
        for name, each in contents.items():
            if any(part["adopted"] for part in each["parts"] if "adopted" in part):
                raise CacheError(
                    f"{self.place.url} has adopted sources, which lie elsewhere: convert it, and "
                    "push the copy"
                )
            self._fetch_named(set_prefix(name), each, seen)
            if version is not None and version in each["tags"]:
                self._fetch_tagged(set_prefix(name), within(each["tags"][version], 1), seen)
        files = {set_prefix(name) + NAME: data for name, data in sets.items()}
        if SETS in contents[OWN]["requires"]:
            write_ids = {name: str(each["write_id"]) for name, each in contents.items()}
            files = {OUTER: outer_of(write_ids), **files}
        is_new = any(self._here(file) != data for file, data in files.items())
        if is_new:
            self._put_down(files, contents)
        known = self._etags()
        now = {name: [etag, digest(data)] for name, (data, etag) in seen.items() if etag}
        if {**known, **now} != known:
            _write(self.directory / ETAGS, json.dumps({**known, **now}).encode())
        for name in sets if is_new else ():
            # who was there first may have removed it again
            self._fetch_named(set_prefix(name), contents[name], seen)
            _remove_superseded(self.directory / set_prefix(name))

    def _put_down(self, files: Mapping[str, bytes], contents: Mapping[str, Json]) -> None:
        """Put manifests in their places, and what names them, the cache's own last."""
        for name, content in contents.items():
            prefix = set_prefix(name)
            if content["index"]:
                kept = prefix + manifest_file(_name(content))
                _write(self.directory / kept, files[prefix + NAME])
        for file in sorted(files, key=lambda file: file == NAME):
            _write(self.directory / file, files[file])

    def _pushed(self, content: Mapping[str, object]) -> dict[str, bytes]:
        """Return the manifests of sets that the one of a pushed cache names."""
        names = pushed_sets(content)

        def fetch(name: str) -> bytes:
            file = pushed_file(name, names[name])
            data = self._kept(file)
            if self._content(file, data)["write_id"] != names[name]:
                raise CorruptCacheError(f"'{self.place.url}/{file}' is damaged: it is another one")
            return data

        return dict(zip(names, self._at_once(fetch, names), strict=True))

    def _copied(self) -> tuple[dict[str, bytes], _Seen]:
        """Return the manifests of sets that lie as on a disk, and the objects that tell it.

        Those of one moment: an edit of several sets is in all of them, or in none.
        """
        outer = self._whole(OUTER)
        content = self._content(OUTER, outer)
        pairs, names = last_pairs(content), [OWN, *read_as(tuple[Name, ...], content[SETS])]

        def fetch(name: str) -> tuple[bytes, tuple[bytes, str | None]]:
            file, (before, after) = set_prefix(name) + NAME, pairs.get(name, (None, None))
            data, etag = self._manifest(file)
            if self._content(file, data)["write_id"] != before:
                return data, (data, etag)
            following = self._whole(set_prefix(name) + NEXT)
            if self._content(set_prefix(name) + NEXT, following)["write_id"] != after:
                raise FileNotFoundError(f"{set_prefix(name)}{NEXT} of {after}")
            return following, (data, None)

        found = dict(zip(names, self._at_once(fetch, names), strict=True))
        if self._whole(OUTER) != outer:
            raise FileNotFoundError(f"the {OUTER} of before")
        seen: _Seen = {set_prefix(name) + NAME: each for name, (_, each) in found.items()}
        return {name: data for name, (data, _) in found.items()}, {OUTER: (outer, None), **seen}

    def _fetch_tagged(self, prefix: str, generation: str, seen: _Seen) -> None:
        """Fetch what a tag names that a manifest has."""
        kept = prefix + manifest_file(generation)
        self._fetch_named(prefix, self._content(kept, self._kept(kept)), seen)

    def _kept(self, name: str) -> bytes:
        """Return a manifest that never changes, fetched unless a sound one is here."""
        data = self._here(name)
        try:
            self._content(name, data)
        except CorruptCacheError:
            data = self._whole(name)
            self._content(name, data)
            _write(self.directory / name, data)
        return data

    def _here(self, name: str) -> bytes:
        try:
            return (self.directory / name).read_bytes()
        except OSError:
            return b""

    def _is_here(self, name: str, expected: str) -> bool:
        """Whether a file that never changes is here; of one of columns the footer is compared."""
        if not name.endswith(".columns"):
            return (self.directory / name).exists()
        try:
            with ColumnFile(self.directory, name, mapped=False, expected=expected):
                return True
        except (CorruptCacheError, FileNotFoundError):
            return False

    def _whole(self, name: str) -> bytes:
        return cast(tuple[bytes, str], requests_to(self.place).whole(name))[0]

    def _manifest(self, name: str) -> tuple[bytes, str | None]:
        """Return a manifest and its ETag; None for the ETag of the one that is here already."""
        here = self._here(name)
        known = self._etags().get(name, ["", ""])
        # another process may have written one of the two since
        etag = known[0] if here and known[1] == digest(here) else None
        try:
            found = requests_to(self.place).whole(name, etag)
        except FileNotFoundError:
            if name != NAME:
                raise
            raise NotACacheError(
                f"{self.place.url} holds no cache: there is no {NAME!r}; give the URL of a cache's "
                "directory"
            ) from None
        return (here, None) if found is None else (found[0], found[1] or "")

    def _content(self, name: str, data: bytes) -> Json:
        content = unpack_json(data, repr(f"{self.place.url}/{name}"))
        if not isinstance(content, dict):
            raise CorruptCacheError(f"'{self.place.url}/{name}' is damaged: it is no object")
        # another name might be that of a file that the shell has for itself
        index = content.get("index", "")
        if index != "" and not INDEX.fullmatch(str(index)):
            raise CorruptCacheError(f"'{self.place.url}/{name}' is damaged: it names no index")
        return content

    def _fetch_named(self, prefix: str, content: Json, seen: _Seen) -> None:
        """Fetch the index of a generation, and its files of roles.

        Raises `FileNotFoundError` where what was `seen` is something else by now.
        """
        sizes = read_as(dict[FilePath, Size], content.get("sizes", {}))
        named = {content["index"]: content["index_digest"]} if content["index"] else {}
        # those of a later version are for who asks for them
        named |= {path: each for path, each in content["files"].items() if role_of(path)}

        def fetch(path: str) -> None:
            self._fetch(prefix + path, sizes.get(path), str(named[path]))

        lacking = [path for path in named if not self._is_here(prefix + within(path), named[path])]
        try:
            self._at_once(fetch, lacking)
        except CorruptCacheError:
            if all(self._whole(name) == data for name, (data, _) in seen.items()):
                raise
            raise FileNotFoundError(f"{prefix}{lacking[0]}") from None

    def _fetch(self, name: str, size: FileSize | None, expected: str | None) -> None:
        """Fetch a file that never changes; it has its name once it is right."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # of this one alone
        try:
            with aside.open("xb", buffering=0) as file:
                self._download(name, size, file)
                sync_file(file)
            if not _is_right(aside, name, size, expected):
                raise CorruptCacheError(
                    f"{self.place.url}/{name} is damaged: it is not what was written; delete it, "
                    "and push the cache again from where it was made"
                )
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    def _download(self, name: str, size: FileSize | None, file: FileIO) -> None:
        requests = requests_to(self.place)
        if size is None:
            try:  # of a cache of before
                found = requests.whole(name, most_bytes=MOST_BYTES)
            except FileNotFoundError:
                raise CorruptCacheError(f"{self.place.url}/{name} is missing") from None
            except CorruptCacheError as error:  # which is too large for that
                raise CacheError(
                    f"{self.place.url}/{name} is too large to be read by its URL: the cache was "
                    "written before manifests told the sizes of files; publish it again where it "
                    "was made (tag it, say), and push it again, or copy it to a disk"
                ) from error
            write_all(file, cast(tuple[bytes, str], found)[0])
            return
        if size.nbytes > MOST_BYTES and role_of(Path(name).name):
            raise CorruptCacheError(
                f"{self.place.url}/{name} is damaged: its manifest tells {size}, and no such file "
                f"has more than {MOST_BYTES:,}"
            )
        options = self.place.options
        room = shutil.disk_usage(cast(str, options.pages)).free - options.floor_bytes
        if size.nbytes > room:
            raise StorageFullError(
                f"no room for {self.place.url}/{name} of {size} in {str(options.pages)!r}; give "
                "RemoteOptions(pages=) a directory on a disk with more room"
            )
        download(requests, name, size.nbytes, file.fileno())

    def _etags(self) -> dict[str, list[str]]:
        try:
            known: Any = json.loads((self.directory / ETAGS).read_bytes())
            return {name: [str(etag), str(of)] for name, (etag, of) in known.items()}
        except (OSError, *NOT_AS_WRITTEN):  # of somebody else
            return {}


def _name(content: Mapping[str, object]) -> str:
    """Return the name of the generation of a manifest."""
    return within(str(content["index"]).removeprefix("index-").removesuffix(".columns"), 1)


def _is_right(path: Path, name: str, size: FileSize | None, expected: str | None) -> bool:
    """Whether a file that was fetched, under whatever name, is what was written."""
    if not name.endswith(".columns"):
        state = xxhash.xxh3_64()
        with path.open("rb") as data:
            while piece := data.read(1 << 20):
                state.update(piece)
        return state.hexdigest() == expected
    with suppress(CorruptCacheError):
        file = ColumnFile(path.parent, path.name, mapped=False, expected=expected, size=size)
        with file:
            return not file.damaged()
    return False


def _remove_superseded(here: Path) -> None:
    """Remove what neither the generation of a shell nor the one before nor a tag leads to.

    Those who have it open read on; who opens one of these has the current one, or fetches it again.
    """
    with suppress(CacheError, OSError):  # such as a manifest that cannot be read: it may need all
        current = read_manifest(here, alone=True)
        tagged = {current.name, current.previous, *current.tags.values()}
        kept = [current]
        for name in kept_manifests(here):
            if name in tagged:
                kept.append(read_manifest(here, manifest_file(name)))
            else:
                (here / manifest_file(name)).unlink(missing_ok=True)
        wanted = {here / path for manifest in kept for path, _ in files_of(manifest)}
        wanted.add(here / Path(pushed_file(here.name, current.write_id)).name)
        for path in _never_changed(here):
            is_young = time.time() - path.stat().st_mtime < UNFINISHED_S
            if path not in wanted and not (path.suffix == ".tmp" and is_young):
                path.unlink(missing_ok=True)


def _never_changed(here: Path) -> Iterator[Path]:
    for pattern in NEVER_CHANGE:
        yield from here.glob(pattern)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole: others see it so, or not at all, and a power cut does not empty it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data)
