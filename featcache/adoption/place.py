"""Places that are adopted: folders and files of a disk, or of a store behind a URL.

On a disk, no link is followed out of the folder.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np

from featcache._cached import cached_property
from featcache.adoptable import ByteSource, Value
from featcache.container_files import read_at
from featcache.errors import (
    AdoptionError,
    CorruptCacheError,
    FeatureError,
    RemoteError,
    describe,
)
from featcache.format import check_annotations, kind_of, wider_kind
from featcache.remote import (
    Look,
    RemoteFiles,
    RemoteOptions,
    RemotePlace,
    files_looked_at,
    requests_to,
)

# The local place of a source: a folder, or what lies around a file. Nothing changes it.

DEPTH = 90
WINDOW_BYTES = 4096  # read at once: the heads around an array, and small arrays whole
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


Tell = Callable[[int], object]


def tell_nobody(count: int) -> None:
    """Do nothing."""


class LocalPlace:
    """Reads files of the local file system, and notes what each was like when it was first opened.

    Args:
        root: the folder.
        only: the files that the user means, relative to it, maybe with `*`; empty: all below it.
        tell: called with 1 for each file that is opened for the first time.

    Attributes:
        root: the folder, without links on the way.
    """

    is_local = True

    def __init__(self, root: Path, only: str = "", *, tell: Tell = tell_nobody) -> None:
        self.name = str(root / only)
        self.root = os.path.realpath(root)
        self._tell = tell
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

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, not below it."""
        try:
            with os.scandir(f"{self.root}/{folder}") as found:
                return sorted(each.name for each in found if each.is_file(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise AdoptionError(
                f"{self.root}/{folder} cannot be read: {describe(error)}"
            ) from error

    def expect(self, paths: Iterable[str]) -> None:
        """Do nothing: files here are read as fast one by one."""

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
            if path not in self._seen:
                self._tell(1)
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

    def expect(self, offsets: Iterable[int], nbytes: int) -> None:
        """Do nothing: a disk is read as fast bit by bit."""


class Window:
    """Reads a file, a few kilobytes at once: small reads side by side cost one."""

    def __init__(self, source: ByteSource) -> None:
        self.size = source.size
        self.path = source.path
        self._source = source
        self._begin, self._bytes = 0, b""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return these bytes; raises `AdoptionError` if the file does not have them."""
        begin = offset - self._begin
        if begin < 0 or begin + nbytes > len(self._bytes):
            if nbytes > WINDOW_BYTES or offset + nbytes > self.size:
                return self._source.read(offset, nbytes)
            most = min(WINDOW_BYTES, self.size - offset)
            self._begin, self._bytes = offset, self._source.read(offset, most)
            begin = 0
        return self._bytes[begin : begin + nbytes]

    def expect(self, offsets: Iterable[int], nbytes: int) -> None:
        """Ask for bytes at each of some places, and do not wait."""
        self._source.expect(offsets, nbytes)


def is_pattern(path: str) -> bool:
    """Whether a path stands for several files."""
    return "*" in path


def ids_of(paths: Sequence[str], suffix: str) -> list[str]:
    """Return the ids of files of one array each: their paths without the suffix."""
    for path in paths:
        if path.rpartition("/")[2].lower() == suffix:
            raise AdoptionError(f"{path!r} has no name to make an id of; rename it")
    return [path[: -len(suffix)] for path in paths]


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
            if not os.path.exists(entry.path):  # noqa: PTH110 (no object each)
                raise AdoptionError(f"{entry.path!r} is a link that leads nowhere; remove it")
            raise AdoptionError(
                f"{entry.path!r} is a link; adopt the folder it leads to, or a copy without links: "
                f"shutil.copytree({root!r}, 'copy')"
            )
        if entry.is_dir():
            yield from _files_below(root, path, depth + 1)
        elif entry.is_file():
            yield path


# Places behind URLs: objects of a store, read by ranges through pages.

LEAST_AHEAD, MOST_AHEAD = 8192, 1 << 20  # bytes that come with those that are asked for
BLOCK_BYTES = 4096  # in which headers lie side by side
GAP_BYTES = 4 * BLOCK_BYTES  # between blocks that are expected: sooner read than asked for
STEP = 4  # by which they grow where they were used, and shrink where they were not


class UrlPlace:
    """Reads objects of a store by ranges, and notes what each was like when it was first seen.

    Folders are listed once, which a web server cannot do.

    Args:
        url: the folder.
        options: how it is reached, with a directory for pages.
        only, tell: as of `LocalPlace`, of objects.

    Attributes:
        root: the path of the folder within the store, with a slash in front.
        is_sure: whether all objects seen had an ETag that changes with any byte.
    """

    is_local = False

    def __init__(
        self, url: str, options: RemoteOptions, only: str = "", *, tell: Tell = tell_nobody
    ) -> None:
        place = RemotePlace.of(url, options)
        self.name = f"{place.url}/{only}" if only else place.url
        parts = urlsplit(place.url)
        self.root = f"/{place.path('')}".rstrip("/") or "/"
        self._tell = tell
        self.is_sure = True
        self._only = only
        self._store = RemotePlace(f"{parts.scheme}://{parts.netloc}", options)
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}  # by path within the store
        self._paths: list[str] = []
        self._looks: list[Look] = []
        self._opened: set[str] = set()
        self._is_listed = False
        self._files = files_looked_at(
            self._store,
            self._paths.__getitem__,
            lambda number: self._looks[number].size,
            lambda number: self._looks[number].state,
        )

    def url_of(self, folder: str) -> str:
        """Return the URL of a folder, by its path within the store."""
        return self._store.url + quote(folder.rstrip("/"), safe="/~!$&'()*+,;=:@")

    def files(self) -> Iterator[str]:
        """List objects, each folder in ascending order."""
        if self._only and not is_pattern(self._only):
            yield self._only
        else:
            yield from (path for path in self._listed if fnmatch(path, self._only or "*"))

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder, not below it."""
        folder = folder.rstrip("/")
        pairs = (path.rpartition("/") for path in self._listed)
        return [name for above, _, name in pairs if above == folder]

    def expect(self, paths: Iterable[str]) -> None:
        """Ask for the first bytes of objects that were listed, all at once, without waiting."""
        with self._lock:
            known = [self._numbers.get(self.absolute(path).lstrip("/")) for path in paths]
        numbers = [number for number in known if number is not None]
        self._files.prefetch([
            (number, 0, min(LEAST_AHEAD, self._looks[number].size)) for number in numbers
        ])  # fmt: skip

    @contextmanager
    def open(self, path: str) -> Iterator[ByteSource]:
        """Open an object below the place, or beside it."""
        number = self._number(path)
        with self._lock:
            if path not in self._opened:
                self._opened.add(path)
                self._tell(1)
        yield _OpenObject(self._files, number, path, self.absolute(path), self._looks[number].size)

    def local(self, path: str) -> Path:
        """Raise `AdoptionError`: nothing lies here."""
        raise AdoptionError(
            f"{path!r} lies behind a URL, {self.name}, and what reads it needs it on a disk: copy "
            "it there, and adopt or convert it there"
        )

    def has(self, path: str) -> bool:
        """Whether an object is there, by its path within the store, with a slash in front."""
        try:
            self._number_at(path)
        except AdoptionError:
            return False
        return True

    def status(self, path: str) -> tuple[int, int]:
        """Return bytes and state of an object, when it was first seen."""
        look = self._looks[self._number(path)]
        return look.size, look.state

    def absolute(self, path: str) -> str:
        """Return the path of an object within the store, with a slash in front."""
        steps: list[str] = []
        for step in f"{self.root}/{path}".split("/"):
            if step == ".." and steps:
                steps.pop()
            elif step == ".." or "\0" in step or path.startswith("/"):
                raise AdoptionError(f"{path!r}, in {self.name!r}, names no file of the store")
            elif step not in ("", "."):
                steps.append(step)
        return f"/{'/'.join(steps)}"

    @cached_property
    def _listed(self) -> list[str]:
        """Paths of all objects below the folder, relative to it."""
        prefix = self.root.strip("/")
        try:
            looks = requests_to(self._store).looks(prefix)
        except RemoteError as error:
            raise AdoptionError(
                f"the objects of a folder, {self.name!r}, cannot be listed: {error}. A web server "
                "lists none: give the URL of one file, or of an scp that names archives"
            ) from error
        for path, look in looks.items():
            self._note(path, look)
        self._is_listed = True
        below = len(prefix) + 1 if prefix else 0
        return sorted((path[below:] for path in looks), key=lambda path: path.split("/"))

    def _number(self, path: str) -> int:
        return self._number_at(self.absolute(path))

    def _number_at(self, path: str) -> int:
        """Return the number of an object; looks at one that is not known yet."""
        where = path.lstrip("/")
        with self._lock:
            known = self._numbers.get(where)
        if known is not None:
            return known
        if self._is_listed and f"/{where}".startswith(f"{self.root.rstrip('/')}/"):
            raise AdoptionError(f"{self._store.url}/{where} is not there")
        try:
            look, front = requests_to(self._store).front(where, LEAST_AHEAD)
        except FileNotFoundError as error:
            raise AdoptionError(f"{error} is not there") from None
        number = self._note(where, look)
        if self._looks[number] == look:  # not that of a thread that saw another content
            self._files.keep(number, front)
        return number

    def _note(self, where: str, look: Look) -> int:
        with self._lock:
            if where not in self._numbers:
                self._paths.append(where)
                self._looks.append(look)
                self._numbers[where] = len(self._paths) - 1
                self.is_sure = self.is_sure and look.is_sure
            return self._numbers[where]


class _OpenObject:
    """Reads ahead: more where what it brought was used, less where it was not."""

    def __init__(self, files: RemoteFiles, number: int, path: str, where: str, size: int) -> None:
        self.path, self.size = path, size
        self._files, self._number, self._where = files, number, where
        self._ahead = LEAST_AHEAD
        self._begin = self._end = self._used = 0  # of what came last

    def expect(self, offsets: Iterable[int], nbytes: int) -> None:
        """Ask for bytes at some places, all at once, and for what lies around them."""
        spans: list[tuple[int, int]] = []
        for offset in sorted(each for each in offsets if 0 <= each < self.size):
            begin = offset - offset % BLOCK_BYTES
            end = min(offset + nbytes + -(offset + nbytes) % BLOCK_BYTES, self.size)
            if spans and begin - spans[-1][1] <= GAP_BYTES:
                begin = spans.pop()[0]
            spans.append((begin, end))
        self._files.prefetch([(self._number, begin, end - begin) for begin, end in spans])

    def read(self, offset: int, nbytes: int) -> bytes:
        end = offset + nbytes
        if not 0 <= offset <= end <= self.size:
            raise AdoptionError(
                f"{self._where!r} has {self.size} bytes, so it lacks those from {offset} to {end}: "
                "it is cut short"
            )
        if not self._files.has(self._number, offset, nbytes):
            was_used = self._used - self._begin >= (self._end - self._begin) // 2
            goes_on = was_used and 0 <= offset - self._end <= self._ahead
            ahead = self._ahead * STEP if goes_on else self._ahead // STEP
            self._ahead = min(max(ahead, LEAST_AHEAD), MOST_AHEAD)
            self._begin = offset - offset % (LEAST_AHEAD // 2)  # headers are written side by side
            self._used = offset
            self._end = min(max(end, self._begin + self._ahead), self.size)
            self._files.prefetch([(self._number, self._begin, self._end - self._begin)])
        if self._begin <= offset < self._end:
            self._used = max(self._used, end)
        data = np.empty(nbytes, np.uint8)
        try:
            self._files.read_into(self._number, offset, data)
        except CorruptCacheError as error:
            raise AdoptionError(
                f"{self._where!r} has changed while it was read: {error}"
            ) from error
        return data.tobytes()


# Values that a source has of its utterances, as columns of annotations.

MOST_NAMES = 256  # each name costs a value of every utterance


class GatheredValues:
    """Values by name and utterance, from JSON or the like, which holds more than annotations can.

    What is none (objects, lists of text), and names whose values are of different kinds, are left
    out; of very many names, as JSON by word or by id has, all but those of the most utterances.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[int, Value]] = {}
        self._kinds: dict[str, str | None] = {}  # None: of several kinds

    def add(self, number: int, values: Mapping[str, object]) -> None:
        """Keep values of an utterance, by the utterance's number."""
        for name, value in values.items():
            try:
                checked = check_annotations("", {name: value})
            except FeatureError:
                continue
            for kept, plain in checked.items():
                kind = kind_of(plain)
                known = self._kinds.setdefault(kept, kind)
                self._kinds[kept] = None if known is None else wider_kind(known, kind)
                self._values.setdefault(kept, {})[number] = plain

    def columns(self, count: int, without: Container[str] = ()) -> dict[str, list[Value]]:
        """Return the values of `count` utterances, by name; names of features are left out."""
        found = {
            name: values
            for name, values in self._values.items()
            if self._kinds[name] is not None and name not in without
        }
        often = sorted(found, key=lambda name: len(found[name]), reverse=True)[:MOST_NAMES]
        return {name: [found[name].get(number) for number in range(count)] for name in often}
