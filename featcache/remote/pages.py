"""Local copies of bytes that lie in object stores, shared by processes, bounded in size.

    <pages>/<key of an object>/000000.segment, 000001.segment, ...

A segment is one sparse file: 64 MiB of the object, and behind them a record of 32 bytes for each
piece that was written, little-endian: first byte and the one after the last, within the object; the
xxh3-64 of the piece; and 8 bytes that stand for this boot of the machine. A piece is written first,
its record after it, so a killed process leaves no record without its bytes. A power cut may: so
records of another boot count only if their bytes still have the hash. Nothing is synced.

A segment is removed as a whole: who has it open reads on in it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from featcache.errors import StorageFullError
from featcache.interface import Bytes
from featcache.remote.ranges import Span, Spans

SEGMENT_BYTES = 64 << 20
RECORD = struct.Struct("<QQQQ")
SUFFIX = ".segment"
LOOK_EVERY_BYTES = 64 << 20  # written, after which the budget is looked at
USED_S = 60.0  # that a segment counts as used after it was
LOW = 0.9  # of the budget is left by a clearance


def _boot() -> int:
    """Return a number that another boot of the machine does not have."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        name = os.urandom(16)  # records count for this process alone
    return xxhash.xxh3_64_intdigest(name)


BOOT = _boot()


