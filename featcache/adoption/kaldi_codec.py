"""Codec of Kaldi's objects that do not hold their numbers as they are: compressed, integers.

A block is one whole object of an archive, see `ark_objects`. Adopted archives are read with it;
nothing is written. Numbers of compressed matrices are those that kaldiio decodes, bit for bit:
Kaldi computes some of them in float64 before it rounds, which may differ in the last bit.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from featcache.adoption.ark_objects import HEAD_BYTES, ArkObject, ark_object
from featcache.errors import ConfigError, CorruptCacheError
from featcache.interface import Array

Floats = NDArray[np.float32]
LEVELS: Floats = np.arange(256, dtype=np.float32)
INTEGER = np.dtype([("size", "u1"), ("number", "<i4")])


@dataclass(frozen=True)
class KaldiCodec:
    """Reads the compressed matrices and integer vectors of Kaldi's archives."""

    name: ClassVar[str] = "kaldi"
    lossless: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"float32", "float64", "int32"})

    def encode(self, block: Array) -> bytes:
        """Raise `ConfigError`: this codec only reads."""
        raise ConfigError("codec 'kaldi' reads what Kaldi wrote; choose another one to write")

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the matrix or vector that `data` holds, as rows of shape `dims`."""
        try:
            found = ark_object(bytes(data[:HEAD_BYTES]))
        except ValueError as error:
            raise CorruptCacheError(f"no object of Kaldi's: {error}") from None
        if found.nbytes != len(data) or dtype != np.dtype(found.dtype).newbyteorder("<"):
            raise CorruptCacheError(
                f"an object of Kaldi's of {found.nbytes} bytes and {found.dtype} lies in "
                f"{len(data)} bytes, as {dtype}"
            )
        held = 1 if found.shape == dims else found.shape[0]  # without a time axis one row is all
        if held > rows or found.shape not in (dims, (held, *dims)):
            raise CorruptCacheError(
                f"an object of Kaldi's has shape {found.shape}, not up to {(rows, *dims)}"
            )
        return _numbers(found, data).reshape(held, *dims)


def _numbers(found: ArkObject, data: memoryview) -> Array:
    body = data[found.begin :]
    if found.is_raw:
        return np.frombuffer(body, np.dtype(found.dtype).newbyteorder("<")).reshape(found.shape)
    if found.kind == b"\4":
        integers = np.frombuffer(body, INTEGER)
        if (integers["size"] != 4).any():
            raise CorruptCacheError("a vector of Kaldi's has integers that are not of 4 bytes")
        return np.ascontiguousarray(integers["number"])
    least, extent = struct.unpack("<ff", data[found.begin - 16 : found.begin - 8])
    rows, columns = found.shape
    with np.errstate(all="ignore"):  # a damaged head may say that numbers span infinity
        if found.kind != b"CM ":
            two = found.kind == b"CM2"
            values = np.frombuffer(body, "<u2" if two else np.uint8).astype(np.float32)
            return _unscaled(values, least, extent, 65535 if two else 255).reshape(found.shape)
        knots = np.frombuffer(body[: 8 * columns], "<u2").astype(np.float32)
        knots = _unscaled(knots, least, extent, 65535).reshape(columns, 4)
        levels = np.frombuffer(body[8 * columns :], np.uint8).reshape(columns, rows)
        if rows < len(LEVELS):  # fewer numbers than a table of them has
            return np.ascontiguousarray(_by_column(knots, levels.astype(np.float32)).T)
        each = _by_column(knots, LEVELS)
    result = np.empty((columns, rows), np.float32)
    for column in range(columns):
        np.take(each[column], levels[column], out=result[column], mode="clip")
    return np.ascontiguousarray(result.T)


def _unscaled(values: Floats, least: float, extent: float, most: int) -> Floats:
    # GlobalHeader.uint_to_float of kaldiio, in float32 throughout
    result: Floats = np.float32(least) + values * np.float32(extent) / np.float32(most)
    return result


def _by_column(knots: Floats, level: Floats) -> Floats:
    """Return the numbers of levels, a row a column: lines between the column's four knots."""
    # PerColHeader.char_to_float of kaldiio, in float32 throughout
    p0, p25, p75, p100 = (knots[:, n, None] for n in range(4))
    low = p0 + (p25 - p0) * level * np.float32(1 / 64)
    middle = p25 + (p75 - p25) * (level - np.float32(64)) * np.float32(1 / 128)
    high = p75 + (p100 - p75) * (level - np.float32(192)) * np.float32(1 / 63)
    return np.where(level <= 64, low, np.where(level > 192, high, middle))
