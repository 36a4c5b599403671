"""Utterances of features of every kind, and a comparison of all that is stored of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import featcache
from featcache import FeatureStorageConfig

FEATURES = [
    FeatureStorageConfig("fbank"),
    FeatureStorageConfig("lossy", backend="lilcom", codec="lilcom"),
    FeatureStorageConfig("tokens", dtype="int16"),
    FeatureStorageConfig("vector", time_axis=None),
    FeatureStorageConfig("packed", backend="hdf5", codec="gzip"),
]


def arrays_of(number: int, frames: int = 5) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(number)
    return {
        "fbank": random.standard_normal((frames, 4), np.float32),
        "lossy": random.standard_normal((frames, 3), np.float32),
        "tokens": random.integers(0, 99, frames // 2, np.int16),
        "vector": random.standard_normal(6, np.float32),
        "packed": random.standard_normal((frames, 2), np.float32),
    }


def check(path: Path, frames: Mapping[str, int]) -> None:
    """Compare all that is stored, arrays and statistics; ids end with their number."""
    with featcache.open(path, verify="arrays", check_reads=True) as cache:
        assert {*cache.ids} == {*frames}
        for id, length in frames.items():
            arrays = arrays_of(int(id.split("-")[1]), length)
            for name in cache.features:
                array = arrays[name]
                tolerance = 2**-6 + 1e-6 if name == "lossy" else 0
                np.testing.assert_allclose(cache.read(id, name), array, rtol=0, atol=tolerance)
        for name in ("fbank", "lossy", "vector"):
            whole = [arrays_of(int(id.split("-")[1]), n)[name] for id, n in frames.items()]
            rows = np.concatenate([np.atleast_2d(each) for each in whole]).astype(np.float64)
            stats = cache.stats(name)
            assert stats.count == len(rows)
            np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=0, atol=1e-12)
            np.testing.assert_allclose(stats.var, rows.var(0), rtol=1e-12)
