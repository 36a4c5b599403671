"""HDF5: one `.h5` file, one dataset an array; `h5py.File(path)["fbank/utt-1"][()]` reads it.

The file is `<feature>.h5` when it holds one feature, `features.h5` when it holds several. Each feature is a group, each
array a dataset of it, `/<feature>/<id>`, with `link_name(id)` for the id: `/` and `%` percent-encoded, so that `a` and
`a/b` can stand side by side. Every dataset's bytes start at a multiple of 64. On disk, for each codec::

    raw     contiguous dataset of shape (frames, *dims); lhotse's `numpy_hdf5`
    gzip    dataset of shape (frames, *dims), growable, in chunks of about 96 KiB with HDF5's filters shuffle (1) and
            deflate (2): a chunk is one zlib stream, the last chunk is filled up with zero frames
    lilcom  scalar dataset of an opaque type as long as the array's one lilcom block; lhotse's `lilcom_hdf5`

A feature without a time axis is a dataset of shape `dims`; with gzip it is one chunk, and of shape (1,) if `dims` is
(), since HDF5 cannot compress a scalar. An array without elements is an empty contiguous dataset of its shape, whatever
the codec. bfloat16 is stored as the uint16 of its bits, and the group's attribute `dtype` is then "bfloat16"; bool is
h5py's enumeration of one byte. Names, as HDF5 wants them: UTF-8, without a null byte. The file is of HDF5's earliest
format, groups apart: HDF5 1.8 opens it, and a flush leaves it readable even if the process is then killed.
HDF5's own records take about 400 bytes an array, with gzip about 3,000.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from featcache.container_files import sync_directory, sync_file
from featcache.errors import ConfigError, CorruptCacheError, FeatureError, MissingDependencyError
from featcache.interface import Array, Blocks, EncodedArray, Extent, FeatureSpec

if TYPE_CHECKING:
    from h5py import File
    from h5py.h5d import DatasetID
    from h5py.h5p import PropDCID
    from h5py.h5t import TypeID

ALIGNMENT = 64  # bytes: a cache line
BLOCK_BYTES = 96 * 1024  # about 300 frames of 80 float32: small enough for windows, large enough to compress


@dataclass(frozen=True)
class Hdf5Backend:
    """One HDF5 file, one dataset per array."""

    codecs: ClassVar[tuple[str, ...]] = ("raw", "gzip", "lilcom")

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> Hdf5Writer:
        """Start one HDF5 file for all features."""
        return Hdf5Writer(directory, features)

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Cut into HDF5 chunks for gzip, not at all for lilcom."""
        if isinstance(feature.codec, GzipCodec):
            return Blocks(rows=_chunk_rows(feature), padded=True)
        return Blocks(rows=None)


@dataclass(frozen=True)
class GzipCodec:
    """HDF5's own compression: deflate, better with the bytes of the numbers shuffled by significance."""

    name: ClassVar[str] = "gzip"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    level: int = 4
    shuffle: bool = True

    def __post_init__(self) -> None:
        if type(self.level) is not int or not 0 <= self.level <= 9:
            raise ConfigError(f"gzip: level must be an integer from 0 to 9, not {self.level!r}")
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
        except (zlib.error, ValueError, OverflowError, MemoryError) as error:
            raise CorruptCacheError(f"gzip: a block of {len(data)} bytes cannot be decompressed: {error}") from error


class Hdf5Writer:
    """Adds datasets to an HDF5 file."""

    def __init__(self, directory: Path, features: Sequence[FeatureSpec]) -> None:
        h5py = _import_h5py()
        path = directory / f"{features[0].name if len(features) == 1 else 'features'}.h5"
        self._file: File = h5py.File(path, "x", alignment_threshold=1, alignment_interval=ALIGNMENT)
        # the same file once more: bytes are written beside HDF5, and made durable after HDF5 has closed it
        self._bytes = path.open("r+b", buffering=0)
        sync_directory(directory)
        self._groups = {
            feature.name: _Group(h5py, self._file, path.name, self._bytes.fileno(), feature) for feature in features
        }

    def append(self, id: str, arrays: Mapping[str, EncodedArray]) -> dict[str, tuple[Extent, ...]]:
        """Add one dataset per feature; raises `FeatureError` for an array that HDF5 cannot hold."""
        return {name: self._groups[name].append(id, array) for name, array in arrays.items()}

    def flush(self) -> None:
        """Make all datasets durable, and the file readable as it is now."""
        with _system_errors():
            self._file.flush()
        sync_file(self._bytes)

    def close(self) -> None:
        """Close the HDF5 file durably."""
        with _system_errors():
            self._file.close()
        sync_file(self._bytes)
        self._bytes.close()

    def abort(self) -> None:
        """Close the HDF5 file, if it still can be."""
        with contextlib.suppress(Exception):  # on a full disk HDF5 cannot even write what it has in memory
            self._file.close()
        self._bytes.close()


