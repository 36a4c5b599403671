"""Arrays that NumPy and torch load from files or bytes; pickles of other objects are never run."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from featcache._loading import without_torch
from featcache._tensors import as_numpy, is_tensor
from featcache.adoptable import CONVERT
from featcache.adoptable.placed_arrays import PlacedArray
from featcache.adoption.libraries.named_arrays import ArrayInfo, is_list_of_texts
from featcache.adoption.npy_files import NpyHeader, read_npy_header
from featcache.errors import AdoptionError, FeatcacheError, FeatureError, describe
from featcache.format.files import from_bfloat16
from featcache.interface import Array

LOAD_IT = (
    "if you trust it, load it yourself and convert what it holds: "
    "featcache.convert({id: array, ...}, 'features')"
)
MOST_TEXT = 1 << 28  # bytes of a list of ids
_OF_TEXT = re.compile(rb"\x93NUMPY.{4,6}\{'descr': '[<>|=]?U\d", re.DOTALL)
COMPLEX = f"real and imaginary parts are two features of real numbers; {LOAD_IT}"


def info_of(array: object, where: str) -> ArrayInfo:
    """Return shape and dtype of an array or a tensor; `AdoptionError` for other than numbers."""
    if is_tensor(array):
        if array.is_nested or "strided" not in str(array.layout):
            raise AdoptionError(f"{where} is {array.layout}, which no cache holds; {LOAD_IT}")
        shape, dtype = tuple(array.shape), str(array.dtype).removeprefix("torch.")
    elif isinstance(array, np.ndarray | np.generic):
        shape, dtype = array.shape, array.dtype.newbyteorder("=").name
    else:
        raise AdoptionError(f"{where} is {type(array).__name__}, no array; {LOAD_IT}")
    refuse_dtype(dtype, where)
    return ArrayInfo(shape, dtype)


def refuse_dtype(dtype: str, where: str) -> None:
    """Raise `AdoptionError` for a dtype that no cache holds."""
    if dtype == "bfloat16":
        return
    try:
        known = np.dtype(dtype)
    except TypeError:
        raise AdoptionError(
            f"{where} holds numbers of {dtype}, which no cache holds; {LOAD_IT}"
        ) from None
    if known.kind not in "fiub" or known.itemsize > 8:
        way = COMPLEX if known.kind == "c" else LOAD_IT
        raise AdoptionError(f"{where} has dtype {dtype}, which no cache holds; {way}")


def numbers_of(array: object, where: str) -> Array:
    """Return an array in this machine's byte order; bfloat16 as the float32 of the same value."""
    try:
        found, is_bfloat16 = as_numpy(array)  # type: ignore[arg-type]
    except FeatureError as error:
        raise AdoptionError(f"{where}: {error}; {LOAD_IT}") from error
    if is_bfloat16:
        return from_bfloat16(found)
    return np.asarray(found, found.dtype.newbyteorder("="))


@contextmanager
def told(where: str) -> Iterator[None]:
    """Raise `AdoptionError`, naming a file, for whatever a library raises of it."""
    try:
        yield
    except FeatcacheError:
        raise
    except Exception as error:  # whatever a file of a stranger makes a library raise
        raise AdoptionError(f"{where} cannot be read: {describe(error)}") from error


# Dicts of arrays, maybe in dicts, by the path of their keys.


