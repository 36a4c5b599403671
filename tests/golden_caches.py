"""The golden caches: content of `tests/golden`, written by `cd tests && python -m golden.make`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.format import Stamps
from featcache.writing.part_writer import PartWriter

GOLDEN = Path(__file__).parent / "golden"
FINGERPRINT: dict[str, object] = {"model": "golden", "layer": 9}
FIRST = ("spk1/utt.7", "b", "ü %")  # ids of the first part: their order is not that of their UTF-8
SECOND = ("a", "empty")
FAILED = "broken"
NEW = "zz"  # what the tests add to a copy
FRAMES = {"spk1/utt.7": 7, "b": 3, "ü %": 4, "a": 5, "empty": 0, NEW: 6}
SMALL = {"chunk_bytes": 32, "shard_bytes": 96}  # a frame of `fbank` has 16 bytes


def _fbank(backend: str, codec: str | None = None, **options: object) -> FeatureStorageConfig:
    return FeatureStorageConfig("fbank", backend=backend, codec=codec, options=options)


def _tokens(backend: str, codec: str = "raw", **options: object) -> FeatureStorageConfig:
    return FeatureStorageConfig(
        "tokens", dtype="int16", backend=backend, codec=codec, options=options
    )


def _of_each_kind(backend: str, codec: str = "raw") -> list[FeatureStorageConfig]:
    """Features without a time axis, without axes, of dtypes that NumPy lacks or HDF5 maps."""
    return [
        FeatureStorageConfig("half", "bfloat16", backend=backend, codec=codec),
        FeatureStorageConfig("voiced", "bool", backend=backend, codec=codec),
        FeatureStorageConfig("speaker", "float64", backend=backend, codec=codec, time_axis=None),
    ]


LAYOUTS: dict[str, list[FeatureStorageConfig]] = {
    "memmap": [_fbank("memmap"), _tokens("memmap"), *_of_each_kind("memmap")],
    "memmap-int8": [_fbank("memmap", "int8"), _tokens("memmap")],
    "hdf5": [_fbank("hdf5"), *_of_each_kind("hdf5")],
    "hdf5-gzip": [_fbank("hdf5", "gzip"), _tokens("hdf5", "gzip", shuffle=False, level=9)],
    "hdf5-lilcom": [_fbank("hdf5", "lilcom"), _tokens("hdf5")],
    "webdataset": [_fbank("webdataset", shard_bytes=5000), _tokens("webdataset", shard_bytes=5000)],
    # two frames a chunk, three chunks a shard: an utterance passes from shard to shard
    "zarr": [_fbank("zarr", "raw", **SMALL), _tokens("zarr", "raw", **SMALL)],
    "zarr-zstd": [_fbank("zarr", "zstd", **SMALL), _tokens("zarr", "zstd", **SMALL)],
    "zarr-blosc": [_fbank("zarr", "blosc", **SMALL), _tokens("zarr", "blosc", **SMALL)],
    "lilcom": [_fbank("lilcom", tick_power=-5), _tokens("memmap")],
}


def arrays_of(id: str, names: list[str]) -> dict[str, NDArray[Any]]:
    """The features of an utterance: multiples of 1/32, which bfloat16 holds exactly."""
    frames, first = FRAMES[id], list(FRAMES).index(id)

    def numbers(*shape: int) -> NDArray[np.int64]:
        return (np.arange(int(np.prod(shape))).reshape(shape) * 37 + first * 11) % 97 - 48

    arrays: dict[str, NDArray[Any]] = {
        "fbank": (numbers(frames, 4) / 32).astype(np.float32),
        "tokens": numbers(frames // 2).astype(np.int16),
        "half": (numbers(frames, 2) / 32).astype(np.float32),
        "voiced": numbers(frames) > 0,
        "speaker": numbers(3) / 32,
    }
    return {name: arrays[name] for name in names}


def assert_array(layout: str, id: str, name: str, found: NDArray[Any]) -> None:
    """Compare an array with what was written; lilcom may move numbers by half a tick, int8 by half
    a step.
    """
    expected = arrays_of(id, [name])[name]
    moved = {"lilcom": 2.0**-6 + 2.0**-20, "int8": 3 / 506}
    codec = layout.rpartition("-")[2]
    if name == "fbank" and codec in moved:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(found, expected, rtol=0, atol=moved[codec])
    else:
        np.testing.assert_array_equal(found, expected, strict=True)


# the cache `changed`: stamps, some of them given anew, an utterance computed again, two files
CHANGED = "changed"
CHANGED_FEATURES = [_fbank("memmap"), _tokens("memmap")]
STAMPED = {FIRST[0]: Stamps(2**64 - 1, 7), FIRST[1]: Stamps(1, 3), FIRST[2]: Stamps(2**63, 0)}
FILES = {"probe": bytes(range(256)), "made-from": b'{"command": "train.py"}'}


def make_changed(path: Path) -> Path:
    """Write a cache of three parts: one with other stamps and a tombstone, one without stamps."""
    names = [feature.name for feature in CHANGED_FEATURES]
    for again in (False, True):
        with CacheWriter(path, CHANGED_FEATURES, FINGERPRINT) as writer:
            writer.expect([*FIRST, *SECOND])
            if again:
                writer.restamp({FIRST[1]: STAMPED[FIRST[1]]})
                writer.delete([FIRST[0]])
                writer.write(FIRST[0], arrays_of(FIRST[0], names), stamps=STAMPED[FIRST[0]])
                continue
            for role, data in FILES.items():
                writer.keep_file(role, data)
            for id in FIRST:
                first = Stamps(STAMPED[id].input, 0) if id != FIRST[0] else Stamps(4, 4)
                writer.write(id, arrays_of(id, names), stamps=first)
            writer.publish()
            for id in SECOND:
                writer.write(id, arrays_of(id, names))
    (path / "writer.lock").unlink()
    return path


# the cache `annotated`: values of all kinds, in two parts, some of them given to the cache later
ANNOTATED = "annotated"
GIVEN: dict[str, dict[str, Any]] = {FIRST[1]: {"speaker": "anna", "snr": 2.5}, "a": {"snr": 7}}


def annotations_of(id: str) -> dict[str, Any]:
    """The annotations with which an utterance is written; some have none of some."""
    number = list(FRAMES).index(id)
    values = {
        "text": f"Sätze {number}",
        "speaker": "ben" if number % 2 else None,
        "take": number - 2,
        "duration_s": number if number < 3 else number + 0.25,
        "clean": number > 2,
        "phones": [*range(number)],
        "peaks": [number / 4, -1e300] if number % 2 else [],
    }
    return values if number else {"text": "", "clean": False}


def make_annotated(path: Path) -> Path:
    """Write a cache of two parts, and give it annotations."""
    names = [feature.name for feature in CHANGED_FEATURES]
    with CacheWriter(path, CHANGED_FEATURES, FINGERPRINT) as writer:
        for part in (FIRST, SECOND):
            for id in part:
                writer.write(id, arrays_of(id, names), annotations=annotations_of(id))
            writer.publish()
    featcache.open(path).annotate(GIVEN)
    (path / "writer.lock").unlink()
    return path


def make_golden(path: Path, features: list[FeatureStorageConfig]) -> Path:
    """Write a cache of two parts and a failed id, with an id that is doubled, so a tombstone."""
    names = [feature.name for feature in features]
    with CacheWriter(path, features, FINGERPRINT) as writer:
        writer.expect([*FIRST, *SECOND, FAILED])
        writer.fail(FAILED)
        parts = [PartWriter(path, features, FINGERPRINT) for _ in range(2)]
        for part, ids in zip(parts, (FIRST, (*SECOND, FIRST[0])), strict=True):
            for id in ids:
                part.write(id, arrays_of(id, names))
        for part in parts:
            part.close()
    (path / "writer.lock").unlink()
    return path
