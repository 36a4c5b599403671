"""The columns and `zarr.json` documents that make the files of one feature a Zarr v3 group.

`featcache_backends.zarr` has the layout, `_zarr_frames` writes the frames. No zarr library here.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featcache.container_files import PagedFile, Pages
from featcache.interface import Extent, FeatureSpec

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
