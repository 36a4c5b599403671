"""HDF5: one `.h5` file, one dataset an array; `h5py.File(path)["fbank/utt-1"][()]` reads it.

The file is `<feature>.h5` when it holds one feature, `features.h5` when it holds several. Each
feature is a group, each array a dataset of it, `/<feature>/<id>`, with `link_name(id)` for the id:
`/` and `%` percent-encoded, so that `a` and `a/b` can stand side by side. Every dataset's bytes
start at a multiple of 64. On disk, for each codec::

    raw     contiguous dataset of shape (frames, *dims); lhotse's `numpy_hdf5`
    gzip    dataset of shape (frames, *dims), growable, in chunks of about 96 KiB with HDF5's
            filters shuffle (1) and deflate (2): a chunk is one zlib stream, the last chunk is
            filled up with zero frames
    lilcom  scalar dataset of an opaque type as long as the array's one lilcom block; lhotse's
            `lilcom_hdf5`

A feature without a time axis is a dataset of shape `dims`; with gzip it is one chunk, and of shape
(1,) if `dims` is (), since HDF5 cannot compress a scalar. An array without elements is an empty
contiguous dataset of its shape, whatever the codec. bfloat16 is stored as the uint16 of its bits,
and the group's attribute `dtype` is then "bfloat16"; bool is h5py's enumeration of one byte. Names,
as HDF5 wants them: UTF-8, without a null byte. The file is of HDF5's earliest format, groups apart:
HDF5 1.8 opens it, and a flush leaves it readable even if the process is then killed. HDF5's own
records take about 400 bytes an array, with gzip about 3,000.

Refused: more than 32 axes, frames included; with gzip, frames of 4 GiB; an id whose name takes more
than 65,000 bytes (HDF5 2.0 cannot open a group again that has up to 8 links, one of them of 65,516
to 65,522 bytes).
"""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, ClassVar
from urllib.parse import unquote

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from featcache.container_files import (
    AT_ONCE_BYTES,
    PAGE_BYTES,
    EncodedArrays,
    Extents,
    Pages,
    append_alone,
    bytes_at,
    start_writing,
    sync_directory,
    sync_file,
    write_each,
)
from featcache.errors import ConfigError, FeatureError
from featcache.interface import Array, Blocks, Bytes, EncodedArray, Extent, FeatureSpec
from featcache_backends._refusals import DAMAGE, check_range, damaged_block, import_library

if TYPE_CHECKING:
    import h5py


ALIGNMENT = 64  # bytes: a cache line
# HDF5's records, together: aligned one by one they made an array, with 500 features, nine times as
# slow after sixty utterances
META_BYTES = 1 << 13
AXES = 32  # H5S_MAX_RANK
CHUNK_LIMIT = 1 << 32  # bytes
NAME_BYTES = 65_000
# about 300 frames of 80 float32: small enough for windows, large enough to compress
BLOCK_BYTES = 96 * 1024


