"""Durable files: what is written here is either whole on disk or not there, also after a power cut.

Files of a cache are opened through `open_within`, which follows no link and waits for nobody.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path

import xxhash

from featcache.container_files import sync_directory, sync_file, write_all
from featcache.container_files.system import O_NONBLOCK, open_unlinked
from featcache.errors import CorruptCacheError

MAX_JSON_BYTES = 32 << 20  # a larger one is no manifest, seal or journal line of ours
_UNSYNCABLE = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOTSUP)


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-64 of `data`, 16 lower-case hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def digest_file(path: Path) -> str:
    """Return the xxh3-64 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def make_directory(path: Path) -> None:
    """Make a directory and what is missing above it, durably.

    All names above are synced, also those that were there: a writer that was killed may have made
    them a moment ago. Directories above that may not be opened, or cannot be synced, are others'.
    """
    path.mkdir(parents=True, exist_ok=True)
    for directory in path.parents:
        try:
            sync_directory(directory)
        except OSError as error:
            if error.errno not in _UNSYNCABLE:
                raise


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file by way of a temporary one; its neighbours are durable before it."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # of this writer alone
    try:
        with aside.open("xb", buffering=0) as file:
            write_all(file, data)
            sync_file(file)
        sync_directory(path.parent)  # what the file names must not come after it
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_directory(path.parent)


def create_durably(path: Path, data: bytes) -> None:
    """Write a whole file under a name that nobody else gives; nothing names it before this ends."""
    try:
        with path.open("xb", buffering=0) as file:
            write_all(file, data)
            sync_file(file)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    sync_directory(path.parent)


def remove_unfinished(directory: Path) -> None:
    """Remove what killed writers left in `write_durably` of a directory's JSON files."""
    for left in directory.glob(f"*.json.{'[0-9a-f]' * 8}.tmp"):
        left.unlink(missing_ok=True)


def open_within(root: Path, path: str) -> int:
    """Open a regular file of a cache for reading, and return its descriptor.

    Raises `CorruptCacheError` for a link on the way, or for what is no regular file: a cache holds
    all that it names, and a pipe would be waited for.
    """
    try:
        descriptor = open_unlinked(root, path, os.O_RDONLY | O_NONBLOCK)
    except FileNotFoundError:
        moved = _moved(root, path)
        if moved is None:
            raise
        return open_within(root, f"{moved}/{path}")
    except OSError as error:
        of_root = str(error.filename) == str(root)  # no cache at all
        wrong = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG)
        if of_root or error.errno not in wrong:
            raise
        raise CorruptCacheError(
            f"{str(root / path)!r} is damaged: it is a link or lies behind one, is no file or can "
            "be none; a cache keeps all its files in its own directory"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptCacheError(f"{str(root / path)!r} is damaged: it is no regular file")
    return descriptor


def _moved(root: Path, path: str) -> str | None:
    """Return the feature set that a file lies in now, whose cache was opened before it was one."""
    if not path.startswith(("parts/", "probe-", "made-from-")):
        return None
    sets = sorted((root / "sets").glob("*"))
    return next((f"sets/{each.name}" for each in sets if (each / path).is_file()), None)


def open_there(root: Path, path: str) -> int:
    """Open a file as `open_within` does; raises `CorruptCacheError` if it is missing."""
    try:
        return open_within(root, path)
    except FileNotFoundError as error:
        raise CorruptCacheError(
            f"{str(root / path)!r} is missing; put it back, or open the cache again if it was "
            "overwritten meanwhile"
        ) from error


def check_own_directory(directory: Path) -> None:
    """Raise `CorruptCacheError` if a directory to write in is a link, or no directory."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise CorruptCacheError(
            f"{str(directory)!r} is damaged: it is a link or no directory; a cache keeps all its "
            "files in its own directory: put back what was there"
        )


def read_within(root: Path, path: str) -> bytes:
    """Read a whole JSON file; raises `CorruptCacheError` for one that is too large to be right."""
    descriptor = open_within(root, path)
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise CorruptCacheError(
            f"{str(root / path)!r} is damaged: it has more than {MAX_JSON_BYTES:,} bytes"
        )
    return data


def remedy(cache: Path, path: str) -> str:
    """Say what to do about a file of a cache that is damaged or lost, as the end of a message."""
    if path.startswith("parts/"):
        part = str(cache / "/".join(path.split("/")[:2]))
        return f"put it back, or remove its part, {part!r}, to compute its utterances again"
    return "put it back, or remove featcache.json and write the cache again: what is sealed is kept"
