"""One file a feature: a header, where the format has one, then the arrays without gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.lib.format import dtype_to_descr

from featcache.container_files import (
    EncodedArrays,
    Extents,
    PagedFile,
    Pages,
    end_file,
    misplaced,
    open_left,
    write_all,
)
from featcache.interface import EncodedArray, Extent, FeatureSpec, Written

Header = Callable[[FeatureSpec, int, int], bytes]


def no_header(feature: FeatureSpec, rows: int, nbytes: int) -> bytes:
    """Return the header of a format that has none."""
    return b""


class ArrayFile:
    """A `FeatureFile` that appends arrays to one file.

    Args:
        path: of the file.
        feature: that it holds.
        header: returns the header for a number of rows and of bytes; it has one size for all.
    """

    def __init__(self, path: Path, feature: FeatureSpec, header: Header = no_header) -> None:
        self._name = path.name
        self._feature = feature
        self._header = header
        self._rows = 0
        self._file = PagedFile(path)
        self._header_bytes = len(header(feature, 0, 0))
        self._file.append(header(feature, 0, 0))

    def append(self, id: str, array: EncodedArray) -> tuple[Extent, ...]:
        """Write an array behind the one before."""
        self._rows += array.rows
        return tuple(
            [Extent(self._name, self._file.append(block), len(block)) for block in array.blocks]
        )

    def append_many(self, ids: Sequence[str], arrays: EncodedArrays) -> Extents:
        """Write many arrays behind the one before."""
        self._rows += int(arrays.rows.sum())
        begin = self._file.append_each(arrays.pieces)
        return Extents(
            counts=arrays.blocks,
            containers=(self._name,),
            container=np.zeros(len(arrays.nbytes), np.int64),
            offset=begin + np.cumsum(arrays.nbytes) - arrays.nbytes,
            nbytes=arrays.nbytes,
        )

    def write_out(self) -> None:
        """Show other processes all arrays."""
        self._file.write_out()

    def flush(self) -> None:
        """Make all arrays durable."""
        self._file.flush()

    def close(self) -> None:
        """Write the header of all rows, and close the file durably."""
        nbytes = self._file.size - self._header_bytes
        self._file.patch(0, self._header(self._feature, self._rows, nbytes))
        self._file.close()

    def abort(self) -> None:
        """Close the file as it is."""
        self._file.abort()

    def pages(self) -> dict[str, Pages]:
        """Return the digests of the pages of the file."""
        return {self._name: self._file.pages}


def finish_array_file(
    path: Path, feature: FeatureSpec, written: Written, header: Header = no_header
) -> None:
    """Leave the file of a dead writer as `ArrayFile.close` would have after these utterances.

    Raises `CorruptCacheError` if it is not such a file.
    """
    begin = end = len(header(feature, 0, 0))
    total = 0
    for id, arrays in written:
        rows, extents = arrays[feature.name]
        expected = end + rows * feature.row_bytes if feature.codec is None else None
        for extent in extents:
            if extent != Extent(path.name, end, extent.nbytes):
                raise misplaced(id)
            end += extent.nbytes
        if expected not in (None, end):
            raise misplaced(id)
        total += rows
    with open_left(path.parent, path.name, end) as file:
        write_all(file, header(feature, total, end - begin))
        end_file(file, end)


def npy_header(dtype: np.dtype[np.generic], shape: tuple[int, ...], least: int = 0) -> bytes:
    """Return the header of an array: `least` bytes, or the next multiple of 64 that holds it.

    The room that numpy's own writer leaves differs from version to version.
    """
    descr = dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin1")
    # 10 bytes in front of the text, "\n" behind it
    length = max(least, -(-(10 + len(text) + 1) // 64) * 64) - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"