@dataclass(frozen=True)
class Hdf5Backend:
    """One HDF5 file, one dataset per array."""

    codecs: ClassVar[tuple[str, ...]] = ("raw", "gzip", "lilcom")

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> Hdf5Writer:
        """Start one HDF5 file for all features.

        Raises `FeatureError` for frames of more axes, or with gzip of more bytes, than HDF5 allows.
        """
        for feature in features:
            _check_frames(feature)
        return Hdf5Writer(directory, features)

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Cut into HDF5 chunks for gzip, not at all for lilcom."""
        if isinstance(feature.codec, GzipCodec):
            return Blocks(rows=_chunk_rows(feature), padded=True)
        return Blocks(rows=None)


class Hdf5Writer:
    """Adds datasets to an HDF5 file."""

    def __init__(self, directory: Path, features: Sequence[FeatureSpec]) -> None:
        h5py = import_library("h5py", "backend 'hdf5'", "hdf5")
        name = features[0].name if len(features) == 1 else "features"
        self._path = path = directory / f"{name}.h5"
        with system_errors(path):
            self._file = h5py.File(
                path,
                "x",
                alignment_threshold=1,
                alignment_interval=ALIGNMENT,
                meta_block_size=META_BYTES,
            )
        self._bytes = PlacedBytes(path)
        self._pages: dict[str, Pages] = {}
        sync_directory(directory)
        self._groups = {f.name: _Group(h5py, self._file, self._bytes, path, f) for f in features}

    def check(self, id: str, arrays: Mapping[str, tuple[int, int]]) -> None:
        """Raise `FeatureError` for an id that cannot be a name."""
        _name(id)

    def append(self, id: str, arrays: Mapping[str, EncodedArray]) -> dict[str, tuple[Extent, ...]]:
        """Add one dataset per feature; raises `FeatureError` for an array that HDF5 cannot hold."""
        return append_alone(self, id, arrays)

    def append_many(
        self, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
    ) -> dict[str, Extents]:
        """Add the datasets of utterances in turn, and write the bytes of all of them together."""
        names = [*map(_name, ids)]
        blocks: list[Placed] = []  # that HDF5 has made room for
        extents: dict[str, list[tuple[Extent, ...]]] = {name: [] for name in arrays}
        for link, *each in zip(names, *arrays.values(), strict=True):
            for name, encoded in zip(arrays, each, strict=True):
                extents[name].append(self._groups[name].append(link, encoded, blocks))
        self._bytes.write(blocks)
        return {name: Extents.of(each) for name, each in extents.items()}

    def write_out(self) -> None:
        """Show other processes the file as it is now."""
        with system_errors(self._path):
            self._file.flush()

    def flush(self) -> None:
        """Make all datasets durable, and the file readable as it is now."""
        self.write_out()
        self._bytes.flush()

    def close(self) -> None:
        """Close the HDF5 file durably."""
        with system_errors(self._path):
            self._file.close()
        self._pages[self._path.name] = self._bytes.pages()
        self._bytes.flush()
        self._bytes.close()

    def pages(self) -> dict[str, Pages]:
        """Return the digests of the file's pages."""
        return self._pages

    def abort(self) -> None:
        """Close the HDF5 file, if it still can be."""
        # on a full disk HDF5 cannot even write what it has in memory
        with contextlib.suppress(Exception):
            self._file.close()
        self._bytes.close()


