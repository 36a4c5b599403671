"""Zarr v3: one group `<feature>.zarr` a feature, `zarr.open_group(path, mode="r")` opens it.

On disk::

    <feature>.zarr/zarr.json              the group
    <feature>.zarr/<feature>/zarr.json    an array (frames, *dims)
    <feature>.zarr/<feature>/c.<i>.0...   its shard i, with as many ".0" as there are dims: inner
                                          chunks (frames, *dims) back to back, then their index:
                                          u64 offset and u64 size of each (2**64-1 twice: not
                                          there), u32 crc32c of these
    <feature>.zarr/ids/                   utterance ids in the order of writing; strings, one
                                          chunk `c.0`: u32 count, then u32 size and UTF-8 of each
    <feature>.zarr/offsets/, lengths/     first frame and number of frames of each utterance;
                                          i64, one chunk `c.0`

All numbers are little-endian; bfloat16 is stored as the uint16 of its bits, and the array's
attribute `dtype_of_bits` says so. The `zarr.json` files come last, when the number of frames is
known. The group's attribute `layout` is one of

    contiguous_ragged   No codec: the frames of all utterances without gaps, the "contiguous
                        ragged array" of the CF conventions, `lengths` its count variable. Frame
                        follows frame in a shard file, so an utterance is one run of bytes, or
                        several where it passes from shard to shard; only the last inner chunk of
                        all is filled up with zeros.
    padded_ragged       A codec: every utterance starts with a new inner chunk, and its last one
                        is filled up with zero frames, which `offsets` and `lengths` leave out.
    rows                A feature without a time axis, codec or not: one row of shape `dims` an
                        utterance, with `ids` alone.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Protocol, cast, runtime_checkable

import numpy as np

from featcache.container_files import FeatureFilesWriter
from featcache.errors import ConfigError, CorruptCacheError, FeatureError, MissingDependencyError
from featcache.interface import Array, Blocks, Extent, FeatureSpec
from featcache_backends._zarr_frames import GroupWriter, finish_group
from featcache_backends._zarr_group import COLUMNS, Grid, Group

# most frames of an inner chunk with a codec: each utterance is filled up to a multiple
PADDED_ROWS = 256
SHARD_CHUNKS = 1 << 16  # most inner chunks of a shard: readers load its whole index
COMPRESSORS = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BLOSC_BYTES = (1 << 31) - 17  # most that a buffer holds
BLOSC_VERSION = 2  # of the format of its buffers
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")  # in the order of Blosc's numbers for them


@dataclass(frozen=True)
class ZarrBackend:
    """One Zarr v3 group per feature, in shards of about `shard_bytes`.

    Inner chunks have about `chunk_bytes`.

    Both count bytes before a codec; an inner chunk has one frame at least. Raises `ConfigError` for
    impossible sizes.
    """

    codecs: ClassVar[tuple[str, ...]] = ("raw", "zstd", "blosc")

    chunk_bytes: int = 1 << 17
    shard_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        _check_range("chunk_bytes", self.chunk_bytes, 1, 1 << 40)
        _check_range("shard_bytes", self.shard_bytes, self.chunk_bytes, 1 << 40)

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Cut arrays into inner chunks, the last one filled up."""
        return Blocks(self._grid(feature).chunk_rows, padded=True)

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        """Start one group per feature.

        Raises `ConfigError` for a name or a codec that cannot stand in a Zarr group, `FeatureError`
        for frames that are too large for Blosc.
        """
        crc32c = _import_crc32c()
        for feature in features:  # all checks before the first file
            _zarr_codec(feature)
            nbytes = self._grid(feature).chunk_bytes
            if isinstance(feature.codec, BloscCodec) and nbytes > BLOSC_BYTES:
                raise FeatureError(
                    f"feature {feature.name!r}: a frame has {nbytes:,} bytes, Blosc holds less "
                    "than 2 GiB; use zstd"
                )
        return FeatureFilesWriter(
            {
                feature.name: GroupWriter(self._group(directory, feature), crc32c)
                for feature in features
            }
        )

    def finish(
        self,
        directory: Path,
        features: Sequence[FeatureSpec],
        written: Sequence[tuple[str, Mapping[str, tuple[int, tuple[Extent, ...]]]]],
    ) -> None:
        """Write the index of each shard, the columns and the documents; remove what is behind."""
        crc32c = _import_crc32c()
        for feature in features:
            arrays = ((id, *arrays[feature.name]) for id, arrays in written)
            finish_group(self._group(directory, feature), crc32c, arrays)

    def _group(self, directory: Path, feature: FeatureSpec) -> Group:
        return Group(directory, feature, self._grid(feature), _zarr_codec(feature))

    def _grid(self, feature: FeatureSpec) -> Grid:
        rows = max(1, self.chunk_bytes // max(1, feature.row_bytes))
        if feature.codec is not None:
            rows = min(rows, PADDED_ROWS) if feature.has_frames else 1
        chunk_bytes = rows * feature.row_bytes
        shard_chunks = max(1, self.shard_bytes // max(1, chunk_bytes))
        return Grid(rows, min(shard_chunks, SHARD_CHUNKS), chunk_bytes)


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
        _check_range("level", self.level, 1, 22)

    def encode(self, block: Array) -> bytes:
        """Compress a block into one Zstandard frame."""
        return bytes(_numcodecs(self.name).compress(block, self.level))

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block that `data` holds, as `Codec` says."""
        return _decompressed(self.name, _zstd_size, data, dtype, dims, rows)

    def zarr_metadata(self, dtype: np.dtype[np.generic]) -> Mapping[str, object]:
        """Return the codec's entry in `zarr.json`."""
        return {"name": self.name, "configuration": {"level": self.level, "checksum": False}}


@dataclass(frozen=True)
class BloscCodec:
    """Blosc: shuffles bytes or bits, then compresses.

    `cname` does so at `clevel` 1 (fast) to 9 (small).
    """

    name: ClassVar[str] = "blosc"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    cname: str = "lz4"
    clevel: int = 5
    shuffle: str = "bitshuffle"

    def __post_init__(self) -> None:
        _check_choice("cname", self.cname, COMPRESSORS)
        _check_range("clevel", self.clevel, 1, 9)
        _check_choice("shuffle", self.shuffle, SHUFFLES)

    def encode(self, block: Array) -> bytes:
        """Compress a block into one Blosc buffer."""
        blosc = _numcodecs(self.name)
        shuffle = SHUFFLES.index(self.shuffle)
        return bytes(
            blosc.compress(
                block, self.cname.encode(), self.clevel, shuffle, typesize=block.dtype.itemsize
            )
        )

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block that `data` holds, as `Codec` says."""
        return _decompressed(self.name, _blosc_size, data, dtype, dims, rows)

    def zarr_metadata(self, dtype: np.dtype[np.generic]) -> Mapping[str, object]:
        """Return the codec's entry in `zarr.json`."""
        options = {"cname": self.cname, "clevel": self.clevel, "shuffle": self.shuffle}
        return {
            "name": self.name,
            "configuration": {**options, "typesize": dtype.itemsize, "blocksize": 0},
        }


def _decompressed(
    codec: str,
    size_of: Callable[[memoryview], int],
    data: memoryview,
    dtype: np.dtype[np.generic],
    dims: tuple[int, ...],
    rows: int,
) -> Array:
    numcodecs = _numcodecs(codec)
    try:
        nbytes, row_bytes = size_of(data), dtype.itemsize * math.prod(dims)
        if not 0 < nbytes <= rows * row_bytes or nbytes % row_bytes:
            raise ValueError(
                f"it says it holds {nbytes} bytes, not up to {rows} rows of {row_bytes}"
            )
        block = np.empty((nbytes // row_bytes, *dims), dtype)
        numcodecs.decompress(data, block)
    except (
        ValueError,
        RuntimeError,
        ArithmeticError,
        SystemError,
        MemoryError,
        struct.error,
    ) as error:
        raise CorruptCacheError(
            f"{codec}: a block of {len(data)} bytes cannot be decompressed: {error}"
        ) from error
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


def _zarr_codec(feature: FeatureSpec) -> Mapping[str, object] | None:
    if feature.name in COLUMNS or feature.name.startswith("__"):
        raise ConfigError(
            f"feature {feature.name!r}: a zarr group keeps this name, and those that start with "
            "'__', for itself; rename the feature"
        )
    if feature.codec is None:
        return None
    if not isinstance(feature.codec, ZarrCodec):
        raise ConfigError(
            f"feature {feature.name!r}: zarr does not know codec {feature.codec.name!r}, which has "
            f"no method zarr_metadata; use one of {', '.join(map(repr, ZarrBackend.codecs))}"
        )
    return feature.codec.zarr_metadata(feature.storage_dtype)


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be an integer from {least} to {most}, not {value!r}")


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def _import_crc32c() -> Callable[[bytes], int]:
    try:
        from google_crc32c import value
    except ImportError as error:
        raise MissingDependencyError(
            "backend 'zarr' needs 'google_crc32c'; try: pip install 'featcache[zarr]'"
        ) from error
    return cast(Callable[[bytes], int], value)


@cache  # importing what is imported already takes 3 us, a block some 50
def _numcodecs(codec: str) -> ModuleType:
    try:
        module = importlib.import_module(f"numcodecs.{codec}")
    except ImportError as error:
        raise MissingDependencyError(
            f"codec {codec!r} needs 'numcodecs'; try: pip install 'featcache[zarr]'"
        ) from error
    # Blosc's own threads write in the order in which they finish, other bytes each time, and need
    # a lock of the whole process to read; zarr turns them off, too
    module.use_threads = False  # type: ignore[attr-defined]
    return module
