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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from featcache.container_files import (
    EncodedArrays,
    Extents,
    PagedFile,
    Pages,
    append_alone,
    end_file,
    misplaced,
    open_left,
    remove_left,
)
from featcache.errors import ConfigError, FeatureError
from featcache.interface import EncodedArray, Extent, FeatureSpec, Written
from featcache_backends._tar_members import BLOCK_BYTES
from featcache_backends._tar_sample import TarPieces, TarSample

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
