"""The shell of a cache in an object store: its manifest and index here, its containers there.

A shell is a directory laid out like the cache, with the files that tell what is where and none of
those that hold arrays. It lies among the pages, so other processes and the next run find it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from featcache.errors import CacheError, CorruptCacheError, NotACacheError
from featcache.format.files import unpack_json, within
from featcache.format.index import ContainerColumns
from featcache.format.manifest import MANIFESTS, NAME, OUTER, PARTS, SETS, Manifest
from featcache.remote import RemoteFiles, RemotePlace, pages_at, requests_to

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
        parts = urlsplit(self.place.url)
        pages = cast(str, self.place.options.pages)
        return Path(pages, f"{parts.scheme}:", parts.netloc, parts.path.strip("/"))

    def refresh(self) -> None:
        """Bring the shell up to date: one conditional request, if the cache has not changed.

        Raises `NotACacheError` where the URL holds no cache.
        """
        for _ in range(TRIES):
            try:
                self._refresh("", {})
                return
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
            key=lambda number: f"{columns.digest(number).hex()}-{columns.sizes[number]}",
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
        lacking = [name for name in names if not (self.directory / name).exists()]
        with ThreadPoolExecutor(self.place.options.concurrency) as threads:
            list(threads.map(self._fetch, lacking))

    def _prefix(self, directory: Path) -> str:
        below = directory.relative_to(self.directory).as_posix()
        return "" if below == "." else f"{below}/"

    def _refresh(self, prefix: str, outer: Mapping[str, Any]) -> None:
        """Fetch the manifest of a cache, or of a set of it, and what it names."""
        etags = self._etags()
        name = prefix + NAME
        there = self.directory / name
        try:
            found = requests_to(self.place).whole(name, etags.get(name) if there.exists() else None)
        except FileNotFoundError:
            if outer:
                raise
            raise NotACacheError(
                f"{self.place.url} holds no cache: there is no {NAME!r}; give the URL of a cache's "
                "directory"
            ) from None
        if found is None:
            return
        data, etag = found
        content = unpack_json(data, repr(f"{self.place.url}/{name}"))
        if not isinstance(content, dict):
            raise CorruptCacheError(f"'{self.place.url}/{name}' is damaged: it is no object")
        for file in _named(content):
            self._fetch(prefix + within(file))
        if not outer and SETS in content.get("requires", ()):
            for each in self._sets():
                self._refresh(f"{SETS}/{each}/", content)
        if content.get("index"):
            kept = str(content["index"]).removeprefix("index-").removesuffix(".columns")
            _write(self.directory / prefix / MANIFESTS / f"{kept}.json", data)
        _write(there, data)
        if etag is not None:
            _write(self.directory / ETAGS, json.dumps({**self._etags(), name: etag}).encode())

    def _sets(self) -> list[str]:
        data, _ = cast(tuple[bytes, str], requests_to(self.place).whole(OUTER))
        _write(self.directory / OUTER, data)
        content = cast(dict[str, Any], unpack_json(data, repr(f"{self.place.url}/{OUTER}")))
        return [within(name, 1) for name in content["sets"]]

    def _fetch(self, name: str) -> None:
        """Fetch a file that never changes, unless it is here."""
        path = self.directory / name
        if not path.exists():
            data, _ = cast(tuple[bytes, str], requests_to(self.place).whole(name))
            _write(path, data)

    def _etags(self) -> dict[str, str]:
        try:
            return cast(dict[str, str], json.loads((self.directory / ETAGS).read_bytes()))
        except (OSError, ValueError):
            return {}


def _named(content: Mapping[str, Any]) -> Iterator[str]:
    """Give the files that a manifest names and a reader may open."""
    if content.get("index"):
        yield str(content["index"])
    yield from content.get("files", ())


def _write(path: Path, data: bytes) -> None:
    """Write a file whole: others see it so, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    Path(name).replace(path)
