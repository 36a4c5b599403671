"""WebDataset: tar shards, an utterance a sample.

`webdataset.WebDataset("shard-{000000..000003}.tar").decode()` iterates over them.

On disk, `shard-000000.tar`, `shard-000001.tar`, ..., the members of an utterance side by side::

    <key>.<feature>.npy   one a feature, in the order of declaration
    <key>.json            {"id": "spk1/utt.7",
                           "features": {"fbank": {"dtype": "float32", "shape": [700, 80]}}}

and a member is::

    0     ustar header of 512 bytes: mode 0644, owner, group and time 0 (same input, same bytes)
    512   "\\x93NUMPY" 01 00, little-endian u16 length, "{'descr': '<f4', ...}", spaces, "\\n":
          a multiple of 64 bytes
    640   the array (640 unless its header is longer), C order, little-endian, at a multiple of
          64 in the shard
          zeros up to a multiple of 512

A name of more than 100 bytes or beyond ASCII stands in a PAX record in front of the header. Two
blocks of 512 zeros end a shard. A shard stays within `shard_bytes` unless a single utterance is
larger.

The key is the id with some characters percent-encoded, as in a URL: `urllib.parse.unquote(key)`
gives the id back::

    .                                     WebDataset cuts a name into key and field at the first dot
    /                                     it would be a directory
    %                                     it starts an encoded character
    U+0000 to U+001F, U+007F to U+009F    line ends and other control characters spoil listings
                                          and file names

Nothing else needs it: WebDataset keeps the case of keys, skips only names that *end* in two
underscores, and expands braces in shard names alone. Of features, it lower-cases the names and does
not decode those that start with `__`, so these, and names that differ in case only, are refused.
bfloat16 is stored as the uint16 of its bits, the JSON member says so. A feature without a time axis
is one array an utterance, of shape `dims`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, ClassVar

from featcache.container_files import (
    EncodedArrays,
    Extents,
    PagedFile,
    Pages,
    append_alone,
    bytes_at,
    end_file,
    misplaced,
    open_left,
    remove_left,
)
from featcache.errors import ConfigError, FeatureError
from featcache.interface import EncodedArray, Extent, FeatureSpec, Written
from featcache_backends._array_file import npy_header

BLOCK_BYTES = 512  # of a tar: headers and data start at multiples of it
END = bytes(2 * BLOCK_BYTES)
SHARD = re.compile(r"shard-[0-9]{6,}\.tar")
ARRAY_LIMIT = 8**11 - (1 << 16)  # bytes: 11 octal digits in a ustar header, and the .npy's header


@dataclass(frozen=True)
class WebDatasetBackend:
    """Tar shards in which an utterance is a WebDataset sample.

    Raises `ConfigError` if `shard_bytes` is not a positive integer.
    """

    codecs: ClassVar[tuple[str, ...]] = ("raw",)

    shard_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if not isinstance(self.shard_bytes, int) or self.shard_bytes < 1:
            raise ConfigError(
                f"shard_bytes must be a positive number of bytes, not {self.shard_bytes!r}"
            )

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> WebDatasetWriter:
        """Start the first shard.

        Raises `ConfigError` if webdataset could not tell the names of two features apart or would
        not decode one.
        """
        fields: dict[str, str] = {}
        for feature in features:
            if feature.name.startswith("__"):
                raise ConfigError(
                    f"feature {feature.name!r}: webdataset decodes no field that starts with '__'; "
                    "rename it"
                )
            other = fields.setdefault(feature.name.lower(), feature.name)
            if other != feature.name:
                raise ConfigError(
                    f"features {other!r} and {feature.name!r} are one field for webdataset, which "
                    "lower-cases names; rename one of them or store them apart"
                )
        return WebDatasetWriter(directory, features, self.shard_bytes)

    def finish(self, directory: Path, features: Sequence[FeatureSpec], written: Written) -> None:
        """End each shard behind its last sample, and remove the shards that have none."""
        sizes = [0]  # bytes of the samples in each shard
        file = open_left(directory, _shard_name(0))
        try:
            for id, arrays in written:
                sample = TarSample(
                    features, id, {name: _size(*each) for name, each in arrays.items()}
                )
                if _passes(sizes[-1], sample.nbytes, self.shard_bytes):
                    file.close()
                    file = open_left(directory, _shard_name(len(sizes)))
                    sizes.append(0)
                extents = {name: found for name, (_, found) in arrays.items()}
                if not sample.lies_in(file, sizes[-1], extents):
                    raise misplaced(id)
                sizes[-1] += sample.nbytes
        finally:
            file.close()
        for number, size in enumerate(sizes):
            with open_left(directory, _shard_name(number), size) as file:
                end_file(file, size, END)
        kept = set(map(_shard_name, range(len(sizes))))
        remove_left(directory, "", lambda name: bool(SHARD.fullmatch(name)) and name not in kept)


class WebDatasetWriter:
    """Appends samples to tar shards."""

    def __init__(self, directory: Path, features: Sequence[FeatureSpec], shard_bytes: int) -> None:
        self._directory = directory
        self._features = tuple(features)
        self._shard_bytes = shard_bytes
        self._pages: dict[str, Pages] = {}  # of the finished shards
        self._open_shard()

    def check(self, id: str, arrays: Mapping[str, tuple[int, int]]) -> None:
        """Raise `FeatureError` if an array is too large for a tar."""
        for name, (_, nbytes) in arrays.items():
            if nbytes >= ARRAY_LIMIT:
                raise FeatureError(
                    f"feature {name!r} of {id!r} has {nbytes:,} bytes, a tar holds less than 8 GiB "
                    "an array; cut the utterance or choose another backend"
                )

    def append(self, id: str, arrays: Mapping[str, EncodedArray]) -> dict[str, tuple[Extent, ...]]:
        """Write one utterance as one sample, in a new shard if it would pass the size of this one.

        Raises `FeatureError`, and writes nothing, if an array is too large for a tar.
        """
        return append_alone(self, id, arrays)

    def append_many(
        self, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
    ) -> dict[str, Extents]:
        """Write utterances as `append` each of them, those of a shard with one call."""
        each = [
            dict(zip(arrays, of_one, strict=True)) for of_one in zip(*arrays.values(), strict=True)
        ]
        sizes = [
            {name: (array.rows, array.nbytes) for name, array in of_one.items()} for of_one in each
        ]
        for id, of_one in zip(ids, sizes, strict=True):
            self.check(id, of_one)
        extents: dict[str, list[tuple[Extent, ...]]] = {name: [] for name in arrays}
        pieces, end = TarPieces(), self._file.size
        for number, id in enumerate(ids):
            sample = TarSample(self._features, id, sizes[number])
            if _passes(end, sample.nbytes, self._shard_bytes):
                self._file.append_each(pieces.taken())
                self.close()
                self._open_shard()
                end = 0
            for name, found in sample.extents(self._container, end).items():
                extents[name].append(found)
            pieces.add(sample.filled(each[number]))
            end += sample.nbytes
        self._file.append_each(pieces.taken())
        return {name: Extents.of(found) for name, found in extents.items()}

    def write_out(self) -> None:
        """Show other processes all samples."""
        self._file.write_out()

    def flush(self) -> None:
        """Make all samples durable; earlier shards are."""
        self._file.flush()

    def close(self) -> None:
        """End and close the shard."""
        self._file.append(END)
        self._file.close()
        self._pages[self._container] = self._file.pages

    def abort(self) -> None:
        """Close the shard without an end."""
        self._file.abort()

    def pages(self) -> dict[str, Pages]:
        """Return the digests of the pages of all shards."""
        return self._pages

    def _open_shard(self) -> None:
        self._container = _shard_name(len(self._pages))
        self._file = PagedFile(self._directory / self._container)


def _size(rows: int, extents: Sequence[Extent]) -> tuple[int, int]:
    return rows, sum(extent.nbytes for extent in extents)


def _passes(size: int, nbytes: int, shard_bytes: int) -> bool:
    """Whether a sample of `nbytes` goes to the next shard, if this one has `size`."""
    return bool(size) and size + nbytes + len(END) > shard_bytes


def _shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


# Members of a tar file: headers of ustar and pax.

# what follows the checksum in the header of a file, and of a PAX record
_USTAR = {kind: kind + bytes(100) + b"ustar\x0000" + bytes(247) for kind in (b"0", b"x")}


def _tar_header(name: str, size: int) -> bytes:
    # The stdlib's TarInfo.tobuf does the same in 40 us, more than all the rest of an append
    if len(name) <= 100 and name.isascii():
        return _ustar_header(name.encode(), size, b"0")
    record = _pax_record("path", name)
    pax = _ustar_header(b"././@PaxHeader", len(record), b"x") + _padded(record)
    return pax + _ustar_header(name.encode("ascii", "replace")[:100], size, b"0")


def _ustar_header(name: bytes, size: int, kind: bytes) -> bytes:
    middle, total = _fields(size, kind)
    # POSIX.1-1988: the sum of the header's bytes, with spaces for the checksum
    return b"%b%b%06o\0 %b" % (name.ljust(100, b"\0"), middle, total + sum(name), _USTAR[kind])


@lru_cache(maxsize=4096)  # utterances have few lengths
def _fields(size: int, kind: bytes) -> tuple[bytes, int]:
    """Return the fields between name and checksum, and the sum of all bytes but the name's."""
    middle = b"0000644\x000000000\x000000000\0" + b"%011o\x0000000000000\0" % size
    return middle, sum(middle) + 8 * 0x20 + sum(_USTAR[kind])


