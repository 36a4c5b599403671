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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from numpy.lib.format import dtype_to_descr

from featcache.container_files import (
    FeatureFilesWriter,
    PagedFile,
    Pages,
    end_file,
    misplaced,
    open_left,
    write_all,
)
from featcache.interface import EncodedArray, Extent, FeatureSpec

HEADER_BYTES = 256  # a multiple of 64, so that frames start aligned


@dataclass(frozen=True)
class MemmapBackend:
    """One memory-mappable `.npy` file per feature."""

    codecs: ClassVar[tuple[str, ...]] = ("raw",)

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        """Start one `.npy` file per feature."""
        return FeatureFilesWriter(
            {feature.name: _NpyFile(directory, feature) for feature in features}
        )

    def finish(
        self,
        directory: Path,
        features: Sequence[FeatureSpec],
        written: Sequence[tuple[str, Mapping[str, tuple[int, tuple[Extent, ...]]]]],
    ) -> None:
        """Give each file the header of its frames, and cut off what is behind these."""
        for feature in features:
            arrays = ((id, *arrays[feature.name]) for id, arrays in written)
            _finish_npy(directory, feature, arrays)


class _NpyFile:
    def __init__(self, directory: Path, feature: FeatureSpec) -> None:
        self._name = f"{feature.name}.npy"
        self._feature = feature
        self._rows = 0
        self._file = PagedFile(directory / self._name)
        self._file.append(_header(feature, 0))

    def append(self, id: str, array: EncodedArray) -> tuple[Extent, ...]:
        start = self._file.size
        for block in array.blocks:
            self._file.append(block)
        self._rows += array.rows
        return (Extent(self._name, start, array.nbytes),) if array.nbytes else ()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.patch(0, _header(self._feature, self._rows))
        self._file.close()

    def abort(self) -> None:
        self._file.abort()

    def pages(self) -> dict[str, Pages]:
        return {self._name: self._file.pages}


def _finish_npy(
    directory: Path, feature: FeatureSpec, arrays: Iterable[tuple[str, int, tuple[Extent, ...]]]
) -> None:
    path, total = f"{feature.name}.npy", 0
    header_bytes = len(_header(feature, 0))
    for id, rows, extents in arrays:
        offset, nbytes = header_bytes + total * feature.row_bytes, rows * feature.row_bytes
        if extents != ((Extent(path, offset, nbytes),) if nbytes else ()):
            raise misplaced(id)
        total += rows
    end = header_bytes + total * feature.row_bytes
    with open_left(directory, path, end) as file:
        write_all(file, _header(feature, total))
        end_file(file, end)


def _header(feature: FeatureSpec, rows: int) -> bytes:
    longest = 10 + len(_description(feature, 2**63)) + 1
    length = max(HEADER_BYTES, -(-longest // 64) * 64) - 10
    text = _description(feature, rows).encode("latin1")
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"


def _description(feature: FeatureSpec, rows: int) -> str:
    entries = {
        "descr": dtype_to_descr(feature.storage_dtype),
        "fortran_order": False,
        "shape": (rows, *feature.dims),
    }
    return "{" + "".join(f"'{key}': {value!r}, " for key, value in entries.items()) + "}"
