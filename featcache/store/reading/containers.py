"""Bytes of extents without any format's library: containers are mapped, or read with pread."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from featcache.container_files import read_at
from featcache.errors import CacheError, ClosedError, CorruptCacheError, FeatcacheError
from featcache.interface import Bytes
from featcache.store.format.disk_errors import read_remedy
from featcache.store.format.files import open_within, remedy
from featcache.store.format.index import ContainerColumns
from featcache.store.reading.adopted_files import AdoptedFiles

Piece = tuple[int, int, int]  # container, offset, nbytes
MAX_OPEN = 4096  # a process may have 65,530 mappings
# each file is open twice (Python's mapping opens it again); often no more than 1,024 may be
SHARE_OPEN = 4
FILES_OF_WINDOWS = 512
LOOK_AT = 4
# Linux
NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None) if hasattr(os, "preadv") else None


class Containers:
    """Gives the bytes of a cache's container files; safe to share between threads and over fork.

    Args:
        root: the directory that paths are relative to.
        path_of: gives the POSIX path of a container, by its number.
        sizes: the bytes that each file must have; a mapped file that is shorter would kill the
            process.
        mapped: True maps files into memory, False reads with pread (better on network file systems,
            where a mapped file that goes away kills the process).
        adopted: those of them that lie elsewhere.
    """

    def __init__(
        self,
        root: Path,
        path_of: Callable[[int], str],
        sizes: Sequence[int],
        mapped: bool = True,
        adopted: AdoptedFiles | None = None,
    ) -> None:
        self._root = root
        self.adopted = adopted
        self._path_of = path_of
        self._sizes = sizes
        self._mapped = mapped
        self._open: dict[int, _File] = {}
        self._missed = False
        self._closed = False
        self._most_open = min(MAX_OPEN, _open_files() // SHARE_OPEN)

    @classmethod
    def of(
        cls,
        root: Path,
        columns: ContainerColumns,
        mapped: bool = True,
        adopted: AdoptedFiles | None = None,
    ) -> Containers:
        """Give the bytes of the containers that an index names."""
        return cls(root, columns.path, cast(Sequence[int], columns.sizes.data), mapped, adopted)

    def mapped(self, container: int) -> memoryview | None:
        """Return the read-only bytes of a whole container; None unless it is mapped."""
        file = self._open.get(container) or self._start(container)
        file.used = True
        return file.memory

    def view(self, container: int, offset: int, nbytes: int) -> Bytes:
        """Return read-only bytes, without a copy where the container is mapped."""
        file = self._file(container)
        self.check(container, offset, nbytes)
        if file.mapped is not None:
            return file.mapped[offset : offset + nbytes]
        out = np.empty(nbytes, np.uint8)
        file.read_into(offset, out)
        return out

    def read_into(self, container: int, offset: int, out: Bytes) -> None:
        """Copy bytes straight into the contiguous `out`."""
        file = self._file(container)
        self.check(container, offset, len(out))
        if file.mapped is not None:
            out[:] = file.mapped[offset : offset + len(out)]
        else:
            file.read_into(offset, out)

    def read_many(self, pieces: Sequence[Piece], outs: Iterable[Bytes]) -> None:
        """Copy pieces, each to the front of one of `outs`; prefetches them first."""
        self.prefetch(pieces)
        for out, (container, offset, nbytes) in zip(outs, pieces, strict=True):
            file = self._file(container)
            if file.mapped is None or not 0 <= offset <= len(file.mapped) - nbytes:
                self.read_into(container, offset, out[:nbytes])
            else:
                out[:nbytes] = file.mapped[offset : offset + nbytes]

    def prefetch(self, pieces: Sequence[Piece]) -> None:
        """Have the system start to read bytes that are not in memory, without waiting for them.

        To look whether bytes are in memory takes 1 us a piece, to ask for them 4 us even where they
        are: so while the last look found nothing missing, only a few pieces are looked at.
        """
        looked_at = pieces if self._missed else pieces[:: max(len(pieces) // LOOK_AT, 1)]
        self._missed = not all(
            self._file(piece[0]).has(piece[1] + piece[2] // 2) for piece in looked_at
        )
        if self._missed:
            for container, offset, nbytes in pieces:
                self._file(container).start_reading(offset, nbytes)

    def check(self, container: int, offset: int, nbytes: int) -> None:
        """Raise `CorruptCacheError` for bytes that a container does not have."""
        if not 0 <= container < len(self._sizes):
            raise CorruptCacheError(
                f"the index of {str(self._root)!r} is damaged: it names a container {container}"
            )
        if not 0 <= offset <= offset + nbytes <= self._sizes[container]:
            raise CorruptCacheError(
                f"container {self._path(container)!r} has no bytes {offset} to {offset + nbytes}"
            )

    def let_go(self) -> None:
        """Close all files until they are needed again; views that are still held stay valid."""
        self._open.clear()

    def close(self) -> None:
        """Close all files for good."""
        self._closed = True
        self.let_go()

    def _file(self, container: int) -> _File:
        file = self._open.get(container) or self._start(container)
        file.used = True
        return file

    def _start(self, container: int) -> _File:
        if self._closed:
            raise ClosedError(f"cache {str(self._root)!r} is closed; open it again")
        # no lock: two threads may open a file twice at worst, but a process forked meanwhile would
        # wait for ever
        self.check(container, 0, 0)
        try:
            file = self._open_file(container)
        except OSError as error:
            if isinstance(error, FeatcacheError):
                raise
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise CacheError(
                    f"container {self._path(container)!r} cannot be read: {read_remedy(error)}"
                ) from error
            self._open.clear()  # others have opened too many files: make do with one
            file = self._open_file(container)
        self._make_room()
        return self._open.setdefault(container, file)

    def _make_room(self) -> None:
        """Let go of files not used since the last time; of the oldest ones, if all were."""
        if len(self._open) < self._most_open:
            return
        for container, file in list(self._open.items()):
            if not file.used:
                self._open.pop(container, None)
            file.used = False
        for oldest in list(self._open)[: max(len(self._open) + 1 - self._most_open, 0)]:
            self._open.pop(oldest, None)

    def _path(self, container: int) -> str:
        if self.adopted is not None and container in self.adopted:
            return self.adopted.path(container)
        return f"{self._root}/{self._path_of(container)}"

    def _descriptor(self, container: int) -> int:
        if self.adopted is not None and container in self.adopted:
            return self.adopted.open(container)
        try:
            return open_within(self._root, self._path_of(container))
        except FileNotFoundError as error:
            raise CorruptCacheError(
                f"container {self._path(container)!r} is not there; was the cache overwritten or "
                "moved while it was open? open it again"
            ) from error

    def _open_file(self, container: int) -> _File:
        path, size = self._path(container), self._sizes[container]
        descriptor = self._descriptor(container)
        file = _File(descriptor, path)  # closes the descriptor when it is dropped
        found = os.fstat(descriptor).st_size
        if found != size:
            raise CorruptCacheError(
                f"container {path!r} has {found} bytes, not the {size} that were written; "
                f"{remedy(self._root, self._path_of(container))}"
            )
        if self._mapped and size:
            file.memory = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
            file.mapped = np.frombuffer(file.memory, np.uint8)
        return file


class _File:
    """An open file, mapped or read with pread, which threads and forked processes may share."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.mapped: Bytes | None = None
        self.memory: memoryview | None = None  # the same: arrays are made of it in less time
        self.used = True
        self._descriptor = descriptor
        self._path = path
        self._can_tell = NO_WAIT is not None

    def read_into(self, offset: int, out: Bytes) -> None:
        rest = out.data
        while rest:
            try:
                count = read_at(self._descriptor, rest, offset)
            except OSError as error:
                raise CacheError(
                    f"container {self._path!r} cannot be read: {read_remedy(error)}"
                ) from error
            if count == 0:
                raise CorruptCacheError(
                    f"container {self._path!r} ends before byte {offset + len(rest)}"
                )
            rest = rest[count:]
            offset += count

    def has(self, offset: int) -> bool:
        """Tell whether a byte is in memory; True where the file system cannot tell."""
        if self._can_tell:
            try:
                os.preadv(self._descriptor, [bytearray(1)], offset, cast(int, NO_WAIT))
            except BlockingIOError:
                return False
            except OSError:  # such as tmpfs, whose files always are in memory
                self._can_tell = False
        return True

    def start_reading(self, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):  # not on macOS, nor Windows
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)  # when the interpreter ends, `os` may be gone before this


def _open_files() -> int:
    """Return how many files a process may have open."""
    try:
        import resource
    except ImportError:  # Windows
        return FILES_OF_WINDOWS
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
