"""The seam between featcache and stores that others wrote, so that they are adopted where they lie.

A kind of store is one object with the methods of `Kind`, entered under the entry point group
`featcache.adoption`. It says where the bytes of every array lie, and nothing else: the cache's
columns, reading, checks and deleting belong to the store. It reads through `Place` alone, so that a
store behind a URL is adopted in the same way.

What a kind cannot make a cache of, it refuses with an `AdoptionError` that names the id, or the
file and the place in it, and ends with `CONVERT` where another library can still read it; with
`COPY` where the kind `ReadsArrays` by that library itself. Sources are untrusted: a truncated file
or a header that lies is an `AdoptionError`, too.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import AdoptionError, ConfigError, FeatcacheError
from featcache.interface import Array, Ints, storage_dtype

_log = logging.getLogger("featcache")
# the end of a message about what is not adopted as it lies
CONVERT = "read it with its own library and write a cache of it (featcache.CacheWriter)"
COPY = "featcache.convert makes a cache of it, by a copy (adopting= takes the settings of adopt)"
COMPLEX = f"store real and imaginary parts as two features: {CONVERT}"
RAW = "raw"
# suffixes of files that people keep beside their arrays; README has none
_BESIDE = frozenset({"", ".md", ".txt", ".rst", ".log", ".json", ".yaml", ".yml"})
_OF_ARRAYS = (
    *(".npy", ".npz", ".pt", ".pth", ".h5", ".hdf5", ".safetensors", ".parquet", ".ark", ".pkl"),
    *(".pickle", ".mat", ".npy.gz"),
)
_LEFT = frozenset({"Thumbs.db", "desktop.ini"})  # by file managers
MOST_NUMBERS = 1 << 56  # of an array: bytes are counted in 64 bits
MOST_OF_ALL = 8  # arrays that may each hold all utterances
MOST_AXES = 64  # of an array, as NumPy has
Value = str | int | float | bool | list[int] | list[float] | None  # of an annotation
# 0, 1 ...: the axis of the frames (-1: the last one), also of arrays of one axis; None: arrays have
# no time axis; "auto": `stored_as` decides
TimeAxis = int | Literal["auto"] | None


class ByteSource(Protocol):
    """A file of the source, open for reading."""

    path: str  # POSIX, as it was opened
    size: int  # bytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly these bytes; raises `AdoptionError` if the file does not have them."""

    def expect(self, offsets: Iterable[int], nbytes: int) -> None:
        """Ask for bytes at each of some places, where that takes a request each, and do not wait.

        Places that the file does not have are passed over.
        """


class SourceFile(io.RawIOBase):
    """A source as a file, for libraries that read one; the caller buffers it."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self._at = source, 0
        self._error: FeatcacheError | None = None

    def raise_error(self) -> None:
        """Raise the error of the last read if it failed, once: not all libraries pass it on."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it leads here by its frames

    def readable(self) -> bool:
        """Whether it can be read, as always."""
        return True

    def seekable(self) -> bool:
        """Whether its place can be chosen, as always."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Choose the place of the next read."""
        at = offset + (0, self._at, self._source.size)[whence]
        if at < 0:
            raise ValueError("a seek before the begin")
        self._at = at
        return at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into a buffer as much as is there; what remains of it becomes 0.

        HDF5, which does not ask how much came, reads zeros behind the end of files on disks, too.
        """
        count = max(min(len(buffer), self._source.size - self._at), 0)
        if count:
            try:
                buffer[:count] = self._source.read(self._at, count)
            except FeatcacheError as error:
                self._error = error
                raise
        if lacking := len(buffer) - count:  # h5py 3.11 puts no empty bytes into its buffer
            buffer[count:] = bytes(lacking)
        self._at += count
        return count


class Place(Protocol):
    """All that a kind may look at: a folder, or what lies around a file.

    Safe to use from several threads.
    """

    name: str  # for messages: the path or URL that the user named
    is_local: bool  # whether its files lie on a disk here, where `local` finds them

    def files(self) -> Iterable[str]:
        """List the files that the user means: all below the folder, or the ones that were named.

        Paths are POSIX, relative to the place, in a fixed order. No link is followed.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, not below it, in order; none if there is none.

        `folder` is relative to the place, "" the place itself. Links are left out.
        """

    def expect(self, paths: Iterable[str]) -> None:
        """Ask for the first bytes of files that will be opened, where that takes a request each."""

    def open(self, path: str) -> AbstractContextManager[ByteSource]:
        """Open a file, to be closed by `with`.

        `path` is relative to the place, or an absolute one where a manifest says so. Raises
        `AdoptionError` if there is no such file, or it cannot be read.
        """

    def local(self, path: str) -> Path:
        """Return where a file lies, for a library that insists on a path.

        Takes the paths that `open` takes. Raises `AdoptionError` where the place is not a local
        one, or has no such file.
        """


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of `featcache.adopt` that say what the source does not."""

    feature: str = "feats"  # name of the feature, where the source has none
    # names of the arrays in a file that names them, such as "{feature}/{id}"; None: the kind's own
    pattern: str | None = None
    time_axis: TimeAxis = "auto"

    def __post_init__(self) -> None:
        if self.time_axis not in (None, "auto") and type(self.time_axis) is not int:
            raise ConfigError(
                "time_axis is the number of the axis of the frames (0 is the first one, -1 the "
                f"last one), None or 'auto', not {self.time_axis!r}"
            )
        if not (self.pattern is None or isinstance(self.pattern, str)):
            raise ConfigError(
                f"a pattern is a string such as '{{feature}}/{{id}}', not {self.pattern!r}"
            )


