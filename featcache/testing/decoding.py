"""Decoding: of any bytes, a codec gives a block within its bounds or `CorruptCacheError`."""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from featcache.declaration import FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.interface import Backend, Codec
from featcache.testing.backend_under_test import Storage, random_numbers

ROWS = 1 << 19  # of a block that is much larger than its bytes
MARGIN_BYTES = 1 << 18


class Decoding:
    """A codec neither trusts the bytes it decodes nor the sizes that they tell."""

    @pytest.fixture
    @classmethod
    def codec(cls, storage: Storage) -> Codec:
        codec = storage.declare().make_codec()
        if codec is None:
            pytest.skip("no codec")
        return codec

    def test_a_block_holds_up_to_the_rows_that_it_may(self, storage: Storage, codec: Codec) -> None:
        block = random_numbers(storage.dtypes[0], (300, 5))
        data = memoryview(codec.encode(block))
        for rows in (300, 301, 1 << 40):
            assert codec.decode(data, block.dtype, (5,), rows).shape == block.shape
        for rows in (299, 1, 0):
            with pytest.raises(CorruptCacheError):
                codec.decode(data, block.dtype, (5,), rows)

    def test_a_block_of_too_many_rows_takes_no_memory(self, storage: Storage, codec: Codec) -> None:
        dtype = np.zeros((), storage.declare().dtype).dtype
        data = memoryview(codec.encode(np.zeros((ROWS, 1), dtype)))
        tracemalloc.start()
        try:
            for rows in (0, 1, 100, ROWS - 1 if len(data) > ROWS else 100):
                with pytest.raises(CorruptCacheError):
                    codec.decode(data, dtype, (1,), rows)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most < 4 * len(data) + MARGIN_BYTES

    def test_bytes_of_anything_else_are_refused(self, storage: Storage, codec: Codec) -> None:
        dtype = np.zeros((), storage.declare().dtype).dtype
        noise = np.random.default_rng(0).bytes(1000)
        for data in (b"", b"\0", bytes(100), noise, b"\x93NUMPY" + noise):
            with pytest.raises(CorruptCacheError):
                codec.decode(memoryview(data), dtype, (5,), 300)

    def test_a_damaged_block_is_refused_or_within_its_bounds(
        self, storage: Storage, codec: Codec
    ) -> None:
        for dtype in {storage.dtypes[0], storage.dtypes[-1]}:
            decode_damaged(storage.declare(dtype=dtype), count=1000)

    def test_no_option_is_one_of_the_backend_too(self, storage: Storage, codec: Codec) -> None:
        backend = storage.declare().make_backend()
        assert not options_of(backend) & options_of(codec), "both are given in one dict of options"


def options_of(owner: Backend | Codec) -> set[str]:
    """Return the names of the options of a backend or a codec: its fields."""
    assert dataclasses.is_dataclass(owner)
    return {field.name for field in dataclasses.fields(owner)}


def decode_damaged(feature: FeatureStorageConfig, count: int, seed: int = 0) -> None:
    """Fail unless a new process decodes or refuses damaged blocks, and lives."""
    job: Mapping[str, object] = {"feature": feature.to_json(), "count": count, "seed": seed}
    script = Path(__file__).with_name("damaged_blocks.py")
    ended = subprocess.run(
        [sys.executable, "-P", script, json.dumps(job)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, (job, ended.stderr[-2000:])
