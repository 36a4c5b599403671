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
from pathlib import Path
from typing import NamedTuple

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from featcache.errors import CacheLockedError

NAME = "writer.lock"
SOFT_NAME = "writer.lock.soft"
HOLDER = "writer.json"
PATIENCE_S = 0.1  # `is_locked` holds a lock for the moment in which it looks
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
_log = logging.getLogger("featcache")
_told: set[int] = set()  # the file systems without flock that were told of


class WriterLock:
    """Held by the one process that may publish a cache, or write a part."""

    def __init__(self, directory: Path) -> None:
        self._holder = directory / HOLDER
        try:
            self._lock = _acquired(directory, PATIENCE_S)
        except Timeout as error:
            soft = directory / SOFT_NAME
            gone = f"; if it is gone, remove {str(soft)!r}" if soft.exists() else ""
            raise CacheLockedError(
                f"{str(directory)!r} is being written by {holder_text(directory)}; wait for it, or "
                f"end it and try again: what it has committed is kept{gone}"
            ) from error
        this = Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"))
        try:
            self._holder.unlink(missing_ok=True)  # a link would lead elsewhere
            self._holder.write_text(json.dumps(this._asdict()))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others write; harmless the second time."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # it names who held the lock, and is harmless
                self._holder.unlink()
            self._lock.release()


class Holder(NamedTuple):
    """The process that holds a lock, or held it when it died."""

    pid: int
    host: str
    since: str


def may_live(found: Holder | None) -> bool:
    """Tell whether the process may still be at work; on another host that cannot be seen."""
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
    return f"{which}, which is this one: close the other writer" if here else which


def is_locked(directory: Path) -> bool:
    """Take the lock of a directory for a moment; True if that failed: a live process holds it."""
    try:
        _acquired(directory, 0).release()
    except Timeout:
        return True
    return False


def _acquired(directory: Path, timeout_s: float) -> BaseFileLock:
    # thread_local: a part is sealed by another thread
    lock: BaseFileLock = FileLock(directory / NAME, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=0.005)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        _tell_once(directory)
        # its being there is the lock
        lock = SoftFileLock(directory / SOFT_NAME, thread_local=False)
        lock.acquire(timeout=timeout_s, poll_interval=0.005)
    return lock


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
