"""Stores of others, adopted: what the tests of all kinds ask of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

import featcache
from featcache import Cache

Array = NDArray[Any]


def assert_holds(cache: Cache, feature: str, arrays: Mapping[str, Array]) -> None:
    """Each array is there bit for bit, whole and in windows, and nothing else."""
    assert list(cache.ids) == sorted(arrays, key=str.encode)
    for id, array in arrays.items():
        found = cache.read(id, feature)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes()
        for start, stop in windows(len(array)):
            assert np.array_equal(cache.read(id, feature, start, stop), array[start:stop])


def windows(length: int) -> list[tuple[int, int]]:
    """Some windows of an array: empty, of one frame, across blocks, to the end."""
    return sorted({(0, 0), (0, min(1, length)), (length // 3, length), (length // 2, length // 2)})


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and times of all files below a folder: adopted sources stay as they are."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def annotation(cache: Cache, name: str) -> dict[str, Any]:
    """Values of an annotation by id."""
    return dict(zip(cache.ids, cache.table.annotation(name), strict=True))


def random_arrays(seed: int, *, count: int = 30, dims: int = 5) -> dict[str, NDArray[np.float32]]:
    """Matrices of several lengths by id."""
    random = np.random.default_rng(seed)
    return {
        f"spk{number % 3}-utt{number:02d}": random.standard_normal(
            (1 + number * 7 % 19, dims), np.float32
        )
        for number in range(count)
    }


def adopted(source: Path, into: Path, **options: Any) -> Cache:
    return featcache.adopt(source, into / "cache", **options)


def write_h5(path: Path, arrays: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)
    return path