def flattened(held: object, where: str, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield what dicts hold by the path of the keys, such as `mel/utt-1`."""
    if not isinstance(held, Mapping):
        yield path, held
        return
    for key, value in held.items():
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise AdoptionError(f"{where} has key {key!r}, which is no text; {LOAD_IT}")
        name = f"{path}/{key}" if path else f"{key}"
        if name == path:
            raise AdoptionError(f"{where} has an empty key")
        yield from flattened(value, where, name)


def _is_array(value: object) -> bool:
    return is_tensor(value) or isinstance(value, np.ndarray)


class LoadedArrays:
    """Arrays, tensors and other values that were loaded, as an `OpenedArrays`."""

    def __init__(self, held: object, where: str) -> None:
        self._where = where
        self._arrays: dict[str, object] = {}
        self._values: dict[str, object] = {}
        for key, value in flattened(held, where):
            is_array = _is_array(value)
            if key in self._arrays or key in self._values:
                raise AdoptionError(f"{where} has {key!r} twice")
            if not (is_array or is_value(value) or is_list_of_texts(value)):
                self.refuse(key, value)
            (self._arrays if is_array else self._values)[key] = value
        if not self._arrays:
            raise AdoptionError(f"{where} holds no array; {LOAD_IT}")

    def refuse(self, key: str, value: object) -> NoReturn:
        """Raise `AdoptionError` for what is no array and no value."""
        named, kind = f"its {key!r}" if key else "it", type(value).__name__
        if isinstance(value, list | tuple) and any(map(_is_array, value)):
            raise AdoptionError(
                f"{self._where}: {named} is a {kind} of {len(value)}, whose arrays have no names; "
                f"say whether these are ids or features; {LOAD_IT}"
            )
        raise AdoptionError(f"{self._where}: {named} is {kind}, no array; {LOAD_IT}")

    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Return what arrays there are."""
        each = self._arrays.items()
        return {key: info_of(array, f"{self._where}, array {key!r},") for key, array in each}

    def values(self) -> Mapping[str, object]:
        """Return text and numbers."""
        return self._values

    def read(self, key: str) -> Array:
        """Return an array."""
        return numbers_of(self._arrays[key], f"{self._where}, array {key!r},")

    def placed(self, key: str) -> PlacedArray | None:
        """Return None: the library alone knows."""
        return None

    def close(self) -> None:
        """Release the arrays."""
        self._arrays = {}


def is_value(value: object) -> bool:
    """Whether something may be an annotation."""
    if value is None or isinstance(value, str | int | float):
        return True
    numbers = isinstance(value, list | tuple) and len(value) > 0
    return numbers and all(type(each) in (int, float) for each in value)  # type: ignore[attr-defined]


# Files of NumPy: one array, or several in a zip file.


class NpzFile:
    """A `.npz` file, as an `OpenedArrays`; its headers alone are read until an array is."""

    def __init__(self, file: Path | IO[bytes], where: str) -> None:
        self._where = where
        self._texts: list[str] = []  # names of those that `arrays` has found
        with told(where):
            self._npz = np.load(file, allow_pickle=False)
        if isinstance(self._npz, np.ndarray):
            raise AdoptionError(f"{where} holds one array, as a .npy file; call it so")

    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Return what arrays there are, by their headers."""
        found, self._texts = {}, []
        members = self._npz.zip.namelist()
        for name in members:
            if not name.endswith(".npy"):
                raise AdoptionError(f"{self._where} holds {name!r}, no array; {LOAD_IT}")
            try:
                header = self._header(name)
            except AdoptionError:
                if not self._is_text(name):
                    raise
                self._texts.append(name)
            else:
                found[name.removesuffix(".npy")] = ArrayInfo(header.shape, header.dtype)
        if len({*members}) < len(members):
            raise AdoptionError(f"{self._where} has an array twice")
        return found

    def _is_text(self, name: str) -> bool:
        """Whether an array is a text, or a list of texts."""
        with told(self._where), self._npz.zip.open(name) as member:
            front = member.read(256)
        is_short = self._npz.zip.getinfo(name).file_size <= MOST_TEXT
        return is_short and bool(_OF_TEXT.match(front))

    def _header(self, name: str) -> NpyHeader:
        where = f"{self._where}, array {name.removesuffix('.npy')!r},"
        with told(where), self._npz.zip.open(name) as member:

            def read(begin: int, nbytes: int) -> bytes:
                member.seek(begin)
                return bytes(member.read(nbytes))

            return read_npy_header(read, 0, self._npz.zip.getinfo(name).file_size, where)

    def values(self) -> Mapping[str, object]:
        """Return texts, and lists of them."""
        with told(self._where):
            return {name.removesuffix(".npy"): self._npz[name].tolist() for name in self._texts}

    def read(self, key: str) -> Array:
        """Read an array."""
        where = f"{self._where}, array {key!r},"
        with told(where):
            return numbers_of(self._npz[key], where)

    def placed(self, key: str) -> PlacedArray | None:
        """Return None: it is in a zip file."""
        return None

    def close(self) -> None:
        """Close the file."""
        self._npz.close()


# What torch loads with `weights_only=True`: no pickle of it runs code.


def torch_load(file: Path | IO[bytes], where: str) -> LoadedArrays:
    """Return what `torch.save` saved; a file's tensors are mapped where torch can."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise without_torch("featcache.convert of torch's files") from error
    mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
    try:
        with told(where), torch.serialization.safe_globals(_of_numpy()):
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except AdoptionError as error:
        if isinstance(error.__cause__, RuntimeError) and "TorchScript" in str(error):
            raise AdoptionError(f"{where} is TorchScript; {LOAD_IT}") from error
        if isinstance(error.__cause__, pickle.UnpicklingError):
            name = re.search(r"GLOBAL (\S+)", str(error))
            told_of = f", such as {name[1]!r}" if name else ""
            raise AdoptionError(
                f"{where} holds more than tensors and plain values{told_of}, and pickles of "
                f"objects are never run here; {LOAD_IT}"
            ) from error
        raise
    return LoadedArrays(held, where)


def _of_numpy() -> list[Any]:
    """Return the names that pickles of plain arrays call; none of them runs a caller's code."""
    import _codecs

    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}
    rebuild = np._core.multiarray._reconstruct  # type: ignore[attr-defined]  # noqa: SLF001
    scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]  # noqa: SLF001
    return [
        rebuild, (rebuild, "numpy.core.multiarray._reconstruct"),
        scalar, (scalar, "numpy.core.multiarray.scalar"),
        np.ndarray, np.dtype, _codecs.encode, bytes, *dtypes,
    ]  # fmt: skip


# Bytes of one value: whatever NumPy or torch wrote into them.


def payload(data: bytes, where: str) -> LoadedArrays | NpzFile:
    """Return the arrays of bytes that `numpy.save`, `savez` or `torch.save` wrote.

    Raises `AdoptionError` for pickles and for bytes that do not say what they are.
    """
    if data[:6] == b"\x93NUMPY":
        read_npy_header(lambda begin, count: data[begin : begin + count], 0, len(data), where)
        with told(where):
            return LoadedArrays(np.load(io.BytesIO(data), allow_pickle=False), where)
    if data[:4] == b"PK\x03\x04":
        with told(where), zipfile.ZipFile(io.BytesIO(data)) as file:
            is_torch = any(name.endswith("/data.pkl") for name in file.namelist())
        if is_torch:
            return torch_load(io.BytesIO(data), where)
        return NpzFile(io.BytesIO(data), where)
    if data[:1] == b"\x80":  # a pickle: torch's legacy format begins with its magic number
        if data[2:14] == b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19":
            return torch_load(io.BytesIO(data), where)
        raise AdoptionError(f"{where} is a pickle, which may run code when it is loaded; {LOAD_IT}")
    raise AdoptionError(
        f"{where} has {len(data):,} bytes that do not say their shape and dtype; read them "
        "yourself, and convert the arrays: featcache.convert({id: np.frombuffer(value, "
        f"'float32').reshape(-1, 80), ...}}, 'features'); or {CONVERT}"
    )