@dataclass(frozen=True, slots=True)
class FoundFeature:
    """The arrays of a feature, in the order of the ids.

    All of them have one dtype, little-endian, in C order. Without a codec, the bytes of the extents
    of an array joined are the array; with one, each extent is a block. Array r has the extents
    first[r] to before first[r + 1]; one of zero bytes has none. Most raw features are `one_piece`.
    """

    dtype: str  # as declared: "float32", "bfloat16", ...
    dims: tuple[int, ...]  # the shape of a frame, or of the array without a time axis
    has_frames: bool
    rows: Ints  # N: frames; 1 without a time axis
    first: Ints  # N + 1
    container: NDArray[np.int32]  # E: the number of a file in `Found.containers`
    offset: Ints  # E
    nbytes: Ints  # E
    codec: str = RAW  # as registered
    options: Mapping[str, object] = field(default_factory=dict)  # of the codec, as declared
    # N: rows of each full block of an array; 0: one block, of exactly `rows`. None: 0 everywhere.
    block_rows: Ints | None = None
    # N: rows to leave out at the front of the first block, for windows into encoded arrays: the
    # rows of the array are those from `skip` on of its blocks. Needs `block_rows` above 0.
    skip: Ints | None = None
    frame_s: float | None = None  # seconds from frame to frame, where the source says so
    offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """All that a source holds: each id with an array of each feature."""

    containers: Sequence[str]  # paths as `Place.open` took them; files that have an extent
    ids: Sequence[str]  # N, each one once, in any order
    features: Mapping[str, FoundFeature]
    # by name, a value of each id; None: it has none
    annotations: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    # by which names of arrays were taken where none was given; None: a list of the source has ids
    pattern: str | None = "{id}"


def files_called(place: Place, ends: tuple[str, ...]) -> list[str]:
    """Return the files of a place whose names end so, in any case; no hidden ones, as `._a.npy`.

    Warns of other files of arrays, which are left out: kinds look at the first files alone.
    """
    others: list[str] = []
    paths: list[str] = []
    for path in place.files():
        if (name := path.lower()).endswith(ends):
            paths.append(path)
        elif name.endswith(_OF_ARRAYS) and not _is_hidden(path, _OF_ARRAYS):
            others.append(path)
    if others:
        _log.warning(
            "%r: %d files of arrays that are not called %s are left out, the first is %r",
            place.name, len(others), ", ".join(ends), others[0],
        )  # fmt: skip
    return [path for path in paths if not _is_hidden(path, ends)]


def _is_hidden(path: str, ends: tuple[str, ...]) -> bool:
    """Whether a file, or a folder on the way, is hidden; one that is called as an end is not."""
    if not (path.startswith(".") or "/." in path):
        return False
    folder, _, name = f"/{path}".rpartition("/")
    return "/." in folder or name not in ends


def data_files(place: Place, most: int) -> list[str]:
    """Return the first files of a place, to recognise it.

    Without hidden ones, READMEs and the like. Raises `AdoptionError` where files cannot be listed.
    """
    of_data = (path for path in place.files() if _is_data(path.rpartition("/")[2]))
    return list(islice(of_data, most))


def _is_data(name: str) -> bool:
    return name[:1] != "." and PurePath(name).suffix.lower() not in _BESIDE and name not in _LEFT


