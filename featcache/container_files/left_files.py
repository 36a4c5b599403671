"""Files that a dead writer left, to be finished where they lie. For backends, ours and others'.

Here is what `featcache.interface.FinishesFiles` takes. No link is followed: neither on the way from
the writer's directory to a file, nor where that directory itself is one. Every `OSError` from here
names its file.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from featcache.container_files import system
from featcache.errors import CorruptCacheError

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
    descriptor = _open(directory, path, os.O_RDWR | system.O_NONBLOCK)
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
    system.write_all(file, tail)
    with system.named(file.name):
        file.truncate(end + len(tail))
    system.sync_file(file)


def remove_left(directory: Path, path: str, is_waste: Callable[[str], bool]) -> None:
    """Remove, durably, what lies below a directory under some names.

    Args:
        directory: that of the writer.
        path: of the directory, relative to it; "" is this one itself.
        is_waste: tells by name which files, links and directories go.
    """
    below = directory / path
    here = _open(directory, path, os.O_RDONLY | system.O_DIRECTORY) if system.O_DIRECTORY else None
    try:
        with system.named(below):
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


def _open(directory: Path, path: str, flags: int) -> int:
    try:
        # from above, so that the directory itself is not followed where it is a link
        steps = "/".join(filter(None, (directory.name, path)))
        return system.open_unlinked(directory.parent, steps, flags)
    except OSError as error:
        if error.errno in _NOT_AS_LEFT:
            raise CorruptCacheError(
                f"{str(directory / path)!r} is not what its writer left: {error.strerror}"
            ) from error
        raise