class Pages:
    """Bytes of objects on a local disk; safe to share between threads, processes and forks.

    Args:
        directory: where they lie; other processes may use it, too.
        budget_bytes: most bytes there; segments used longest ago are removed first.
        floor_bytes: least bytes that are left free on its disk.
    """

    def __init__(self, directory: Path, budget_bytes: int, floor_bytes: int) -> None:
        self.directory = directory
        self._budget_bytes, self._floor_bytes = budget_bytes, floor_bytes
        self._segments: dict[tuple[str, int], _Segment] = {}
        self._written = LOOK_EVERY_BYTES  # look at the first write
        self._lock = threading.RLock()
        self._process = os.getpid()

    def missing(self, key: str, begin: int, end: int) -> list[Span]:
        """Return the spans of an object's bytes that are not here."""
        found: list[Span] = []
        for number, first, last in _by_segment(begin, end):
            segment = self._there(key, number)
            found += [(first, last)] if segment is None else segment.missing(first, last)
        return found

    def read_into(self, key: str, begin: int, out: Bytes) -> list[Span]:
        """Copy bytes of an object; return the spans that are not here, whose places are as before.

        Others may remove pages at any moment: `missing` tells what to fetch, this what was read.
        """
        lacking: list[Span] = []
        for number, first, last in _by_segment(begin, begin + len(out)):
            segment = self._there(key, number)
            if segment is None or (spans := segment.missing(first, last)):
                lacking += [(first, last)] if segment is None else spans
                continue
            at = first - number * SEGMENT_BYTES
            out[first - begin : last - begin] = segment.bytes[at : at + last - first]
        return lacking

    def write(self, key: str, begin: int, data: memoryview) -> None:
        """Keep bytes of an object; raises `StorageFullError` where there is no room for them."""
        with self._guard():
            self._make_room(len(data))
        done = 0
        for number, first, last in _by_segment(begin, begin + len(data)):
            piece = data[done : done + last - first]
            for again in (True, False):
                try:
                    self._opened(key, number).write(first, piece)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not again:
                        raise self._full(error) from error
                    with self._guard():
                        self._clear(0)
            done += last - first

    def close(self) -> None:
        """Close all segments."""
        with self._guard():
            self._segments.clear()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        if self._process != os.getpid():  # the parent may have held it
            self._process, self._lock = os.getpid(), threading.RLock()
        with self._lock:
            yield

    def _path(self, key: str, number: int) -> Path:
        return self.directory / key / f"{number:06d}{SUFFIX}"

    def _there(self, key: str, number: int) -> _Segment | None:
        """Return a segment, None unless there is one."""
        segment = self._segments.get((key, number))
        if segment is not None and segment.is_there():
            return segment
        return self._opened(key, number) if self._path(key, number).exists() else None

    def _opened(self, key: str, number: int) -> _Segment:
        """Return a segment, made where there is none."""
        with self._guard():
            segment = self._segments.get((key, number))
            if segment is None or not segment.is_there():
                segment = self._segments[key, number] = _Segment(self._path(key, number), number)
            return segment

    def _make_room(self, nbytes: int) -> None:
        self._written += nbytes
        if self._written >= min(LOOK_EVERY_BYTES, max(self._budget_bytes // 8, 1)):
            self._written = 0
            free = shutil.disk_usage(self.directory).free
            self._clear(self._budget_bytes, self._floor_bytes - free)

    def _clear(self, budget_bytes: int, least: int = 0) -> None:
        """Remove segments, those used longest ago first, until the rest fits."""
        found = []
        for path in self.directory.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process has removed it
                status = path.stat()
                found.append((status.st_mtime, status.st_blocks * 512, path))
        total = sum(nbytes for _, nbytes, _ in found)
        over = max(total - int(LOW * budget_bytes) if total > budget_bytes else 0, least)
        for _, nbytes, path in sorted(found):
            if over <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                over -= nbytes

    def _full(self, error: OSError) -> StorageFullError:
        return StorageFullError(
            f"no room for pages in {str(self.directory)!r} ({error.strerror}); give "
            "RemoteOptions(pages=) a directory on a disk with more room"
        )


class _Segment:
    """64 MiB of an object, as far as they are here."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self._begin = number * SEGMENT_BYTES
        self._spans = Spans()
        self._records = 0  # bytes of records that were read
        self._lock = threading.Lock()
        self._used = 0.0
        _make(path)
        # one to write bytes in their place, one that appends whatever others append meanwhile
        self._file = path.open("r+b", buffering=0)
        log = Path(f"/proc/self/fd/{self._file.fileno()}")
        self._log = log.open("ab", buffering=0)
        mapping = mmap.mmap(self._file.fileno(), SEGMENT_BYTES, access=mmap.ACCESS_READ)
        self.bytes: Bytes = np.frombuffer(mapping, np.uint8)
        self._read_records()

    def __del__(self) -> None:
        for name in ("_file", "_log"):
            if name in self.__dict__:
                self.__dict__[name].close()

    def is_there(self) -> bool:
        """Whether it was not removed meanwhile; tells others that it is in use."""
        now = time.monotonic()
        if now - self._used < USED_S:
            return True
        if not os.fstat(self._file.fileno()).st_nlink:
            return False
        with contextlib.suppress(OSError):
            os.utime(self._file.fileno())
        self._used = now
        return True

    def missing(self, begin: int, end: int) -> list[Span]:
        if self._spans.has(begin, end):
            return []
        self._read_records()  # others may have written it
        return self._spans.missing(begin, end)

    def write(self, begin: int, data: memoryview) -> None:
        at = begin - self._begin
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], at + done)
        digest = xxhash.xxh3_64_intdigest(data)
        self._log.write(RECORD.pack(begin, begin + len(data), digest, BOOT))
        with self._lock:
            self._spans.add(begin, begin + len(data))

    def _read_records(self) -> None:
        with self._lock:
            size = os.fstat(self._file.fileno()).st_size - SEGMENT_BYTES - self._records
            size -= size % RECORD.size
            if size <= 0:
                return
            data = os.pread(self._file.fileno(), size, SEGMENT_BYTES + self._records)
            self._records += len(data) - len(data) % RECORD.size
            for begin, end, digest, boot in RECORD.iter_unpack(data[: len(data) - len(data) % 32]):
                if self._counts(begin, end, digest, boot):
                    self._spans.add(begin, end)

    def _counts(self, begin: int, end: int, digest: int, boot: int) -> bool:
        if not self._begin <= begin <= end <= self._begin + SEGMENT_BYTES:
            return False
        if boot == BOOT:
            return True
        data = self.bytes[begin - self._begin : end - self._begin]
        return xxhash.xxh3_64_intdigest(data.data) == digest


def _make(path: Path) -> None:
    """Make an empty segment unless it is there; others never see it before it has its size."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        os.ftruncate(descriptor, SEGMENT_BYTES)
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _by_segment(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cut bytes at the borders of segments: number, first byte, the one after the last."""
    for number in range(begin // SEGMENT_BYTES, -(-end // SEGMENT_BYTES)):
        first = max(begin, number * SEGMENT_BYTES)
        yield number, first, min(end, (number + 1) * SEGMENT_BYTES)
