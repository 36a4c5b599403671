"""NumPy arrays: one `<feature>.npy` a feature, `np.load(path, mmap_mode="r")` opens it.

On disk::

    0     "\\x93NUMPY" 01 00, little-endian u16 246
    10    "{'descr': '<f4', 'fortran_order': False, 'shape': (total_frames, *dims), }", spaces,
          "\\n"
    256   frames of all utterances in the order of writing, C order, without gaps

More than some fifty axes make the header longer, by a multiple of 64. It has its final size from
the start, so `total_frames` (0 until then) is patched into it when the file is closed. A feature
without a time axis counts as one frame an utterance. bfloat16 is stored as the uint16 of its bits.

With the codec int8 it is an array of uint8, (total_bytes,): the blocks of all utterances, each of
up to 1,000 frames, of which `featcache_backends._int8` makes numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from featcache.container_files import FeatureFilesWriter
from featcache.interface import Blocks, FeatureSpec, Written
from featcache_backends._array_file import ArrayFile, finish_array_file
from featcache_backends._int8 import Int8Codec as Int8Codec  # its entry point is here
from featcache_backends._npy_header import npy_header

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