class Kind(Protocol):
    """A kind of store that can be adopted.

    Its module and `recognises` need no library of the format. One that reads `Options.pattern` has
    `takes_pattern = True`; a pattern for any other is an error.
    """

    name: str  # as registered

    def recognises(self, place: Place, what: str) -> bool:
        """Whether the user means a store of this kind; a look at a few files at most.

        `what` is the file that the user named, relative to the place, or "" for all `files()`.
        What it cannot read is not of its kind: then it may as well raise `AdoptionError`.
        """

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find where everything lies.

        100,000 utterances must take seconds: columns, not an object each. Raises `AdoptionError`
        for what cannot be adopted, `MissingDependencyError` where a library lacks.
        """


@dataclass(frozen=True, slots=True)
class Stored:
    """Dtype and shape of the frames of a feature, and the rows of each array."""

    dtype: str
    dims: tuple[int, ...]
    has_frames: bool
    rows: Ints


@dataclass(frozen=True, slots=True)
class Readable:
    """Arrays that a format's own library reads, wherever they lie."""

    files: Sequence[str]  # paths as `Place.local` took them
    ids: Sequence[str]  # each one once, in any order
    features: Mapping[str, Stored]
    # returns the arrays of an utterance, by its number in `ids`; raises `AdoptionError`
    read: Callable[[int], Mapping[str, Array]]
    # by name, a value of each id; None: it has none
    annotations: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    # by which names of arrays were taken where none was given; None: a list of the source has ids
    pattern: str | None = "{id}"


@runtime_checkable
class ReadsArrays(Protocol):
    """A `Kind` that reads what it cannot adopt, so that `featcache.convert` copies it."""

    name: str

    def readable(
        self, place: Place, what: str, options: Options
    ) -> AbstractContextManager[Readable]:
        """Open the arrays of a source; raises what `Kind.index` raises."""


def stored_as(
    feature: str,
    ids: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    time_axis: TimeAxis = "auto",
    *,
    copies: bool = False,
) -> Stored:
    """Return what arrays of these shapes and dtypes are as a feature.

    Arrays of rank 0 have no time axis, nor have floats of rank 1 that are all equally long (two
    arrays at least), unless `time_axis` says otherwise; all else has frames along axis 0, where
    `frames_first` has put them. A shape may be the same object for many ids: then none of this
    costs a step an id.

    Raises `AdoptionError`, naming an id, where they have not one dtype and one shape of a frame;
    with `copies`, `featcache.convert` makes one dtype of several.
    """
    if not len(ids):
        raise AdoptionError(f"feature {feature!r}: there are no arrays")
    way = COPY if copies and common_dtype(dtypes) is not None else CONVERT
    _agree(feature, ids, dtypes, "dtype", dtypes[0], _of_all(shapes), way)
    distinct = set(shapes)
    for shape in distinct:
        if len(shape) > MOST_AXES:
            raise AdoptionError(f"feature {feature!r}: an array has {len(shape):,} axes")
        if math.prod(max(length, 1) for length in shape) >= MOST_NUMBERS:  # without frames, say
            raise AdoptionError(f"feature {feature!r}: an array has the impossible shape {shape}")
    dtype, rank = str(np.dtype(dtypes[0])) if dtypes[0] != "bfloat16" else dtypes[0], len(shapes[0])
    _agree(feature, ids, [len(shape) for shape in shapes], "number of axes", rank, _of_all(shapes))
    embeds = rank == 1 and len(distinct) == 1 < len(ids) and storage_dtype(dtype).kind == "f"
    has_frames = isinstance(time_axis, int) or (time_axis == "auto" and rank > 0 and not embeds)
    if has_frames and not rank:
        raise AdoptionError(f"utterance {ids[0]!r}, feature {feature!r}: one number has no frames")
    if not has_frames:
        _agree(feature, ids, shapes, "shape", shapes[0])
        return Stored(dtype, shapes[0], False, np.ones(len(ids), np.int64))
    if len({shape[1:] for shape in distinct}) > 1:
        frames = [shape[1:] for shape in shapes]
        hint = "" if time_axis not in (0, "auto") else _guess(distinct)
        _agree(feature, ids, frames, "shape of a frame", frames[0], hint)
    rows = np.fromiter((shape[0] for shape in shapes), np.int64, len(shapes))
    if 0 in shapes[0][1:] and rows.any():  # any number of them takes no byte
        raise AdoptionError(
            f"feature {feature!r}: utterance {ids[int(rows.argmax())]!r} has frames without a "
            f"number, of shape {shapes[0][1:]}; leave it out"
        )
    return Stored(dtype, shapes[0][1:], True, rows)


