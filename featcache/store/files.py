"""Durable files: what is written here is either whole on disk or not there, also after a power cut."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.interface import Array

Number = TypeVar("Number", bound=np.generic)
SMALL_BYTES = 1 << 16  # columns up to this are read, since a mapping takes one of the files that a process may open
# As NumPy writes it. NumPy's own reader takes 50 us, and on Python 3.11 it fails in several threads at once, with
# "AST constructor recursion depth mismatch": https://github.com/python/cpython/issues/106905
COLUMN_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00v\x00"
    rb"\{'descr': '(?P<dtype>[<|][iu][1248])', 'fortran_order': False, 'shape': \((?P<length>[0-9]{1,18}),\), \} *\n"
)


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-64 of `data`, 16 lower-case hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def digest_file(path: Path) -> str:
    """Return the xxh3-64 of a file's content."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            state.update(piece)
    return state.hexdigest()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: a rename without this can be lost (ALICE, OSDI'14)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and what is missing above it, durably."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync_directory(directory.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file under its final name, by way of a temporary one; all its neighbours are durable before it."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)  # what the file names must not come after it
    aside.replace(path)
    sync_directory(path.parent)


def pack_json(content: object) -> bytes:
    r"""Return `["<digest>", <content>]` in UTF-8; the digest is of the bytes of <content>.

    >>> pack_json({"a": 1})
    b'["c5e3762ffc8453c6",{"a":1}]'
    """
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return b'["' + digest(body).encode() + b'",' + body + b"]"


def unpack_json(data: bytes, where: str) -> object:
    """Return the content that `pack_json` wrote; raises `CorruptCacheError` if any byte differs."""
    data = data.strip()
    body = data[20:-1]
    if data[:2] != b'["' or data[18:20] != b'",' or data[-1:] != b"]" or digest(body).encode() != data[2:18]:
        raise CorruptCacheError(f"{where} is damaged: its checksum does not match")
    try:
        return cast(object, json.loads(body))
    except (ValueError, RecursionError) as error:
        raise CorruptCacheError(f"{where} is damaged: {error}") from error


def within(path: str, depth: int = 100) -> str:
    """Return a path that a file gave; raises `ValueError` if it leads out of the directory that it is relative to."""
    steps = path.split("/")
    if len(steps) > depth or "\0" in path or any(step in ("", ".", "..") for step in steps):
        raise ValueError(f"{path!r} does not lead to a file of the cache")
    return path


def save_column(path: Path, column: Array) -> None:
    """Write one `.npy` column durably (its directory must still be synced)."""
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(column), version=(1, 0), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def load_column(path: Path, dtype: type[Number], mapped: bool = True) -> NDArray[Number]:
    """Map one `.npy` column into memory, read-only, or read it; a mapping keeps a file open in this process."""
    with path.open("rb") as file:
        header = COLUMN_HEADER.match(file.read(256))
        if header is None or np.dtype(dtype) != header["dtype"].decode():
            raise CorruptCacheError(f"{str(path)!r} is damaged: it is no column of {np.dtype(dtype)}")
        offset, length, size = header.end(), int(header["length"]), os.fstat(file.fileno()).st_size
        if size != offset + np.dtype(dtype).itemsize * length:
            raise CorruptCacheError(f"{str(path)!r} is damaged: it has {size} bytes, which are not {length} numbers")
        file.seek(offset)
        if mapped and size > SMALL_BYTES:
            with contextlib.suppress(OSError):  # too many open files: read it then
                return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype, length, offset)
        return np.fromfile(file, dtype)
