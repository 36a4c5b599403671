"""NumPy arrays: one `<feature>.npy` a feature, `np.load(path, mmap_mode="r")` opens it.

On disk::

    0     "\\x93NUMPY" 01 00, little-endian u16 246
    10    "{'descr': '<f4', 'fortran_order': False, 'shape': (total_frames, *dims), }", spaces,
          "\\n"
    256   frames of all utterances in the order of writing, C order, without gaps

More than some fifty axes make the header longer, by a multiple of 64. It has its final size from
the start, so `total_frames` (0 until then) is patched into it when the file is closed. A feature
without a time axis counts as one frame an utterance. bfloat16 is stored as the uint16 of its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from featcache.container_files import FeatureFilesWriter
from featcache.interface import FeatureSpec, Written
from featcache_backends._array_file import ArrayFile, finish_array_file
from featcache_backends._npy_header import npy_header

HEADER_BYTES = 256  # a multiple of 64, so that frames start aligned


@dataclass(frozen=True)
class MemmapBackend:
    """One memory-mappable `.npy` file per feature."""

    codecs: ClassVar[tuple[str, ...]] = ("raw",)

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        """Start one `.npy` file per feature."""
        return FeatureFilesWriter(
            {f.name: ArrayFile(directory / f"{f.name}.npy", f, _header) for f in features}
        )

    def finish(self, directory: Path, features: Sequence[FeatureSpec], written: Written) -> None:
        """Give each file the header of its frames, and cut off what is behind these."""
        for feature in features:
            finish_array_file(directory / f"{feature.name}.npy", feature, written, _header)


def _header(feature: FeatureSpec, rows: int) -> bytes:
    longest = npy_header(feature, (2**63, *feature.dims))
    return npy_header(feature, (rows, *feature.dims), max(HEADER_BYTES, len(longest)))
