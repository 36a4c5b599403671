"""Folders of `.npy` files as `numpy.save` writes them, and what they held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache import Cache

Arrays = Mapping[str, NDArray[Any]]


def some_arrays(count: int = 12, dims: tuple[int, ...] = (5,), dtype: str = "f4") -> Arrays:
    """Arrays of ids in folders and beside them; one has no frames."""
    random = np.random.default_rng(count)
    ids = [f"spk{number % 3}/utt-{number}" if number % 2 else f"utt-{number}"
           for number in range(count)]  # fmt: skip
    return {
        id: (random.standard_normal((number * 7 % 23, *dims)) * 100).astype(dtype)
        for number, id in enumerate(ids)
    }


def save_all(folder: Path, arrays: Arrays) -> Path:
    for id, array in arrays.items():
        path = folder / f"{id}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, array)
    return folder


def check_arrays(cache: Cache, arrays: Arrays, feature: str = "feats") -> None:
    """Compare everything that is read with what was saved, bit for bit; windows too."""
    assert list(cache) == sorted(arrays, key=str.encode)
    for id, array in arrays.items():
        found = cache.read(id, feature)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes()
        if array.ndim and len(cache.dims(feature)) < array.ndim:
            third = len(array) // 3
            window = cache.read(id, feature, third, 2 * third)
            assert window.tobytes() == array[third : 2 * third].tobytes()


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of all files of a folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
