"""A codec of a stranger that breaks its promise is noticed where its blocks are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from third_party_install import install_flat

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.registry import get_codec


def raises(dtype: np.dtype[Any], dims: tuple[int, ...], rows: int) -> None:
    raise IndexError("no block")


# in place of raising `CorruptCacheError`, or of returning a block
BROKEN_PROMISES: Mapping[str, Callable[..., object]] = {
    "raising": raises,
    "dims": lambda dtype, dims, rows: np.zeros((1, 1), dtype),
    "number": lambda dtype, dims, rows: np.zeros((), dtype),
    "rows": lambda dtype, dims, rows: np.zeros((rows + 1, *dims), dtype),
    "dtype": lambda dtype, dims, rows: np.zeros((rows, *dims), "f8"),
    "nothing": lambda dtype, dims, rows: None,
}


@pytest.mark.parametrize("promise", BROKEN_PROMISES)
def test_a_codec_that_breaks_its_promise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promise: str
) -> None:
    backend, codec = f"promise_{promise}", f"squeeze_promise_{promise}"
    monkeypatch.syspath_prepend(tmp_path)
    install_flat(tmp_path, backend)
    fbank = FeatureStorageConfig("fbank", backend=backend, codec=codec)
    with CacheWriter(tmp_path / "cache", [fbank]) as writer:
        writer.write("a", {"fbank": np.ones((250, 3), np.float32)})

    def decode(self: object, data: memoryview, *wanted: object) -> object:
        return BROKEN_PROMISES[promise](*wanted)

    monkeypatch.setattr(get_codec(codec), "decode", decode)
    cache = featcache.open(tmp_path / "cache")
    reads: list[Callable[[], object]] = [
        lambda: cache.read("a", "fbank"),
        lambda: cache.read("a", "fbank", 120, 130),
        lambda: cache.read_batch(["a"], "fbank"),
    ]
    for read in reads:
        with pytest.raises(CorruptCacheError, match=f"codec '{codec}'"):
            read()
