"""Files as the operating system has them: Linux, macOS and Windows differ in these.

Durable writes, reads at an offset, opening without following links, and finishing of files that a
dead writer left. Every `OSError` from here names its file.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import functools
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

from featcache.errors import CorruptCacheError

try:
    import fcntl
except ImportError:  # Windows
    F_FULLFSYNC: int | None = None
else:
    # on macOS fsync leaves the bytes in the disk's own memory
    F_FULLFSYNC = getattr(fcntl, "F_FULLFSYNC", None)

# what a system does not know asks for nothing
O_DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
O_BINARY: int = getattr(os, "O_BINARY", 0)  # or Windows changes ends of lines
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
# bytes of a call: for more, Linux looks for pages of 2 MiB, which can take four times as long
WRITTEN_AT_ONCE = 1 << 18
_START = 2  # SYNC_FILE_RANGE_WRITE
_PIECES_AT_ONCE = 1024  # IOV_MAX of Linux and macOS
_QUICK_S = 5e-5  # a sync that takes less is not worth a thread
_is_quick = True  # the last one was
_ONE_POSITION = threading.Lock()  # of files, where a system cannot read at an offset


def create(path: Path) -> BinaryIO:
    """Create a file that must not exist yet, unbuffered; its name is durable when this returns."""
    file = path.open("x+b", buffering=0)
    try:
        sync_directory(path.parent)
    except BaseException:
        file.close()
        raise
    return file


def write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`: an unbuffered file may take less."""
    rest = memoryview(data).cast("B")
    try:
        while rest:
            rest = rest[file.write(rest[:WRITTEN_AT_ONCE]) :]
    except OSError as error:
        error.filename = str(file.name)
        raise


def write_each(file: BinaryIO, pieces: Sequence[memoryview]) -> None:
    """Write all of several pieces, one behind the other, with few calls."""
    for some in calls_of(pieces):
        write_together(file, some)


def write_together(file: BinaryIO, pieces: Sequence[memoryview]) -> None:
    """Write all of the pieces that `calls_of` puts into one call."""
    if len(pieces) == 1 or not hasattr(os, "writev"):
        for piece in pieces:
            write_all(file, piece)
        return
    rest = pieces
    try:  # not `named`: that takes as long as a short write
        while rest:
            rest = _behind(rest, os.writev(file.fileno(), rest))
    except OSError as error:
        error.filename = str(file.name)
        raise


def calls_of(pieces: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    """Cut pieces into those of one system call each."""
    some: list[memoryview] = []
    nbytes = 0
    for piece in pieces:
        rest = piece
        while nbytes + len(rest) > WRITTEN_AT_ONCE:
            room = WRITTEN_AT_ONCE - nbytes
            yield [*some, rest[:room]]
            some, nbytes, rest = [], 0, rest[room:]
        some.append(rest)
        nbytes += len(rest)
        if len(some) == _PIECES_AT_ONCE:
            yield some
            some, nbytes = [], 0
    yield some


def _behind(pieces: Sequence[memoryview], nbytes: int) -> Sequence[memoryview]:
    """Return what follows so many bytes."""
    for number, piece in enumerate(pieces):
        if nbytes < len(piece):
            return [piece[nbytes:], *pieces[number + 1 :]]
        nbytes -= len(piece)
    return []


def read_at(descriptor: int, out: memoryview, offset: int) -> int:
    """Read into `out` from an offset of an open file; returns how many bytes, maybe too few.

    Threads and forked processes may share the file where the system has `pread` (all but Windows).
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [out], offset)
    data = _some_at(descriptor, len(out), offset)
    out[: len(data)] = data
    return len(data)


def bytes_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Return bytes from an offset of an open file on, fewer where it ends before."""
    pieces = []
    while nbytes and (piece := _some_at(descriptor, min(nbytes, 1 << 30), offset)):
        pieces.append(piece)
        offset, nbytes = offset + len(piece), nbytes - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _some_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, nbytes, offset)
    with _ONE_POSITION:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, nbytes)


