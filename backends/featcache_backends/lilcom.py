"""lilcom: lhotse's `lilcom_chunky` archive, one `<feature>.lca` a feature.

On disk: lilcom blocks of 500 frames (the last of an array may be shorter), one after another,
without any header. An array whose blocks start at `offset` and take `n0`, `n1`, ... bytes has the
key "offset,n0,n1,..." in lhotse::

    LilcomChunkyReader("fbank.lca").read("0,8213,4026")

An array without a time axis is one block of shape (1, *dims); one without elements has no bytes
here.

lilcom rounds each number to a multiple of a tick after predicting it from its neighbours; a block
holds its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
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
from featcache.errors import ConfigError, CorruptCacheError, FeatureError, MissingDependencyError
from featcache.interface import Array, Blocks, EncodedArray, Extent, FeatureSpec

BLOCK_ROWS = 500  # fixed in lhotse's reader
TICK_POWERS = range(-20, 21)  # what lilcom accepts
# a prediction from n <= 4 neighbours, the distance to it and their sum again: magnitudes of up to n
# + 1 times the largest number, each rounded to half a unit in the last place of 24 bits
ROUNDING = 2.0**-21


@dataclass(frozen=True)
class LilcomBackend:
    """One lhotse `lilcom_chunky` archive per feature."""

    codecs: ClassVar[tuple[str, ...]] = ("lilcom",)

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        """Start one archive per feature."""
        _import_lilcom()
        return FeatureFilesWriter(
            {feature.name: _Archive(directory, feature) for feature in features}
        )

    def finish(
        self,
        directory: Path,
        features: Sequence[FeatureSpec],
        written: Sequence[tuple[str, Mapping[str, tuple[int, tuple[Extent, ...]]]]],
    ) -> None:
        """Cut off what is behind the last block of each archive."""
        for feature in features:
            path, end = f"{feature.name}.lca", 0
            for id, arrays in written:
                for extent in arrays[feature.name][1]:
                    if extent != Extent(path, end, extent.nbytes):
                        raise misplaced(id)
                    end += extent.nbytes
            with open_left(directory, path, end) as file:
                end_file(file, end)

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Cut as lhotse does."""
        return Blocks(rows=BLOCK_ROWS)


@dataclass(frozen=True)
class LilcomCodec:
    """Lossy compression of float32.

    No number moves by more than half a tick, 2 ** `tick_power` / 2.

    Beside that, float32 rounds while lilcom predicts: at most 2 ** -21 of the largest magnitude in
    the block.
    """

    name: ClassVar[str] = "lilcom"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"float32"})

    tick_power: int = -5

    def __post_init__(self) -> None:
        if type(self.tick_power) is not int or self.tick_power not in TICK_POWERS:
            raise ConfigError(
                f"lilcom: tick_power must be an integer from {TICK_POWERS[0]} to "
                f"{TICK_POWERS[-1]}, not {self.tick_power!r}"
            )

    def encode(self, block: Array) -> bytes:
        """Compress a float32 block of shape (rows, *dims).

        Raises `FeatureError` if a number would move further than the class promises: NaN, infinity,
        and numbers of more than about 2 ** 31 ticks.
        """
        lilcom = _import_lilcom()
        largest = float(np.abs(block).max())
        if not math.isfinite(largest):
            raise FeatureError(f"lilcom cannot hold {_described(block)}: not all are finite")
        try:
            with np.errstate(all="ignore"):  # huge numbers overflow in its regression
                # it writes into its input
                data: bytes = lilcom.compress(block.copy(), tick_power=self.tick_power)
        except (ValueError, RuntimeError) as error:
            raise FeatureError(f"lilcom cannot hold {_described(block)}: {error}") from error
        # only decoding (a fifth of the time of encoding) tells: beside huge numbers, lilcom
        # silently loses smooth blocks of shape (a, b, c, 1), whose decoder adds in another order
        # than the encoder and drifts from it
        with np.errstate(all="ignore"):
            moved = np.abs(lilcom.decompress(data) - block)
        if not (moved <= 2.0**self.tick_power / 2 + largest * ROUNDING).all():
            raise FeatureError(
                f"lilcom cannot hold {_described(block)} to half a tick of 2 ** {self.tick_power}, "
                f"a number would move by {moved.max()}; try a larger tick_power, or another codec"
            )
        return data

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block that `data` holds, as `Codec` says."""
        lilcom = _import_lilcom()
        try:
            octets = bytes(data)
            shape = lilcom.get_shape(octets)  # a block knows its own
            if shape[1:] != dims or shape[0] > rows:
                raise ValueError(f"its shape is {shape!r}, not up to {(rows, *dims)!r}")
            with np.errstate(all="ignore"):
                block: Array = lilcom.decompress(octets)
        except (ValueError, RuntimeError, ArithmeticError, SystemError, MemoryError) as error:
            raise CorruptCacheError(
                f"lilcom: a block of {len(data)} bytes cannot be decompressed: {error}"
            ) from error
        return block.astype(dtype, copy=False)


class _Archive:
    def __init__(self, directory: Path, feature: FeatureSpec) -> None:
        self._name = f"{feature.name}.lca"
        self._file = PagedFile(directory / self._name)

    def append(self, id: str, array: EncodedArray) -> tuple[Extent, ...]:
        return tuple(
            Extent(self._name, self._file.append(block), len(block)) for block in array.blocks
        )

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def abort(self) -> None:
        self._file.abort()

    def pages(self) -> dict[str, Pages]:
        return {self._name: self._file.pages}


def _described(block: Array) -> str:
    return f"a block of shape {block.shape!r} with numbers from {block.min()} to {block.max()}"


def _import_lilcom() -> ModuleType:
    try:
        import lilcom
    except ImportError as error:
        raise MissingDependencyError(
            "codec 'lilcom' needs 'lilcom'; try: pip install 'featcache[lilcom]'"
        ) from error
    module: ModuleType = lilcom
    return module
