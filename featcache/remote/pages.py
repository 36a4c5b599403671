"""Local copies of bytes that lie in object stores, shared by processes, bounded in size.

    <pages>/<key of an object>/000000.segment, 000001.segment, ...

A segment is one sparse file: 64 MiB of the object, and behind them a record of 32 bytes for each
piece that was written, little-endian: first byte and the one after the last, within the object; the
xxh3-64 of the piece; and 8 bytes that stand for this boot of the machine. A piece is written first,
its record after it, so a killed process leaves no record without its bytes. A power cut may: so
records of another boot count only if their bytes still have the hash. Nothing is synced.

A segment is removed as a whole: who has it open reads on in it. A forked child opens segments
anew: those of its parent may be half-changed in it, and their locks held for ever.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar, TypeVarTuple

import numpy as np
import xxhash

from featcache.errors import StorageFullError
from featcache.interface import Bytes
from featcache.remote.ranges import Piece, Span, Spans

Key = TypeVarTuple("Key")
T = TypeVar("T")
SEGMENT_BYTES = 64 << 20
RECORD = struct.Struct("<QQQQ")
SUFFIX = ".segment"
LOOK_EVERY_BYTES = 64 << 20  # written, after which the budget is looked at
USED_S = 60.0  # that a segment counts as used after it was
LOW = 0.9  # of the budget is left by a clearance
DESCRIPTORS = Path("/proc/self/fd")  # open files, by number; not on every system
TRIES = 10  # of making a segment, while others remove it
MOST_OPEN = 4096  # segments: a process may map some 65 000 times


def _boot() -> int:
    """Return a number that another boot of the machine does not have."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        name = os.urandom(16)  # records count for this process alone
    return xxhash.xxh3_64_intdigest(name)


BOOT = _boot()
_forks = 0  # between the first process and this one


def _after_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Locks:
    """A lock for each process: in a forked child no thread may be left that could release one."""

    def __init__(self) -> None:
        self._of: dict[int, threading.RLock] = {}

    def mine(self) -> threading.RLock:
        """Return the lock of this process."""
        lock = self._of.get(_forks)
        return self._of.setdefault(_forks, threading.RLock()) if lock is None else lock


class MadeOnce(Generic[*Key, T]):
    """A function that makes one value for the same arguments, also for threads that ask at once."""

    def __init__(self, make: Callable[[*Key], T]) -> None:
        self._make, self._locks = make, Locks()
        self._made: dict[tuple[*Key], T] = {}

    def __call__(self, *key: *Key) -> T:
        """Return what was made, or make it."""
        with self._locks.mine():
            if key not in self._made:
                self._made[key] = self._make(*key)
            return self._made[key]

    def cache_clear(self) -> None:
        """Forget what was made."""
        self._made.clear()


