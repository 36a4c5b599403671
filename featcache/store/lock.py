"""Who may write: advisory locks that vanish with the process that holds them."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from featcache.errors import CacheLockedError

NAME = "writer.lock"
HOLDER = "writer.json"


class WriterLock:
    """Held by the one process that may publish a cache, or write a part."""

    def __init__(self, directory: Path) -> None:
        self._holder = directory / HOLDER
        self._lock = FileLock(directory / NAME, thread_local=False)  # a part is sealed by another thread
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise CacheLockedError(
                f"{str(directory)!r} is being written by {self._holder_text()}; wait for it, or end it and "
                "try again: what it has committed is kept"
            ) from error
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            self._holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
        except BaseException:
            self._lock.release()
            raise

    def release(self) -> None:
        """Let others write; harmless the second time."""
        if self._lock.is_locked:
            self._holder.unlink(missing_ok=True)
            self._lock.release()

    def _holder_text(self) -> str:
        found = holder(self._holder.parent)
        if found is None:
            return "another process"
        which = f"process {found.pid} on {found.host} since {found.since}"
        here = found[:2] == (os.getpid(), socket.gethostname())
        return f"{which}, which is this one: close the other writer" if here else which


class Holder(NamedTuple):
    """The process that holds a lock, or held it when it died."""

    pid: int
    host: str
    since: str


def holder(directory: Path) -> Holder | None:
    """Return who holds the lock of a directory; None if that is not written there, or not yet."""
    try:
        content = json.loads((directory / HOLDER).read_text())
        return Holder(content["pid"], content["host"], content["since"])
    except (OSError, ValueError, LookupError, TypeError):  # it is being written, or was left half written
        return None


def is_locked(directory: Path) -> bool:
    """Say whether a live process holds the lock of a directory."""
    try:
        with FileLock(directory / NAME).acquire(timeout=0):
            return False
    except Timeout:
        return True
