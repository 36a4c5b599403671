"""What the tests of conversion share: a source of all kinds of features, and its comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.format import Stamps

FINGERPRINT = {"model": "wavlm", "layer": 9}
FAILED = ["utt-broken"]
KINDS = {
    "fbank": FeatureStorageConfig("fbank", frame_s=0.01, dims=[8]),
    "half": FeatureStorageConfig("half", "float16"),
    "brain": FeatureStorageConfig("brain", "bfloat16"),
    "double": FeatureStorageConfig("double", "float64", nonfinite="keep"),  # no dims declared
    "units": FeatureStorageConfig("units", "int16"),
    "large": FeatureStorageConfig("large", "uint64"),
    "voiced": FeatureStorageConfig("voiced", "bool"),
    "speaker": FeatureStorageConfig("speaker", time_axis=None),
}


def arrays_of(number: int, frames: int | None = None) -> dict[str, np.ndarray]:
    """Return the features of an utterance, the same for the same number."""
    random = np.random.default_rng(number)
    length = (number * 37 + 20) % 61 if frames is None else frames
    double = random.standard_normal((length, 2, 3))
    double[:1] = np.nan, np.inf, -0.0
    return {
        "fbank": (random.standard_normal((length, 8)) * 3).astype(np.float32),
        "half": random.standard_normal((length, 3)).astype(np.float16),
        "brain": random.integers(-100, 100, (length, 2)).astype(np.float32),
        "double": double,
        "units": random.integers(-500, 500, length, np.int16),
        "large": random.integers(0, 2**64 - 1, length, np.uint64),
        "voiced": random.random(length) > 0.5,
        "speaker": random.standard_normal(5).astype(np.float32),
    }


def make_source(path: Path, names: list[str], number: int = 40) -> Path:
    """Write a complete cache with annotations, stamps, and an id that failed."""
    with CacheWriter(path, [KINDS[name] for name in names], FINGERPRINT) as writer:
        ids = [f"utt-{(each * 17) % number}" for each in range(number)]
        writer.expect([*ids, *FAILED])
        writer.fail(FAILED[0])
        writer.keep_file("made-from", b'{"command": ["python", "train.py"]}')
        for each, id in enumerate(ids):
            arrays = arrays_of(each)
            writer.write(
                id,
                {name: arrays[name] for name in names},
                annotations={"text": f"words {each}", "snr": None if each % 3 else each / 2},
                stamps=Stamps(each + 1, each + 7),
            )
    return path


def assert_same(cache: featcache.Cache, source: featcache.Cache, rtol: float = 1e-12) -> None:
    """Compare all that a cache holds with its source, to the bit."""
    assert list(cache) == list(source)
    assert cache.complete
    assert (cache.failed, cache.expected) == (source.failed, source.expected)
    assert cache.annotations == source.annotations
    for name in source.annotations:
        assert list(cache.annotation(name)) == list(source.annotation(name))
    stamps, expected = cache.opened.index.stamps, source.opened.index.stamps
    assert np.array_equal(np.array(stamps), np.array(expected))
    for id in source:
        for name, array in source[id].items():
            found = cache.read(id, name)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()
    for name in source.opened.index.stats:
        mine, theirs = cache.stats(name), source.stats(name)
        assert mine.count == theirs.count
        np.testing.assert_allclose(mine.mean, theirs.mean, rtol=rtol)
        np.testing.assert_allclose(mine.m2, theirs.m2, rtol=rtol)