def _pax_record(key: str, value: str) -> bytes:
    # POSIX.1-2001: "<length> <key>=<value>\n", where the length counts its own digits
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK_BYTES)


# Samples of WebDataset, as the bytes in a tar that lie around the arrays.

SMALL_BYTES = 1 << 13  # pieces smaller than this are put together: each costs a microsecond
ENCODED = {ord(char): f"%{ord(char):02X}" for char in "%./"} | {
    code: "".join(f"%{byte:02X}" for byte in chr(code).encode())
    for code in (*range(0x20), *range(0x7F, 0xA0))
}


class TarSample:
    """A sample of a tar: all bytes but those of its arrays, which it leaves room for.

    Args:
        features: in the order of declaration.
        id: of the utterance.
        arrays: by feature, the number of rows and of bytes.
    """

    def __init__(
        self, features: Sequence[FeatureSpec], id: str, arrays: Mapping[str, tuple[int, int]]
    ) -> None:
        key = id.translate(ENCODED)
        self._names = [feature.name for feature in features]
        # the bytes in front of each array, and behind the last one, and where they begin
        self._frames: list[tuple[int, bytes]] = []
        self._room: dict[str, tuple[int, int]] = {}  # where each array starts, and its bytes
        self.nbytes = 0
        shapes: list[str] = []
        padding = b""
        for feature in features:
            rows, nbytes = arrays[feature.name]
            npy, shape = _npy_and_shape(feature, rows)
            size = len(npy) + nbytes
            self._add_frame(padding + _tar_header(f"{key}.{feature.name}.npy", size) + npy)
            self._room[feature.name] = (self.nbytes, nbytes)
            self.nbytes += nbytes
            padding = bytes(-size % BLOCK_BYTES)
            shapes.append(shape)
        # what `json.dumps` makes of it all
        text = f'{{"id": {json.dumps(id)}, "features": {{{", ".join(shapes)}}}}}'.encode()
        self._add_frame(padding + _tar_header(f"{key}.json", len(text)) + _padded(text))

    def _add_frame(self, frame: bytes) -> None:
        self._frames.append((self.nbytes, frame))
        self.nbytes += len(frame)

    def extents(self, container: str, begin: int) -> dict[str, tuple[Extent, ...]]:
        """Return the places of the arrays in a sample that begins at `begin`."""
        return {
            name: (Extent(container, begin + start, nbytes),) if nbytes else ()
            for name, (start, nbytes) in self._room.items()
        }

    def filled(self, arrays: Mapping[str, EncodedArray]) -> Iterator[bytes | memoryview]:
        """Yield all bytes of the sample, those of its arrays among them."""
        for name, (_, frame) in zip(self._names, self._frames, strict=False):
            yield frame
            yield from arrays[name].blocks
        yield self._frames[-1][1]

    def lies_in(
        self, file: BinaryIO, begin: int, extents: Mapping[str, tuple[Extent, ...]]
    ) -> bool:
        """Whether a shard holds the sample from `begin` on: compares all but the arrays."""
        return extents == self.extents(Path(file.name).name, begin) and all(
            bytes_at(file.fileno(), len(frame), begin + start) == frame
            for start, frame in self._frames
        )


class TarPieces:
    """Pieces of bytes to be written one behind the other, small ones put together."""

    def __init__(self) -> None:
        self._pieces: list[bytes | memoryview] = []
        self._small: list[bytes | memoryview] = []

    def add(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Put pieces behind those that there are."""
        for piece in pieces:
            if len(piece) < SMALL_BYTES:
                self._small.append(piece)
            else:
                self._pieces += [b"".join(self._small), piece]
                self._small = []

    def taken(self) -> list[bytes | memoryview]:
        """Return them all, and begin anew."""
        pieces = [*self._pieces, b"".join(self._small)]
        self._pieces, self._small = [], []
        return pieces


@lru_cache(maxsize=4096)  # utterances have few lengths
def _npy_and_shape(feature: FeatureSpec, rows: int) -> tuple[bytes, str]:
    """Return the header of an array's `.npy`, and what stands of it in the JSON member."""
    shape = feature.shape(rows)
    told = json.dumps({"dtype": feature.dtype, "shape": shape})
    return npy_header(feature.storage_dtype, shape), f"{json.dumps(feature.name)}: {told}"