def most_open() -> int:
    """Return how many segments may be open, three descriptors and a few more for each."""
    try:
        import resource  # not on every system
    except ImportError:
        return 8
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if limit < 0 else min(max(limit // 12, 8), MOST_OPEN)


Kept = tuple[str, int, memoryview]  # the key of an object, the first byte, and bytes


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
        # by process, key and number
        self._segments: dict[tuple[int, str, int], _Segment] = {}
        self._turns = count()
        self._most_open = most_open()
        self._written = LOOK_EVERY_BYTES  # look at the first write
        self._locks = Locks()

    def missing(self, key: str, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield those of an object's bytes that are not here of some, in their order."""
        looked: set[int] = set()  # at what others may have written, once
        there: dict[int, _Segment | None] = {}
        for span in spans:
            for number, first, last in _by_segment(*span):
                if number not in there:
                    there[number] = self._there(key, number)
                segment = there[number]
                if segment is None:
                    yield first, last
                elif not segment.has(first, last):
                    yield from segment.missing(first, last, look=number not in looked)
                    looked.add(number)

    def view(self, key: str, begin: int, nbytes: int) -> Bytes | None:
        """Return bytes of an object without a copy; None unless they are known to be here.

        Those of two segments are not. They stay readable when they are removed, and take their room
        until nobody has them.
        """
        segment = self._known(key, begin // SEGMENT_BYTES)
        return None if segment is None else segment.view(begin, nbytes)

    def copy_known(
        self, keys: Mapping[int, str], pieces: Iterable[Piece], outs: Iterable[Bytes]
    ) -> list[int]:
        """Copy what is known to be here of some pieces, each to the front of one of `outs`.

        Pieces are (object, first byte, bytes), and `keys` those of the objects. Returns the numbers
        of the pieces that are not copied.
        """
        known: dict[tuple[int, int], _Segment | None] = {}
        others: list[int] = []
        for number, ((file, begin, nbytes), out) in enumerate(zip(pieces, outs, strict=True)):
            place = file, begin // SEGMENT_BYTES
            if place not in known:
                known[place] = self._known(keys.get(file), place[1])
            segment = known[place]
            here = None if segment is None else segment.view(begin, nbytes)
            if here is None:
                others.append(number)
            else:
                out[:nbytes] = here
        return others

    def read_into(self, key: str, begin: int, out: Bytes) -> list[Span]:
        """Copy bytes of an object that are here; return the spans that are not.

        Others may remove pages at any moment: `missing` tells what to fetch, this what was read.
        """
        lacking: list[Span] = []
        for number, first, last in _by_segment(begin, begin + len(out)):
            segment = self._there(key, number)
            if segment is None:
                lacking.append((first, last))
                continue
            absent = segment.missing(first, last)
            lacking += absent
            for low, high in [*absent, (last, last)]:
                # nothing is read of what is absent: on a tmpfs that is full it ends the process
                at = first - number * SEGMENT_BYTES
                out[first - begin : low - begin] = segment.bytes[at : at + low - first]
                first = high
        return lacking

    def write(self, some: Sequence[Kept]) -> None:
        """Keep bytes of objects; raises `StorageFullError` where there is no room for them."""
        try:
            self._make_room(sum(len(data) for _, _, data in some))
        except OSError as error:
            raise self._full(error) from error
        pieces: dict[tuple[str, int], list[tuple[int, memoryview]]] = {}
        for key, begin, data in some:
            for number, first, last in _by_segment(begin, begin + len(data)):
                piece = first, data[first - begin : last - begin]
                pieces.setdefault((key, number), []).append(piece)
        for (key, number), of_segment in pieces.items():
            for again in (True, False):
                try:
                    segment = self._there(key, number) or self._opened(key, number, make=True)
                    segment.write(of_segment)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not again:
                        raise self._full(error) from error
                    self._clear(0)

    def remove(self, key: str, begin: int, end: int) -> None:
        """Remove the segments that bytes of an object lie in, which are not what was written."""
        for number, _, _ in _by_segment(begin, end):
            self._path(key, number).unlink(missing_ok=True)
        self._forget_removed()

    def close(self) -> None:
        """Close all segments."""
        with self._lock:
            self._segments.clear()

    @property
    def _lock(self) -> threading.RLock:
        return self._locks.mine()

    def _path(self, key: str, number: int) -> Path:
        return self.directory / key / f"{number:06d}{SUFFIX}"

    def _known(self, key: str | None, number: int) -> _Segment | None:
        """Return a segment that is open, None unless there is one; no lock, which takes 1 us."""
        segment = None if key is None else self._segments.get((_forks, key, number))
        if segment is None or not segment.is_there():
            return None
        segment.turn = next(self._turns)
        return segment

    def _there(self, key: str, number: int) -> _Segment | None:
        """Return a segment, None unless there is one."""
        if (segment := self._known(key, number)) is not None:  # most often
            return segment
        try:
            return self._opened(key, number, make=False)
        except FileNotFoundError:
            return None

    def _opened(self, key: str, number: int, *, make: bool) -> _Segment:
        """Return a segment; raises `FileNotFoundError` where there is none and none is made."""
        place = (_forks, key, number)
        with self._lock:
            segment = self._segments.get(place)
            if segment is None or not segment.is_there():
                self._segments.pop(place, None)
                self._close_some()
                segment = _Segment(self._path(key, number), number, make=make)
                self._segments[place] = segment
            segment.turn = next(self._turns)
            return segment

    def _close_some(self) -> None:
        """Forget segments used longest ago if many are open; who reads in one has it still."""
        if len(self._segments) >= self._most_open:
            places = sorted(self._segments, key=lambda place: self._segments[place].turn)
            for place in places[: self._most_open // 8]:
                del self._segments[place]

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes
            if self._written < min(LOOK_EVERY_BYTES, max(self._budget_bytes // 8, 1)):
                return
            self._written = 0
        self.directory.mkdir(parents=True, exist_ok=True)
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
                break
            with contextlib.suppress(OSError):
                path.unlink()
                over -= nbytes
        self._forget_removed()

    def _forget_removed(self) -> None:
        with self._lock:  # their bytes are free once nobody has them open
            for place in [place for place, each in self._segments.items() if each.is_removed()]:
                del self._segments[place]

    def _full(self, error: OSError) -> StorageFullError:
        return StorageFullError(
            f"no room for pages in {str(self.directory)!r} ({error.strerror}); give "
            "RemoteOptions(pages=) a directory on a disk with more room"
        )


class _Segment:
    """64 MiB of an object, as far as they are here."""

    def __init__(self, path: Path, number: int, *, make: bool) -> None:
        self.path = path
        self._begin = number * SEGMENT_BYTES
        self._spans = Spans()
        self._records = 0  # bytes of records that were read
        self._lock = threading.Lock()  # of one process: see `Pages._opened`
        self._used = 0.0
        self._log: int | None = None  # opened by the first that writes
        self.turn = 0  # the last one it was used in
        self._file = _file_at(path, make=make)
        mapping = mmap.mmap(self._file.fileno(), SEGMENT_BYTES, access=mmap.ACCESS_READ)
        self.bytes: Bytes = np.frombuffer(mapping, np.uint8)
        self._read_records()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if "_file" in self.__dict__:
            self._file.close()
            if self._log is not None and self._log >= 0:
                close(self._log)  # when the interpreter ends, `os` may be gone before this

    def is_removed(self) -> bool:
        """Whether its file has no name any more."""
        return not os.fstat(self._file.fileno()).st_nlink

    def is_there(self) -> bool:
        """Whether it was not removed meanwhile; tells others that it is in use."""
        now = time.monotonic()
        if now - self._used < USED_S:
            return True
        if self.is_removed():
            return False
        with contextlib.suppress(OSError):
            os.utime(self._file.fileno())
        self._used = now
        return True

    def view(self, begin: int, nbytes: int) -> Bytes | None:
        """Return bytes of the object without a copy, None where it is not known to have them."""
        at = begin - self._begin
        with self._lock:
            if nbytes <= 0 or not self._spans.has(begin, begin + nbytes):
                return None
        return self.bytes[at : at + nbytes]

    def has(self, begin: int, end: int) -> bool:
        """Whether it is known to have bytes of the object."""
        with self._lock:
            return self._spans.has(begin, end)

    def missing(self, begin: int, end: int, *, look: bool = True) -> list[Span]:
        """Return the spans between `begin` and `end` that it has not; looks at new records."""
        with self._lock:
            if self._spans.has(begin, end):
                return []
            if look:
                self._read_records()  # others may have written it
            return self._spans.missing(begin, end)

    def write(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Keep bytes of the object: pieces, and the first byte of each."""
        records = []
        for begin, data in pieces:
            done, at = 0, begin - self._begin
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], at + done)
            digest = xxhash.xxh3_64_intdigest(data)
            records.append((begin, begin + len(data), digest, BOOT))
        self._note(b"".join(RECORD.pack(*each) for each in records))
        with self._lock:
            for begin, end, _, _ in records:
                self._spans.add(begin, end)

    def _note(self, records: bytes) -> None:
        """Append records, whatever others append meanwhile; a removed segment needs none."""
        with self._lock:
            if self._log is None:
                self._log = self._opened_log()
        if self._log >= 0 and os.write(self._log, records) < len(records):
            self.path.unlink(missing_ok=True)  # the next record would not be where it must
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _opened_log(self) -> int:
        """Return a descriptor that appends; -1 for a segment that was removed."""
        mine = self._file.fileno()
        log = DESCRIPTORS / str(mine)
        how = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        try:
            found = os.open(log if log.exists() else self.path, how)
        except FileNotFoundError:  # no such names on this system, and it was removed
            return -1
        if os.path.sameopenfile(found, mine):
            return found
        os.close(found)
        return -1

    def _read_records(self) -> None:
        """Add the spans of new records; its caller holds the lock."""
        size = os.fstat(self._file.fileno()).st_size - SEGMENT_BYTES - self._records
        size -= size % RECORD.size
        if size <= 0:
            return
        data = os.pread(self._file.fileno(), size, SEGMENT_BYTES + self._records)
        data = data[: len(data) - len(data) % RECORD.size]
        self._records += len(data)
        for begin, end, digest, boot in RECORD.iter_unpack(data):
            if self._counts(begin, end, digest, boot):
                self._spans.add(begin, end)

    def _counts(self, begin: int, end: int, digest: int, boot: int) -> bool:
        if not self._begin <= begin <= end <= self._begin + SEGMENT_BYTES:
            return False
        if boot == BOOT:
            return True
        data = self.bytes[begin - self._begin : end - self._begin]
        return xxhash.xxh3_64_intdigest(data.data) == digest


def _file_at(path: Path, *, make: bool) -> FileIO:
    """Open a segment, made anew where it has not the size of one.

    Raises `FileNotFoundError` where there is none and none is made.
    """
    for _ in range(TRIES if make else 1):
        with contextlib.suppress(FileNotFoundError):  # others have removed it meanwhile
            if make:
                _make(path)
            file = path.open("r+b", buffering=0)
            records = os.fstat(file.fileno()).st_size - SEGMENT_BYTES
            if records >= 0 and records % RECORD.size == 0:
                return file
            file.close()
            path.unlink()
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _make(path: Path) -> None:
    """Make an empty segment unless it is there; others never see it before it has its size."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try:
        os.ftruncate(descriptor, SEGMENT_BYTES)
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.close(descriptor)
        name.unlink(missing_ok=True)


def _by_segment(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cut bytes at the borders of segments: number, first byte, the one after the last."""
    for number in range(begin // SEGMENT_BYTES, -(-end // SEGMENT_BYTES) if begin < end else 0):
        first = max(begin, number * SEGMENT_BYTES)
        yield number, first, min(end, (number + 1) * SEGMENT_BYTES)
