"""Folders of `.pt` files of `torch.save`: a tensor an utterance, or a dict of tensors by name.

Such a file is a zip of stored members (torch 1.6 and later)::

    <name>/data.pkl     a pickle, which `torch_pickles` reads without running it
    <name>/data/<key>   the storage of a tensor, little-endian if <name>/byteorder says so

The id is the path below the folder without `.pt`. A single tensor is the feature that the user
names; of a dict each tensor is a feature, each text and number an annotation.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from array import array
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from featcache.adoptable import CONVERT, ByteSource, Found, Options, Place, one_piece, stored_as
from featcache.adoption.gathered_values import GatheredValues
from featcache.adoption.place import ids_of
from featcache.adoption.torch_pickles import SavedTensor, saved
from featcache.errors import AdoptionError
from featcache.interface import storage_dtype

LOOK_AT = 100
END = ".pt"
LOCAL = struct.Struct("<4s22xHH")  # of a local header: its signature, bytes of name and extra field
BROKEN = (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError, KeyError)


class PtKind:
    """Tensors in files of `torch.save`."""

    name = "pt"

    def recognises(self, place: Place, what: str) -> bool:
        """Tell whether this is a folder of such files."""
        try:
            return not what and any(path.endswith(END) for path in islice(place.files(), LOOK_AT))
        except AdoptionError:
            return False

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find the tensors of all files."""
        paths = [path for path in ([what] if what else place.files()) if path.endswith(END)]
        ids = ids_of(paths, END)
        tensors: dict[str, _Tensors] = {}
        values = GatheredValues()
        for number, (id, path) in enumerate(zip(ids, paths, strict=True)):
            with place.open(path) as source:
                held = _held(source, id)
                for name, value in held.content(options.feature).items():
                    if isinstance(value, SavedTensor):
                        tensors.setdefault(name, _Tensors()).add(number, value, held.begin(value))
                    else:
                        values.add(number, {name: value})
        features = {}
        for name, each in sorted(tensors.items()):
            each.check_all(name, ids)
            stored = stored_as(name, ids, each.shapes, each.dtypes, options.time_axis)
            features[name] = one_piece(stored, each.file, each.offset)
        if not features:
            raise AdoptionError(f"{place.name!r} holds no tensors in '.pt' files; {CONVERT}")
        return Found(paths, ids, features, values.columns(len(ids), without=features))


KIND = PtKind()


@dataclass
class _Tensors:
    """Tensors of one name."""

    file: array[int] = field(default_factory=lambda: array("i"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def add(self, file: int, tensor: SavedTensor, offset: int) -> None:
        self.file.append(file)
        self.offset.append(offset)
        self.shapes.append(tensor.shape)
        self.dtypes.append(tensor.dtype)

    def check_all(self, name: str, ids: list[str]) -> None:
        if len(self.file) < len(ids):
            lacks = next(n for n, file in enumerate([*self.file, -1]) if n != file)
            raise AdoptionError(f"utterance {ids[lacks]!r} has no tensor {name!r}; {CONVERT}")


class _Member(NamedTuple):
    begin: int
    nbytes: int


@dataclass(frozen=True)
class _Held:
    """The content of a file, and where its storages lie."""

    value: object
    storages: dict[str, _Member]
    where: str

    def content(self, feature: str) -> dict[str, object]:
        """Return tensors and other values by name."""
        if isinstance(self.value, SavedTensor):
            return {feature: self.value}
        if isinstance(self.value, dict):
            return self.value
        raise AdoptionError(f"{self.where} holds {type(self.value).__name__}, no tensor; {CONVERT}")

    def begin(self, tensor: SavedTensor) -> int:
        """Return the first byte of a tensor."""
        itemsize = storage_dtype(tensor.dtype).itemsize
        first, nbytes = tensor.first * itemsize, math.prod(tensor.shape) * itemsize
        member = self.storages.get(tensor.storage)
        if member is None or first + nbytes > member.nbytes:
            raise AdoptionError(f"{self.where} is damaged: a tensor of it lacks bytes")
        return member.begin + first


def _held(source: ByteSource, id: str) -> _Held:
    where = f"utterance {id!r}, {source.path!r},"
    try:
        with zipfile.ZipFile(io.BufferedReader(_Reader(source), 1024)) as file:
            places = [*(info.header_offset for info in file.infolist()), file.start_dir]
            if len({*places}) < len(places):  # from Python 3.14 on zipfile warns of it
                raise zipfile.BadZipFile("members lie at the same place")
            members = {info.filename.partition("/")[2]: info for info in file.infolist()}
            if "byteorder" in members and file.read(members["byteorder"]) != b"little":
                raise ValueError("its numbers are big-endian")
            value = saved(file.read(members["data.pkl"]))
            storages = {
                name.removeprefix("data/"): _member(source, info)
                for name, info in members.items()
                if name.startswith("data/")
            }
    except BROKEN as error:
        if isinstance(error, AdoptionError):
            raise
        raise AdoptionError(f"{where} is not adopted: {error}; {CONVERT}") from None
    return _Held(value, storages, where)


def _member(source: ByteSource, info: zipfile.ZipInfo) -> _Member:
    """Return where the bytes of a stored member lie."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"its member {info.filename!r} is compressed, or encrypted")
    signature, name, extra = LOCAL.unpack(source.read(info.header_offset, LOCAL.size))
    begin = info.header_offset + LOCAL.size + name + extra
    if signature != b"PK\3\4" or begin + info.file_size > source.size:
        raise ValueError("it is damaged")
    return _Member(begin, info.file_size)


class _Reader(io.RawIOBase):
    """A source as a file, for the library that reads zips."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._source.size)[whence]
        if at < 0:
            raise ValueError("a seek before the begin")
        self._at = at
        return at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(min(len(buffer), self._source.size - self._at), 0)
        buffer[:count] = self._source.read(self._at, count)
        self._at += count
        return count
