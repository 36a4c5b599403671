"""Advisory locks for writers, which vanish with the process that holds them.

Where the file system knows no `flock`, a lock is a file that names its holder. It does not vanish
by itself then, but is broken by the next writer on the same host when its process is gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from featcache.errors import CacheLockedError

if TYPE_CHECKING:
    from filelock import BaseFileLock

NAME = "writer.lock"
SOFT_NAME = "writer.lock.soft"
HOLDER = "writer.json"
FILES = {NAME, SOFT_NAME, HOLDER}
PATIENCE_S = 0.1  # `is_locked` holds a lock for the moment in which it looks
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
_log = logging.getLogger("featcache")
_told: set[int] = set()  # the file systems without flock that were told of


class Held(ABC):
    """A lock, or what has one; a `with` block releases it."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock; harmless the second time."""

    def __enter__(self) -> Self:
        try:
            return self
        except BaseException:
            self.release()
            raise

    def __exit__(self, *error: object) -> None:
        # twice, for an interrupt (Ctrl-C) that comes right before: the traceback of one may keep
        # the lock alive for as long as the process lives
        try:
            self.release()
        finally:
            self.release()


class WriterLock(Held):
    """Held by the one process that may publish a cache, or write a part.

    Raises `CacheLockedError` if another holds it for `patience_s`, `FileNotFoundError` without such
    a directory.
    """

    def __init__(self, directory: Path, patience_s: float = 0.0) -> None:
        from filelock import Timeout

        self._holder = directory / HOLDER
        try:
            self._lock = _acquired(directory, max(patience_s, PATIENCE_S))
        except Timeout as error:
            soft = directory / SOFT_NAME
            gone = f"; if it is gone, remove {str(soft)!r}" if soft.exists() else ""
            raise CacheLockedError(
                f"{str(directory)!r} is being written by {holder_text(directory)}; wait for it, or "
                f"end it and try again: what it has committed is kept{gone}"
            ) from error
        try:
            this = Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S%z"))
            self._holder.unlink(missing_ok=True)  # a link would lead elsewhere
            self._holder.write_bytes(json.dumps(this._asdict()).encode())
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock; harmless the second time."""
        if self._lock.is_locked:
            try:
                with contextlib.suppress(OSError):  # it names who held the lock, and is harmless
                    self._holder.unlink()
            finally:
                self._lock.release()


class Holder(NamedTuple):
    """The process that holds a lock, or held it when it died."""

    pid: int
    host: str
    since: str


def may_live(found: Holder | None) -> bool:
    """Whether the process may still be at work; on another host that cannot be seen."""
    if found is None:
        return False
    if found.host != socket.gethostname() or os.name == "nt":  # there, to ask would be to kill
        return True
    try:
        os.kill(found.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, TypeError):  # it is another user's, or no process at all
        return True
    return True


def holder(directory: Path) -> Holder | None:
    """Return who holds the lock of a directory; None if that is not written there, or not yet."""
    try:
        content = json.loads((directory / HOLDER).read_text())
        return Holder(content["pid"], content["host"], content["since"])
    except (OSError, ValueError, LookupError, TypeError):
        return None  # it is being written, or was left half written


def holder_text(directory: Path) -> str:
    """Name the process that holds the lock of a directory, as part of a message."""
    found = holder(directory)
    if found is None:
        return "another process"
    which = f"process {found.pid} on {found.host} since {found.since}"
    here = found[:2] == (os.getpid(), socket.gethostname())
    if not here:
        return which
    return (
        f"{which}, which is this one: close the other writer (close() of it, or of the function "
        "that reads through the cache)"
    )


def at_work(directory: Path) -> str:
    """Return a part of a message: who is writing; "" where nobody seems to be."""
    found = holder(directory)
    if found is None or not may_live(found):
        return ""
    return f"being written by process {found.pid} on {found.host} since {found.since}"


def is_locked(directory: Path) -> bool:
    """Take the lock of a directory for a moment; True if that failed: a live process holds it.

    Raises `FileNotFoundError` if there is no such directory: its writer may have removed it.
    """
    from filelock import Timeout

    try:
        _acquired(directory, 0).release()
    except Timeout:
        return True
    return False


def _acquired(directory: Path, timeout_s: float) -> BaseFileLock:
    from filelock import FileLock, SoftFileLock

    directory.stat()  # one that its writer has removed is not made again
    # thread_local: a part is sealed by another thread
    lock: BaseFileLock = FileLock(directory / NAME, thread_local=False, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=timeout_s, poll_interval=0.005)
        except FileExistsError as error:  # removed as the lock made sure that it is there
            gone = errno.ENOENT
            raise FileNotFoundError(gone, os.strerror(gone), str(directory)) from error
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            _tell_once(directory)
            # its being there is the lock
            lock = SoftFileLock(directory / SOFT_NAME, thread_local=False)
            lock.acquire(timeout=timeout_s, poll_interval=0.005)
        return lock
    except KeyboardInterrupt:  # its traceback may keep the lock alive
        lock.release(force=True)
        raise


def _tell_once(directory: Path) -> None:
    disk = directory.stat().st_dev
    if disk not in _told:
        _told.add(disk)
        _log.warning(
            "%r lies on a file system without flock: a file is the lock, %r; where a writer was "
            "killed on another host, remove it",
            str(directory),
            SOFT_NAME,
        )
