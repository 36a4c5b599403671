"""The seam between featcache and a storage format.

A backend writes its ecosystem's own standard file and tells, for every array, where its bytes lie.
Nothing else: durability, index, statistics, resume and all reading belong to the store, which goes
straight to those bytes.

A new format is one frozen dataclass (its fields are the format's options) and one
`ContainerWriter`, entered under the entry point group `featcache.backends`;
`featcache.container_files` has what writing files takes, and `featcache.testing.BackendContract`
tells whether it keeps its word. No option of a backend may have the name of an option of one of its
codecs: both are given in one dict.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Extent(NamedTuple):
    """Place of bytes: `nbytes` bytes from `offset` in a file."""

    container: str  # POSIX path, relative to the directory given to `Backend.open_writer`
    offset: int
    nbytes: int


# utterances in the order of writing: the id, and by feature the rows and the extents
Written = Sequence[tuple[str, Mapping[str, tuple[int, tuple[Extent, ...]]]]]


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """A feature as a backend must know it before its first array."""

    name: str
    dtype: str  # the declared dtype, "float32", "bfloat16", ...
    dims: tuple[int, ...]  # shape of one frame; () for one number a frame
    has_frames: bool = True  # False: one array of shape `dims` an utterance, stored as one row
    codec: Codec | None = None  # None: raw bytes

    @property
    def storage_dtype(self) -> np.dtype[np.generic]:
        """The dtype on disk, little-endian.

        bfloat16 is stored as the uint16 of its bits, since numpy has none.
        """
        return storage_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Size of one uncompressed frame in bytes."""
        return self.storage_dtype.itemsize * math.prod(self.dims)

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape that the user sees of an array of `rows` frames."""
        return (rows, *self.dims) if self.has_frames else self.dims


class EncodedArray(NamedTuple):
    """One utterance's array on its way to disk.

    Without a codec `blocks` is one C-ordered little-endian buffer, with one it is one buffer per
    block.
    """

    rows: int  # frames; 1 for a feature without a time axis
    blocks: tuple[bytes | memoryview, ...]  # empty when `rows` is 0

    @property
    def nbytes(self) -> int:
        """Size of all blocks in bytes."""
        return sum(map(len, self.blocks))


class ContainerWriter(Protocol):
    """Writes the arrays of some features into the files of one format, append only.

    Used by one thread at a time. Bytes of earlier arrays never move: extents stay valid for ever,
    also when the process dies. New files have durable names (their directory is synced) before a
    `flush` returns.
    """

    def append(self, id: str, arrays: Mapping[str, EncodedArray]) -> dict[str, tuple[Extent, ...]]:
        """Write one utterance, all features of this container; returns where their bytes lie.

        Without a codec, the extents of a feature joined together are the array's bytes; with one,
        there is one extent per block. An array of zero bytes has no extents. `id` is any non-empty
        Unicode string without NUL. The blocks are the caller's again once this returns.

        Raises `FeatureError`, having written nothing, for an array that the format cannot hold. By
        then the one who gave it has gone on, so this ends the writing of the cache as any other
        error does, and what is committed stays: whatever can be told without the bytes
        `ChecksArrays.check` should tell, which refuses that utterance alone. After any other error
        only `abort` is called.
        """

    def flush(self) -> None:
        """Return once all that was appended would survive a power cut."""

    def close(self) -> None:
        """Finish the files, durably, so that the format's own tools open them; let go of them."""

    def abort(self) -> None:
        """Release the files as they are; never raises."""


@runtime_checkable
class ChecksArrays(Protocol):
    """A `ContainerWriter` that can say, before it writes, that its format cannot hold an array."""

    def check(self, id: str, arrays: Mapping[str, tuple[int, int]]) -> None:
        """Raise `FeatureError` if `append` would refuse this id, or arrays of these sizes.

        `arrays` has by feature the number of rows and of bytes, before a codec. Called in the
        thread of the one who writes, while another thread may be in the other methods: it must
        depend on nothing that these change.
        """


