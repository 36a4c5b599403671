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

import json
import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from featcache.container_files import (
    EncodedArrays,
    Extents,
    FeatureFilesWriter,
    PagedFile,
    Pages,
    end_file,
    misplaced,
    open_left,
    remove_left,
    sync_directory,
)
from featcache.errors import ConfigError, FeatureError
from featcache.interface import Array, Blocks, EncodedArray, Extent, FeatureSpec, Written
from featcache_backends._refusals import DAMAGE, check_range, damaged_block, import_library

# most frames of an inner chunk with a codec: each utterance is filled up to a multiple
PADDED_ROWS = 256
SHARD_CHUNKS = 1 << 16  # most inner chunks of a shard: readers load its whole index


@dataclass(frozen=True)
class ZarrBackend:
    """One Zarr v3 group per feature.

    Shards have about `shard_bytes`, and inner chunks about `chunk_bytes`, counted before a codec;
    an inner chunk has one frame at least. Raises `ConfigError` for impossible sizes.
    """

    codecs: ClassVar[tuple[str, ...]] = ("raw", "zstd", "blosc")

    chunk_bytes: int = 1 << 17
    shard_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        check_range("chunk_bytes", self.chunk_bytes, 1, 1 << 40)
        check_range("shard_bytes", self.shard_bytes, self.chunk_bytes, 1 << 40)

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Cut arrays into inner chunks, the last one filled up."""
        return Blocks(self._grid(feature).chunk_rows, padded=True)

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        """Start one group per feature.

        Raises `ConfigError` for a name or a codec that cannot stand in a Zarr group, `FeatureError`
        for frames that are too large for Blosc.
        """
        crc32c = _import_crc32c()
        groups = [self._group(directory, feature) for feature in features]  # all checked first
        return FeatureFilesWriter({group.name: GroupWriter(group, crc32c) for group in groups})

    def finish(self, directory: Path, features: Sequence[FeatureSpec], written: Written) -> None:
        """Write the index of each shard, the columns and the documents; remove what is behind."""
        crc32c = _import_crc32c()
        for feature in features:
            finish_group(self._group(directory, feature), crc32c, written)

    def _group(self, directory: Path, feature: FeatureSpec) -> Group:
        grid = self._grid(feature)
        if isinstance(feature.codec, BloscCodec) and grid.chunk_bytes > BLOSC_BYTES:
            raise FeatureError(
                f"feature {feature.name!r}: a frame has {grid.chunk_bytes:,} bytes, Blosc holds "
                "less than 2 GiB; use zstd"
            )
        return Group(directory, feature, grid, _zarr_codec(feature))

    def _grid(self, feature: FeatureSpec) -> Grid:
        rows = max(1, self.chunk_bytes // max(1, feature.row_bytes))
        if feature.codec is not None:
            rows = min(rows, PADDED_ROWS) if feature.has_frames else 1
        chunk_bytes = rows * feature.row_bytes
        shard_chunks = max(1, self.shard_bytes // max(1, chunk_bytes))
        return Grid(rows, min(shard_chunks, SHARD_CHUNKS), chunk_bytes)


def _zarr_codec(feature: FeatureSpec) -> Json | None:
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


def _import_crc32c() -> Crc32c:
    value: Crc32c = import_library("google_crc32c", "backend 'zarr'", "zarr").value
    return value


# The columns and `zarr.json` documents that make the files of one feature a Zarr v3 group.

Json = Mapping[str, object]
COLUMNS = ("ids", "offsets", "lengths")  # arrays beside the one of frames
LITTLE_ENDIAN: Json = {"name": "bytes", "configuration": {"endian": "little"}}


@dataclass(frozen=True)
class ZarrValues:
    """Numbers or strings of an array, as its `zarr.json` describes them."""

    data_type: str
    fill_value: object
    codecs: Sequence[Json]

    def document(
        self, shape: Sequence[int], chunk: Sequence[int], axes: Sequence[str], attributes: Json
    ) -> Json:
        """Return the `zarr.json` of an array, with the shape of its chunks and its axes' names."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": self.data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            # one flat directory, whatever the rank: fewer directories to make durable
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": self.fill_value,
            "codecs": self.codecs,
            "attributes": attributes,
            "dimension_names": axes,
        }


INT64 = ZarrValues("int64", 0, [LITTLE_ENDIAN])
STRINGS = ZarrValues("string", "", [{"name": "vlen-utf8", "configuration": {}}])


@dataclass(frozen=True)
class Grid:
    """Cut of the frames of a feature into inner chunks and shards."""

    chunk_rows: int  # of an inner chunk
    shard_chunks: int  # inner chunks of a shard
    chunk_bytes: int  # of an inner chunk without a codec; 0 if frames have no bytes


