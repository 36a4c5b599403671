"""The arrays of one feature: from a row of the index to numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from featcache.errors import CacheError, CorruptCacheError, FeatcacheError
from featcache.interface import Array, Bytes, Codec, Ints, storage_dtype
from featcache.registry import RAW, get_codec
from featcache.store.format.index import Index
from featcache.store.format.manifest import Manifest
from featcache.store.reading.block_decoding import decoded
from featcache.store.reading.checks import Checks
from featcache.store.reading.containers import Containers, Piece


class FeatureArrays:
    """Reads the arrays of one feature as they are stored.

    With `checks`, all bytes are compared with their checksums before they are given.
    """

    def __init__(
        self,
        manifest: Manifest,
        name: str,
        index: Index,
        containers: Containers,
        checks: Checks | None = None,
    ) -> None:
        declared, columns = manifest.features[name], index.features[name]
        self.name = name
        self.declared_dtype: str = declared["dtype"]
        self.dtype = storage_dtype(self.declared_dtype)
        self.dims = manifest.dims.get(name, ())
        self.has_frames = declared["time_axis"] is not None
        self.lengths = columns.rows
        self._index = index
        self._columns = columns
        self._checks = checks
        # one item of a memoryview costs a third of one of an array
        self._length, self._first = columns.rows.data, columns.first.data
        self._container, self._offset, self._nbytes = (
            columns.container.data,
            columns.offset.data,
            columns.nbytes.data,
        )
        self._containers = containers
        self._row_bytes = self.dtype.itemsize * math.prod(self.dims)
        self._codec_name = declared["codec"]
        self._options: Mapping[str, object] = declared["options"]
        self._codec: Codec | None = None
        self._part = index.containers.parts.data
        self._block_rows = [part.block_rows[name] for part in manifest.parts]

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Array:
        """Return a writable copy of frames `start` to before `stop`, in the user's shape."""
        try:
            if self._checks is not None:
                self._check(row, start, self._length[row] if stop is None else stop)
            view = self.view(row)
            if view is not None:
                return view[start:stop].copy() if self.has_frames else view[0, ...].copy()
            length: int = self._length[row] if stop is None else stop
            self.check_length(row)
            out = self.empty(length - start)
            self._read_into(row, out, start)
            return out if self.has_frames else out[0, ...]
        except (IndexError, ValueError, OverflowError) as error:
            raise self._damaged(row, error) from None

    def empty(self, *lengths: int) -> Array:
        """Return an array of shape (*lengths, *dims) to read into.

        Raises `CacheError` if memory lacks.
        """
        try:
            return np.empty((*lengths, *self.dims), self.dtype)
        except (MemoryError, ValueError) as error:
            raise CacheError(
                f"feature {self.name!r}: no memory for frames {lengths} of shape {self.dims}: "
                f"{error}; read less at once, or see whether the cache is damaged "
                "(verify='columns')"
            ) from error

    def read_into(self, row: int, out: Array, start: int = 0) -> None:
        """Copy the frames from `start` on into the contiguous `out` of shape (frames, *dims)."""
        if self._checks is not None:
            self._check(row, start, start + len(out))
        self._read_into(row, out, start)

    def _read_into(self, row: int, out: Array, start: int) -> None:
        try:
            view = self.view(row)
            if view is not None:
                if len(out) > len(view) - start:  # NumPy would repeat a single frame
                    raise self._damaged(row, "it is shorter than its length")
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
        """Return the read-only array of shape (rows, *dims) without a copy.

        None unless it lies mapped in one piece.
        """
        extent = self._first[row]
        if self._codec_name != RAW or self._first[row + 1] != extent + 1:
            return None
        source = self._containers.mapped(self._container[extent])
        if source is None:
            return None
        rows, offset = self._length[row], self._offset[extent]
        nbytes = rows * self._row_bytes
        # NumPy takes any offset
        if not (0 <= nbytes <= self._nbytes[extent] and 0 <= offset <= len(source) - nbytes):
            raise self._damaged(row, "its extent is shorter than its length")
        return np.ndarray((rows, *self.dims), self.dtype, source.data, offset)

    def read_many(self, rows: Ints, starts: Ints, lengths: Ints, outs: Iterable[Bytes]) -> None:
        """Copy `lengths` frames from `starts` on of many rows.

        Each goes to the front of the bytes of one of `outs`.
        """
        pieces = self._pieces(rows, starts, lengths)
        if pieces is not None and self._checks is not None:
            for row, start, length in zip(
                rows.tolist(), starts.tolist(), lengths.tolist(), strict=True
            ):
                self._check(row, start, start + length)
        if pieces is not None:
            self._containers.read_many(pieces, outs)
            return
        extents = [
            extent
            for row in rows.tolist()
            for extent in range(self._first[row], self._first[row + 1])
        ]
        self._containers.prefetch(
            [(self._container[e], self._offset[e], self._nbytes[e]) for e in extents]
        )
        counts = (lengths * self._row_bytes).tolist()
        for row, start, count, out in zip(
            rows.tolist(), starts.tolist(), counts, outs, strict=True
        ):
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
                raise self._damaged(
                    int(rows[short.argmax()]), "its extent is shorter than its length"
                )
            where = (
                columns.container[extent].tolist(),
                (columns.offset[extent] + begin).tolist(),
                nbytes.tolist(),
            )
        except IndexError as error:
            raise self._damaged(int(rows[0]), error) from None
        return list(zip(*where, strict=True))

    def check_length(self, row: int) -> None:
        """Raise `CorruptCacheError` for a length that the row's bytes cannot have.

        This comes before memory is taken for it.
        """
        length, extents = self._length[row], range(self._first[row], self._first[row + 1])
        try:
            for extent in extents:
                self._containers.check(
                    self._container[extent], self._offset[extent], self._nbytes[extent]
                )
            if self._codec_name == RAW or not extents:
                fits = (
                    0 <= length * self._row_bytes <= sum(self._nbytes[extent] for extent in extents)
                )
            else:  # what a single block of any length holds only shows when it is decoded
                size = self._block_rows[self._part[self._container[extents[0]]]]
                fits = not size or 0 <= length <= size * len(extents)
        except IndexError as error:
            raise self._damaged(row, error) from None
        if not fits:
            raise self._damaged(row, "its extents are shorter than its length")

    def _damaged(self, row: int, what: object) -> FeatcacheError:
        if isinstance(what, FeatcacheError):
            return what
        try:
            which = f"utterance {self._index.id(row)!r}"
        except (CorruptCacheError, IndexError):
            which = f"row {row}"
        return CorruptCacheError(
            f"{which}, feature {self.name!r} is damaged: {what}; opening the cache with "
            "verify='arrays' tells all damage, and what to do"
        )

    def _check(self, row: int, start: int, stop: int) -> None:
        """Raise `CorruptCacheError` unless the bytes of some frames are what was written.

        Those of a whole array by its checksum, those of a window by the pages that they lie on.
        """
        checks = cast(Checks, self._checks)
        extents = [
            (self._container[each], self._offset[each], self._nbytes[each])
            for each in range(self._first[row], self._first[row + 1])
        ]
        if start == 0 and stop == self._length[row]:
            if not checks.same_array(extents, int(self._columns.checksum[row])):
                raise self._damaged(row, "its checksum does not match")
        elif self._codec_name == RAW:
            begin, end = start * self._row_bytes, stop * self._row_bytes
            for container, offset, nbytes in extents:
                if begin < nbytes and end > 0:
                    checks.same_pages(
                        container, offset + max(begin, 0), min(end, nbytes) - max(begin, 0)
                    )
                begin, end = begin - nbytes, end - nbytes
        elif extents:
            size = self._block_rows[self._part[extents[0][0]]] or self._length[row]
            for extent in extents[start // size : -(-stop // size)]:
                checks.same_pages(*extent)

    def _copy_bytes(self, row: int, skip: int, target: Bytes) -> None:
        for extent in range(self._first[row], self._first[row + 1]):
            nbytes: int = self._nbytes[extent]
            if skip < nbytes:
                here = target[: nbytes - skip]
                self._containers.read_into(
                    self._container[extent], self._offset[extent] + skip, here
                )
                target = target[len(here) :]
                if not len(target):
                    return
            skip = max(skip - nbytes, 0)
        raise self._damaged(row, "its extents are shorter than its length")

    def _decode(self, row: int, start: int, out: Array) -> None:
        first, last = self._first[row], self._first[row + 1]
        if first == last:
            raise self._damaged(row, "it has frames but no extents")
        size = self._block_rows[self._part[self._container[first]]] or self._length[row]
        done = 0
        for extent in range(first + start // size, last):
            block = self._block(extent, size)[max(start - (extent - first) * size, 0) :][
                : len(out) - done
            ]
            out[done : done + len(block)] = block
            done += len(block)
            if done == len(out):
                return
        raise self._damaged(row, "its blocks are shorter than its length")

    def _block(self, extent: int, rows: int) -> Array:
        data = self._containers.view(
            self._container[extent], self._offset[extent], self._nbytes[extent]
        )
        if self._codec is None:
            kind = get_codec(self._codec_name)
            known = {field.name for field in dataclasses.fields(cast(Any, kind))}
            self._codec = kind(
                **{key: value for key, value in self._options.items() if key in known}
            )
        return decoded(self._codec, data.data, self.dtype, self.dims, rows)
