"""HDF5's own compression, deflate and shuffle, as a codec, without HDF5."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Array, Bytes
from featcache_backends._refusals import DAMAGE, check_range, damaged_block


@dataclass(frozen=True)
class GzipCodec:
    """HDF5's own compression: deflate, better with the bytes of the numbers shuffled."""

    name: ClassVar[str] = "gzip"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    level: int = 4
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_range("gzip: level", self.level, 0, 9)
        if type(self.shuffle) is not bool:
            raise ConfigError(f"gzip: shuffle must be true or false, not {self.shuffle!r}")

    def encode(self, block: Array) -> bytes:
        """Shuffle and deflate a block of shape (rows, *dims)."""
        octets = block.reshape(-1).view(np.uint8)
        if self.shuffle:
            return zlib.compress(octets.reshape(-1, block.itemsize).T.tobytes(), self.level)
        return zlib.compress(octets.data, self.level)

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block that `data` holds, as `Codec` says."""
        most = rows * math.prod(dims) * dtype.itemsize
        inflate = zlib.decompressobj()
        try:
            octets = np.frombuffer(inflate.decompress(data, most + 1), np.uint8)
            if len(octets) > most:
                raise ValueError(f"it holds more than {rows} rows")
            if not inflate.eof or inflate.unused_data:
                raise ValueError("it ends too early, or goes on behind its end")
            if self.shuffle:
                octets = _unshuffled(octets, dtype.itemsize)
            return octets.view(dtype).reshape(-1, *dims)
        except DAMAGE as error:
            raise damaged_block(self.name, data, error) from error


def _unshuffled(octets: Bytes, itemsize: int) -> Bytes:
    planes = octets.reshape(itemsize, -1)
    numbers = np.empty((planes.shape[1], itemsize), np.uint8)
    for significance, plane in enumerate(planes):  # four times as fast as a transposed copy
        numbers[:, significance] = plane
    return numbers.reshape(-1)
