"""The arrays of one feature: from a row of the index to numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError, FeatcacheError
from featcache.interface import Array, Codec, storage_dtype
from featcache.registry import RAW, get_codec
from featcache.store.extents import Containers, Piece
from featcache.store.index import FeatureColumns
from featcache.store.manifest import Manifest
from featcache.store.order import Ints


class FeatureArrays:
    """Reads the arrays of one feature as they are stored."""

    def __init__(self, manifest: Manifest, name: str, columns: FeatureColumns, containers: Containers) -> None:
        declared = manifest.features[name]
        self.name = name
        self.declared_dtype: str = declared["dtype"]
        self.dtype = storage_dtype(self.declared_dtype)
        self.dims = manifest.dims.get(name, ())
        self.has_frames = declared["time_axis"] is not None
        self.lengths = columns.rows
        self._columns = columns
        # one item of a memoryview costs a third of one of an array
        self._length, self._first = columns.rows.data, columns.first.data
        self._container, self._offset, self._nbytes = columns.container.data, columns.offset.data, columns.nbytes.data
        self._containers = containers
        self._row_bytes = self.dtype.itemsize * math.prod(self.dims)
        self._codec_name = declared["codec"]
        self._options: Mapping[str, object] = declared["options"]
        self._codec: Codec | None = None
        self._block_rows = np.array(
            [part.block_rows[name] for part in manifest.parts for _ in part.containers], np.int64
        )

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Array:
        """Return a writable copy of frames `start` to before `stop`, in the shape that the user sees."""
        try:
            view = self.view(row)
            if view is not None:
                return view[start:stop].copy() if self.has_frames else view[0, ...].copy()
            length: int = self._length[row] if stop is None else stop
            self.check_length(row)
            out = np.empty((length - start, *self.dims), self.dtype)
            self.read_into(row, out, start)
            return out if self.has_frames else out[0, ...]
        except (IndexError, ValueError, OverflowError) as error:
            raise self._damaged(row, error) from None

    def read_into(self, row: int, out: Array, start: int = 0) -> None:
        """Copy the frames from `start` on into the contiguous `out` of shape (frames, *dims)."""
        try:
            view = self.view(row)
            if view is not None:
                out[...] = view[start : start + len(out)]
            elif out.nbytes == 0:
                return
            elif self._codec_name == RAW:
                self._copy_bytes(row, start * self._row_bytes, out.reshape(-1).view(np.uint8))
            else:
                self._decode(row, start, out)
        except (IndexError, ValueError, OverflowError) as error:
            raise self._damaged(row, error) from None

    def view(self, row: int) -> Array | None:
        """Return the read-only array of shape (rows, *dims) without a copy; None unless it lies mapped in one piece."""
        extent = self._first[row]
        if self._codec_name != RAW or self._first[row + 1] != extent + 1:
            return None
        source = self._containers.mapped(self._container[extent])
        if source is None:
            return None
        rows, offset = self._length[row], self._offset[extent]
        nbytes = rows * self._row_bytes
        if not (0 <= nbytes <= self._nbytes[extent] and 0 <= offset <= len(source) - nbytes):  # NumPy takes any offset
            raise self._damaged(row, "its extent is shorter than its length")
        return np.ndarray((rows, *self.dims), self.dtype, source.data, offset)

    def read_many(self, rows: Ints, starts: Ints, lengths: Ints, outs: Iterable[NDArray[np.uint8]]) -> None:
        """Copy `lengths` frames from `starts` on of many rows, each to the front of the bytes of one of `outs`."""
        pieces = self._pieces(rows, starts, lengths)
        if pieces is not None:
            self._containers.read_many(pieces, outs)
            return
        extents = [extent for row in rows.tolist() for extent in range(self._first[row], self._first[row + 1])]
        self._containers.prefetch([(self._container[e], self._offset[e], self._nbytes[e]) for e in extents])
        counts = (lengths * self._row_bytes).tolist()
        for row, start, count, out in zip(rows.tolist(), starts.tolist(), counts, outs, strict=True):
            self.read_into(row, out[:count].view(self.dtype).reshape(-1, *self.dims), start)

    def _pieces(self, rows: Ints, starts: Ints, lengths: Ints) -> list[Piece] | None:
        """Return where the bytes of these frames lie, None unless each lies in one piece."""
        columns = self._columns
        try:
            extent = columns.first[rows]
            if self._codec_name != RAW or (columns.first[rows + 1] != extent + 1).any():
                return None
            begin, nbytes = starts * self._row_bytes, lengths * self._row_bytes
            short = begin + nbytes > columns.nbytes[extent]
            if short.any():
                raise self._damaged(int(rows[short.argmax()]), "its extent is shorter than its length")
            where = columns.container[extent].tolist(), (columns.offset[extent] + begin).tolist(), nbytes.tolist()
        except IndexError as error:
            raise self._damaged(int(rows[0]), error) from None
        return list(zip(*where, strict=True))

    def check_length(self, row: int) -> None:
        """Raise `CorruptCacheError` for a length that the row's bytes cannot have, before memory is taken for it."""
        length, extents = self._length[row], range(self._first[row], self._first[row + 1])
        try:
            for extent in extents:
                self._containers.check(self._container[extent], self._offset[extent], self._nbytes[extent])
            if self._codec_name == RAW or not extents:
                fits = 0 <= length * self._row_bytes <= sum(self._nbytes[extent] for extent in extents)
            else:  # what a single block of any length holds only shows when it is decoded
                size = int(self._block_rows[self._container[extents[0]]])
                fits = not size or 0 <= length <= size * len(extents)
        except IndexError as error:
            raise self._damaged(row, error) from None
        if not fits:
            raise self._damaged(row, "its extents are shorter than its length")

    def _damaged(self, row: int, what: object) -> FeatcacheError:
        if isinstance(what, FeatcacheError):
            return what
        return CorruptCacheError(f"row {row} of feature {self.name!r} is damaged: {what}")

    def _copy_bytes(self, row: int, skip: int, target: NDArray[np.uint8]) -> None:
        for extent in range(self._first[row], self._first[row + 1]):
            nbytes: int = self._nbytes[extent]
            if skip < nbytes:
                here = target[: nbytes - skip]
                self._containers.read_into(self._container[extent], self._offset[extent] + skip, here)
                target = target[len(here) :]
                if not len(target):
                    return
            skip = max(skip - nbytes, 0)
        raise self._damaged(row, "its extents are shorter than its length")

    def _decode(self, row: int, start: int, out: Array) -> None:
        first, last = self._first[row], self._first[row + 1]
        if first == last:
            raise self._damaged(row, "it has frames but no extents")
        size = int(self._block_rows[self._container[first]]) or self._length[row]
        done = 0
        for extent in range(first + start // size, last):
            block = self._block(extent, size)[max(start - (extent - first) * size, 0) :][: len(out) - done]
            out[done : done + len(block)] = block
            done += len(block)
            if done == len(out):
                return
        raise self._damaged(row, "its blocks are shorter than its length")

    def _block(self, extent: int, rows: int) -> Array:
        data = self._containers.view(self._container[extent], self._offset[extent], self._nbytes[extent])
        if self._codec is None:
            kind = get_codec(self._codec_name)
            known = {field.name for field in dataclasses.fields(cast(Any, kind))}
            self._codec = kind(**{key: value for key, value in self._options.items() if key in known})
        return self._codec.decode(data.data, self.dtype, self.dims, rows)
