"""Claims on utterances that are being computed, so that no two processes compute the same one.

All processes that fill a cache append to one file, `work-through/claims`, records of 16 bytes: the
xxh3-64 of an id, and the token of the claimant, an even number; the token plus one gives the claim
up. Of an id the first claimant that lives has it. A claimant lives while it holds the lock of its
directory, `work-through/<token>`, which goes with the process. Claims are advice: where they fail,
an utterance is computed twice, and the store keeps one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import struct
from pathlib import Path

import xxhash

from featcache.container_files import bytes_at
from featcache.container_files.system import O_BINARY, O_NOFOLLOW
from featcache.errors import CacheLockedError
from featcache.store.format.files import check_own_directory
from featcache.store.format.lock import WriterLock, is_locked

HOME = "work-through"
_FILE = "claims"
_RECORD = struct.Struct("<QQ")
_TOKEN = re.compile("[0-9a-f]{16}")
_MOST = 1 << 20  # claims that are remembered; the oldest are forgotten, being long computed


class Claims:
    """Claims of this process on utterances of a cache, and those of others; used by one thread."""

    def __init__(self, cache: Path) -> None:
        self._home = cache / HOME
        check_own_directory(self._home)
        self._home.mkdir(parents=True, exist_ok=True)
        self._token, self._lock = self._begin()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY | O_NOFOLLOW
        self._file = os.open(self._home / _FILE, flags, 0o666)
        self._read = 0  # bytes
        self._claimants: dict[int, list[int]] = {}  # by hash of the id, the first one first
        self._gone: set[int] = set()  # claimants that do not live, or that one waits for no more

    def take(self, id: str) -> int | None:
        """Claim an utterance; returns the one that has it already, or None: it is ours."""
        key = xxhash.xxh3_64_intdigest(id.encode())
        self._look()
        holder = self._holder(key)
        if holder is None:
            os.write(self._file, _RECORD.pack(key, self._token))
            self._look()
            holder = self._holder(key)
        return None if holder == self._token else holder

    def give_up(self, id: str) -> None:
        """Let others compute an utterance that could not be computed or stored here."""
        key = xxhash.xxh3_64_intdigest(id.encode())
        os.write(self._file, _RECORD.pack(key, self._token + 1))

    def wait_no_more(self, claimant: int) -> None:
        """Take a claimant for gone: it has not delivered for too long."""
        self._gone.add(claimant)

    def close(self) -> None:
        """Give up all claims, and remove what processes that are gone have left."""
        os.close(self._file)
        self._lock.release()
        with contextlib.suppress(OSError):  # others may be at the same
            shutil.rmtree(self._home / f"{self._token:016x}")
            others = [path for path in self._home.iterdir() if _TOKEN.fullmatch(path.name)]
            for path in others:
                if not (path.is_symlink() or is_locked(path)):
                    shutil.rmtree(path)
            if not any(path.exists() for path in others):
                (self._home / _FILE).unlink()
                self._home.rmdir()  # unless somebody else has put something there

    def _begin(self) -> tuple[int, WriterLock]:
        while True:
            token = secrets.randbits(63) << 1
            place = self._home / f"{token:016x}"
            place.mkdir(parents=True, exist_ok=True)
            try:
                return token, WriterLock(place)
            except (CacheLockedError, FileNotFoundError):  # another one that tidies up was quicker
                continue

    def _holder(self, key: int) -> int | None:
        for claimant in self._claimants.get(key, ()):
            if claimant == self._token or self._lives(claimant):
                return claimant
        return None

    def _lives(self, claimant: int) -> bool:
        if claimant in self._gone:
            return False
        place = self._home / f"{claimant:016x}"
        try:
            if place.is_dir() and is_locked(place):
                return True
        except OSError:  # it has just tidied up
            pass
        self._gone.add(claimant)
        return False

    def _look(self) -> None:
        """Take note of what all have claimed since the last look."""
        size = os.fstat(self._file).st_size
        count = (size - self._read) // _RECORD.size
        if count <= 0:
            return
        data = bytes_at(self._file, count * _RECORD.size, self._read)
        self._read += len(data) - len(data) % _RECORD.size
        for key, token in _RECORD.iter_unpack(data[: len(data) - len(data) % _RECORD.size]):
            claimants = self._claimants.setdefault(key, [])
            if not token & 1:
                claimants.append(token)
            elif token - 1 in claimants:
                claimants.remove(token - 1)
        while len(self._claimants) > _MOST:
            del self._claimants[next(iter(self._claimants))]