def copied_as(
    feature: str,
    ids: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    time_axis: TimeAxis,
) -> Stored:
    """Return what arrays are as a feature of a copy, in the one dtype that holds all numbers.

    Takes, and raises, what `stored_as` does; but shapes are those of the source, before its frames
    are put first.
    """
    one = common_dtype(dtypes)
    turned = []
    for id, shape in zip(ids, shapes, strict=True):
        try:
            turned.append(tuple(shape[axis] for axis in frames_first(shape, time_axis)))
        except AdoptionError as error:
            told = f"feature {feature!r}: utterance {id!r} {error}; {CONVERT}"
            raise AdoptionError(told) from None
    return stored_as(
        feature, ids, turned, dtypes if one is None else [one] * len(dtypes), time_axis
    )


def common_dtype(dtypes: Iterable[str]) -> str | None:
    """Return the dtype that holds all numbers of several ones as they are; None if none does.

    >>> common_dtype(["float32", "float64"]), common_dtype(["int16", "uint8"])
    ('float64', 'int16')
    >>> common_dtype(["int64", "float32"]) is None
    True
    """
    names = {*dtypes}
    if len(names) == 1:
        return names.pop()
    if "bfloat16" in names:
        return "float32" if names == {"bfloat16", "float32"} else None
    each = [np.dtype(name) for name in names]
    found: np.dtype[np.generic] = np.result_type(*each)
    kinds = {dtype.kind for dtype in each}
    return found.name if kinds == {"f"} or (kinds <= {*"iu"} and found.kind in "iu") else None


def frames_first(shape: tuple[int, ...], time_axis: TimeAxis) -> tuple[int, ...]:
    """Return the axes of an array in the order in which featcache has them: the frames first.

    Raises `AdoptionError` where the array has no such axis.

    >>> frames_first((1, 80, 700), -1)
    (2, 0, 1)
    """
    axes = range(len(shape))
    if not isinstance(time_axis, int) or time_axis == 0 or not shape:
        return tuple(axes)
    if not -len(shape) <= time_axis < len(shape):
        last = "; -1 is the last axis of each" if time_axis > 0 else ""
        raise AdoptionError(f"has shape {shape}, and no axis {time_axis} of frames{last}")
    first = time_axis % len(shape)
    return first, *(axis for axis in axes if axis != first)


def one_piece(stored: Stored, container: ArrayLike, offset: ArrayLike) -> FoundFeature:
    """Return a feature of raw arrays that lie in one piece each.

    Args:
        stored: of the arrays.
        container: the number of the file of each, in `Found.containers`.
        offset: the first byte of each.
    """
    row_bytes = storage_dtype(stored.dtype).itemsize * math.prod(stored.dims)
    nbytes = stored.rows * row_bytes
    has_bytes = nbytes > 0
    return FoundFeature(
        dtype=stored.dtype,
        dims=stored.dims,
        has_frames=stored.has_frames,
        rows=stored.rows,
        first=np.append(0, np.cumsum(has_bytes)).astype(np.int64),
        container=np.asarray(container, np.int32)[has_bytes],
        offset=np.asarray(offset, np.int64)[has_bytes],
        nbytes=nbytes[has_bytes],
    )


def _of_all(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return how arrays that are few and equally long may be meant, as the end of a message."""
    rows = {shape[:1] for shape in shapes}
    if len(shapes) > MOST_OF_ALL or len(rows) > 1 or max(rows) <= (1,):
        return ""
    return (
        "; are these arrays of all utterances, a row each? then put an array of their ids beside "
        "them, called 'ids'"
    )


def _guess(shapes: set[tuple[int, ...]]) -> str:
    """Return why frames of several shapes may differ, as the end of a message."""
    if all(shape[0] == 1 for shape in shapes) and len({shape[2:] for shape in shapes}) == 1:
        return "; was a batch axis left in? store array[0] of each"
    if all(len(shape) == 2 for shape in shapes) and len({shape[0] for shape in shapes}) == 1:
        return "; are they transposed? give time_axis=1 if the second axis is the frames"
    if len({shape[:-1] for shape in shapes}) == 1:
        return "; are the frames the last axis? give time_axis=-1 if they are"
    axes = [axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if len({*lengths}) > 1]
    return f"; is axis {axes[0]} the frames? give time_axis={axes[0]}" if len(axes) == 1 else ""


def _agree(
    feature: str,
    ids: Sequence[str],
    values: Sequence[object],
    what: str,
    first: object,
    hint: str = "",
    way: str = CONVERT,
) -> None:
    if len(set(values)) == 1:
        return
    other = next(number for number, value in enumerate(values) if value != first)
    raise AdoptionError(
        f"feature {feature!r}: utterance {ids[0]!r} has {what} {first}, {ids[other]!r} has "
        f"{values[other]}; a feature has one{hint}; {way}"
    )
