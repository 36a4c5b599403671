"""Places of a batch in memory, and copies of many pieces of mapped files into them in one call.

NumPy lets go of the interpreter's lock for each array that it copies, and takes it again: beside a
loop that is busy in Python, a thread waits up to 5 ms for it each time. The system copies all
pieces of a batch without the lock, and tells of a page that cannot be read, for which a mapped file
would end the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from featcache.interface import Bytes, Ints

AT_ONCE = 1024  # pieces of a call, as Linux has it
SOON_ZERO_BYTES = 1 << 20  # that are filled while others wait for the interpreter's lock
_REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES)  # as some sandboxes do
_CopyPieces = Callable[[int, int, int, int, int, int], int]
_refused = False


@dataclass(frozen=True, slots=True)
class Places:
    """Places in contiguous memory, `begins[i]` to before `ends[i]` in bytes, one a row."""

    data: Bytes
    begins: Ints
    ends: Ints

    @classmethod
    def between(cls, data: Bytes, ends: Ints) -> Places:
        """Return places one after the other, `ends[i]` to before `ends[i + 1]`."""
        return cls(data, ends[:-1], ends[1:])

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Bytes]:
        for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True):
            yield self.data[begin:end]

    def some(self, rows: Ints | slice) -> Places:
        """Return the places of some rows."""
        return Places(self.data, self.begins[rows], self.ends[rows])

    def clear_behind(self, nbytes: Ints) -> None:
        """Fill each place with zeros behind its first bytes."""
        begins, memset = self.begins + nbytes, _memset() if self._hold(nbytes) else None
        short = np.flatnonzero(begins < self.ends)
        address = self.data.ctypes.data
        for begin, end in zip(begins[short].tolist(), self.ends[short].tolist(), strict=True):
            if memset is None or end - begin > SOON_ZERO_BYTES:
                self.data[begin:end] = 0
            else:
                memset(address + begin, 0, end - begin)

    def fill(self, addresses: Sequence[int], nbytes: Sequence[int]) -> bool:
        """Copy mapped memory to the front of each place; False where the system does not.

        Raises `OSError` for memory that cannot be read: its file was cut, or its disk fails.
        """
        copy = None if _refused else _process_vm_readv()
        if copy is None or not self._hold(np.array(nbytes, np.int64)):
            return False
        pieces = np.empty((2, len(self), 2), np.uint64)
        pieces[0, :, 0] = self.begins + self.data.ctypes.data
        pieces[1, :, 0] = addresses
        pieces[:, :, 1] = nbytes
        for begin in range(0, len(self), AT_ONCE):
            if not _copied(copy, pieces[:, begin : begin + AT_ONCE]):
                return False
        return True

    def _hold(self, nbytes: Ints) -> bool:
        """Whether the places lie in the memory, and so many bytes in each: else NumPy tells."""
        ends, most = self.begins + nbytes, len(self.data)
        return bool(((self.begins >= 0) & (nbytes >= 0) & (ends <= self.ends)).all()) and bool(
            (self.ends <= most).all()
        )


def _copied(copy: _CopyPieces, pieces: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> bool:
    """Copy pieces, (to and from, pieces, address and bytes); False where that is refused."""
    global _refused
    to, source = pieces
    copied = copy(os.getpid(), to.ctypes.data, len(to), source.ctypes.data, len(source), 0)
    if copied == to[:, 1].sum():
        return True
    _refused = copied < 0 and ctypes.get_errno() in _REFUSED
    if _refused:
        return False
    raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


@cache
def _process_vm_readv() -> _CopyPieces | None:
    """Return the call that copies pieces of memory of a process, here of this one."""
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    call.restype = ctypes.c_ssize_t
    copy: _CopyPieces = call
    return copy


@cache
def _memset() -> Callable[[int, int, int], object] | None:
    """Return the call that fills memory and keeps the interpreter's lock meanwhile."""
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.PyDLL(None), "memset", None)
    if call is None:
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    call.restype = None
    memset: Callable[[int, int, int], object] = call
    return memset
