"""What the tests of the store share: utterances with known content, and the comparison of a cache
with them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.format import ColumnFile, read_manifest, save_columns, write_manifest
from featcache.writing.part_writer import PartWriter

Arrays = dict[str, NDArray[Any]]
Verify = Literal["columns", "arrays"] | None
FINGERPRINT: dict[str, object] = {"model": "wavlm", "layer": 9}


def two_features(backend: str = "memmap", other: str = "memmap") -> list[FeatureStorageConfig]:
    """One float feature with statistics and one integer feature without."""
    return [
        FeatureStorageConfig("fbank", backend=backend),
        FeatureStorageConfig("units", dtype="int16", backend=other),
    ]


def id_of(number: int) -> str:
    """Ids whose order is not the order of their numbers."""
    return f"spk{number % 7}/utt-{number}"


def arrays_of(number: int, frames: int | None = None) -> Arrays:
    """The features of an utterance, the same for the same number; some have no frames."""
    random = np.random.default_rng(number)
    length = (number * 5) % 23 if frames is None else frames
    return {
        "fbank": random.standard_normal((length, 4)).astype(np.float32) * 3 + 40,
        "units": random.integers(-500, 500, length // 2, np.int16),
    }


def write(writer: CacheWriter | PartWriter, numbers: Iterable[int]) -> None:
    for number in numbers:
        writer.write(id_of(number), arrays_of(number))


def make_cache(
    path: Path,
    numbers: Iterable[int],
    features: list[FeatureStorageConfig] | None = None,
    fingerprint: Mapping[str, object] = FINGERPRINT,
    *,
    overwrite: bool = False,
) -> Path:
    """Write a complete cache of `two_features`."""
    with CacheWriter(path, features or two_features(), fingerprint, overwrite=overwrite) as writer:
        write(writer, numbers)
    return path


def oracle(numbers: Iterable[int]) -> dict[str, Arrays]:
    """What a cache of these utterances must hold."""
    return {id_of(number): arrays_of(number) for number in numbers}


def assert_holds(cache: featcache.Cache, expected: Mapping[str, Arrays]) -> None:
    """Compare a cache with what it must hold: ids, order, arrays, lengths and statistics."""
    assert list(cache) == sorted(expected, key=str.encode)
    for id, arrays in expected.items():
        found = cache[id]
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, strict=True)
    for name in cache.features:
        assert cache.lengths(name).tolist() == [len(expected[id][name]) for id in cache]
    frames = [arrays["fbank"].astype(np.float64) for arrays in expected.values()]
    stats = cache.stats("fbank")
    assert stats.count == sum(map(len, frames))
    if stats.count:
        joined = np.concatenate(frames)
        np.testing.assert_allclose(stats.mean, joined.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(stats.var, joined.var(axis=0), rtol=1e-12, atol=1e-12)


def check_cache(path: Path, numbers: Iterable[int], complete: bool | None = True) -> None:
    """Open a cache, verify all its checksums and compare it with what it must hold."""
    cache = featcache.open(path, verify="arrays")
    if complete is not None:
        assert cache.complete == complete
    assert_holds(cache, oracle(numbers))


def read_everything(
    path: Path, verify: Verify = None, mapped: bool = True, check_reads: bool = False
) -> None:
    """Read all there is, in every way."""
    cache = featcache.open(path, verify=verify, mapped=mapped, check_reads=check_reads)
    ids = list(cache)
    for name in cache.features:
        cache.lengths(name, ids=ids)
        cache.read_batch(ids, name)
        for id in ids:
            cache.read(id, name)
            cache.read(id, name, 0, 1 if cache.lengths(name, ids=[id])[0] else 0)
    cache.stats("fbank")


def free_space(path: Path) -> Path:
    """Make the small disk large enough."""
    subprocess.run(["mount", "-o", "remount,size=64m", path], check=True)
    return path


def change_index(path: Path, changed: Mapping[str, Any]) -> None:
    """Write the index of a cache anew, sealed as if it were right, with some other columns."""
    manifest = read_manifest(path)
    with ColumnFile(path, manifest.index) as file:
        columns = {
            name: file.column(name, np.dtype(kind).type)
            for name, (kind, *_) in file._columns.items()
        }
    (path / manifest.index).unlink()
    digest = save_columns(path / manifest.index, (columns | dict(changed)).items())
    write_manifest(path, replace(manifest, index_digest=digest, sizes={}))
