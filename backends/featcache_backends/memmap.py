"""NumPy arrays, one `<feature>.npy` a feature that `np.load` maps; and the codec int8.

On disk::

    0     "\\x93NUMPY" 01 00, little-endian u16 246
    10    "{'descr': '<f4', 'fortran_order': False, 'shape': (total_frames, *dims), }", spaces,
          "\\n"
    256   frames of all utterances in the order of writing, C order, without gaps

More than some fifty axes make the header longer, by a multiple of 64. It has its final size from
the start, so `total_frames` (0 until then) is patched into it when the file is closed. A feature
without a time axis counts as one frame an utterance. bfloat16 is stored as the uint16 of its bits.

With the codec int8 it is an array of uint8, (total_bytes,): the blocks of all utterances, each of
up to 1,000 frames. A block of `rows` frames of `width` numbers, little-endian, without gaps::

    0     "int8"
    4     u32 rows
    8     f32 low, one a dimension: the least number of the block
          u16 step, one a dimension: the upper half of a float32
          u8 codes, (rows, width) in C order

A number is `low + code * step` in float32: the product has 16 bits, so it is exact, and the sum is
rounded. One or two frames, which that would not make smaller, stand behind `rows` as they are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from featcache.container_files import FeatureFilesWriter
from featcache.errors import FeatureError
from featcache.interface import Array, Blocks, FeatureSpec, Written
from featcache_backends._array_file import ArrayFile, finish_array_file, npy_header
from featcache_backends._refusals import DAMAGE, damaged_block

HEADER_BYTES = 256  # a multiple of 64, so that frames start aligned
# of int8: the heads of most utterances take half a percent, and what is loud for a while does not
# coarsen the rest of a long recording
BLOCK_ROWS = 1000


@dataclass(frozen=True)
class MemmapBackend:
    """One memory-mappable `.npy` file per feature."""

    codecs: ClassVar[tuple[str, ...]] = ("raw", "int8")

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        """Start one `.npy` file per feature."""
        return FeatureFilesWriter(
            {f.name: ArrayFile(directory / f"{f.name}.npy", f, _header) for f in features}
        )

    def finish(self, directory: Path, features: Sequence[FeatureSpec], written: Written) -> None:
        """Give each file the header of its frames, and cut off what is behind these."""
        for feature in features:
            finish_array_file(directory / f"{feature.name}.npy", feature, written, _header)

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Cut into blocks of 1,000 frames."""
        return Blocks(rows=BLOCK_ROWS)


def _header(feature: FeatureSpec, rows: int, nbytes: int) -> bytes:
    dtype, dims = feature.storage_dtype, feature.dims
    if feature.codec is not None:
        dtype, dims, rows = np.dtype(np.uint8), (), nbytes
    longest = npy_header(dtype, (2**63, *dims))
    return npy_header(dtype, (rows, *dims), max(HEADER_BYTES, len(longest)))


# int8: float32 in a byte a number, with a scale for each block and dimension.

