"""The arrays of one feature: from a row of the index to numbers, checked where that is wanted."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from featcache._cached import cached_property
from featcache._recycled import RECYCLED
from featcache.container_files import PAGE_BYTES
from featcache.declaration import DeclaredFeature, FrameTimes
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    FeatcacheError,
    FormatVersionError,
    WindowError,
)
from featcache.format import ContainerColumns, FeatureColumns, Index, Manifest, SealedPart
from featcache.interface import (
    Array,
    Bytes,
    Codec,
    DecodesFrames,
    EncodedArray,
    FeatureSpec,
    Ints,
    storage_dtype,
)
from featcache.reading.containers import Containers, Piece, Wanted
from featcache.reading.roots import NO_ROOTS, AdoptedFiles, Roots
from featcache.reading.shell import RemoteCache
from featcache.reading.verify import ContainerPages
from featcache.registry import RAW, get_codec

# An array's bytes as they are stored, for those who copy or compare them without decoding.


def stored_blocks(columns: FeatureColumns, row: int, containers: Containers) -> EncodedArray:
    """Return the blocks of a row, one an extent; views where the containers are mapped."""
    extents = range(int(columns.first[row]), int(columns.first[row + 1]))
    places = (
        (int(columns.container[at]), int(columns.offset[at]), int(columns.nbytes[at]))
        for at in extents
    )
    blocks = tuple(containers.view(*place).data for place in places)
    return EncodedArray(int(columns.rows[row]), blocks)


# Decoding of a codec's blocks, with its promises checked: any package may bring a codec.

Decoder = Callable[[memoryview, int, int, Array], int]


def decoded(
    codec: Codec, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
) -> Array:
    """Decode a block, whoever wrote the codec; raises `CorruptCacheError` if it breaks its promise.

    Without this, a block of one row too many would be taken for the next one's, and one of other
    dims be repeated to fill a frame.
    """
    try:
        block = np.asanyarray(codec.decode(data, dtype, dims, rows))
    except FeatcacheError:
        raise
    except Exception as error:
        raise _undecodable(codec, data, error) from error
    if block.dtype != dtype or block.ndim == 0 or block.shape[1:] != dims or len(block) > rows:
        raise CorruptCacheError(
            f"codec {codec.name!r} decodes a block of {len(data)} bytes to {block.dtype} of shape "
            f"{block.shape}, not {dtype} of up to {(rows, *dims)}"
        )
    return block


def decoder_of(codec: Codec) -> Decoder:
    """Return what fills `out` (frames, *dims) with frames of a block.

    Called with the block, the first of these frames, the rows that the block may hold, and `out`;
    returns how many frames it found. Raises as `decoded` does.
    """
    if not isinstance(codec, DecodesFrames):  # which takes as long as to decode an utterance

        def decode(data: memoryview, start: int, rows: int, out: Array) -> int:
            block = decoded(codec, data, out.dtype, out.shape[1:], rows)[start : start + len(out)]
            out[: len(block)] = block
            return len(block)

        return decode
    into = codec.decode_into

    def decode_into(data: memoryview, start: int, rows: int, out: Array) -> int:
        try:
            return operator.index(into(data, start, out))
        except FeatcacheError:
            raise
        except Exception as error:
            raise _undecodable(codec, data, error) from error

    return decode_into


def _undecodable(codec: Codec, data: memoryview, error: Exception) -> CorruptCacheError:
    return CorruptCacheError(
        f"codec {codec.name!r} cannot decode a block of {len(data)} bytes: {error!r}"
    )


def joined(spec: FeatureSpec, array: EncodedArray, block_rows: int) -> Array:
    """Return a whole array of shape (rows, *dims), storage dtype, from its blocks.

    Args:
        spec: the feature.
        array: its rows and its blocks.
        block_rows: rows a block of the codec; 0: the whole array is one block.
    """
    dtype, rows = spec.storage_dtype, array.rows
    if spec.codec is None or not array.blocks:
        flat = np.frombuffer(b"".join(array.blocks), dtype)
        return cast(Array, flat.reshape(rows, *spec.dims))
    size = block_rows or rows
    blocks = (memoryview(block) for block in array.blocks)
    frames = [decoded(spec.codec, block, dtype, spec.dims, size) for block in blocks]
    return np.concatenate(frames)[:rows]


# Checks of bytes when they are read: arrays by their checksum, windows of them by their pages.


class Checks:
    """Compares bytes of a generation's containers with what was written.

    Safe to share between threads.
    """

    def __init__(
        self,
        cache: Path,
        manifest: Manifest,
        columns: ContainerColumns,
        containers: Containers,
        remote: RemoteCache | None = None,
    ) -> None:
        self._containers = containers
        self._pages = ContainerPages(cache, manifest, columns, containers.adopted, remote)

    def same_array(self, extents: Sequence[Piece], checksum: int) -> bool:
        """Whether the bytes of a whole array have its checksum."""
        state = xxhash.xxh3_64()
        for extent in extents:
            state.update(self._containers.view(*extent).data)
        return state.intdigest() == checksum

    def check_pages(self, container: int, offset: int, nbytes: int) -> None:
        """Raise `CorruptCacheError` unless the pages that hold some bytes are what was written."""
        self._containers.check(container, offset, nbytes)
        first, last = offset // PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES)
        begin = first * PAGE_BYTES
        end = min(last * PAGE_BYTES, int(self._pages.columns.sizes[container]))
        data = self._containers.view(container, begin, end - begin).data
        pages = (data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES))
        found = list(map(xxhash.xxh3_64_intdigest, pages))
        if found != self._pages.of(container)[first:last].tolist():
            raise CorruptCacheError(
                f"container {self._pages.file(container)!r} is damaged between bytes {begin} and "
                f"{end}: the checksums of its pages do not match"
            )


# The arrays of one feature: from a row of the index to numbers.

MOST_FRAMES = 1 << 40  # no memory that they could be written from holds more
_LARGE_BYTES = 1 << 30  # of an array whose one block has to show that it holds as much


@contextmanager
def memory_for(feature: str, lengths: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[None]:
    """Raise `CacheError` where the memory for arrays of a feature cannot be had."""
    try:
        yield
    except (MemoryError, ValueError, RuntimeError) as error:  # torch raises the last one
        raise CacheError(
            f"feature {feature!r}: no memory for frames {lengths} of shape {dims}: {error}; read "
            "less at once, or see whether the cache is damaged (verify='columns')"
        ) from error


class FeatureArrays:
    """Reads the arrays of one feature as they are stored.

    With `checks`, all bytes are compared with their checksums before they are given.

    Args:
        name: of the feature.
        declared: its declaration, as a manifest has it.
        dims: of a frame.
        block_rows: frames a block, of each part that the index numbers.
        index: where the arrays lie.
        containers: their bytes.
        checks: of these.
    """

    def __init__(
        self,
        name: str,
        declared: DeclaredFeature,
        dims: tuple[int, ...],
        block_rows: list[int],
        index: Index,
        containers: Containers,
        checks: Checks | None = None,
    ) -> None:
        columns = index.features[name]
        self.name = name
        self.declared_dtype: str = declared["dtype"]
        self.dtype = storage_dtype(self.declared_dtype)
        self.dims = dims
        self.has_frames = declared["time_axis"] is not None
        self.times = FrameTimes.declared(declared)
        self.lengths = columns.rows
        self._index = index
        self._columns = columns
        self._checks = checks
        # one item of a memoryview costs a third of one of an array
        self._length, self._first = columns.rows.data, columns.first.data
        self._container, self._offset = columns.container.data, columns.offset.data
        self._nbytes = columns.nbytes.data
        self._containers = containers
        self._row_bytes = self.dtype.itemsize * math.prod(self.dims)
        self._declared = declared
        self._is_raw = declared["codec"] == RAW
        self._part = index.containers.parts.data
        self._block_rows = block_rows
        # of adopted arrays, row by row
        self._rows_blocks = None if columns.block_rows is None else columns.block_rows.data
        self._skip = None if columns.skip is None else columns.skip.data

    def read(
        self,
        row: int,
        start: int | None = None,
        stop: int | None = None,
        *,
        id: str = "",
        copy: bool = True,
    ) -> Array:
        """Return a writable copy of frames `start` to before `stop`, in the user's shape.

        Without `copy`, the mapped bytes themselves where they are the array. Raises `WindowError`,
        which names the `id`, for frames that there are not.
        """
        try:
            begin, end = 0, self._length[row]
            if start is not None or stop is not None:
                begin, end = self.window(id, end, start, stop)
            view = self._view(row, begin, end)
            if view is None:
                self.check_length(row)
                out = self.empty(end - begin)
                self.read_into(row, out, begin)
                return out if self.has_frames else out[0, ...]
            if self._checks is not None:
                self._check(row, begin, end)
            view = view if self.has_frames else view[0, ...]
            return RECYCLED.copy(view) if copy else view
        except (IndexError, ValueError, OverflowError) as error:
            raise self._damaged(row, error) from None

    def window(self, id: str, length: int, start: int | None, stop: int | None) -> tuple[int, int]:
        """Return the first frame and the one after the last of a window into `length` frames.

        Raises `WindowError` unless 0 <= start <= stop <= length, whole numbers.
        """
        if not self.has_frames:
            raise WindowError(
                f"feature {self.name!r} has no time axis, so there are no frames to choose from"
            )
        try:
            begin = 0 if start is None else operator.index(start)
            end = length if stop is None else operator.index(stop)
        except TypeError:
            wrong = (
                "give whole numbers of frames, from start to before stop, not "
                f"{start!r} and {stop!r}"
            )
        else:
            if 0 <= begin <= end <= length:
                return begin, end
            wrong = f"frames {begin} to {end} are not within 0 to {length}"
        raise WindowError(f"utterance {id!r}, feature {self.name!r}: {wrong}")

    def empty(self, *lengths: int) -> Array:
        """Return an array of shape (*lengths, *dims) to read into.

        Raises `CacheError` if memory lacks.
        """
        with memory_for(self.name, lengths, self.dims):
            return RECYCLED.empty((*lengths, *self.dims), self.dtype)

    def read_into(self, row: int, out: Array, start: int = 0) -> None:
        """Copy the frames from `start` on into the contiguous `out` of shape (frames, *dims)."""
        try:
            if self._checks is not None:
                self._check(row, start, start + len(out))
            view = self._view(row, start, start + len(out))
            if view is not None:
                out[...] = view
            elif out.nbytes == 0:
                return
            elif self._is_raw:
                self._copy_bytes(row, start * self._row_bytes, out.reshape(-1).view(np.uint8))
            else:
                self._decode(row, start, out)
        except (IndexError, ValueError, OverflowError) as error:
            raise self._damaged(row, error) from None

    def _view(self, row: int, start: int, stop: int) -> Array | None:
        """Return frames `start` to before `stop` of a row, read-only, without a copy.

        None unless the row lies mapped in one piece. Every microsecond of a read counts here: no
        property, slice or call more than it takes.
        """
        extent = self._first[row]
        if not self._is_raw or self._first[row + 1] != extent + 1:
            return None
        source = self._containers.mapped(self._container[extent])
        if source is None:
            return self._view_of_copies(row, start, stop) if self._containers.is_remote else None
        rows, offset, row_bytes = self._length[row], self._offset[extent], self._row_bytes
        nbytes = rows * row_bytes
        # NumPy takes any offset
        if not (0 <= nbytes <= self._nbytes[extent] and 0 <= offset <= len(source) - nbytes):
            raise self._damaged(row, "its extent is shorter than its length")
        if not 0 <= start <= stop <= rows:
            raise self._damaged(row, "it is shorter than its length")
        return np.ndarray(
            (stop - start, *self.dims), self.dtype, source, offset + start * row_bytes
        )

    def _view_of_copies(self, row: int, start: int, stop: int) -> Array | None:
        """Return the same of a row in an object store; None unless local copies have all of it."""
        extent, row_bytes = self._first[row], self._row_bytes
        begin, end = start * row_bytes, stop * row_bytes
        if not 0 <= start <= stop <= self._length[row] or end > self._nbytes[extent]:
            return None
        place = self._container[extent], self._offset[extent] + begin, end - begin
        data = self._containers.here(*place)
        if data is None:
            return None
        return data.view(self.dtype).reshape(stop - start, *self.dims)

    def read_many(self, rows: Ints, starts: Ints, lengths: Ints, outs: Iterable[Bytes]) -> None:
        """Copy `lengths` frames of each row, from `starts` on, to the front of one of `outs`."""
        try:
            self._read_many(rows, starts, lengths, outs)
        finally:
            self._containers.at([])

    def want(self, rows: Ints, starts: Ints, lengths: Ints, wanted: Wanted) -> None:
        """Add what `read_many` will read of an object store to what is wanted of it."""
        if not self._containers.lie_afar:
            return
        pieces = self._pieces(rows, starts, lengths)
        if pieces is None:
            pieces = [piece for row in rows.tolist() for piece in self._extents(row)]
        self._containers.want(pieces, wanted)

    def _read_many(self, rows: Ints, starts: Ints, lengths: Ints, outs: Iterable[Bytes]) -> None:
        windows = zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        pieces = self._pieces(rows, starts, lengths)
        if pieces is not None:
            if self._checks is not None:
                for row, start, length in windows:
                    self._check(row, start, start + length)
            self._containers.read_many(pieces, outs)
            return
        extents = [self._extents(row) for row in rows.tolist()]
        self._containers.prefetch([piece for of_row in extents for piece in of_row])
        for (row, start, length), of_row, out in zip(windows, extents, outs, strict=True):
            frames = out[: length * self._row_bytes].view(self.dtype).reshape(length, *self.dims)
            self._containers.at(of_row[:1])
            self.read_into(row, frames, start)

    def _pieces(self, rows: Ints, starts: Ints, lengths: Ints) -> list[Piece] | None:
        """Return where the bytes of these frames lie, None unless each lies in one piece."""
        columns = self._columns
        try:
            extent = columns.first[rows]
            if not self._is_raw or (columns.first[rows + 1] != extent + 1).any():
                return None
            begin, nbytes = starts * self._row_bytes, lengths * self._row_bytes
            short = begin + nbytes > columns.nbytes[extent]
            if short.any():
                raise self._damaged(
                    int(rows[short.argmax()]), "its extent is shorter than its length"
                )
            containers, offsets = columns.container[extent], columns.offset[extent] + begin
        except IndexError as error:
            raise self._damaged(int(rows[0]), error) from None
        return list(zip(containers.tolist(), offsets.tolist(), nbytes.tolist(), strict=True))

    def _extents(self, row: int, some: slice = slice(None)) -> list[Piece]:
        """Return where the bytes of a row lie, or some of its extents: a row may have thousands."""
        extents = range(self._first[row], self._first[row + 1])[some]
        try:
            return [(self._container[e], self._offset[e], self._nbytes[e]) for e in extents]
        except IndexError as error:
            raise self._damaged(row, error) from None

    def check_length(self, row: int) -> None:
        """Raise `CorruptCacheError` for a length that the row's bytes cannot have.

        To be called before memory is taken for it.
        """
        length, extents = self._length[row], self._extents(row)
        for extent in extents:
            self._containers.check(*extent)
        if self._is_raw or not extents:
            held = sum(nbytes for _, _, nbytes in extents)
            fits = length * self._row_bytes <= held
        elif size := self._declared_rows(row, extents[0][0]):
            fits = length <= size * len(extents) - self._skipped(row)
        else:
            fits = length * self._row_bytes <= _LARGE_BYTES or self._is_held(row, length)
        if not 0 <= length <= MOST_FRAMES or not fits:
            raise self._damaged(row, "its extents are shorter than its length")

    def _is_held(self, row: int, length: int) -> bool:
        """Decode the single block of a row: what it holds shows only then."""
        data = self._containers.view(*self._extents(row, slice(1))[0]).data
        return len(decoded(self._codec, data, self.dtype, self.dims, length)) == length

    @cached_property
    def all_lengths(self) -> Ints:
        """The frames of all rows: the column itself, once it has been looked at as a whole."""
        self.check_lengths(self.lengths)
        return self.lengths

    def check_lengths(self, lengths: Ints) -> None:
        """Raise `CorruptCacheError` for lengths, those of some rows, that no arrays can have."""
        most = MOST_FRAMES
        if self._is_raw and self._row_bytes:
            held = int(self._index.containers.sizes.sum())
            most = min(most, held // self._row_bytes)
        if lengths.min(initial=0) < 0 or lengths.max(initial=0) > most:
            raise CorruptCacheError(
                f"feature {self.name!r} is damaged: its index tells of {lengths.min()} to "
                f"{lengths.max()} frames; opening the cache with verify='arrays' tells all damage, "
                "and what to do"
            )

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

        A whole array is compared with its checksum, a window with those of the pages that it lies
        on. Local copies of what is not are removed: the next read asks the store.
        """
        try:
            self._compare(row, start, stop)
        except CorruptCacheError:
            self._containers.forget(self._extents(row))
            raise

    def _compare(self, row: int, start: int, stop: int) -> None:
        checks, extents = cast(Checks, self._checks), self._extents(row)
        if start == 0 and stop == self._length[row]:
            if not checks.same_array(extents, int(self._columns.checksum[row])):
                raise self._damaged(row, "its checksum does not match")
        elif self._is_raw:
            for piece in self._window(row, start * self._row_bytes, stop * self._row_bytes):
                checks.check_pages(*piece)
        elif extents:
            size, skip = self._rows_a_block(row, extents[0][0]), self._skipped(row)
            start, stop = start + skip, stop + skip
            for extent in extents[start // size : -(-stop // size)]:
                checks.check_pages(*extent)

    def _window(self, row: int, begin: int, end: int) -> list[Piece]:
        """Return where the bytes `begin` to before `end` of a raw array lie."""
        pieces = []
        for extent in range(self._first[row], self._first[row + 1]):
            nbytes = self._nbytes[extent]
            if begin < nbytes and end > 0:
                first, last = max(begin, 0), min(end, nbytes)
                pieces.append((self._container[extent], self._offset[extent] + first, last - first))
            begin, end = begin - nbytes, end - nbytes
        return pieces

    def _copy_bytes(self, row: int, begin: int, target: Bytes) -> None:
        done = 0
        for container, offset, nbytes in self._window(row, begin, begin + len(target)):
            self._containers.read_into(container, offset, target[done : done + nbytes])
            done += nbytes
        if done < len(target):
            raise self._damaged(row, "its extents are shorter than its length")

    def _decode(self, row: int, start: int, out: Array) -> None:
        first = self._first[row]
        if first == self._first[row + 1]:
            raise self._damaged(row, "it has frames but no extents")
        size, done = self._rows_a_block(row, self._container[first]), 0
        start += self._skipped(row)
        wanted = slice(start // size, -(-(start + len(out)) // size))
        for number, extent in enumerate(self._extents(row, wanted), wanted.start):
            data = self._containers.view(*extent).data
            begin = max(start - number * size, 0)
            done += self._decoder(data, begin, size, out[done : done + size - begin])
            if done == len(out):
                return
        raise self._damaged(row, "its blocks are shorter than its length")

    def _rows_a_block(self, row: int, container: int) -> int:
        """Return the rows of a codec's full block, those of the array where it is one block."""
        return self._declared_rows(row, container) or self._length[row]

    def _declared_rows(self, row: int, container: int) -> int:
        """Return the rows of a full block as the row says, or its part; 0: it is one block."""
        of_row: int = 0 if self._rows_blocks is None else self._rows_blocks[row]
        if of_row < 0:
            raise self._damaged(row, "its blocks have a negative length")
        return of_row or self._block_rows[self._part[container]]

    def _skipped(self, row: int) -> int:
        """Return the rows of the first block that stand before the array."""
        skip: int = 0 if self._skip is None else self._skip[row]
        if skip < 0:
            raise self._damaged(row, "it begins before its first block")
        return skip

    @cached_property
    def _decoder(self) -> Decoder:
        return decoder_of(self._codec)

    @cached_property
    def _codec(self) -> Codec:  # made when needed: its library may be missing
        name, options = self._declared["codec"], self._declared["codec_options"]
        kind = get_codec(name)
        known = {field.name for field in dataclasses.fields(cast(Any, kind))}
        if unknown := sorted(options.keys() - known):
            raise FormatVersionError(
                f"feature {self.name!r} is stored by codec {name!r} with options that it does not "
                f"know, {', '.join(map(repr, unknown))}; upgrade featcache, or the package that "
                "has the codec"
            )
        return kind(**options)


def arrays_of(
    manifest: Manifest, index: Index, containers: Containers, checks: Checks | None = None
) -> dict[str, FeatureArrays]:
    """Return what reads each feature of a generation."""
    found = {}
    for name, declared in manifest.features.items():
        dims, rows = manifest.dims.get(name, ()), [part.block_rows[name] for part in manifest.parts]
        found[name] = FeatureArrays(name, declared, dims, rows, index, containers, checks)
    return found


@dataclass(frozen=True)
class OpenedPart:
    """A sealed part, open for reading, whether or not a generation names it."""

    index: Index
    containers: Containers
    arrays: Mapping[str, FeatureArrays]
    adopted: AdoptedFiles | None  # of an adopted part

    @classmethod
    def of(
        cls,
        cache: Path,
        part: SealedPart,
        declared: Mapping[str, DeclaredFeature],
        index: Index,
        roots: Roots = NO_ROOTS,
    ) -> OpenedPart:
        """Open the features of a part that are `declared`; `index` is the part's."""
        adopted = AdoptedFiles.of(cache, [part.entry], index.containers, roots)
        containers = Containers(cache / part.directory, index.containers, adopted=adopted)
        arrays = {}
        for name, each in declared.items():
            dims, rows = part.header.dims[name], [part.entry.block_rows[name]]
            arrays[name] = FeatureArrays(name, each, dims, rows, index, containers)
        return cls(index, containers, arrays, adopted)
