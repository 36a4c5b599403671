"""Codecs that Zarr knows, `zstd` and `blosc`: a block is one frame or buffer of numcodecs."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Array
from featcache_backends._refusals import DAMAGE, check_range, damaged_block, import_library

COMPRESSORS = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")  # in the order of Blosc's numbers for them
BLOSC_BYTES = (1 << 31) - 17  # most that a buffer holds
BLOSC_VERSION = 2  # of the format of its buffers
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@runtime_checkable
class ZarrCodec(Protocol):
    """A codec that Zarr knows."""

    def zarr_metadata(self, dtype: np.dtype[np.generic]) -> Mapping[str, object]:
        """Return the codec's `name` and `configuration` in `zarr.json` for an array of `dtype`."""
        ...


@dataclass(frozen=True)
class ZstdCodec:
    """Zstandard, `level` 1 (fast) to 22 (small)."""

    name: ClassVar[str] = "zstd"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    level: int = 3

    def __post_init__(self) -> None:
        check_range("level", self.level, 1, 22)

    def encode(self, block: Array) -> bytes:
        """Compress a block into one Zstandard frame."""
        return bytes(_numcodecs(self.name).compress(block, self.level))

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block that `data` holds, as `Codec` says."""
        return _decompressed(self.name, data, dtype, dims, rows)

    def zarr_metadata(self, dtype: np.dtype[np.generic]) -> Mapping[str, object]:
        """Return the codec's entry in `zarr.json`."""
        return {"name": self.name, "configuration": {"level": self.level, "checksum": False}}


@dataclass(frozen=True)
class BloscCodec:
    """Blosc: shuffles bytes or bits, then compresses by `cname`, `clevel` 1 (fast) to 9 (small)."""

    name: ClassVar[str] = "blosc"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    cname: str = "lz4"
    clevel: int = 5
    shuffle: str = "bitshuffle"

    def __post_init__(self) -> None:
        _check_choice("cname", self.cname, COMPRESSORS)
        check_range("clevel", self.clevel, 1, 9)
        _check_choice("shuffle", self.shuffle, SHUFFLES)

    def encode(self, block: Array) -> bytes:
        """Compress a block into one Blosc buffer."""
        shuffle = SHUFFLES.index(self.shuffle)
        compress = _numcodecs(self.name).compress
        name, itemsize = self.cname.encode(), block.dtype.itemsize
        return bytes(compress(block, name, self.clevel, shuffle, typesize=itemsize))

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block that `data` holds, as `Codec` says."""
        return _decompressed(self.name, data, dtype, dims, rows)

    def zarr_metadata(self, dtype: np.dtype[np.generic]) -> Mapping[str, object]:
        """Return the codec's entry in `zarr.json`."""
        options = {"cname": self.cname, "clevel": self.clevel, "shuffle": self.shuffle}
        options |= {"typesize": dtype.itemsize, "blocksize": 0}
        return {"name": self.name, "configuration": options}


def _decompressed(
    codec: str, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
) -> Array:
    numcodecs = _numcodecs(codec)
    try:
        nbytes, row_bytes = SIZES[codec](data), dtype.itemsize * math.prod(dims)
        if not 0 < nbytes <= rows * row_bytes or nbytes % row_bytes:
            raise ValueError(
                f"it says it holds {nbytes} bytes, not up to {rows} rows of {row_bytes}"
            )
        block = np.empty((nbytes // row_bytes, *dims), dtype)
        numcodecs.decompress(data, block)
    except DAMAGE as error:
        raise damaged_block(codec, data, error) from error
    return block


def _zstd_size(data: memoryview) -> int:
    """Return how many bytes a Zstandard frame says that it holds: RFC 8878, section 3.1.1.1."""
    if bytes(data[:4]) != ZSTD_MAGIC or len(data) < 6:
        raise ValueError("it is no Zstandard frame")
    descriptor = data[4]
    flag, is_single = descriptor >> 6, descriptor >> 5 & 1
    # behind the size of the window and the number of a dictionary
    start = 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3]
    width = (is_single, 2, 4, 8)[flag]
    if not width or len(data) < start + width:
        raise ValueError("it does not say how much it holds")
    return int.from_bytes(data[start : start + width], "little") + (256 if flag == 1 else 0)


def _blosc_size(data: memoryview) -> int:
    """Return how many bytes a Blosc buffer says that it holds.

    Its header: u8 version, version of the compressor, flags, size of a number; u32 nbytes,
    blocksize, cbytes. C-Blosc checks all that follows against `cbytes`, and numcodecs does not tell
    it how much there is: a greater `cbytes` reads, and crashes, behind the end of `data`.
    """
    version, _, _, _, nbytes, blocksize, cbytes = struct.unpack_from("<4B3I", data)
    if version != BLOSC_VERSION or cbytes != len(data) or not 0 < blocksize <= nbytes:
        raise ValueError("its header is damaged")
    return int(nbytes)


SIZES = {ZstdCodec.name: _zstd_size, BloscCodec.name: _blosc_size}


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


@cache  # importing what is imported already takes 3 us, a block some 50
def _numcodecs(codec: str) -> ModuleType:
    module = import_library(f"numcodecs.{codec}", f"codec {codec!r}", "zarr")
    # Blosc's own threads write in the order in which they finish, other bytes each time, and need
    # a lock of the whole process to read; zarr turns them off, too
    module.use_threads = False  # type: ignore[attr-defined]
    return module