class Group:
    """The group of one feature; makes no file before `finish`.

    Args:
        directory: that the group is in.
        feature: the feature.
        grid: its chunks and shards.
        codec: its entry in `zarr.json`, None without one.
    """

    def __init__(
        self, directory: Path, feature: FeatureSpec, grid: Grid, codec: Json | None
    ) -> None:
        self.name = feature.name
        self.path = directory / f"{feature.name}.zarr"
        self.frames = f"{self.path.name}/{feature.name}"  # directory of the shards
        self.feature = feature
        self.grid = grid
        # frames without bytes make no chunks
        self.codec = codec if feature.row_bytes else None
        self.pages: dict[str, Pages] = {}  # of the finished files
        self._ids = bytearray()  # as on disk
        self._offsets = array("q")
        self._lengths = array("q")
        self._rows = 0

    def shard(self, number: int) -> str:
        """Return the path of a shard, relative to the directory that the group is in."""
        return f"{self.frames}/" + ".".join(["c", str(number), *("0" for _ in self.feature.dims)])

    def add(self, id: str, rows: int, chunks: int) -> None:
        """Add an utterance; with a codec, its frames take so many inner chunks."""
        text = id.encode()
        self._ids += len(text).to_bytes(4, "little") + text
        self._offsets.append(self._rows)
        self._lengths.append(rows)
        self._rows += rows if self.codec is None else chunks * self.grid.chunk_rows

    def fits(self, rows: int, extents: Sequence[Extent]) -> bool:
        """Whether rows take these extents: as many bytes, or with a codec as many chunks."""
        if self.codec is None:
            return sum(extent.nbytes for extent in extents) == rows * self.feature.row_bytes
        return len(extents) == -(-rows // self.grid.chunk_rows)

    def finish(self) -> None:
        """Write the columns and the documents, durably; none of them may be there."""
        count = len(self._lengths)
        self._write_column("ids", STRINGS, count.to_bytes(4, "little") + self._ids)
        layout = "rows"
        if self.feature.has_frames:
            layout = "contiguous_ragged" if self.codec is None else "padded_ragged"
            # CF marks the count variable of a contiguous ragged array in this way
            counts = {"sample_dimension": "frame"} if self.codec is None else {}
            self._write_column("offsets", INT64, _int64(self._offsets))
            self._write_column("lengths", INT64, _int64(self._lengths), counts)
        self._write_json(f"{self.name}/", self._frames_document())
        attributes = {"layout": layout}
        self._write_json("", {"zarr_format": 3, "node_type": "group", "attributes": attributes})

    def _write_column(
        self, name: str, values: ZarrValues, data: bytes, attributes: Json | None = None
    ) -> None:
        (self.path / name).mkdir()  # its name is durable with that of the group's zarr.json
        count = len(self._lengths)
        if count:
            self._write_file(f"{name}/c.0", data)
        document = values.document([count], [max(1, count)], ["utterance"], attributes or {})
        self._write_json(f"{name}/", document)

    def _write_json(self, directory: str, document: Json) -> None:
        self._write_file(f"{directory}zarr.json", json.dumps(document, indent=2).encode())

    def _write_file(self, path: str, data: bytes) -> None:
        file = PagedFile(self.path / path)
        try:
            file.append(data)
            file.close()
        finally:
            file.abort()
        self.pages[f"{self.path.name}/{path}"] = file.pages

    def _frames_document(self) -> Json:
        feature, grid, dtype = self.feature, self.grid, self.feature.storage_dtype
        inner = [max(1, dim) for dim in feature.dims]  # a chunk cannot be empty, an array can
        sharding = {
            "chunk_shape": [grid.chunk_rows, *inner],
            "codecs": [LITTLE_ENDIAN] if self.codec is None else [LITTLE_ENDIAN, self.codec],
            "index_codecs": [LITTLE_ENDIAN, {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
        return ZarrValues(dtype.name, np.zeros((), dtype).item(), codecs).document(
            [self._rows, *feature.dims],
            [grid.chunk_rows * grid.shard_chunks, *inner],
            [
                "frame" if feature.has_frames else "utterance",
                *(f"dim_{axis}" for axis in range(1, 1 + len(inner))),
            ],
            {"dtype_of_bits": feature.dtype} if feature.dtype != dtype.name else {},
        )


def _int64(values: array[int]) -> bytes:
    return np.array(values, "<i8").tobytes()


# Frames of a feature in the shards of a group.

Crc32c = Callable[[bytes], int]
MISSING = 2**64 - 1  # offset and size of an inner chunk that a shard does not have


class GroupWriter:
    """Appends frames to a group; `crc32c` returns the checksum of bytes."""

    def __init__(self, group: Group, crc32c: Crc32c) -> None:
        self._group = group
        self._crc32c = crc32c
        self._shard = _Shard(group, 0)
        self._file: PagedFile | None = None  # of that shard, once it has frames
        (group.path / group.name).mkdir(parents=True)
        sync_directory(group.path)
        sync_directory(group.path.parent)

    def append(self, id: str, encoded: EncodedArray) -> tuple[Extent, ...]:
        """Write the frames of one utterance behind those of the one before."""
        extents = []
        for block in encoded.blocks:
            rest = memoryview(block)
            while rest:
                if self._file is None:
                    self._file = PagedFile(self._group.path.parent / self._shard.path)
                extent = self._shard.take(len(rest))
                self._file.append(rest[: extent.nbytes])
                extents.append(extent)
                rest = rest[extent.nbytes :]
                if self._shard.is_full():
                    self._finish_shard(self._file)
        self._group.add(id, encoded.rows, len(encoded.blocks))
        return tuple(extents)

    def write_out(self) -> None:
        """Show other processes all frames."""
        if self._file is not None:
            self._file.write_out()

    def append_many(self, ids: Sequence[str], arrays: EncodedArrays) -> Extents:
        """Write the frames of many utterances behind those of the one before."""
        total = int(arrays.nbytes.sum())
        if not self._shard.has_room(total) or not total:
            pairs = zip(ids, arrays, strict=True)
            return Extents.of([self.append(id, array) for id, array in pairs])
        if self._file is None:
            self._file = PagedFile(self._group.path.parent / self._shard.path)
        path, begin, _ = self._shard.take(total)
        self._file.append_each(arrays.pieces)
        if self._shard.is_full():
            self._finish_shard(self._file)
        columns = (ids, arrays.rows.tolist(), arrays.blocks.tolist())
        for id, rows, blocks in zip(*columns, strict=True):
            self._group.add(id, rows, blocks)
        return Extents(
            counts=arrays.blocks,
            containers=(path,),
            container=np.zeros(len(arrays.nbytes), np.int64),
            offset=begin + np.cumsum(arrays.nbytes) - arrays.nbytes,
            nbytes=arrays.nbytes,
        )

    def flush(self) -> None:
        """Make all frames durable; full shards are."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Finish the last shard, then write what makes the files a group."""
        if self._file is not None:
            self._finish_shard(self._file)
        self._group.finish()

    def abort(self) -> None:
        """Close the shard without an index."""
        if self._file is not None:
            self._file.abort()

    def pages(self) -> dict[str, Pages]:
        """Return the digests of the pages of all files."""
        return self._group.pages

    def _finish_shard(self, file: PagedFile) -> None:
        file.append(self._shard.tail(self._crc32c))
        file.close()
        self._group.pages[self._shard.path] = file.pages
        self._file, self._shard = None, self._shard.next()


def finish_group(group: Group, crc32c: Crc32c, written: Written) -> None:
    """Finish a group whose writer died after these utterances."""
    directory = group.path.parent
    shards = [_Shard(group, 0)]
    for id, arrays in written:
        rows, extents = arrays[group.name]
        for extent in extents:
            if shards[-1].is_full():
                shards.append(shards[-1].next())
            if extent != shards[-1].take(extent.nbytes):
                raise misplaced(id)
        if not group.fits(rows, extents):
            raise misplaced(id)
        group.add(id, rows, len(extents))
    if not shards[0].size:
        del shards[0]
    kept = {shard.path.rpartition("/")[2] for shard in shards}
    remove_left(directory, group.frames, lambda name: name not in kept)
    remove_left(directory, group.path.name, lambda name: name != group.name)
    for shard in shards:
        with open_left(directory, shard.path, shard.size) as file:
            end_file(file, shard.size, shard.tail(crc32c))
    group.finish()


class _Shard:
    """The inner chunks of one shard, back to back, and behind them their index."""

    def __init__(self, group: Group, number: int) -> None:
        self.path = group.shard(number)
        self.size = 0  # bytes of the chunks so far
        self._group, self._number = group, number
        self._ends = array("q")  # of the chunks that a codec made, each of its own size

    def next(self) -> _Shard:
        """Return the empty shard behind this one."""
        return _Shard(self._group, self._number + 1)

    def take(self, nbytes: int) -> Extent:
        """Take what there is room for: all of an encoded chunk, else as many bytes as fit."""
        offset, grid = self.size, self._group.grid
        if self._group.codec is None:
            nbytes = min(nbytes, grid.shard_chunks * grid.chunk_bytes - offset)
        else:
            self._ends.append(offset + nbytes)
        self.size += nbytes
        return Extent(self.path, offset, nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether bytes of several utterances, without a codec, fit."""
        grid = self._group.grid
        room = grid.shard_chunks * grid.chunk_bytes - self.size
        return self._group.codec is None and nbytes <= room

    def is_full(self) -> bool:
        """Whether the next frames go to the next shard."""
        grid = self._group.grid
        if self._group.codec is None:
            return self.size == grid.shard_chunks * grid.chunk_bytes
        return len(self._ends) == grid.shard_chunks

    def tail(self, crc32c: Crc32c) -> bytes:
        """Return what fills up the last chunk, and the index."""
        ends = np.array(self._ends, np.int64)
        grid = self._group.grid
        if self._group.codec is None:
            chunks = -(-self.size // grid.chunk_bytes)
            ends = np.arange(1, chunks + 1) * grid.chunk_bytes
        filling = bytes(int(ends[-1]) - self.size)
        index = np.full((grid.shard_chunks, 2), MISSING, "<u8")
        index[: len(ends), 1] = np.diff(ends, prepend=0)
        index[: len(ends), 0] = ends - index[: len(ends), 1]
        data = index.tobytes()
        return filling + data + crc32c(data).to_bytes(4, "little")


# Codecs that Zarr knows, `zstd` and `blosc`: a block is one frame or buffer of numcodecs.

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
