"""Writes one Zarr v3 group for one feature, as laid out in `featcache_backends.zarr`, without the zarr library."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featcache.container_files import PagedFile, Pages, sync_directory
from featcache.interface import EncodedArray, Extent, FeatureSpec

COLUMNS = ("ids", "offsets", "lengths")  # arrays beside the one of frames
MISSING = 2**64 - 1  # offset and size of an inner chunk that a shard does not have
LITTLE_ENDIAN: Mapping[str, object] = {"name": "bytes", "configuration": {"endian": "little"}}
STRINGS: Mapping[str, object] = {"name": "vlen-utf8", "configuration": {}}


@dataclass(frozen=True)
class Grid:
    """How the frames of a feature are cut into inner chunks and shards."""

    chunk_rows: int  # of an inner chunk
    shard_chunks: int  # inner chunks of a shard
    chunk_bytes: int  # of an inner chunk without a codec; 0 if frames have no bytes


class GroupWriter:
    """Appends frames to the group of one feature.

    `codec` is its entry in `zarr.json`, None without one; `crc32c` returns the checksum of bytes.
    """

    def __init__(
        self,
        directory: Path,
        feature: FeatureSpec,
        grid: Grid,
        codec: Mapping[str, object] | None,
        crc32c: Callable[[bytes], int],
    ) -> None:
        self.name = feature.name
        self._feature = feature
        self._grid = grid
        self._codec = codec if feature.row_bytes else None  # frames without bytes make no chunks
        self._crc32c = crc32c
        self._path = directory / f"{feature.name}.zarr"
        self._ids = bytearray()  # as on disk
        self._offsets = array("q")
        self._lengths = array("q")
        self._rows = 0
        self._shards = 0
        self._shard: _Shard | None = None
        self._pages: dict[str, Pages] = {}  # of the finished files
        (self._path / self.name).mkdir(parents=True)
        sync_directory(self._path)
        sync_directory(directory)

    def append(self, id: str, encoded: EncodedArray) -> tuple[Extent, ...]:
        """Write the frames of one utterance behind those of the one before."""
        extents = self._write(encoded.blocks) if self._feature.row_bytes else ()
        text = id.encode()
        self._ids += len(text).to_bytes(4, "little") + text
        self._offsets.append(self._rows)
        self._lengths.append(encoded.rows)
        self._rows += encoded.rows if self._codec is None else len(encoded.blocks) * self._grid.chunk_rows
        return extents

    def flush(self) -> None:
        """Make all frames durable; full shards are."""
        if self._shard is not None:
            self._shard.flush()

    def close(self) -> None:
        """Finish the last shard, then write what makes the files a group."""
        if self._shard is not None:
            self._finish_shard(self._shard)
        count = len(self._lengths)
        self._write_column("ids", "string", "", STRINGS, count.to_bytes(4, "little") + self._ids)
        layout = "rows"
        if self._feature.has_frames:
            layout = "contiguous_ragged" if self._codec is None else "padded_ragged"
            # CF marks the count variable of a contiguous ragged array in this way
            counts = {"sample_dimension": "frame"} if self._codec is None else {}
            self._write_column("offsets", "int64", 0, LITTLE_ENDIAN, _int64(self._offsets))
            self._write_column("lengths", "int64", 0, LITTLE_ENDIAN, _int64(self._lengths), counts)
        self._write_json(f"{self.name}/", self._frames_document())
        attributes = {"layout": layout}
        self._write_json("", {"zarr_format": 3, "node_type": "group", "attributes": attributes})

    def abort(self) -> None:
        """Close the shard without an index."""
        if self._shard is not None:
            self._shard.abort()

    def pages(self) -> dict[str, Pages]:
        """Return the digests of the pages of all files."""
        return self._pages

    def _write(self, blocks: Sequence[bytes | memoryview]) -> tuple[Extent, ...]:
        extents = []
        for block in blocks:
            rest = memoryview(block)
            while rest:
                shard = self._shard or self._open_shard()
                extents.append(shard.write(rest))
                rest = rest[extents[-1].nbytes :]
                if shard.is_full():
                    self._finish_shard(shard)
        return tuple(extents)

    def _open_shard(self) -> _Shard:
        key = ".".join(["c", str(self._shards), *("0" for _ in self._feature.dims)])
        chunk_bytes = self._grid.chunk_bytes if self._codec is None else None
        file = PagedFile(self._path / self.name / key)
        container = f"{self._path.name}/{self.name}/{key}"
        shard = _Shard(file, container, self._grid.shard_chunks, chunk_bytes)
        self._shard = shard
        self._shards += 1
        return shard

    def _finish_shard(self, shard: _Shard) -> None:
        self._pages[shard.container] = shard.finish(self._crc32c)
        self._shard = None

    def _write_column(
        self,
        name: str,
        data_type: str,
        fill_value: object,
        codec: Mapping[str, object],
        data: bytes,
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        (self._path / name).mkdir()  # its name is durable with that of the group's zarr.json
        count = len(self._lengths)
        if count:
            self._write_file(f"{name}/c.0", data)
        document = _array_document([count], [max(1, count)], data_type, fill_value, [codec], ["utterance"], attributes)
        self._write_json(f"{name}/", document)

    def _write_json(self, directory: str, document: Mapping[str, object]) -> None:
        self._write_file(f"{directory}zarr.json", json.dumps(document, indent=2).encode())

    def _write_file(self, path: str, data: bytes) -> None:
        file = PagedFile(self._path / path)
        try:
            file.append(data)
            file.close()
        finally:
            file.abort()
        self._pages[f"{self._path.name}/{path}"] = file.pages

    def _frames_document(self) -> dict[str, object]:
        feature, grid = self._feature, self._grid
        dtype = feature.storage_dtype
        inner = [max(1, dim) for dim in feature.dims]  # a chunk cannot be empty, an array can
        sharding = {
            "chunk_shape": [grid.chunk_rows, *inner],
            "codecs": [LITTLE_ENDIAN] if self._codec is None else [LITTLE_ENDIAN, self._codec],
            "index_codecs": [LITTLE_ENDIAN, {"name": "crc32c"}],
            "index_location": "end",
        }
        return _array_document(
            shape=[self._rows, *feature.dims],
            chunk_shape=[grid.chunk_rows * grid.shard_chunks, *inner],
            data_type=dtype.name,
            fill_value=np.zeros((), dtype).item(),
            codecs=[{"name": "sharding_indexed", "configuration": sharding}],
            dimension_names=[
                "frame" if feature.has_frames else "utterance",
                *(f"dim_{axis}" for axis in range(1, 1 + len(inner))),
            ],
            attributes={"dtype_of_bits": feature.dtype} if feature.dtype != dtype.name else {},
        )


class _Shard:
    """One shard file: inner chunks back to back, then their index."""

    def __init__(
        self, file: PagedFile, container: str, slots: int, chunk_bytes: int | None
    ) -> None:
        self.container = container
        self._file = file
        self._slots = slots
        self._chunk_bytes = chunk_bytes  # None: with a codec, every chunk has its own size
        self._ends = array("q")  # of the chunks that a codec made

    def write(self, data: memoryview) -> Extent:
        """Write what there is room for: all of an encoded chunk, else as many frames as fit."""
        if self._chunk_bytes is not None:
            data = data[: self._slots * self._chunk_bytes - self._file.size]
        extent = Extent(self.container, self._file.append(data), len(data))
        if self._chunk_bytes is None:
            self._ends.append(self._file.size)
        return extent

    def is_full(self) -> bool:
        if self._chunk_bytes is None:
            return len(self._ends) == self._slots
        return self._file.size == self._slots * self._chunk_bytes

    def flush(self) -> None:
        self._file.flush()

    def finish(self, crc32c: Callable[[bytes], int]) -> Pages:
        """Fill up the last chunk, write the index, close; returns the digests of the pages."""
        ends = np.array(self._ends, np.int64)
        if self._chunk_bytes is not None:
            chunks = -(-self._file.size // self._chunk_bytes)
            self._file.append(bytes(chunks * self._chunk_bytes - self._file.size))
            ends = np.arange(1, chunks + 1) * self._chunk_bytes
        sizes = np.diff(ends, prepend=0)
        index = np.full((self._slots, 2), MISSING, "<u8")
        index[: len(ends), 0] = ends - sizes
        index[: len(ends), 1] = sizes
        data = index.tobytes()
        self._file.append(data + crc32c(data).to_bytes(4, "little"))
        self._file.close()
        return self._file.pages

    def abort(self) -> None:
        self._file.abort()


def _array_document(
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    data_type: str,
    fill_value: object,
    codecs: Sequence[Mapping[str, object]],
    dimension_names: Sequence[str],
    attributes: Mapping[str, object] | None,
) -> dict[str, object]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        # one flat directory, whatever the rank: fewer directories to make durable
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill_value,
        "codecs": codecs,
        "attributes": attributes or {},
        "dimension_names": dimension_names,
    }


def _int64(values: array[int]) -> bytes:
    return np.array(values, "<i8").tobytes()
