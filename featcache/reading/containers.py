"""Bytes of extents, mapped or read without any format's library; changes of adopted files.

Those of adopted parts lie elsewhere (`roots`), and are looked at again while they are read; those
in an object store are asked for.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import get_ident
from typing import cast

import numpy as np

from featcache.container_files import read_at
from featcache.errors import CacheError, ClosedError, CorruptCacheError, FeatcacheError
from featcache.format.files import open_within, read_remedy, remedy
from featcache.format.index import ContainerColumns
from featcache.interface import Bytes
from featcache.reading.roots import AdoptedFiles, State, state_now
from featcache.remote import Counts, RemoteFiles, requests_to

Piece = tuple[int, int, int]  # container, offset, nbytes
Wanted = dict[RemoteFiles, list[Piece]]  # in object stores, to be asked for together
MAX_OPEN = 4096  # a process may have 65,530 mappings
# each file is open twice (Python's mapping opens it again); often no more than 1,024 may be
SHARE_OPEN = 4
FILES_OF_WINDOWS = 512
# others may change an adopted file that is open: it is looked at again when it is read a second
# later, or sooner: a look takes 3 us, which is 3 % of the pause
LOOK_AGAIN_S = 1.0
PAUSE_S = 1e-4
PAUSE = 50  # times a look that takes longer than the pause, as on network file systems
LOOK_AT = 4
# Linux
NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None) if hasattr(os, "preadv") else None


class Containers:
    """Gives the bytes of a cache's container files; safe to share between threads and over fork.

    Args:
        root: the directory that paths are relative to.
        columns: the containers, as an index names them. Each file must have its size; a mapped file
            that is shorter would kill the process.
        mapped: True maps files into memory, False reads with pread (better on network file systems,
            where a mapped file that goes away kills the process).
        adopted: those of them that lie elsewhere. An open one that has changed since is an error
            within a second of its next read.
        check_reads: look at these at every read.
        remote: their bytes, where all lie in an object store.

    Attributes:
        is_remote: whether any lie in an object store.
    """

    def __init__(
        self,
        root: Path,
        columns: ContainerColumns,
        mapped: bool = True,
        adopted: AdoptedFiles | None = None,
        check_reads: bool = False,
        remote: RemoteFiles | None = None,
    ) -> None:
        self._root = root
        self._remote = remote
        self.adopted = adopted
        self.is_remote = remote is not None or (adopted is not None and adopted.any_remote)
        self._path_of = columns.path
        self._sizes = cast(Sequence[int], columns.sizes.data)
        self._mapped = mapped
        self._open: dict[int, _File | _RemoteFile] = {}
        # of a cache's own files nothing is asked: every microsecond of a read counts
        self._held: Callable[[int], _File | _RemoteFile | None] = self._open.get
        if adopted is not None:
            self._held = _Unchanged(self._open, 0.0 if check_reads else LOOK_AGAIN_S)
        self._missed = False
        self._at: dict[int, Piece] = {}  # what each thread is reading, by its ident
        self._closed = False
        self._most_open = min(MAX_OPEN, _open_files() // SHARE_OPEN)

    def mapped(self, container: int) -> memoryview | None:
        """Return the read-only bytes of a whole container; None unless it is mapped."""
        file = self._held(container) or self._start(container)
        file.used = True
        return file.memory

    def here(self, container: int, offset: int, nbytes: int) -> Bytes | None:
        """Return read-only bytes without a copy, None where that cannot be."""
        return self._file_of((container, offset, nbytes)).here(offset, nbytes)

    def view(self, container: int, offset: int, nbytes: int) -> Bytes:
        """Return read-only bytes, without a copy where the container is mapped."""
        file = self._file_of((container, offset, nbytes))
        if (here := file.here(offset, nbytes)) is not None:
            return here
        out = np.empty(nbytes, np.uint8)
        file.read_into(offset, out)
        return out

    def read_into(self, container: int, offset: int, out: Bytes) -> None:
        """Copy bytes straight into the contiguous `out`."""
        file = self._file(container)
        self.check(container, offset, len(out))
        if (mapped := file.mapped) is not None:
            out[:] = mapped[offset : offset + len(out)]
        else:
            file.read_into(offset, out)

    def read_many(self, pieces: Sequence[Piece], outs: Iterable[Bytes]) -> None:
        """Copy pieces, each to the front of one of `outs`; prefetches them first."""
        self.at(pieces)
        if (remote := self._remote_of_all(pieces)) is not None:
            outs = list(outs)
            if others := remote.read_here(pieces, outs):
                some = self._checked(pieces[number] for number in others)
                remote.read_many(some, [outs[number] for number in others])
            return
        self.prefetch(pieces)
        me, last, mapped = get_ident(), None, None
        for out, piece in zip(outs, pieces, strict=True):
            self._at[me] = piece
            container, offset, nbytes = piece
            if container != last or self.adopted is not None:  # which may change meanwhile
                last, mapped = container, self._file(container).mapped
            if mapped is None or not 0 <= offset <= len(mapped) - nbytes:
                self.read_into(container, offset, out[:nbytes])
            else:
                out[:nbytes] = mapped[offset : offset + nbytes]

    @property
    def lie_afar(self) -> bool:
        """Whether some of them lie in an object store, and what is read of these not all here."""
        if self._remote is None:
            return self.adopted is not None and self.adopted.lie_afar
        return not self._remote.is_quiet

    @property
    def counts(self) -> list[Counts]:
        """Sums over the requests to each store that any of them lie in, in this process."""
        if self._remote is not None:
            return [requests_to(self._remote.place).counts]
        places = () if self.adopted is None else self.adopted.places
        return [requests_to(place).counts for place in places]

    def want(self, pieces: Iterable[Piece], wanted: Wanted) -> list[Piece]:
        """Add pieces that lie in object stores to what is wanted of these; return the others."""
        if self._remote is not None:
            wanted.setdefault(self._remote, []).extend(self._checked(pieces))
            return []
        if not self.is_remote:
            return list(pieces)
        here: list[Piece] = []
        for piece in self._checked(pieces):
            files = self.remote_of(piece[0])
            (here if files is None else wanted.setdefault(files, [])).append(piece)
        return here

    def at(self, pieces: Sequence[Piece]) -> None:
        """Note that this thread reads some pieces; none: that it is done."""
        if pieces:
            self._at[get_ident()] = pieces[0]
        else:
            self._at.pop(get_ident(), None)

    def being_read(self, thread: int) -> str | None:
        """Name the file and the bytes that a thread reads for a batch; None for nothing."""
        piece = self._at.get(thread)
        if piece is None:
            return None
        container, offset, nbytes = piece
        return f"{self._path(container)!r}, bytes {offset} to {offset + nbytes}"

    def prefetch(self, pieces: Sequence[Piece]) -> None:
        """Ask the system to read bytes that are not in memory, without waiting for them.

        To look whether bytes are in memory takes 1 us a piece, to ask for them 4 us even where they
        are: so while the last look found nothing missing, only a few pieces are looked at.
        """
        if self.is_remote:
            wanted: Wanted = {}
            pieces = self.want(pieces, wanted)
            for files, some in wanted.items():
                files.prefetch(some)
        looked_at = pieces if self._missed else pieces[:: max(len(pieces) // LOOK_AT, 1)]
        self._missed = not all(
            self._file_of(piece).has(piece[1] + piece[2] // 2) for piece in looked_at
        )
        if self._missed:
            for piece in pieces:
                self._file_of(piece).start_reading(*piece[1:])

    def _checked(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return pieces; raise `CorruptCacheError` for one that a container does not have."""
        found = list(pieces)
        for piece in found:
            self.check(*piece)
        return found

    def remote_of(self, container: int) -> RemoteFiles | None:
        """Return the files in an object store that a container is one of; None: it lies here."""
        if self._remote is not None or self.adopted is None:
            return self._remote
        return self.adopted.remote(container)

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Remove local copies of bytes that are not what was written, where they are copies."""
        for container, offset, nbytes in pieces:
            if (remote := self.remote_of(container)) is not None:
                remote.forget(container, offset, nbytes)

    def _remote_of_all(self, pieces: Sequence[Piece]) -> RemoteFiles | None:
        """Return the files in an object store that all pieces are of; None where some are not."""
        if self._remote is not None or not self.is_remote:
            return self._remote
        numbers = {container for container, _, _ in pieces}
        found = {
            self.remote_of(number) for number, _, _ in self._checked((n, 0, 0) for n in numbers)
        }
        return found.pop() if len(found) == 1 else None

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

    def _file(self, container: int) -> _File | _RemoteFile:
        file = self._held(container) or self._start(container)
        file.used = True
        return file

    def _file_of(self, piece: Piece) -> _File | _RemoteFile:
        """Return the file of a piece that it has: the system takes no offset beyond 2^63."""
        self.check(*piece)
        return self._file(piece[0])

    def _start(self, container: int) -> _File | _RemoteFile:
        if self._closed:
            raise ClosedError(f"cache {str(self._root)!r} is closed; open it again")
        # no lock: two threads may open a file twice at worst, but a process forked meanwhile would
        # wait for ever
        self.check(container, 0, 0)
        if (remote := self.remote_of(container)) is not None:
            return self._open.setdefault(container, _RemoteFile(remote, container))
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
        """Release files not used since the last time; of the oldest ones, if all were."""
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
        try:
            return open_within(self._root, self._path_of(container))
        except FileNotFoundError as error:
            raise CorruptCacheError(
                f"container {self._path(container)!r} is missing; was the cache overwritten or "
                "moved while it was open? open it again; else "
                f"{remedy(self._root, self._path_of(container))}"
            ) from error

    def check_file(self, container: int) -> None:
        """Raise `CorruptCacheError` unless a container is there, in the size that was written.

        An adopted one must be as it was, too.
        """
        if (remote := self.remote_of(container)) is not None:
            remote.check(container)
        else:
            self._open_file(container)  # which closes itself

    def _open_file(self, container: int) -> _File:
        path, size = self._path(container), self._sizes[container]
        state: State | None = None
        if self.adopted is not None and container in self.adopted:
            descriptor, state = self.adopted.open(container)
        else:
            descriptor = self._descriptor(container)
        file = _File(descriptor, path, state)  # closes the descriptor when it is dropped
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

    def __init__(self, descriptor: int, path: str, state: State | None) -> None:
        self.mapped: Bytes | None = None
        self.memory: memoryview | None = None  # the same: arrays are made of it in less time
        self.used = True
        self.state = state  # of an adopted file, when it was opened
        self.looked_at = time.monotonic()
        self._descriptor = descriptor
        self.path = path
        self._can_tell = NO_WAIT is not None

    def here(self, offset: int, nbytes: int) -> Bytes | None:
        """Return bytes without a copy, None where that cannot be."""
        return None if self.mapped is None else self.mapped[offset : offset + nbytes]

    def read_into(self, offset: int, out: Bytes) -> None:
        rest = out.data
        while rest:
            try:
                count = read_at(self._descriptor, rest, offset)
            except OSError as error:
                raise CacheError(
                    f"container {self.path!r} cannot be read: {read_remedy(error)}"
                ) from error
            if count == 0:
                raise CorruptCacheError(
                    f"container {self.path!r} ends before byte {offset + len(rest)}"
                )
            rest = rest[count:]
            offset += count

    def has(self, offset: int) -> bool:
        """Whether a byte is in memory; True where the file system cannot tell."""
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


class _RemoteFile:
    """A container in an object store, read by ranges."""

    mapped: Bytes | None = None
    memory: memoryview | None = None
    state: State | None = None

    def __init__(self, files: RemoteFiles, number: int) -> None:
        self.used = True
        self._files, self._number = files, number

    def here(self, offset: int, nbytes: int) -> Bytes | None:
        return self._files.here(self._number, offset, nbytes)

    def read_into(self, offset: int, out: Bytes) -> None:
        self._files.read_into(self._number, offset, out)

    def has(self, offset: int) -> bool:
        return True  # what is lacking is asked for together, not file by file

    def start_reading(self, offset: int, nbytes: int) -> None:
        pass


class _Unchanged:
    """Gives files that are open, of the adopted ones those that are as they were when opened.

    Args:
        files: those that are open.
        seconds: for so long at most an adopted file is not looked at again while it is read.
    """

    def __init__(self, files: dict[int, _File | _RemoteFile], seconds: float) -> None:
        self._files = files
        self._seconds = seconds
        self._pause_ends = 0.0

    def __call__(self, container: int) -> _File | _RemoteFile | None:
        """Return an open file; None where it is to be opened, which tells what has changed."""
        file = self._files.get(container)
        if file is None or isinstance(file, _RemoteFile) or file.state is None:
            return file
        begin = time.monotonic()
        if begin < self._pause_ends and begin - file.looked_at < self._seconds:
            return file
        if state_now(file.path) != file.state:
            self._files.pop(container, None)
            return None
        file.looked_at = time.monotonic()
        took = file.looked_at - begin
        self._pause_ends = file.looked_at + (PAUSE_S if took < PAUSE_S else PAUSE * took)
        return file


def _open_files() -> int:
    """Return how many files a process may have open."""
    try:
        import resource
    except ImportError:  # Windows
        return FILES_OF_WINDOWS
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