class _Group:
    """The datasets of one feature.

    h5py's low-level interface, since `Group.create_dataset` takes two to three times as long as all of `append`.
    """

    def __init__(self, h5py: ModuleType, file: File, container: str, descriptor: int, feature: FeatureSpec) -> None:
        group = file.create_group(feature.name)
        if feature.dtype == "bfloat16":
            group.attrs["dtype"] = feature.dtype
        self._group = group.id
        self._h5py = h5py
        self._container = container
        self._descriptor = descriptor
        self._feature = feature
        self._number: TypeID = h5py.h5t.py_create(feature.storage_dtype, logical=True)
        self._names = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        self._names.set_char_encoding(h5py.h5t.CSET_UTF8)
        self._contiguous = _creation_properties(h5py)
        # HDF5 reserves the bytes at once, so that they can be written beside it: half the time of `DatasetID.write`
        self._contiguous.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        self._chunk = (_chunk_rows(feature), *feature.dims) if feature.has_frames else feature.dims or (1,)
        self._chunked = _creation_properties(h5py)
        if isinstance(feature.codec, GzipCodec) and 0 not in self._chunk:
            self._chunked.set_chunk(self._chunk)
            if feature.codec.shuffle:
                self._chunked.set_shuffle()
            self._chunked.set_deflate(feature.codec.level)

    def append(self, id: str, array: EncodedArray) -> tuple[Extent, ...]:
        try:
            with _system_errors():
                return self._append(link_name(id).encode(), array)
        except ValueError as error:
            shape = self._feature.shape(array.rows)
            raise FeatureError(
                f"{self._container!r} cannot hold feature {self._feature.name!r} of {id!r}, shape {shape!r}: {error}"
            ) from error

    def _append(self, name: bytes, array: EncodedArray) -> tuple[Extent, ...]:
        feature = self._feature
        if array.rows * feature.row_bytes == 0:
            self._create(name, self._number, feature.shape(array.rows), self._contiguous)
            return ()
        if isinstance(feature.codec, GzipCodec):
            return self._append_chunks(name, array)
        if feature.codec is None:
            return self._append_bytes(name, self._number, feature.shape(array.rows), array)
        return self._append_bytes(name, self._h5py.h5t.py_create(np.dtype(f"V{array.nbytes}")), (), array)

    def _append_bytes(
        self, name: bytes, datatype: TypeID, shape: tuple[int, ...], array: EncodedArray
    ) -> tuple[Extent, ...]:
        (block,) = array.blocks
        offset = self._create(name, datatype, shape, self._contiguous).get_offset()
        _write_all(self._descriptor, block, offset)
        return (Extent(self._container, offset, len(block)),)

    def _append_chunks(self, name: bytes, array: EncodedArray) -> tuple[Extent, ...]:
        shape, limits = self._feature.shape(array.rows) or (1,), None
        if self._feature.has_frames:  # HDF5 allows a chunk longer than the dataset only where the dataset may grow
            limits = (self._h5py.h5s.UNLIMITED, *self._feature.dims)
        dataset = self._create(name, self._number, shape, self._chunked, limits)
        extents = []
        for index, block in enumerate(array.blocks):
            start = (index * self._chunk[0], *(0 for _ in self._chunk[1:]))
            dataset.write_direct_chunk(start, block)
            chunk = dataset.get_chunk_info_by_coord(start)
            extents.append(Extent(self._container, chunk.byte_offset, chunk.size))
        return tuple(extents)

    def _create(
        self,
        name: bytes,
        datatype: TypeID,
        shape: tuple[int, ...],
        properties: PropDCID,
        limits: tuple[int, ...] | None = None,
    ) -> DatasetID:
        h5s = self._h5py.h5s
        space = h5s.create_simple(shape, limits) if shape else h5s.create(h5s.SCALAR)
        return self._h5py.h5d.create(self._group, name, datatype, space, properties, self._names)


def link_name(id: str) -> str:
    """Return the name of the dataset of `id` in its group; `urllib.parse.unquote` turns it back.

    >>> link_name("a/b"), link_name("100%"), link_name("."), link_name("utt-1.5 é")
    ('a%2Fb', '100%25', '%2E', 'utt-1.5 é')
    """
    if id in {".", ".."}:  # "." means the group itself to HDF5; ".." means its parent to people
        return id.replace(".", "%2E")
    return id.replace("%", "%25").replace("/", "%2F")


def _chunk_rows(feature: FeatureSpec) -> int:
    if not feature.has_frames:
        return 1
    return max(1, BLOCK_BYTES // max(1, feature.row_bytes))


def _creation_properties(h5py: ModuleType) -> PropDCID:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)  # the same data gives the same file
    return properties


def _unshuffled(octets: NDArray[np.uint8], itemsize: int) -> NDArray[np.uint8]:
    planes = octets.reshape(itemsize, -1)
    numbers = np.empty((planes.shape[1], itemsize), np.uint8)
    for significance, plane in enumerate(planes):  # four times as fast as a transposed copy
        numbers[:, significance] = plane
    return numbers.reshape(-1)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data).cast("B")
    while rest:  # the system takes at most 2 GiB at once
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """Raise as `OSError`, with its number, what the system told HDF5 and h5py repeats only in words."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        number = re.search(r"errno = (\d+)", str(error))
        if number is None and isinstance(error, ValueError):
            raise
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


def _import_h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError("backend 'hdf5' needs 'h5py'; try: pip install 'featcache[hdf5]'") from error
    module: ModuleType = h5py
    return module
