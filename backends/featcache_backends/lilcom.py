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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from featcache.container_files import FeatureFilesWriter
from featcache.errors import FeatureError
from featcache.interface import Array, Blocks, FeatureSpec, Written
from featcache_backends._array_file import ArrayFile, finish_array_file
from featcache_backends._refusals import DAMAGE, check_range, damaged_block, import_library

LILCOM = ("lilcom", "codec 'lilcom'", "lilcom")
BLOCK_ROWS = 500  # fixed in lhotse's reader
# a prediction from n <= 4 neighbours, the distance to it and their sum again: magnitudes of up to n
# + 1 times the largest number, each rounded to half a unit in the last place of 24 bits
ROUNDING = 2.0**-21


@dataclass(frozen=True)
class LilcomBackend:
    """One lhotse `lilcom_chunky` archive per feature."""

    codecs: ClassVar[tuple[str, ...]] = ("lilcom",)

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        """Start one archive per feature."""
        import_library(*LILCOM)
        return FeatureFilesWriter(
            {f.name: ArrayFile(directory / f"{f.name}.lca", f) for f in features}
        )

    def finish(self, directory: Path, features: Sequence[FeatureSpec], written: Written) -> None:
        """Cut off what is behind the last block of each archive."""
        for feature in features:
            finish_array_file(directory / f"{feature.name}.lca", feature, written)

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Cut into blocks of 500 frames, as lhotse does."""
        return Blocks(rows=BLOCK_ROWS)


@dataclass(frozen=True)
class LilcomCodec:
    """Lossy compression of float32: no number moves by more than half a tick of 2 ** `tick_power`.

    float32 rounds while lilcom predicts, which adds at most 2 ** -21 of the largest magnitude in
    the block.
    """

    name: ClassVar[str] = "lilcom"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"float32"})

    tick_power: int = -5

    def __post_init__(self) -> None:
        # what lilcom accepts
        check_range("lilcom: tick_power", self.tick_power, -20, 20)

    def encode(self, block: Array) -> bytes:
        """Compress a float32 block of shape (rows, *dims).

        Raises `FeatureError` if a number would move further than the class promises: NaN, infinity,
        and numbers of more than about 2 ** 31 ticks.
        """
        lilcom = import_library(*LILCOM)
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
        lilcom = import_library(*LILCOM)
        try:
            octets = bytes(data)
            shape = lilcom.get_shape(octets)  # a block knows its own
            if shape[1:] != dims or shape[0] > rows:
                raise ValueError(f"its shape is {shape!r}, not up to {(rows, *dims)!r}")
            with np.errstate(all="ignore"):
                block: Array = lilcom.decompress(octets)
        except DAMAGE as error:
            raise damaged_block(self.name, data, error) from error
        return block.astype(dtype, copy=False)


def _described(block: Array) -> str:
    return f"a block of shape {block.shape!r} with numbers from {block.min()} to {block.max()}"
