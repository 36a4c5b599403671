"""Objects of Kaldi's archives, decoded: as kaldiio does, and whatever lies on disk."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from featcache.adoption.ark import KaldiCodec
from featcache.errors import ConfigError, CorruptCacheError
from featcache.interface import storage_dtype

kaldiio = pytest.importorskip("kaldiio")


def written(array: Any, method: int | None = None) -> bytes:
    file = io.BytesIO()
    kaldiio.matio.write_array(file, array, compression_method=method)
    return file.getvalue()


def decoded(data: bytes, dtype: str, dims: tuple[int, ...], rows: int) -> Any:
    return KaldiCodec().decode(memoryview(data), storage_dtype(dtype), dims, rows)


@pytest.mark.parametrize("method", range(1, 8))
@pytest.mark.parametrize("rows", [1, 3, 255, 256, 400])
def test_numbers_are_those_of_kaldiio(rows: int, method: int) -> None:
    array = np.random.default_rng(rows).random((rows, 6), np.float32) * 200
    data = written(array, method)
    found = decoded(data, "float32", (6,), rows)
    assert found.dtype == np.float32
    assert found.tobytes() == kaldiio.matio.read_kaldi(io.BytesIO(data)).tobytes()


@pytest.mark.parametrize("kind", ["matrix", "vector", "integers", 2, 3, 5])
def test_damaged_objects_are_a_typed_error_or_numbers(kind: Any) -> None:
    array = np.random.default_rng(1).random((9, 4), np.float32)
    wholes = {"matrix": (array, None, (4,)), "vector": (array[0], None, ())}
    wholes["integers"] = (np.arange(4, dtype=np.int32), None, ())
    value, method, dims = wholes.get(kind, (array, kind, (4,)))
    data, dtype = bytearray(written(value, method)), str(value.dtype)
    for end in range(len(data)):
        with pytest.raises(CorruptCacheError):
            decoded(bytes(data[:end]), dtype, dims, len(value))
    for place in range(len(data)):
        for changed in (0, 4, 0x7F, 0xFF):
            hurt = data.copy()
            hurt[place] = changed
            try:
                found = decoded(bytes(hurt), dtype, dims, len(value))
            except CorruptCacheError:
                continue
            assert found.shape == value.shape


def test_rows_beyond_what_is_asked_for_and_other_dims_are_refused() -> None:
    data = written(np.ones((5, 4), np.float32))
    for dtype, dims, rows in [
        ("float32", (4,), 4),
        ("float32", (2,), 10),
        ("float32", (), 5),
        ("float64", (4,), 5),
    ]:
        with pytest.raises(CorruptCacheError):
            decoded(data, dtype, dims, rows)


def test_nothing_is_encoded() -> None:
    with pytest.raises(ConfigError, match="choose another"):
        KaldiCodec().encode(np.ones((2, 2), np.float32))