def open_unlinked(root: Path, path: str, flags: int) -> int:
    """Open what lies at a path below a directory, following no link, and return its descriptor.

    Args:
        root: the directory; where it lies itself may be told by links.
        path: relative to it, with "/"; "" is the directory.
        flags: of `os.open`.

    Raises `OSError` of number `ELOOP` or `ENOTDIR` for a link or a file on the way. Windows opens
    no directory, and looks for links just before it opens a file.
    """
    *above, name = path.split("/")
    if os.open not in os.supports_dir_fd:
        return _open_looking(root, [*above, name], flags)
    here = os.open(root, os.O_RDONLY | O_DIRECTORY)
    try:
        for directory in above:
            below = os.open(directory, os.O_RDONLY | O_DIRECTORY | O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        return os.open(name or ".", flags | O_NOFOLLOW, dir_fd=here)
    except OSError as error:
        error.filename = str(root / path)
        raise
    finally:
        os.close(here)


def sync_file(file: BinaryIO) -> None:
    """Make what was written to an unbuffered file durable."""
    with named(file.name):
        if F_FULLFSYNC is None:
            os.fsync(file.fileno())
        else:
            fcntl.fcntl(file.fileno(), F_FULLFSYNC)


def start_writing(file: BinaryIO, offset: int, nbytes: int) -> None:
    """Ask the system to bring bytes of a file to the disk, without waiting for them.

    Else all of them wait for the next `sync_file`. Linux alone can be asked; `posix_fadvise` would
    drop from memory what is on the disk already.
    """
    call = _sync_file_range()
    if call is not None:  # where it fails, `sync_file` tells
        call(file.fileno(), offset, nbytes, _START)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[[int, int, int, int], int] | None, call)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: syncing a file does not (ALICE, OSDI'14).

    Windows cannot be asked for that, and writes them down with the files.
    """
    if not O_DIRECTORY:
        return
    descriptor = os.open(path, os.O_RDONLY | O_DIRECTORY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_together(*syncs: Callable[[], object]) -> None:
    """Make files and names durable side by side: a disk joins what it is asked for at once.

    One after the other where that took no longer than threads do, as in memory. Returns once all
    have ended, and raises the first error.
    """
    global _is_quick
    beside = [] if _is_quick else [_Beside(sync) for sync in syncs[1:]]
    here = syncs[: len(syncs) - len(beside)]
    begin = time.perf_counter()
    try:
        for sync in here:
            sync()
        _is_quick = time.perf_counter() - begin < _QUICK_S * len(here)
    finally:
        for each in beside:
            each.wait()
    for each in beside:
        if each.error is not None:
            raise each.error


class _Beside:
    """A call in a thread of its own: the barest kind, for `threading` takes twice as long."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()
        try:
            if sys.is_finalizing():  # a thread would end before it has run
                self._run()
            else:
                _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the process ends, or has too many
            self._run()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._running.release()

    def wait(self) -> None:
        """Return once the call has ended."""
        with self._running:
            pass


def sync_path(path: Path) -> None:
    """Make a file that was closed, or the names in a directory, durable."""
    if path.is_dir():
        sync_directory(path)
    else:
        # of another user's it may be read alone; Windows syncs only what can be written
        mode = "r+b" if sys.platform == "win32" else "rb"
        with FileIO(path, mode, opener=_open_at_once) as file:
            sync_file(file)


def _open_at_once(path: str, flags: int) -> int:
    """Open what may be a pipe that somebody put there, and wait for nobody to write to it."""
    return os.open(path, flags | O_NONBLOCK)


def _open_looking(root: Path, steps: list[str], flags: int) -> int:
    here = root
    for number, step in enumerate(filter(None, steps), 1):
        here /= step
        is_last = number == len(steps)
        if here.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(here))
        if not is_last and here.exists() and not here.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(here))
    return os.open(here, flags | O_BINARY)


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Put a path on an `OSError`: the system names no file for a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


# Files that a dead writer left, to be finished where they lie: for `FinishesFiles`.
#
# No link is followed: neither on the way from the writer's directory to a file, nor where that
# directory itself is one.

_NOT_AS_LEFT = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)


def open_left(directory: Path, path: str, least: int = 0) -> BinaryIO:
    """Open a file for reading and writing, unbuffered.

    Args:
        directory: that of the writer.
        path: of the file, relative to it.
        least: how many bytes it must have.

    Raises `CorruptCacheError` for a file that is not there, lies behind a link, has a second name,
    maybe elsewhere, or is too short.
    """
    # without waiting for the other end of a pipe
    descriptor = _open_left(directory, path, os.O_RDWR | O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size < least:
            raise CorruptCacheError(
                f"{str(directory / path)!r} is not the file that its writer left"
            )
        return open(directory / path, "r+b", 0, opener=lambda *_: descriptor)  # with its name
    except BaseException:
        os.close(descriptor)
        raise


def end_file(file: BinaryIO, end: int, tail: bytes = b"") -> None:
    """Write `tail` at the offset `end`, cut off what is behind it, make the file durable."""
    file.seek(end)
    write_all(file, tail)
    with named(file.name):
        file.truncate(end + len(tail))
    sync_file(file)


def remove_left(directory: Path, path: str, is_waste: Callable[[str], bool]) -> None:
    """Remove, durably, what lies below a directory under some names.

    Args:
        directory: that of the writer.
        path: of the directory, relative to it; "" is this one itself.
        is_waste: tells by name which files, links and directories go.
    """
    below = directory / path
    here = _open_left(directory, path, os.O_RDONLY | O_DIRECTORY) if O_DIRECTORY else None
    try:
        with named(below):
            for name in filter(is_waste, os.listdir(here or below)):  # noqa: PTH208 (a descriptor)
                found = below / name if here is None else name
                if stat.S_ISDIR(os.stat(found, dir_fd=here, follow_symlinks=False).st_mode):
                    shutil.rmtree(found, dir_fd=here)
                else:
                    os.unlink(found, dir_fd=here)
            if here is not None:
                os.fsync(here)
    finally:
        if here is not None:
            os.close(here)


def misplaced(id: str) -> CorruptCacheError:
    """Return the error for an utterance that lies elsewhere than its format would have put it."""
    return CorruptCacheError(f"utterance {id!r} does not lie where its writer puts it")


def _open_left(directory: Path, path: str, flags: int) -> int:
    try:
        # from above, so that the directory itself is not followed where it is a link
        steps = "/".join(filter(None, (directory.name, path)))
        return open_unlinked(directory.parent, steps, flags)
    except OSError as error:
        if error.errno in _NOT_AS_LEFT:
            raise CorruptCacheError(
                f"{str(directory / path)!r} is not what its writer left: {error.strerror}"
            ) from error
        raise