MAGIC = b"int8"
HEAD_BYTES = 8  # in front of the numbers
LOW = np.dtype("<f4")
STEP = np.dtype("<u2")
CODE = np.dtype("u1")
SCALE_BYTES = LOW.itemsize + STEP.itemsize  # of a dimension
MOST_EXACT = 2  # frames: of more, codes are smaller
MOST_CODE = 255
LARGEST = float(np.finfo(np.float32).max)
# numbers: from 32,768 on torch hands a share to threads of its own, and waits for them, which takes
# milliseconds where the processors are busy
GRAIN = 32_000

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Int8Codec:
    """A byte a number: 256 steps from the least to the largest of each dimension of a block.

    No number moves by more than a 506th of that range, and 2 ** -23 of the largest magnitude. A
    dimension that has one value in a block keeps it exactly, and so do blocks of one or two frames.
    """

    name: ClassVar[str] = "int8"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"float32"})

    def encode(self, block: Array) -> bytes:
        """Encode a float32 block of shape (rows, *dims).

        Raises `FeatureError` for NaN, infinity, and a dimension whose range float32 cannot hold.
        """
        frames = block.reshape(len(block), -1)
        low, high = frames.min(axis=0), frames.max(axis=0)
        span = np.subtract(high, low, dtype=np.float64)
        if not (span <= LARGEST).all():  # nor is NaN
            raise FeatureError(
                f"int8 cannot hold a block of shape {block.shape!r} with numbers from "
                f"{low.min()} to {high.max()}: not all are finite, or they lie too far apart; mend "
                "it, or choose another codec"
            )
        head = MAGIC + len(frames).to_bytes(4, "little")
        if len(frames) <= MOST_EXACT:
            return head + block.tobytes()
        bits = (span / MOST_CODE).astype(np.float32).view(np.uint32)
        steps = (bits + np.uint32(0xFFFF) >> 16).astype(STEP)  # none is rounded down
        widths = _as_floats(steps)
        codes = np.subtract(frames, low)
        codes /= np.where(widths > 0, widths, np.float32(1))
        np.minimum(np.rint(codes, out=codes), MOST_CODE, out=codes)
        return b"".join((head, low.tobytes(), steps.tobytes(), codes.astype(CODE).tobytes()))

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block that `data` holds, as `Codec` says."""
        try:
            held = _rows(data, math.prod(dims))
            if held > rows:
                raise ValueError(f"it holds {held} rows, not up to {rows}")
        except DAMAGE as error:
            raise damaged_block(self.name, data, error) from error
        block = np.empty((held, *dims), dtype)
        self.decode_into(data, 0, block)
        return block

    def decode_into(self, data: memoryview, start: int, out: Array) -> int:
        """Fill `out` with frames from `start` on, as `DecodesFrames` says."""
        width = math.prod(out.shape[1:])
        try:
            if out.dtype != LOW:
                raise ValueError(f"it holds float32, not {out.dtype}")
            rows = _rows(data, width)
        except DAMAGE as error:
            raise damaged_block(self.name, data, error) from error
        count = min(rows - start, len(out))
        if count <= 0:
            return 0
        frames = cast(Floats, out[:count].reshape(count, width))
        if rows <= MOST_EXACT:
            begin = HEAD_BYTES + start * width * LOW.itemsize
            frames[...] = np.ndarray((count, width), LOW, data, begin)
        else:
            low = np.ndarray((width,), LOW, data, HEAD_BYTES).copy()  # torch needs it aligned
            steps = np.ndarray((width,), STEP, data, HEAD_BYTES + width * LOW.itemsize)
            begin = HEAD_BYTES + (SCALE_BYTES + start) * width
            codes = np.ndarray((count, width), CODE, data, begin)
            _fill(frames, codes, _as_floats(steps), low)
        return count


def _rows(data: memoryview, width: int) -> int:
    """Return how many frames a block holds; raises `ValueError` where it is none."""
    rows = int.from_bytes(data[4:HEAD_BYTES], "little")
    row_bytes = rows * LOW.itemsize if rows <= MOST_EXACT else SCALE_BYTES + rows
    if data[:4] != MAGIC or not rows or len(data) != HEAD_BYTES + row_bytes * width:
        raise ValueError(f"it is no block of frames of {width} numbers")
    return rows


def _as_floats(steps: NDArray[np.uint16]) -> Floats:
    """Return the float32 of which these are the upper halves."""
    halves = np.zeros((len(steps), 2), STEP)  # in less time than by shifting
    halves[:, 1] = steps
    return halves.view(LOW)[:, 0]


def _fill(frames: Floats, codes: NDArray[np.uint8], step: Floats, low: Floats) -> None:
    """Fill frames (rows, width) with the numbers of codes.

    torch, where the process has it, gives the same bits in two thirds of NumPy's time.
    """
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "addcmul"):  # nor has one that is still being imported
        np.copyto(frames, codes)
        with np.errstate(all="ignore"):  # of damaged heads
            frames *= step
            frames += low
        return
    together = len(frames) if torch.get_num_threads() == 1 else max(GRAIN // len(low), 1)
    low, step = torch.from_numpy(low), torch.from_numpy(step)
    for begin in range(0, len(frames), together):
        some = frames[begin : begin + together]
        some[...] = codes[begin : begin + together]
        tensor = torch.from_numpy(some)
        torch.addcmul(low, tensor, step, out=tensor)
