"""Decodes damaged blocks before memory that nobody may read: `python -P damaged_blocks.py JOB`.

JOB is JSON: the declaration of a feature with a codec, the number of blocks to damage, the seed.
Ends without a word if each is decoded to a block within its bounds or refused with
`CorruptCacheError`.
"""

from __future__ import annotations

import itertools
import json
import mmap
import random
import sys
import tempfile

import numpy as np

from featcache import FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.interface import DecodesFrames
from featcache.testing.backend_under_test import random_numbers

SHAPES = ((3, 2), (300,), (256, 80), (40, 7), (2, 3, 4))
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF)  # bytes that make a size 0, huge or negative


def main(job: str) -> None:
    """Damage, decode, check."""
    content = json.loads(job)
    feature = FeatureStorageConfig.from_json(content["feature"])
    codec = feature.make_codec()
    assert codec is not None
    blocks = [random_numbers(feature.dtype, shape) for shape in SHAPES]
    encoded = [(bytes(codec.encode(block)), block) for block in blocks]
    limits = GuardedMemory(2 * max(len(data) for data, _ in encoded))
    draw = random.Random(content["seed"])
    for data, block in itertools.islice(itertools.cycle(encoded), content["count"]):
        dims, rows = block.shape[1:], len(block)
        try:
            memory = limits.put(damaged(data, draw))
            if isinstance(codec, DecodesFrames):
                assert codec.decode_into(memory, rows // 2, np.empty_like(block)) <= rows
            decoded = codec.decode(memory, block.dtype, dims, rows)
        except CorruptCacheError:
            continue
        assert (decoded.dtype, decoded.shape[1:]) == (block.dtype, dims)
        assert len(decoded) <= rows


class GuardedMemory:
    """Memory up to a page that does not exist: reading it ends the process (SIGBUS)."""

    def __init__(self, nbytes: int) -> None:
        self._end = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with tempfile.TemporaryFile() as file:
            file.truncate(self._end + mmap.PAGESIZE)
            self._map = mmap.mmap(file.fileno(), self._end + mmap.PAGESIZE)
            file.truncate(self._end)

    def put(self, data: bytes) -> memoryview:
        """Return `data` right before that page, read-only."""
        self._map[self._end - len(data) : self._end] = data
        return memoryview(self._map)[self._end - len(data) : self._end].toreadonly()


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Change, cut, remove or repeat some bytes, of the first 32 more often than not."""
    octets = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(octets), draw.choice((32, 32, len(data)))) or 1)
        size = draw.choice((1, 2, 4, 16))
        match draw.randrange(6):
            case 0:
                octets[at : at + 1] = bytes(
                    octet ^ 1 << draw.randrange(8) for octet in octets[at : at + 1]
                )
            case 1:
                octets[at : at + 1] = bytes([draw.choice(NUMBERS)])
            case 2:
                octets[at : at + size] = draw.randbytes(len(octets[at : at + size]))
            case 3:
                number = draw.choice((len(octets), len(octets) // 2, draw.randrange(1 << 32)))
                octets[at : at + 4] = number.to_bytes(4, "little")[: len(octets[at : at + 4])]
            case 4:
                del octets[at : at + size]
            case 5:
                octets[at:at] = octets[at : at + size]
    if draw.random() < 0.2:
        del octets[draw.randrange(len(octets) + 1) :]
    return bytes(octets[: 2 * len(data)])


if __name__ == "__main__":
    main(*sys.argv[1:])
