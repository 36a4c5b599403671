"""Roots: folders, or URLs, that adopted parts' containers lie below; and these files as they are.

`adopted.json` in the cache maps keys to absolute paths, or URLs: `{"fbank": "/data/fbank"}`. It is
of one machine, so nothing digests it, and it may be edited. A part names its root by the key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from featcache._checks import directory
from featcache.container_files import write_durably
from featcache.errors import CacheError, ConfigError, CorruptCacheError, nearest
from featcache.format import (
    NOT_AS_WRITTEN,
    ContainerColumns,
    Name,
    PartEntry,
    open_within,
    read_as,
    read_within,
)
from featcache.remote import (
    DEFAULT,
    RemoteFiles,
    RemoteOptions,
    RemotePlace,
    files_looked_at,
    is_url,
    options_with_pages,
)

_FILE = "adopted.json"
PathOrUrl = Path | str  # a URL is a str


@dataclass(frozen=True, slots=True)
class Roots:
    """Places of adopted sources, by key, that count in place of those that a cache knows.

    Args:
        places: paths, or URLs.
        remote: how all sources behind URLs are reached.
    """

    places: Mapping[str, PathOrUrl] = field(default_factory=dict)
    remote: RemoteOptions = DEFAULT


NO_PLACES: Mapping[str, str] = {}
NO_ROOTS = Roots()


@dataclass(frozen=True, slots=True)
class Root:
    """The place of an adopted source."""

    key: str
    path: PathOrUrl | None  # None: it is not known here


def absolute_roots(
    roots: Mapping[str, str | os.PathLike[str]], remote: RemoteOptions = DEFAULT
) -> Roots:
    """Return roots, checked as arguments are, with absolute paths."""
    if not isinstance(roots, Mapping):
        raise ConfigError(f"roots map keys of adopted sources to directories, not {roots!r}")
    places: dict[str, PathOrUrl] = {}
    for key, place in roots.items():
        if is_url(place):
            places[key] = RemotePlace.of(cast(str, place)).url
        else:
            places[key] = directory(place, "the place of a source").absolute()
    return Roots(places, remote)


def read_roots(cache: Path) -> dict[str, PathOrUrl]:
    """Read where the sources of a cache lie; empty where nothing says so."""
    try:
        data = read_within(cache, _FILE)
    except FileNotFoundError:
        return {}
    try:
        content: Any = json.loads(data)
        roots: dict[str, PathOrUrl] = {}
        for key, place in read_as(dict[Name, str], content).items():
            roots[key] = RemotePlace.of(place).url if is_url(place) else Path(place)
            if not (is_url(place) or Path(place).is_absolute()) or "\0" in place:
                raise ValueError(f"{place!r}, of {key!r}, is no absolute path")
    except (*NOT_AS_WRITTEN, RecursionError) as error:
        raise CorruptCacheError(
            f"{str(cache / _FILE)!r} is damaged: {error}; it maps the keys of adopted sources to "
            "absolute paths, or URLs"
        ) from error
    return roots


def write_root(cache: Path, key: str, path: PathOrUrl) -> None:
    """Write durably where a source lies, beside the others."""
    roots = {**read_roots(cache), key: path}
    content = {each: str(place) for each, place in sorted(roots.items())}
    write_durably(cache / _FILE, json.dumps(content, ensure_ascii=False, indent=1).encode())


def roots_of(
    cache: Path, parts: Iterable[PartEntry], elsewhere: Roots = NO_ROOTS
) -> list[Root | None]:
    """Return the root of each part, None for those whose containers lie in the cache.

    Args:
        cache: the cache directory.
        parts: of a manifest.
        elsewhere: count in place of those that the cache knows.
    """
    keys = [None if part.adopted is None else part.adopted.root for part in parts]
    if not any(keys):
        return [None] * len(keys)
    known = {**elsewhere.places}
    if not known.keys() >= {*keys} - {None}:
        known = read_roots(cache) | known
    return [None if key is None else Root(key, known.get(key)) for key in keys]


def check_roots(cache: Path, parts: Iterable[PartEntry], elsewhere: Roots) -> None:
    """Raise `ConfigError` for a key that no part of a cache names."""
    keys = {part.adopted.root for part in parts if part.adopted is not None}
    for key in elsewhere.places:
        if key not in keys:
            raise ConfigError(
                f"cache {str(cache)!r} has no adopted source {key!r}; {nearest(key, keys)}"
            )


# Files of adopted sources: opened where they lie, if they are as they were when adopted.

_SECOND = 10**9  # nanoseconds
State = tuple[int, int, int, int]  # of a file: device, inode, bytes, time of change


def state_now(path: str) -> State | None:
    """Return the state of a file, another one once it is changed or replaced; None: it is gone."""
    try:
        return _state(os.lstat(path))
    except OSError:
        return None


class AdoptedFiles:
    """The containers of an index that lie below the roots of adopted parts.

    Args:
        columns: the containers.
        roots: of each part, in the manifest's order; None: its containers lie in the cache.
        options: how roots behind URLs are reached.
    """

    def __init__(
        self,
        columns: ContainerColumns,
        roots: Sequence[Root | None],
        options: RemoteOptions = DEFAULT,
    ) -> None:
        self._columns = columns
        self._roots, self.options = roots, options
        # keys of those behind URLs
        self._there = {root.key for root in roots if root is not None and is_url(root.path)}
        if self._there:  # processes that open the cache again share them
            self.options = options_with_pages(options)
        self._remote: dict[str, RemoteFiles] = {}  # by key
        self._parts, self._sizes = columns.parts.data, columns.sizes.data
        if columns.mtimes is None:
            raise CorruptCacheError("the index of an adopted part is damaged: it lacks times")
        self._mtimes = columns.mtimes.data

    @classmethod
    def of(
        cls,
        cache: Path,
        parts: Sequence[PartEntry],
        columns: ContainerColumns,
        elsewhere: Roots = NO_ROOTS,
    ) -> AdoptedFiles | None:
        """Return the adopted ones of the containers of some parts; None if there are none."""
        roots = roots_of(cache, parts, elsewhere)
        return cls(columns, roots, elsewhere.remote) if len(columns) and any(roots) else None

    def __contains__(self, number: int) -> bool:
        part = self._parts[number]
        return 0 <= part < len(self._roots) and self._roots[part] is not None

    def path(self, number: int) -> str:
        """Return where a container is looked for."""
        root, path = self._root(number), self._columns.path(number)
        return f"<{root.key}>/{path}" if root.path is None else f"{root.path}/{path}"

    def remote(self, number: int) -> RemoteFiles | None:
        """Return the files behind a URL that a container is one of; None where it lies here."""
        if not self._there or number not in self:
            return None
        root = self._root(number)
        if not isinstance(root.path, str):
            return None
        if self._mtimes[number] >= 0:
            raise CorruptCacheError(
                f"{self.path(number)!r}: the source was adopted on a disk, and nothing tells "
                "whether this object is the same; adopt it by its URL"
            )
        files = self._remote.get(root.key)
        return files or self._remote.setdefault(root.key, self._files_at(root.path))

    @property
    def any_remote(self) -> bool:
        """Whether any lie behind a URL."""
        return bool(self._there)

    @property
    def lie_afar(self) -> bool:
        """Whether some lie behind a URL, and what is read of these not all here."""
        return any(key not in self._remote or not self._remote[key].is_quiet for key in self._there)

    @property
    def places(self) -> list[RemotePlace]:
        """The places behind URLs that they lie in."""
        urls = {root.path for root in self._roots if root is not None and is_url(root.path)}
        return [RemotePlace.of(str(url), self.options) for url in urls]

    def _files_at(self, url: str) -> RemoteFiles:
        place, path = RemotePlace.of(url, self.options), self._columns.path
        sizes, states = self._sizes, self._mtimes
        return files_looked_at(
            place, path, lambda number: int(sizes[number]), lambda number: int(states[number])
        )

    def check(self, number: int) -> None:
        """Raise `CorruptCacheError` if a container is not as it was when it was adopted."""
        if (files := self.remote(number)) is not None:
            files.check(number)
        else:
            os.close(self.open(number)[0])

    def open(self, number: int) -> tuple[int, State]:
        """Open a container for reading, and return its descriptor, and its state.

        Raises `CorruptCacheError` if it is not there, or not as it was when it was adopted.
        """
        root, path, size = self._root(number), self._columns.path(number), self._sizes[number]
        if root.path is None:
            raise CorruptCacheError(
                f"adopted file {self.path(number)!r}: nothing says where its source lies; if "
                f"{_moved(root)}"
            )
        if isinstance(root.path, str):
            raise CacheError(f"{self.path(number)!r} lies behind a URL, and not in a file")
        try:
            descriptor = open_within(root.path, path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptCacheError(
                f"adopted file {self.path(number)!r} is not there; if {_moved(root)}"
            ) from error
        except CorruptCacheError as error:
            raise CorruptCacheError(
                f"adopted file {self.path(number)!r} is another one now (a link, or no regular "
                "file); adopt its source again"
            ) from error
        status = os.fstat(descriptor)
        if status.st_size != size or not _is_same(status.st_mtime_ns, self._mtimes[number]):
            os.close(descriptor)
            raise CorruptCacheError(
                f"{self.path(number)!r} has changed since it was adopted ({size} bytes then, "
                f"{status.st_size} now, or another time of change); adopt its source again"
            )
        return descriptor, _state(status)

    def _root(self, number: int) -> Root:
        root = self._roots[self._parts[number]]
        if root is None:
            raise CorruptCacheError(f"container {number} belongs to no adopted part")
        return root


def _state(status: os.stat_result) -> State:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _moved(root: Root) -> str:
    return (
        f"the source {root.key!r} lies elsewhere now, open the cache with "
        f"roots={{{root.key!r}: <its directory>}}"
    )


def _is_same(found: int, noted: int) -> bool:
    """Compare times of change; tar and some file systems keep whole seconds."""
    return found == noted or (found % _SECOND == 0 and found == noted - noted % _SECOND)
