"""The shell of a cache in an object store: its manifest and index here, its containers there.

A shell is a directory laid out like the cache, with the files that tell what is where and none of
those that hold arrays. It lies among the pages, so other processes and the next run find it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import xxhash

from featcache.container_files import write_durably
from featcache.errors import CacheError, CorruptCacheError, FeatcacheError, NotACacheError
from featcache.format.files import NOT_AS_WRITTEN, digest, unpack_json, within
from featcache.format.index import ContainerColumns
from featcache.format.manifest import (
    INDEX,
    MANIFESTS,
    NAME,
    OUTER,
    PARTS,
    SETS,
    Manifest,
    manifest_file,
    role_of,
)
from featcache.remote import Counts, RemoteFiles, RemotePlace, pages_at, requests_to

ETAGS = "etags.json"  # in a shell, of the files that may change
OF_PART = ("part.json", "index.columns")
TRIES = 10  # while others publish


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

    @property
    def counts(self) -> Counts:
        """Sums over the requests to its place, in this process."""
        return requests_to(self.place).counts

    def refresh(self, version: str | None = None) -> None:
        """Bring the shell up to date: one conditional request, if the cache has not changed.

        Raises `NotACacheError` where the URL holds no cache, `CacheError` for one with adopted
        sources.

        Args:
            version: a tag, whose generation is fetched, too.
        """
        for _ in range(TRIES):
            try:
                self._refresh("", None, version)
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

    def fetch_checksums(self, directory: Path, manifest: Manifest) -> None:
        """Fetch what tells the checksums of a generation's pages, all at once.

        Args:
            directory: the shell's, or that of a feature set in it.
            manifest: of the generation.
        """
        prefix = self._prefix(directory)
        names = (
            f"{prefix}{PARTS}/{part.name}/{file}" for part in manifest.parts for file in OF_PART
        )
        self._fetch_at_once(names, self._fetch)

    def fetch_all(self, directory: Path, manifest: Manifest) -> None:
        """Fetch all files of a generation but its containers, so that these can be compared.

        What the store lacks is not here then.

        Args:
            directory: the shell's, or that of a feature set in it.
            manifest: of the generation.
        """
        prefix = self._prefix(directory)
        parts = {f"{PARTS}/{part.name}/": part for part in manifest.parts}
        names = [part + file for part in parts for file in OF_PART]
        for part, entry in parts.items():
            beside = (entry.tombstones, entry.stamps)
            names += [part + each.file for each in beside if each is not None]
        names += [file for file in manifest.files if role_of(file) is not None]
        wanted = (prefix + name for name in names)
        self._fetch_at_once(wanted, self._fetch_if_there)

    def _fetch_at_once(self, names: Iterable[str], fetch: Callable[[str], None]) -> None:
        lacking = [name for name in names if not (self.directory / name).exists()]
        with ThreadPoolExecutor(self.place.options.concurrency) as threads:
            list(threads.map(fetch, lacking))

    def _fetch_if_there(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fetch(name)

    def _prefix(self, directory: Path) -> str:
        below = directory.relative_to(self.directory).as_posix()
        return "" if below == "." else f"{below}/"

    def _refresh(self, prefix: str, outer: Mapping[str, Any] | None, version: str | None) -> None:
        """Fetch the manifest of a cache, or of a set of it, and what it names."""
        name = prefix + NAME
        data, etag = self._manifest(name, outer is None)
        content = self._content(name, data)
        if any(part["adopted"] for part in content["parts"] if "adopted" in part):
            raise CacheError(
                f"{self.place.url} has adopted sources, which lie elsewhere: convert it, and push "
                "the copy"
            )
        self._fetch_named(prefix, content)
        if outer is None and SETS in content["requires"]:
            for each in self._sets():
                self._refresh(f"{SETS}/{each}/", content, version)
        if version is not None and version in content["tags"]:
            kept = manifest_file(within(content["tags"][version], 1))
            self._fetch(prefix + kept)
            tagged = (self.directory / prefix / kept).read_bytes()
            self._fetch_named(prefix, self._content(prefix + kept, tagged))
        if etag is None:
            return
        if content["index"]:
            _write(self.directory / prefix / MANIFESTS / f"{_name(content)}.json", data)
        _write(self.directory / name, data)
        known = {**self._etags(), name: [etag, digest(data)]}
        _write(self.directory / ETAGS, json.dumps(known).encode())

    def _manifest(self, name: str, is_first: bool) -> tuple[bytes, str | None]:
        """Return a manifest and its ETag; None for the ETag of the one that is here already."""
        try:
            here = (self.directory / name).read_bytes()
        except OSError:
            here = b""
        known = self._etags().get(name, ["", ""])
        # another process may have written one of the two since
        etag = known[0] if here and known[1] == digest(here) else None
        try:
            found = requests_to(self.place).whole(name, etag)
        except FileNotFoundError:
            if not is_first:
                raise
            raise NotACacheError(
                f"{self.place.url} holds no cache: there is no {NAME!r}; give the URL of a cache's "
                "directory"
            ) from None
        return (here, None) if found is None else (found[0], found[1] or "")

    def _content(self, name: str, data: bytes) -> dict[str, Any]:
        content = unpack_json(data, repr(f"{self.place.url}/{name}"))
        if not isinstance(content, dict):
            raise CorruptCacheError(f"'{self.place.url}/{name}' is damaged: it is no object")
        # another name might be that of a file that the shell has for itself
        index = content.get("index", "")
        if index != "" and not INDEX.fullmatch(str(index)):
            raise CorruptCacheError(f"'{self.place.url}/{name}' is damaged: it names no index")
        return content

    def _fetch_named(self, prefix: str, content: Mapping[str, Any]) -> None:
        """Fetch the index of a generation, and its files of roles."""
        named = [content["index"]] if content["index"] else []
        for file in (*named, *content["files"]):
            if file not in named and role_of(file) is None:
                continue  # of a later version: its readers ask for it
            self._fetch(prefix + within(file))

    def _sets(self) -> list[str]:
        data, _ = cast(tuple[bytes, str], requests_to(self.place).whole(OUTER))
        _write(self.directory / OUTER, data)
        return [within(name, 1) for name in self._content(OUTER, data)[SETS]]

    def _fetch(self, name: str) -> None:
        """Fetch a file that never changes, unless it is here."""
        path = self.directory / name
        if not path.exists():
            data, _ = cast(tuple[bytes, str], requests_to(self.place).whole(name))
            _write(path, data)

    def _etags(self) -> dict[str, list[str]]:
        try:
            known: Any = json.loads((self.directory / ETAGS).read_bytes())
            return {name: [str(etag), str(of)] for name, (etag, of) in known.items()}
        except (OSError, *NOT_AS_WRITTEN):  # of somebody else
            return {}


def _name(content: Mapping[str, Any]) -> str:
    """Return the name of the generation of a manifest."""
    return within(str(content["index"]).removeprefix("index-").removesuffix(".columns"), 1)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole: others see it so, or not at all, and a power cut does not empty it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data)
