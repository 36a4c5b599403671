"""Errors of the disk, told as errors of a cache: which path, what is kept, what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from featcache.errors import CacheError, FeatcacheError, StorageFullError

GO_ON = "run the same again, it goes on from there"
FREE_SPACE = f"free some space and {GO_ON}"
_REMEDIES = {
    errno.EACCES: (
        "get the right to write there (or open the cache with featcache.open to read it), and "
        f"{GO_ON}"
    ),
    errno.EPERM: f"get the right to write there, and {GO_ON}",
    errno.EROFS: "its file system is read-only: mount it for writing, or give another directory",
    errno.EMFILE: (
        f"this process has too many files open: close some or raise `ulimit -n`, and {GO_ON}"
    ),
    errno.ENFILE: f"this machine has too many files open: close some, and {GO_ON}",
    errno.EFBIG: f"the file is larger than is allowed (`ulimit -f`): raise that, and {GO_ON}",
}

_TO_READ = {
    errno.EACCES: "get the right to read it",
    errno.EPERM: "get the right to read it",
    errno.EMFILE: "close files of this process, or raise `ulimit -n`",
    errno.ENFILE: "close files of this machine",
}


def reading(path: Path) -> AbstractContextManager[None]:
    """Raise a system error while a cache is read as a `CacheError`: which path, what to do."""

    def tell(error: OSError, where: str) -> CacheError:
        return CacheError(f"cache {str(path)!r} cannot be read{where}: {read_remedy(error)}")

    return _told(path, tell)


def read_remedy(error: OSError) -> str:
    """Say what went wrong with reading, and what to do, as the end of a message."""
    remedy = _TO_READ.get(error.errno or 0, "see to the disk")
    return f"{error.strerror or error}; {remedy}, and try again"


def explained(path: Path, kept: Callable[[], str]) -> AbstractContextManager[None]:
    """Raise a system error while a cache is written as a `CacheError`, or `StorageFullError`.

    Args:
        path: the cache directory.
        kept: says what of the work is safe.
    """

    def tell(error: OSError, where: str) -> CacheError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFullError(
                f"the disk of {str(path)!r} is full{where}; {kept()}: {FREE_SPACE}"
            )
        remedy = _REMEDIES.get(error.errno or 0, f"see to the disk, and {GO_ON}")
        return CacheError(
            f"cache {str(path)!r} cannot be written{where}: {error.strerror or error}; "
            f"{kept()}: {remedy}"
        )

    return _told(path, tell)


@contextmanager
def _told(path: Path, tell: Callable[[OSError, str], CacheError]) -> Iterator[None]:
    """Raise a system error as what `tell` makes of it and of the file, if that is not `path`."""
    try:
        yield
    except FeatcacheError:
        raise
    except OSError as error:
        where = f" at {error.filename!r}" if error.filename not in (None, str(path)) else ""
        told = tell(error, where)
        told.errno = error.errno
        raise told from error
