"""Codec of adopted arrays whose numbers lie in another order: of axes, or of the bytes of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from featcache.errors import ConfigError, CorruptCacheError
from featcache.interface import Array


@dataclass(frozen=True)
class ReorderedCodec:
    """Reads whole arrays in Fortran order, transposed, or of big-endian numbers.

    A window is cut out of a view of the array: its bytes alone are looked at. Raises `ConfigError`
    for axes that are none.

    Args:
        axes: of an array of shape (rows, *dims), 0 the rows, in the order in which their numbers
            lie, the slowest first; empty: C order.
        big_endian: whether the numbers are.
    """

    name: ClassVar[str] = "reordered"
    lossless: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    axes: Sequence[int] = ()
    big_endian: bool = False

    def __post_init__(self) -> None:
        axes = self.axes
        if not isinstance(axes, Sequence) or sorted(map(repr, axes)) != sorted(
            map(repr, range(len(axes)))
        ):
            raise ConfigError(f"axes are the numbers 0, 1, ... in another order, not {axes!r}")
        if not isinstance(self.big_endian, bool):
            raise ConfigError(f"big_endian is True or False, not {self.big_endian!r}")

    def encode(self, block: Array) -> bytes:
        """Raise `ConfigError`: this codec only reads."""
        raise ConfigError(f"codec {self.name!r} reads what others wrote; choose another to write")

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return a view of the array of exactly `rows` rows that `data` holds."""
        shape = (rows, *dims)
        axes = [*self.axes] or [*range(len(shape))]
        if len(axes) != len(shape) or len(data) != math.prod(shape) * dtype.itemsize:
            raise CorruptCacheError(
                f"an array of shape {shape} and {dtype}, with axes {axes}, is no {len(data)} bytes"
            )
        stored = np.frombuffer(data, dtype.newbyteorder(">") if self.big_endian else dtype)
        found = stored.reshape([shape[axis] for axis in axes])
        found = found.transpose([axes.index(axis) for axis in range(len(axes))])
        return found.astype(dtype) if self.big_endian else found
