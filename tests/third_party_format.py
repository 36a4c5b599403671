"""A storage format as a stranger would add it, whole: `test_third_party_backend.py` installs it.

One `<feature>.flat` a feature: the bytes of all arrays, or of their compressed blocks, one after
another; then a table in JSON, `{id: [rows, [[offset, nbytes], ...]]}`, and its size in 8 bytes.
`read_flat` is the format's own library.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from featcache.container_files import (
    FeatureFilesWriter,
    PagedFile,
    Pages,
    end_file,
    misplaced,
    open_left,
)
from featcache.errors import CorruptCacheError
from featcache.interface import Array, Blocks, EncodedArray, Extent, FeatureSpec


@dataclass(frozen=True)
class FlatBackend:
    codecs: ClassVar[tuple[str, ...]] = ("raw", "squeeze")

    alignment: int = 1

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        return FeatureFilesWriter(
            {f.name: FlatFile(directory, f.name, self.alignment) for f in features}
        )

    def finish(
        self,
        directory: Path,
        features: Sequence[FeatureSpec],
        written: Sequence[tuple[str, Mapping[str, tuple[int, tuple[Extent, ...]]]]],
    ) -> None:
        for feature in features:
            path, end = f"{feature.name}.flat", 0
            table: dict[str, object] = {}
            for id, arrays in written:
                rows, extents = arrays[feature.name]
                for extent in extents:
                    end += -end % self.alignment
                    if extent != Extent(path, end, extent.nbytes):
                        raise misplaced(id)
                    end += extent.nbytes
                table[id] = entry(rows, extents)
            with open_left(directory, path, end) as file:
                end_file(file, end, tail(table))

    def blocks(self, feature: FeatureSpec) -> Blocks:
        return Blocks(rows=100)


@dataclass(frozen=True)
class SqueezeCodec:
    name: ClassVar[str] = "squeeze"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    level: int = 1

    def encode(self, block: Array) -> bytes:
        return zlib.compress(block.tobytes(), self.level)

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        most = rows * math.prod(dims) * dtype.itemsize
        try:
            stream = zlib.decompressobj()
            octets = stream.decompress(data, most + 1)
            if len(octets) > most or not stream.eof:
                raise ValueError("it holds more, or is cut short")
            return np.frombuffer(octets, dtype).reshape(-1, *dims)
        except (zlib.error, ValueError) as error:
            raise CorruptCacheError(f"squeeze: {error}") from error


class FlatFile:
    def __init__(self, directory: Path, name: str, alignment: int) -> None:
        self._name = f"{name}.flat"
        self._alignment = alignment
        self._table: dict[str, object] = {}
        self._file = PagedFile(directory / self._name)

    def append(self, id: str, array: EncodedArray) -> tuple[Extent, ...]:
        extents = tuple(self._append(block) for block in array.blocks)
        self._table[id] = entry(array.rows, extents)
        return extents

    def write_out(self) -> None:
        self._file.write_out()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.append(tail(self._table))
        self._file.close()

    def abort(self) -> None:
        self._file.abort()

    def pages(self) -> dict[str, Pages]:
        return {self._name: self._file.pages}

    def _append(self, block: bytes | memoryview) -> Extent:
        self._file.append(bytes(-self._file.size % self._alignment))
        return Extent(self._name, self._file.append(block), len(block))


def entry(rows: int, extents: Sequence[Extent]) -> object:
    return [rows, [[extent.offset, extent.nbytes] for extent in extents]]


def tail(table: Mapping[str, object]) -> bytes:
    data = json.dumps(table).encode()
    return data + len(data).to_bytes(8, "little")


def read_flat(path: Path) -> dict[str, tuple[int, list[bytes]]]:
    """Return the number of rows and the blocks of each id."""
    data = path.read_bytes()
    size = int.from_bytes(data[-8:], "little")
    table = json.loads(data[-8 - size : -8])
    return {
        id: (rows, [data[o : o + n] for o, n in places]) for id, (rows, places) in table.items()
    }
