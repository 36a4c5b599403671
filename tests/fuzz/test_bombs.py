"""Small files that claim, or decode to, gigabytes: refused before they take memory."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz_children import Outcome, run_inputs
from store_helpers import FINGERPRINT

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import FeatcacheError
from featcache.registry import get_codec

ROW = 300_000  # numbers in a row: a block is large enough to hold a bomb
BOMB_BYTES = 1 << 30
ZSTD_BLOCK = 1 << 17
ZSTD_FRAME = b"\x28\xb5\x2f\xfd\xe0"  # magic, then: a content size of 8 bytes, a single segment


def gzip_bomb(size: int) -> bytes:
    packer, zeros = zlib.compressobj(9), bytes(1 << 20)
    pieces = [packer.compress(zeros) for _ in range(400)]
    return b"".join([*pieces, packer.flush()])


def zstd_bomb(size: int) -> bytes:
    """A frame of blocks that each repeat one byte 128 KiB times."""
    last = BOMB_BYTES // ZSTD_BLOCK - 1
    headers = [ZSTD_BLOCK << 3 | 1 << 1 | (at == last) for at in range(last + 1)]
    blocks = [struct.pack("<I", header)[:3] + b"\0" for header in headers]
    return _zstd_filled(ZSTD_FRAME + struct.pack("<Q", BOMB_BYTES) + b"".join(blocks), size)


def zstd_claim(size: int) -> bytes:
    """A frame that says that it holds 32 TiB."""
    return _zstd_filled(ZSTD_FRAME + struct.pack("<Q", 1 << 45) + b"\x03\0\0\0", size)


def _zstd_filled(frame: bytes, size: int) -> bytes:
    """Follow a frame by one that is skipped."""
    rest = size - len(frame) - 8
    return frame + struct.pack("<II", 0x184D2A50, rest) + bytes(rest)


def blosc_bomb(size: int) -> bytes:
    """A header of a gigabyte, blocks of 2 MiB that all start at the same place."""
    whole: bytes = get_codec("blosc")().encode(np.zeros((1, 1 << 19), np.float32))
    version, inner, flags, item, nbytes, blocksize, _ = struct.unpack_from("<BBBBIII", whole)
    per_block = nbytes // blocksize
    count = (BOMB_BYTES // nbytes) * per_block
    starts = struct.pack("<I", 16 + 4 * count) * count
    (first,) = struct.unpack_from("<I", whole, 16)
    body = whole[first:]
    sizes = count * blocksize, blocksize, 16 + 4 * count + len(body)
    header = struct.pack("<BBBBIII", version, inner, flags, item, *sizes)
    return b"".join((header, starts, body))


def blosc_claim(size: int) -> bytes:
    return struct.pack("<BBBBIII", 2, 1, 0x21, 4, 0x7FFFFFF0, 1 << 18, size) + bytes(size - 16)


def lilcom_claim(size: int) -> bytes:
    """The block's own dimensions made huge, one byte of its header after the other."""
    block = bytearray(get_codec("lilcom")().encode(np.ones((2, 8), np.float32)))
    block[2:10] = b"\x7f" * 8
    return bytes(block)


BOMBS: list[tuple[str, str, Callable[[int], bytes]]] = [
    ("hdf5", "gzip", gzip_bomb),
    ("zarr", "zstd", zstd_bomb),
    ("zarr", "zstd", zstd_claim),
    ("zarr", "blosc", blosc_bomb),
    ("zarr", "blosc", blosc_claim),
    ("lilcom", "lilcom", lilcom_claim),
    ("hdf5", "lilcom", lilcom_claim),
]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_bomb_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    for number, (backend, codec, make) in enumerate(BOMBS):
        _plant(tmp_path / str(number), backend, codec, make)
    bad = [
        outcome
        for outcome in run_inputs(_read(tmp_path), range(len(BOMBS)), tmp_path / "work")
        if outcome.what
    ]
    for outcome in bad:
        print(f"  {_said(outcome)}")
    print(f"fuzz, bombs: {len(BOMBS)} inputs: {len(bad)} did harm")
    assert not bad


def _said(outcome: Outcome) -> str:
    backend, codec, make = BOMBS[outcome.number]
    return f"{backend} {codec} {make.__name__}: {outcome.what} {outcome.where}"


def _plant(path: Path, backend: str, codec: str, make: Callable[[int], bytes]) -> None:
    """Write a cache of one utterance, and put a bomb where its first block is."""
    frames = np.random.default_rng(0).standard_normal((1, ROW)).astype(np.float32)
    feature = FeatureStorageConfig("fbank", backend=backend, codec=codec)
    with CacheWriter(path, [feature], FINGERPRINT) as writer:
        writer.write("utt", {"fbank": frames})
    made = feature.make_codec()
    assert made is not None
    block = bytes(made.encode(frames))
    bomb = make(len(block))
    assert len(bomb) <= len(block)
    (file,) = [
        file for file in path.rglob("*") if file.is_file() and block[:4096] in file.read_bytes()
    ]
    file.write_bytes(file.read_bytes().replace(block, bomb + block[len(bomb) :]))


def _read(root: Path) -> Callable[[int, Path], str | None]:
    def read(number: int, directory: Path) -> str | None:
        with contextlib.suppress(FeatcacheError):
            frames = featcache.open(root / str(number)).read("utt", "fbank", 0, 1)
            return f"was read as an array of shape {frames.shape}"
        return None

    return read
