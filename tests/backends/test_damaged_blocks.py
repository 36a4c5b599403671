"""Damaged blocks of our codecs, with all options; FEATCACHE_DAMAGED_BLOCKS=100000 tries more."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

import numpy as np
import pytest

from featcache import FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.testing.promises import decode_damaged
from featcache_backends.lilcom import LilcomCodec
from featcache_backends.zarr import BloscCodec, ZstdCodec

COUNT = int(os.environ.get("FEATCACHE_DAMAGED_BLOCKS", "2000"))  # with each of the options

CNAMES = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
DTYPES = ("float32", "int64", "uint8")
OPTIONS: list[tuple[str, str, str, Mapping[str, object]]] = [
    *(
        (DTYPES[(c + s) % 3], "zarr", "blosc", {"cname": cname, "shuffle": shuffle})
        for (c, cname), (s, shuffle) in itertools.product(enumerate(CNAMES), enumerate(SHUFFLES))
    ),
    *(("float32", "zarr", "zstd", {"level": level}) for level in (1, 19)),
    ("float32", "hdf5", "gzip", {"level": 0, "shuffle": False}),
    ("int64", "hdf5", "gzip", {"level": 9}),
    ("float32", "memmap", "int8", {}),
    *(("float32", "lilcom", "lilcom", {"tick_power": power}) for power in (-8, 0)),
]


@pytest.mark.parametrize(("dtype", "backend", "codec", "options"), OPTIONS, ids=str)
def test_no_damaged_block_ends_the_process(
    dtype: str, backend: str, codec: str, options: Mapping[str, object]
) -> None:
    feature = FeatureStorageConfig("f", dtype, backend=backend, codec=codec, options=options)
    decode_damaged(feature, COUNT)


def test_a_blosc_buffer_must_be_as_long_as_it_says() -> None:
    data = BloscCodec().encode(np.ones((256, 80), np.float32))
    for damaged in (
        data[:-1],
        data + b"\0",
        data[:12] + b"\xff\xff\xff\x7f" + data[16:],
        data[:16],
        data[:7],
    ):
        with pytest.raises(CorruptCacheError, match=f"blosc: a block of {len(damaged)} bytes"):
            BloscCodec().decode(memoryview(damaged), np.dtype("f4"), (80,), 256)


@pytest.mark.parametrize("size", [1, 255, 256, 300, 65_535, 65_536, 1 << 20])
def test_the_size_of_a_zstandard_frame_is_found_in_each_form_of_its_header(size: int) -> None:
    block = np.arange(size, dtype=np.uint8)
    data = ZstdCodec().encode(block)
    decoded = ZstdCodec().decode(memoryview(data), block.dtype, (), size)
    np.testing.assert_array_equal(decoded, block)


def test_a_zstandard_frame_that_does_not_tell_its_size_is_refused() -> None:
    magic, no_size, window, last_empty = b"\x28\xb5\x2f\xfd", b"\x00", b"\x58", b"\x01\x00\x00"
    with pytest.raises(CorruptCacheError, match="does not say how much it holds"):
        ZstdCodec().decode(
            memoryview(magic + no_size + window + last_empty), np.dtype("u1"), (), 10
        )


def test_a_lilcom_block_of_other_frames_is_refused() -> None:
    data = LilcomCodec().encode(np.ones((10, 80), np.float32))
    for dims in ((), (79,), (80, 1), (8, 10)):
        with pytest.raises(CorruptCacheError, match=r"its shape is \(10, 80\), not up to"):
            LilcomCodec().decode(memoryview(data), np.dtype("f4"), dims, 10)