class _Group:
    """The datasets of one feature.

    h5py's low-level interface, since `Group.create_dataset` takes two to three times as long as all
    of `append`.
    """

    def __init__(
        self,
        h5py: ModuleType,
        file: h5py.File,
        octets: PlacedBytes,
        path: Path,
        feature: FeatureSpec,
    ) -> None:
        group = file.create_group(feature.name)
        if feature.dtype == "bfloat16":
            group.attrs["dtype"] = feature.dtype
        self._group = group.id
        self._h5py = h5py
        self._path = path
        self._bytes = octets
        self._feature = feature
        self._number = h5py.h5t.py_create(feature.storage_dtype, logical=True)
        self._space = lru_cache(maxsize=1024)(partial(_space, h5py.h5s))
        self._names = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        self._names.set_char_encoding(h5py.h5t.CSET_UTF8)
        self._contiguous = _creation_properties(h5py)
        # HDF5 reserves the bytes at once, so that they can be written beside it: half the time of
        # `DatasetID.write`
        self._contiguous.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        self._chunk = (
            (_chunk_rows(feature), *feature.dims) if feature.has_frames else feature.dims or (1,)
        )
        self._chunked = _creation_properties(h5py)
        if isinstance(feature.codec, GzipCodec) and 0 not in self._chunk:
            self._chunked.set_chunk(self._chunk)
            if feature.codec.shuffle:
                self._chunked.set_shuffle()
            self._chunked.set_deflate(feature.codec.level)

    def append(self, name: bytes, array: EncodedArray, blocks: list[Placed]) -> tuple[Extent, ...]:
        """Add a dataset; what is to be written beside HDF5 goes to `blocks`."""
        try:
            with system_errors(self._path):
                return self._append(name, array, blocks)
        except ValueError as error:
            shape = self._feature.shape(array.rows)
            raise FeatureError(
                f"{self._path.name!r} cannot hold feature {self._feature.name!r} of "
                f"{unquote(name.decode())!r}, shape "
                f"{shape!r}: {error}"
            ) from error

    def _append(self, name: bytes, array: EncodedArray, blocks: list[Placed]) -> tuple[Extent, ...]:
        number, shape = self._number, self._feature.shape(array.rows)
        if not array.nbytes:
            self._create(name, number, shape)
            return ()
        if isinstance(self._feature.codec, GzipCodec):
            return self._append_chunks(name, array)
        if self._feature.codec is not None:
            number, shape = self._h5py.h5t.py_create(np.dtype(f"V{array.nbytes}")), ()
        (block,) = array.blocks
        offset = self._create(name, number, shape).get_offset()
        blocks.append((offset, memoryview(block).cast("B")))
        return (Extent(self._path.name, offset, len(block)),)

    def _append_chunks(self, name: bytes, array: EncodedArray) -> tuple[Extent, ...]:
        shape = self._feature.shape(array.rows) or (1,)
        dataset = self._create(name, self._number, shape, chunked=True)
        extents = []
        for index, block in enumerate(array.blocks):
            start = (index * self._chunk[0], *(0 for _ in self._chunk[1:]))
            dataset.write_direct_chunk(start, block)
            chunk = dataset.get_chunk_info_by_coord(start)
            extents.append(Extent(self._path.name, chunk.byte_offset, chunk.size))
            self._bytes.take(chunk.byte_offset, memoryview(block).cast("B"))
        return tuple(extents)

    def _create(
        self, name: bytes, number: h5py.h5t.TypeID, shape: tuple[int, ...], chunked: bool = False
    ) -> h5py.h5d.DatasetID:
        # HDF5 allows a chunk longer than the dataset only where the dataset may grow
        grows = chunked and self._feature.has_frames
        limits = (self._h5py.h5s.UNLIMITED, *self._feature.dims) if grows else None
        properties = self._chunked if chunked else self._contiguous
        return self._h5py.h5d.create(
            self._group, name, number, self._space(shape, limits), properties, self._names
        )


def link_name(id: str) -> str:
    """Return the name of the dataset of `id` in its group; `urllib.parse.unquote` turns it back.

    >>> link_name("a/b"), link_name("100%"), link_name("."), link_name("utt-1.5 é")
    ('a%2Fb', '100%25', '%2E', 'utt-1.5 é')
    """
    if id in {".", ".."}:  # "." means the group itself to HDF5; ".." means its parent to people
        return id.replace(".", "%2E")
    return id.replace("%", "%25").replace("/", "%2F")


def _name(id: str) -> bytes:
    name = link_name(id).encode()
    if len(name) > NAME_BYTES:
        raise FeatureError(
            f"id {id[:50]!r}... takes {len(name):,} bytes as a name, HDF5 holds {NAME_BYTES:,}; "
            "give a shorter one"
        )
    return name


def _space(
    h5s: ModuleType, shape: tuple[int, ...], limits: tuple[int, ...] | None
) -> h5py.h5s.SpaceID:
    return h5s.create_simple(shape, limits) if shape else h5s.create(h5s.SCALAR)


def _check_frames(feature: FeatureSpec) -> None:
    axes, nbytes = len(feature.shape(1)), feature.row_bytes
    if axes > AXES:
        raise FeatureError(
            f"feature {feature.name!r}: arrays have {axes} axes, HDF5 holds {AXES} at most"
        )
    if isinstance(feature.codec, GzipCodec) and nbytes >= CHUNK_LIMIT:
        raise FeatureError(
            f"feature {feature.name!r}: a frame has {nbytes:,} bytes, a chunk of HDF5 holds less "
            "than 4 GiB; store it raw"
        )


