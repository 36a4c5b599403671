"""`.safetensors` files: an utterance each, with a tensor a feature; or shards of many ids.

Layout: the bytes of the header (8 bytes, little-endian); the header in JSON, with dtype, shape and
the begin and end of each tensor by name; the tensors, in C order, little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from featcache.adoptable.placed_arrays import PlacedArray
from featcache.adoption.libraries.named_arrays import ArrayInfo, FilesOfArrays
from featcache.adoption.libraries.payloads import COMPLEX, LOAD_IT, told
from featcache.errors import AdoptionError
from featcache.format.files import from_storage
from featcache.interface import Array, storage_dtype

MOST_HEADER = 100_000_000  # bytes, as the library reads
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class SafetensorsFile:
    """A file, as an `OpenedArrays`."""

    def __init__(self, path: Path) -> None:
        self._path, self._where = path, repr(str(path))
        with told(self._where), path.open("rb") as file:
            size = path.stat().st_size
            nbytes = int.from_bytes(file.read(8), "little")
            if not 2 <= nbytes <= min(size - 8, MOST_HEADER):
                raise ValueError("it is cut short, or no safetensors file")
            header = json.loads(file.read(nbytes))
            header.pop("__metadata__", None)
            self._found = {
                key: self._placed(key, told, 8 + nbytes, size) for key, told in header.items()
            }

    def _placed(self, key: str, said: Mapping[str, Any], begin: int, size: int) -> PlacedArray:
        where = f"{self._where}, tensor {key!r},"
        if said["dtype"] not in _DTYPES:
            way = COMPLEX if said["dtype"] == "C64" else LOAD_IT
            raise AdoptionError(f"{where} has dtype {said['dtype']}, which no cache holds; {way}")
        dtype, shape = _DTYPES[said["dtype"]], tuple(map(int, said["shape"]))
        first, end = map(int, said["data_offsets"])
        nbytes = storage_dtype(dtype).itemsize * math.prod(shape)
        if min((first, *shape)) < 0 or end - first != nbytes or begin + end > size:
            raise AdoptionError(f"{where} is damaged: it lacks bytes")
        return PlacedArray(dtype, shape, ((begin + first, nbytes),) if nbytes else ())

    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Return what tensors there are."""
        return {key: ArrayInfo(each.shape, each.dtype) for key, each in self._found.items()}

    def values(self) -> Mapping[str, object]:
        """Return nothing: all are tensors."""
        return {}

    def read(self, key: str) -> Array:
        """Read a tensor."""
        each = self._found[key]
        dtype, offset = storage_dtype(each.dtype), each.extents[0][0] if each.extents else 0
        with told(f"{self._where}, tensor {key!r},"):
            count = math.prod(each.shape)
            found = np.fromfile(self._path, dtype, count, offset=offset)
            return from_storage(found.reshape(each.shape), each.dtype)

    def placed(self, key: str) -> PlacedArray:
        """Return where a tensor lies."""
        return self._found[key]

    def close(self) -> None:
        """Do nothing: no file is kept open."""


KIND = FilesOfArrays("safetensors", (".safetensors",), SafetensorsFile, in_place=True)
