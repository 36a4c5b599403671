"""Zarr v3: one group `<feature>.zarr` a feature, `zarr.open_group(path, mode="r")` opens it.

On disk::

    <feature>.zarr/zarr.json              the group
    <feature>.zarr/<feature>/zarr.json    an array (frames, *dims)
    <feature>.zarr/<feature>/c.<i>.0...   its shard i, with as many ".0" as there are dims: inner
                                          chunks (frames, *dims) back to back, then their index:
                                          u64 offset and u64 size of each (2**64-1 twice: not
                                          there), u32 crc32c of these
    <feature>.zarr/ids/                   utterance ids in the order of writing; strings, one
                                          chunk `c.0`: u32 count, then u32 size and UTF-8 of each
    <feature>.zarr/offsets/, lengths/     first frame and number of frames of each utterance;
                                          i64, one chunk `c.0`

All numbers are little-endian; bfloat16 is stored as the uint16 of its bits, and the array's
attribute `dtype_of_bits` says so. The `zarr.json` files come last, when the number of frames is
known. The group's attribute `layout` is one of

    contiguous_ragged   No codec: the frames of all utterances without gaps, the "contiguous
                        ragged array" of the CF conventions, `lengths` its count variable. Frame
                        follows frame in a shard file, so an utterance is one run of bytes, or
                        several where it passes from shard to shard; only the last inner chunk of
                        all is filled up with zeros.
    padded_ragged       A codec: every utterance starts with a new inner chunk, and its last one
                        is filled up with zero frames, which `offsets` and `lengths` leave out.
    rows                A feature without a time axis, codec or not: one row of shape `dims` an
                        utterance, with `ids` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from featcache.container_files import FeatureFilesWriter
from featcache.errors import ConfigError, FeatureError
from featcache.interface import Blocks, FeatureSpec, Written
from featcache_backends._refusals import check_range, import_library
from featcache_backends._zarr_codecs import BLOSC_BYTES, ZarrCodec
from featcache_backends._zarr_codecs import BloscCodec as BloscCodec
from featcache_backends._zarr_codecs import ZstdCodec as ZstdCodec
from featcache_backends._zarr_frames import Crc32c, GroupWriter, finish_group
from featcache_backends._zarr_group import COLUMNS, Grid, Group, Json

# most frames of an inner chunk with a codec: each utterance is filled up to a multiple
PADDED_ROWS = 256
SHARD_CHUNKS = 1 << 16  # most inner chunks of a shard: readers load its whole index


@dataclass(frozen=True)
class ZarrBackend:
    """One Zarr v3 group per feature.

    Shards have about `shard_bytes`, and inner chunks about `chunk_bytes`, counted before a codec;
    an inner chunk has one frame at least. Raises `ConfigError` for impossible sizes.
    """

    codecs: ClassVar[tuple[str, ...]] = ("raw", "zstd", "blosc")

    chunk_bytes: int = 1 << 17
    shard_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        check_range("chunk_bytes", self.chunk_bytes, 1, 1 << 40)
        check_range("shard_bytes", self.shard_bytes, self.chunk_bytes, 1 << 40)

    def blocks(self, feature: FeatureSpec) -> Blocks:
        """Cut arrays into inner chunks, the last one filled up."""
        return Blocks(self._grid(feature).chunk_rows, padded=True)

    def open_writer(self, directory: Path, features: Sequence[FeatureSpec]) -> FeatureFilesWriter:
        """Start one group per feature.

        Raises `ConfigError` for a name or a codec that cannot stand in a Zarr group, `FeatureError`
        for frames that are too large for Blosc.
        """
        crc32c = _import_crc32c()
        groups = [self._group(directory, feature) for feature in features]  # all checked first
        return FeatureFilesWriter({group.name: GroupWriter(group, crc32c) for group in groups})

    def finish(self, directory: Path, features: Sequence[FeatureSpec], written: Written) -> None:
        """Write the index of each shard, the columns and the documents; remove what is behind."""
        crc32c = _import_crc32c()
        for feature in features:
            finish_group(self._group(directory, feature), crc32c, written)

    def _group(self, directory: Path, feature: FeatureSpec) -> Group:
        grid = self._grid(feature)
        if isinstance(feature.codec, BloscCodec) and grid.chunk_bytes > BLOSC_BYTES:
            raise FeatureError(
                f"feature {feature.name!r}: a frame has {grid.chunk_bytes:,} bytes, Blosc holds "
                "less than 2 GiB; use zstd"
            )
        return Group(directory, feature, grid, _zarr_codec(feature))

    def _grid(self, feature: FeatureSpec) -> Grid:
        rows = max(1, self.chunk_bytes // max(1, feature.row_bytes))
        if feature.codec is not None:
            rows = min(rows, PADDED_ROWS) if feature.has_frames else 1
        chunk_bytes = rows * feature.row_bytes
        shard_chunks = max(1, self.shard_bytes // max(1, chunk_bytes))
        return Grid(rows, min(shard_chunks, SHARD_CHUNKS), chunk_bytes)


def _zarr_codec(feature: FeatureSpec) -> Json | None:
    if feature.name in COLUMNS or feature.name.startswith("__"):
        raise ConfigError(
            f"feature {feature.name!r}: a zarr group keeps this name, and those that start with "
            "'__', for itself; rename the feature"
        )
    if feature.codec is None:
        return None
    if not isinstance(feature.codec, ZarrCodec):
        raise ConfigError(
            f"feature {feature.name!r}: zarr does not know codec {feature.codec.name!r}, which has "
            f"no method zarr_metadata; use one of {', '.join(map(repr, ZarrBackend.codecs))}"
        )
    return feature.codec.zarr_metadata(feature.storage_dtype)


def _import_crc32c() -> Crc32c:
    value: Crc32c = import_library("google_crc32c", "backend 'zarr'", "zarr").value
    return value