def _chunk_rows(feature: FeatureSpec) -> int:
    return max(1, BLOCK_BYTES // max(1, feature.row_bytes)) if feature.has_frames else 1


def _creation_properties(h5py: ModuleType) -> h5py.h5p.PropDCID:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)  # the same data gives the same file
    return properties


# Arrays that are written into a file beside HDF5, which tells where they belong.


class PagePieces:
    """Pieces of a file whose bytes were in hand, each within one page.

    Pages that lie within arrays are hashed while these are in hand. The others are read when the
    file is finished; what there is of arrays in them must be what was in hand.
    """

    def __init__(self) -> None:
        self._begins, self._sizes, self._digests = (
            array.array("q"),
            array.array("q"),
            array.array("Q"),
        )
        self._begin = self._end = 0  # of the piece that may go on
        self._state = xxh3_64()  # of that

    def add(self, offset: int, data: memoryview) -> None:
        """Hash bytes that lie in the file from `offset` on."""
        if offset != self._end:
            self._cut()
            self._begin = self._end = offset
        start = 0
        while start < len(data):
            piece = data[start : start + PAGE_BYTES - self._end % PAGE_BYTES]
            start += len(piece)
            self._end += len(piece)
            self._state.update(piece)
            if self._end % PAGE_BYTES == 0:
                self._cut()

    def _cut(self) -> None:
        if self._begin < self._end:
            self._note(self._state.intdigest())
            self._state.reset()

    def _note(self, digest: int) -> None:
        self._begins.append(self._begin)
        self._sizes.append(self._end - self._begin)
        self._digests.append(digest)
        self._begin = self._end

    def pages_of(self, file: BinaryIO) -> Pages:
        """Return the digests of the pages of the finished file.

        Raises `OSError` if a piece in a page that is read is not what was in hand.
        """
        self._cut()
        begins = np.array(self._begins, np.int64)
        order = np.argsort(begins)
        begins = begins[order]
        sizes = np.array(self._sizes, np.int64)[order]
        digests = np.array(self._digests, np.uint64)[order]
        pages = np.zeros(-(-os.fstat(file.fileno()).st_size // PAGE_BYTES), np.uint64)
        bounds = np.arange(len(pages) + 1) * PAGE_BYTES
        firsts = begins.searchsorted(bounds).tolist()  # of the pieces of each page
        if firsts[-1] < len(begins):
            raise _not_written(file, int(begins[-1]))
        whole = sizes == PAGE_BYTES
        known = begins[whole] // PAGE_BYTES
        pages[known] = digests[whole]
        for number in np.setdiff1d(np.arange(len(pages)), known).tolist():
            page = memoryview(bytes_at(file.fileno(), PAGE_BYTES, number * PAGE_BYTES))
            pages[number] = xxh3_64_intdigest(page)
            first, last = firsts[number], firsts[number + 1]
            starts = (begins[first:last] - number * PAGE_BYTES).tolist()
            lengths = sizes[first:last].tolist()
            found = [
                xxh3_64_intdigest(page[start : start + length])
                for start, length in zip(starts, lengths, strict=True)
            ]
            wrong = np.flatnonzero(np.array(found, np.uint64) != digests[first:last])
            if len(wrong):
                raise _not_written(file, int(begins[first + wrong[0]]))
        return pages


def _not_written(file: BinaryIO, offset: int) -> OSError:
    what = f"the array at byte {offset} is not what was written"
    return OSError(errno.EIO, what, str(file.name))


Placed = tuple[int, memoryview]  # an offset in the file, and the bytes from there on


class PlacedBytes:
    """The same file once more, for the bytes of arrays.

    HDF5 never touches these, so they are hashed while they are in hand.

    Args:
        path: of the file, which HDF5 has open.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b", buffering=0)
        self._on_its_way = 0  # bytes that the system was asked to bring to the disk
        self._pieces = PagePieces()

    def write(self, blocks: Sequence[Placed]) -> None:
        """Write blocks, with one call where they follow each other."""
        for offset, run in _runs(blocks):
            self._file.seek(offset)
            write_each(self._file, run)
            end = offset + sum(map(len, run))
            if end - self._on_its_way >= AT_ONCE_BYTES:
                start_writing(self._file, self._on_its_way, end - self._on_its_way)
                self._on_its_way = end
        for block in blocks:
            self._pieces.add(*block)

    def take(self, offset: int, block: memoryview) -> None:
        """Take note of bytes of an array that HDF5 wrote itself."""
        self._pieces.add(offset, block)

    def pages(self) -> Pages:
        """Return the digests of the file's pages, once HDF5 has closed it.

        Raises `OSError` for an array that is not what was written.
        """
        return self._pieces.pages_of(self._file)

    def flush(self) -> None:
        """Make the file durable, whoever wrote its bytes."""
        sync_file(self._file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _runs(blocks: Sequence[Placed]) -> Iterator[tuple[int, list[memoryview]]]:
    """Put together blocks that follow each other in the file."""
    begin, end, run = 0, 0, list[memoryview]()
    for offset, block in blocks:
        if run and offset != end:
            yield begin, run
            run = []
        if not run:
            begin = offset
        run.append(block)
        end = offset + len(block)
    if run:
        yield begin, run


# Errors of the disk as h5py tells them.


@contextlib.contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raise as `OSError`, with number and file, what h5py repeats only in words."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        number = getattr(error, "errno", None) or re.search(r"errno = (\d+)", str(error))
        if number is None and isinstance(error, ValueError):
            raise
        code = number if isinstance(number, int) else int(number[1]) if number else errno.EIO
        raise OSError(code, getattr(error, "strerror", None) or str(error), str(path)) from error


# HDF5's own compression, deflate and shuffle, as a codec, without HDF5.


@dataclass(frozen=True)
class GzipCodec:
    """HDF5's own compression: deflate, better with the bytes of the numbers shuffled."""

    name: ClassVar[str] = "gzip"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    level: int = 4
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_range("gzip: level", self.level, 0, 9)
        if type(self.shuffle) is not bool:
            raise ConfigError(f"gzip: shuffle must be true or false, not {self.shuffle!r}")

    def encode(self, block: Array) -> bytes:
        """Shuffle and deflate a block of shape (rows, *dims)."""
        octets = block.reshape(-1).view(np.uint8)
        if self.shuffle:
            return zlib.compress(octets.reshape(-1, block.itemsize).T.tobytes(), self.level)
        return zlib.compress(octets.data, self.level)

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block that `data` holds, as `Codec` says."""
        most = rows * math.prod(dims) * dtype.itemsize
        inflate = zlib.decompressobj()
        try:
            octets = np.frombuffer(inflate.decompress(data, most + 1), np.uint8)
            if len(octets) > most:
                raise ValueError(f"it holds more than {rows} rows")
            if not inflate.eof or inflate.unused_data:
                raise ValueError("it ends too early, or goes on behind its end")
            if self.shuffle:
                octets = _unshuffled(octets, dtype.itemsize)
            return octets.view(dtype).reshape(-1, *dims)
        except DAMAGE as error:
            raise damaged_block(self.name, data, error) from error


def _unshuffled(octets: Bytes, itemsize: int) -> Bytes:
    planes = octets.reshape(itemsize, -1)
    numbers = np.empty((planes.shape[1], itemsize), np.uint8)
    for significance, plane in enumerate(planes):  # four times as fast as a transposed copy
        numbers[:, significance] = plane
    return numbers.reshape(-1)
