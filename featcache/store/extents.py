"""From extents to bytes: containers are mapped into memory, or read with pread, without any format's library."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError

Bytes = NDArray[np.uint8]
MAX_OPEN = 4096  # a process may have 65,530 mappings
SHARE_OPEN = 8  # a mapping keeps a file open in Python, and a process may often open no more than 1,024


class Containers:
    """Gives the bytes of a cache's container files; safe to share between threads and over fork.

    Args:
        root: the directory that `paths` are relative to.
        paths: one POSIX path a container.
        sizes: the bytes that each file must have; a mapped file that is shorter would kill the process.
        mapped: True maps files into memory, False reads with pread (better on network file systems, where a mapped
            file that goes away kills the process).
    """

    def __init__(self, root: Path, paths: Sequence[str], sizes: Sequence[int], mapped: bool = True) -> None:
        self._root = root
        self._paths = paths
        self._sizes = sizes
        self._mapped = mapped
        self._open: dict[int, Bytes | _File] = {}
        self._most_open = min(MAX_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE_OPEN)

    def mapped(self, container: int) -> Bytes | None:
        """Return the read-only bytes of a whole container; None unless it is mapped."""
        source = self._open.get(container)
        if source is None:
            source = self._start(container)
        return None if isinstance(source, _File) else source

    def view(self, container: int, offset: int, nbytes: int) -> Bytes:
        """Return read-only bytes, without a copy where the container is mapped."""
        source = self._open.get(container)
        if source is None:
            source = self._start(container)
        self.check(container, offset, nbytes)
        if isinstance(source, _File):
            out = np.empty(nbytes, np.uint8)
            source.read_into(offset, out)
            return out
        return source[offset : offset + nbytes]

    def read_into(self, container: int, offset: int, out: Bytes) -> None:
        """Copy bytes straight into the contiguous `out`."""
        source = self._open.get(container)
        if source is None:
            source = self._start(container)
        self.check(container, offset, len(out))
        if isinstance(source, _File):
            source.read_into(offset, out)
        else:
            out[:] = source[offset : offset + len(out)]

    def check(self, container: int, offset: int, nbytes: int) -> None:
        """Raise `CorruptCacheError` for bytes that a container does not have."""
        if not 0 <= container < len(self._paths):
            raise CorruptCacheError(f"the index of {str(self._root)!r} is damaged: it names a container {container}")
        if not 0 <= offset <= offset + nbytes <= self._sizes[container]:
            path = str(self._root / self._paths[container])
            raise CorruptCacheError(f"container {path!r} has no bytes {offset} to {offset + nbytes}")

    def close(self) -> None:
        """Let go of all files; views that are still held stay valid."""
        self._open.clear()

    def _start(self, container: int) -> Bytes | _File:
        # no lock: two threads may open a file twice at worst, but a process forked meanwhile would wait for ever
        self.check(container, 0, 0)
        path, size = self._root / self._paths[container], self._sizes[container]
        try:
            source = self._open_file(path, size)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._open.clear()  # others have opened too many files: make do with one
            source = self._open_file(path, size)
        for oldest in list(self._open)[: max(len(self._open) + 1 - self._most_open, 0)]:
            self._open.pop(oldest, None)
        return self._open.setdefault(container, source)

    def _open_file(self, path: Path, size: int) -> Bytes | _File:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise CorruptCacheError(
                f"container {str(path)!r} is not there; was the cache overwritten or moved while it was open? "
                "open it again"
            ) from error
        source = _File(descriptor, path)  # closes the descriptor when it is dropped
        found = os.fstat(descriptor).st_size
        if found != size:
            raise CorruptCacheError(f"container {str(path)!r} has {found} bytes, not the {size} that were written")
        if not self._mapped or size == 0:
            return source
        return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)


class _File:
    """A file that is read with pread, which knows no position and so may be shared between threads and forks."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    def read_into(self, offset: int, out: Bytes) -> None:
        rest = out.data
        while rest:
            count = os.preadv(self._descriptor, [rest], offset)
            if count == 0:
                raise CorruptCacheError(f"container {str(self._path)!r} ends before byte {offset + len(rest)}")
            rest = rest[count:]
            offset += count

    def __del__(self) -> None:
        os.close(self._descriptor)
