"""A sealed file of columns: any number of arrays of numbers, mapped at once, with checksums.

On disk::

    columns     little-endian numbers, each column at a multiple of 64 bytes, zeros up to the next
    footer      sealed JSON: {"columns": {name: [dtype, length, offset, digest], ...}}
    8 bytes     u64, where the footer begins

The digest of a column is the xxh3-64 of all bytes from its offset up to the next column, or the
footer. Whoever names the file keeps the xxh3-64 of the footer and the 8 bytes behind it, and so
knows each byte of the file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.container_files import bytes_at, sync_file, write_all
from featcache.errors import CorruptCacheError
from featcache.store.format.checked import NOT_AS_WRITTEN, natural
from featcache.store.format.files import digest, open_within, remedy
from featcache.store.format.sealed_json import pack_json, unpack_json

Number = TypeVar("Number", bound=np.generic)
ALIGNMENT = 64
# bytes at the end that are read at once, in the hope that they hold the footer
FOOTER_GUESS = 1 << 16
MOST_FOOTER_BYTES = 64 << 20
# files up to this are read as a whole: a mapping takes one of the files that a process may open
SMALL_BYTES = 1 << 16
DTYPE = re.compile(r"[|<][biuf][1248]")  # of a column; of those that a reader does not know, too


def save_columns(path: Path, columns: Iterable[tuple[str, NDArray[Any]]]) -> str:
    """Write a new file of columns durably, and return its digest; sync its directory afterwards.

    The columns are taken one by one, so that they need not be in memory together. Digests are of
    what was in memory, and the size on disk is compared: a write that went wrong unseen is an error
    here.
    """
    with path.open("xb", buffering=0) as file:
        named: dict[str, tuple[str, int, int, str]] = {}
        end = 0
        for name, column in columns:
            data = np.ascontiguousarray(column, column.dtype.newbyteorder("<"))
            filling = bytes(-data.nbytes % ALIGNMENT)
            state = xxhash.xxh3_64()
            for piece in (data.reshape(-1).view(np.uint8).data, filling):
                state.update(piece)
                write_all(file, piece)
            named[name] = (data.dtype.str, len(data), end, state.hexdigest())
            end += data.nbytes + len(filling)
        footer = pack_json({"columns": named}) + end.to_bytes(8, "little")
        write_all(file, footer)
        sync_file(file)
        size = os.fstat(file.fileno()).st_size
        if size != end + len(footer):
            what = f"it has {size} bytes after {end + len(footer)} were written"
            raise OSError(errno.EIO, what, str(path))
    return digest(footer)


class ColumnFile:
    """An open file of columns: `column` maps or reads one of them, valid also once it is closed.

    Args:
        root: the cache directory.
        path: the file, relative to it.
        mapped: map the file into memory; False reads each column when it is asked for.
        expected: the digest of the footer; None takes any footer.

    Raises `CorruptCacheError` for what `save_columns` did not write, `FileNotFoundError` without a
    file.
    """

    def __init__(
        self, root: Path, path: str, *, mapped: bool = True, expected: str | None = None
    ) -> None:
        self.path = root / path
        self._remedy = remedy(root, path)
        self._file = open(open_within(root, path), "rb", buffering=0)  # noqa: PTH123, SIM115
        try:
            descriptor = self._file.fileno()
            self._size = os.fstat(descriptor).st_size
            footer = self._footer()
            if expected is not None and digest(footer) != expected:
                raise self._damaged("its checksum does not match")
            self._columns = self._read_footer(footer)
            self._mapping: mmap.mmap | bytes | None = None
            if mapped and self._size <= SMALL_BYTES:
                self._mapping = self._read(0, self._size)
            elif mapped:
                with contextlib.suppress(OSError):  # too many mappings or open files: read it then
                    self._mapping = mmap.mmap(descriptor, self._size, access=mmap.ACCESS_READ)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ColumnFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def until_read(self, *, later: bool) -> AbstractContextManager[object]:
        """Close the file after a block; if columns are read from it `later`, once it is dropped."""
        if later and self._mapping is None:
            weakref.finalize(self, self._file.close)
            return contextlib.nullcontext()
        return self

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each column, by name."""
        return {name: kind for name, (kind, *_) in self._columns.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str, dtype: type[Number]) -> NDArray[Number]:
        """Return a column, read-only; raises `CorruptCacheError` without one of that dtype."""
        if name not in self:
            raise self._damaged(f"it has no column {name!r}")
        kind, length, offset, _, _ = self._columns[name]
        if np.dtype(kind) != np.dtype(dtype):
            raise self._damaged(f"column {name!r} is of {kind}, not of {np.dtype(dtype)}")
        if self._mapping is not None:
            return np.frombuffer(self._mapping, dtype, length, offset)
        return np.frombuffer(self._read(offset, length * np.dtype(dtype).itemsize), dtype)

    def digest(self, name: str) -> str:
        """Return length and digest of a column, as its footer has them."""
        _, length, _, _, expected = self._columns[name]
        return f"{length}:{expected} "

    def damage(self, names: Iterable[str] | None = None) -> list[str]:
        """Compare all columns with their digests, or some; return a sentence for each that differs.

        The file must not be closed.
        """
        found = []
        for name in self._columns if names is None else names:
            _, _, begin, end, expected = self._columns[name]
            state = xxhash.xxh3_64()
            for start in range(begin, end, 1 << 20):
                state.update(self._read(start, min(1 << 20, end - start)))
            if state.hexdigest() != expected:
                found.append(str(self._damaged(f"the checksum of column {name!r} does not match")))
        return found

    def _footer(self) -> bytes:
        guess = self._read(max(self._size - FOOTER_GUESS, 0), min(self._size, FOOTER_GUESS))
        self._end = int.from_bytes(guess[-8:], "little")
        length = self._size - self._end
        if self._size < 8 or not 8 <= length <= min(self._size, MOST_FOOTER_BYTES):
            raise self._damaged("it has no footer")
        return guess[-length:] if length <= len(guess) else self._read(self._end, length)

    def _read_footer(self, footer: bytes) -> dict[str, tuple[str, int, int, int, str]]:
        """Return of each column the dtype, the length, where it begins and ends, and the digest."""
        content = cast(Any, unpack_json(footer[:-8], repr(str(self.path))))
        columns = {}
        end = 0
        try:
            for name, (kind, length, offset, expected) in content["columns"].items():
                if not DTYPE.fullmatch(kind) or natural(offset) != end:
                    raise ValueError(f"column {name!r} is {kind!r} at {offset}")
                end = offset + natural(length) * np.dtype(kind).itemsize
                end += -end % ALIGNMENT
                columns[name] = (str(kind), length, offset, end, str(expected))
            if end != self._end:
                raise ValueError(f"columns end at {end}")
        except NOT_AS_WRITTEN as error:
            raise self._damaged(str(error)) from error
        return columns

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = bytes_at(self._file.fileno(), nbytes, offset)
        if len(data) < nbytes:
            raise self._damaged(f"it ends before byte {offset + nbytes}")
        return data

    def _damaged(self, what: str) -> CorruptCacheError:
        return CorruptCacheError(f"{str(self.path)!r} is damaged: {what}; {self._remedy}")
