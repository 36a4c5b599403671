"""A storage format as a stranger would add it, whole: `test_third_party_backend.py` installs copies of this file.

One `<feature>.flat` a feature: the bytes of all arrays, or of their compressed blocks, one after another.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

import numpy as np

from featcache.interface import Array, Blocks, EncodedArray, Extent, FeatureSpec


@dataclass(frozen=True)
class FlatBackend:
    codecs: ClassVar[tuple[str, ...]] = ("raw", "squeeze")

    alignment: int = 1

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FlatWriter:
        return FlatWriter(directory, features, self.alignment)

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

    def decode(self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...]) -> Array:
        return np.frombuffer(zlib.decompress(data), dtype).reshape(-1, *dims)


class FlatWriter:
    def __init__(self, directory: Path, features: Sequence[FeatureSpec], alignment: int) -> None:
        self._alignment = alignment
        self._files = {feature.name: (directory / f"{feature.name}.flat").open("xb") for feature in features}

    def append(self, id: str, arrays: Mapping[str, EncodedArray]) -> dict[str, tuple[Extent, ...]]:
        return {
            name: tuple(self._append(self._files[name], f"{name}.flat", block) for block in array.blocks)
            for name, array in arrays.items()
        }

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self.flush()
        self.abort()

    def abort(self) -> None:
        for file in self._files.values():
            file.close()

    def _append(self, file: BinaryIO, container: str, block: bytes | memoryview) -> Extent:
        file.write(bytes(-file.tell() % self._alignment))
        offset = file.tell()
        file.write(block)
        return Extent(container, offset, len(block))
