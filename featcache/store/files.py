"""Durable files: what is written here is either whole on disk or not there, also after a power cut."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import numpy as np
import xxhash

from featcache.errors import CorruptCacheError
from featcache.interface import Array


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


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file under its final name, by way of a temporary one."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
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
    return cast(object, json.loads(body))


def save_column(path: Path, column: Array) -> None:
    """Write one `.npy` column durably (its directory must still be synced)."""
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(column), version=(1, 0), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def load_column(path: Path) -> Array:
    """Map one `.npy` column into memory, read-only."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"npy version {version}")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
            size = path.stat().st_size
        if len(shape) != 1 or fortran or dtype.hasobject or size != offset + dtype.itemsize * shape[0]:
            raise ValueError(f"shape {shape}, dtype {dtype}, {size} bytes")
    except ValueError as error:
        raise CorruptCacheError(f"{str(path)!r} is damaged: {error}") from error
    if shape == (0,):  # an empty array cannot be mapped
        return np.empty(0, dtype)
    # a plain array over the mapping: numpy.memmap is several times slower to index
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)
