"""The local place of a source: a folder, or what lies around a file. Nothing changes it."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

from featcache.adoptable import ByteSource
from featcache.container_files import read_at
from featcache.errors import AdoptionError, describe

DEPTH = 90
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


class LocalPlace:
    """Reads files of the local file system, and notes what each was like when it was first opened.

    Args:
        root: the folder.
        only: the files that the user means, relative to it, maybe with `*`; empty: all below it.

    Attributes:
        root: the folder, without links on the way.
    """

    def __init__(self, root: Path, only: str = "") -> None:
        self.name = str(root / only)
        self.root = os.path.realpath(root)
        self._seen: dict[str, tuple[int, int]] = {}  # size and time of change
        self._only = only
        self._lock = threading.Lock()
        self._resolved = lru_cache(maxsize=4096)(os.path.realpath)

    def files(self) -> Iterator[str]:
        """List regular files, each folder in ascending order; a link is an `AdoptionError`."""
        if self._only and not is_pattern(self._only):
            yield self._only
            return
        below = _files_below(self.root, "")
        yield from (path for path in below if not self._only or fnmatch(path, self._only))

    @contextmanager
    def open(self, path: str) -> Iterator[ByteSource]:
        """Open a file below the place, or at an absolute path."""
        where = self._path(path)
        try:
            descriptor = os.open(where, _FLAGS)
        except (OSError, ValueError) as error:
            raise AdoptionError(f"{where!r} cannot be read: {describe(error)}") from error
        try:
            yield _OpenFile(descriptor, path, where, self._note(path, os.fstat(descriptor)))
        finally:
            os.close(descriptor)

    def local(self, path: str) -> Path:
        """Return where a file lies."""
        where = self._path(path)
        try:
            self._note(path, Path(where).stat())
        except (OSError, ValueError) as error:
            raise AdoptionError(f"{where!r} cannot be read: {describe(error)}") from error
        return Path(where)

    def status(self, path: str) -> tuple[int, int]:
        """Return bytes and time of change (nanoseconds) of a file, when it was first opened."""
        if path not in self._seen:
            self.local(path)
        return self._seen[path]

    def absolute(self, path: str) -> str:
        """Return a file's path, with links on the way to it followed."""
        folder, _, name = self._path(path).rpartition("/")
        there = f"{self._resolved(folder or '/').rstrip('/')}/{name}"
        is_link = os.path.islink(there)  # noqa: PTH114 (no object for each of many files)
        return os.path.realpath(there) if is_link else there

    def _path(self, path: str) -> str:
        if not path or "\0" in path:
            raise AdoptionError(f"{path!r}, in {self.name!r}, names no file")
        return path if path.startswith("/") else f"{self.root}/{path}"

    def _note(self, path: str, status: os.stat_result) -> int:
        if not stat.S_ISREG(status.st_mode):
            raise AdoptionError(f"{self._path(path)!r} is no regular file")
        with self._lock:
            found = (status.st_size, status.st_mtime_ns)
            if self._seen.setdefault(path, found) != found:
                raise AdoptionError(
                    f"{self._path(path)!r} is being written; adopt it when it is finished"
                )
        return status.st_size


class _OpenFile:
    def __init__(self, descriptor: int, path: str, where: str, size: int) -> None:
        self.path, self.size = path, size
        self._descriptor, self._where = descriptor, where

    def read(self, offset: int, nbytes: int) -> bytes:
        if not 0 <= offset <= offset + nbytes <= self.size:
            raise AdoptionError(
                f"{self._where!r} has {self.size} bytes, so it lacks those from {offset} to "
                f"{offset + nbytes}: it is cut short"
            )
        data = bytearray(nbytes)
        rest = memoryview(data)
        while rest:
            try:
                count = read_at(self._descriptor, rest, offset)
            except OSError as error:
                raise AdoptionError(f"{self._where!r}: {describe(error)}") from error
            if not count:
                raise AdoptionError(f"{self._where!r} ends before byte {offset + len(rest)}")
            rest, offset = rest[count:], offset + count
        return bytes(data)


def is_pattern(path: str) -> bool:
    """Tell whether a path stands for several files."""
    return "*" in path


def ids_of(paths: Sequence[str], suffix: str) -> list[str]:
    """Return the ids of files of one array each: their paths without the suffix."""
    for path in paths:
        if path.rpartition("/")[2] == suffix:
            raise AdoptionError(f"{path!r} has no name to make an id of; rename it")
    return [path.removesuffix(suffix) for path in paths]


def _files_below(root: str, folder: str, depth: int = 1) -> Iterator[str]:
    if depth > DEPTH:
        raise AdoptionError(f"{root}/{folder} lies more than {DEPTH} folders deep")
    try:
        with os.scandir(f"{root}/{folder}") as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise AdoptionError(f"{root}/{folder} cannot be read: {describe(error)}") from error
    for entry in entries:
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_symlink():
            raise AdoptionError(
                f"{entry.path!r} is a link; put the file there, or adopt the folder it leads to"
            )
        if entry.is_dir():
            yield from _files_below(root, path, depth + 1)
        elif entry.is_file():
            yield path