@runtime_checkable
class WritesOut(Protocol):
    """A `ContainerWriter` that holds bytes back until `flush`, and can give them out before."""

    def write_out(self) -> None:
        """Return once other processes can read all that was appended; it need not be durable."""


@runtime_checkable
class SupportsPages(Protocol):
    """A `ContainerWriter` that knows the digests of its files; those of others are read again."""

    def pages(self) -> Mapping[str, NDArray[np.uint64]]:
        """Return the digests of the pages of each file, valid once the writer is closed.

        By the path of the file, as in extents, also of files without an extent: the xxh3-64 of each
        `featcache.container_files.PAGE_BYTES` bytes of the finished file, the last ones maybe
        fewer. An array has the digests of the bytes that `append` was given: no reading of the file
        may give it others. Files that the writer cannot promise that of are left out.
        """


@runtime_checkable
class Backend(Protocol):
    """A storage format; a frozen dataclass whose fields are its options, checked when made.

    Importing its module and making it must not import the format's library; `open_writer` may.
    """

    # names of the codecs that the format can declare; the first is the default
    codecs: ClassVar[tuple[str, ...]]

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> ContainerWriter:
        """Start new files for `features` in the existing, empty or foreign `directory`.

        Raises, having made no file, `MissingDependencyError` when the format's library is not
        installed, `ConfigError` for features that the format cannot hold, `FeatureError` where only
        the shape of a frame is at fault.
        """


@runtime_checkable
class FinishesFiles(Protocol):
    """A backend that can finish the files of a writer that died, where they lie."""

    def finish(self, directory: Path, features: Sequence[FeatureSpec], written: Written) -> None:
        """Leave the files as `ContainerWriter.close` would have after exactly these utterances.

        What lies behind them is cut off. All is durable when this returns. May be called again
        after it was interrupted anywhere, and must not change a byte of an extent nor follow a
        link: `featcache.container_files` has what that takes.

        Raises `CorruptCacheError` if these are not the files that such a writer leaves: then the
        store copies the arrays instead.
        """


@dataclass(frozen=True, slots=True)
class Blocks:
    """Cut of the arrays of a feature into blocks, before a codec encodes them."""

    rows: int | None  # rows a block; None: the whole array is one block
    padded: bool = False  # True: the last block is filled up with zero rows


@runtime_checkable
class SupportsBlocks(Protocol):
    """A backend that can hold encoded blocks."""

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Return how to cut the arrays of `feature`; only asked when `feature.codec` is set."""


@runtime_checkable
class Codec(Protocol):
    """A way to turn blocks of rows into bytes; a frozen dataclass whose fields are its options.

    Options are checked when it is made. One with a class attribute `only_reads = True` is for
    adopted stores alone: no backend lists it, and its `encode` raises `ConfigError`.
    """

    name: ClassVar[str]  # as registered
    lossless: ClassVar[bool]
    dtypes: ClassVar[frozenset[str] | None]  # declared dtypes that it can hold; None: all

    def encode(self, block: Array) -> bytes:
        """Encode a C-ordered, little-endian block of shape (rows, *dims), rows > 0.

        Must not change `block`.
        """

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the block of shape (up to `rows`, *dims) that `data` holds.

        `data` is whatever lies on disk. Raises `CorruptCacheError`, and nothing else, if it holds
        no such block or more rows, before it takes memory for these. It must neither end the
        process nor run on and on.
        """


@runtime_checkable
class DecodesFrames(Protocol):
    """A `Codec` that decodes some frames of a block, straight to where they are wanted."""

    def decode_into(self, data: memoryview, start: int, out: Array) -> int:
        """Fill `out` (frames, *dims) with the block's frames from `start` on.

        Returns how many frames that are: fewer than `out` has room for where the block ends.
        Raises as `decode` does, also for another dtype than that of the block.
        """


@functools.cache
def storage_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the little-endian numpy dtype that holds the declared `dtype` on disk.

    >>> storage_dtype("bfloat16"), storage_dtype("bool")
    (dtype('uint16'), dtype('bool'))
    """
    return np.dtype("<" + np.dtype("uint16" if dtype == "bfloat16" else dtype).str[1:])
