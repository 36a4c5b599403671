"""`.pt` files of tensors, adopted where they lie; their pickles are read, and never run."""

from __future__ import annotations

import io
import logging
import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, cast

from featcache.adoptable import (
    CONVERT,
    COPY,
    MOST_AXES,
    ByteSource,
    Found,
    Options,
    Place,
    Readable,
    SourceFile,
    files_called,
)
from featcache.adoptable.flat_arrays import flat_names
from featcache.adoptable.names import EACH, Names
from featcache.adoptable.placed_arrays import ArrayColumns, PlacedArray, found_features
from featcache.adoption.libraries.named_arrays import FilesOfArrays
from featcache.adoption.libraries.payloads import LoadedArrays, torch_load
from featcache.adoption.place import GatheredValues, ids_of
from featcache.errors import AdoptionError, ConfigError
from featcache.interface import storage_dtype

# The pickle in a file of `torch.save`, read without running it: tensors, text and numbers.
#
# A stack machine of the few opcodes that torch writes for tensors and dicts of them. Names are
# compared with a list and never looked up; nothing is imported or called. Whatever else stands in
# a pickle is a `ValueError`.
#
# Time and memory are in proportion to the bytes of the pickle: values share nothing that they
# hold, and hold no more levels than tensors need.

DTYPES = {
    "torch FloatStorage": "float32",
    "torch DoubleStorage": "float64",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}
TENSOR, ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
# calls of torch's own for parameters, and for tensors of newer dtypes
LOADABLE = {"torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor_v3"}
VALUES = {
    "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE"
}  # fmt: skip
CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}
IGNORED = {"PROTO", "FRAME", "STOP"}
_PUT, _GET = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
# of a pickle: of two thousand tensors that share a storage, or a storage each
MOST_BYTES, MOST_STEPS = 1 << 20, 100_000
BYTES_A_STORAGE, STEPS_A_STORAGE = 1 << 10, 80
MOST_NUMBERS = 1 << 56


class _Other:
    """Stands for a value that is no tensor, text or number, nor a list of numbers."""

    def __repr__(self) -> str:
        return "..."


_OTHER = _Other()


class LoadableError(ValueError):
    """Raised for what is not read here, but by `torch.load(..., weights_only=True)`."""


class SavedTensor(NamedTuple):
    """A tensor: where its numbers lie in its storage, side by side."""

    dtype: str
    shape: tuple[int, ...]
    storage: str  # name of the file of its storage
    first: int  # number of the storage where it begins
    axes: tuple[int, ...] = ()  # as of `PlacedArray`


class _Name(NamedTuple):
    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str


@dataclass(slots=True)
class _Machine:
    stack: list[object] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # what the stack held at each mark
    memo: dict[int, object] = field(default_factory=dict)

    def to_mark(self) -> list[object]:
        """Take what was pushed since the last mark."""
        at = self.marks.pop()
        taken = self.stack[at:]
        del self.stack[at:]
        return taken

    def last(self, count: int) -> list[object]:
        """Take what was pushed last."""
        taken = self.stack[-count:]
        if len(self.stack) - count < (self.marks[-1] if self.marks else 0):
            raise ValueError("it takes more than there is")
        del self.stack[-count:]
        return taken

    def top(self, kind: type) -> object:
        """Return what was pushed last, which must be of this kind."""
        if not isinstance(self.stack[-1], kind):
            raise ValueError("it puts values into what holds none")
        return self.stack[-1]

    def put_items(self, items: list[object]) -> None:
        """Put keys and values, which follow one another, into the dict on the stack."""
        held = cast(dict[str, object], self.top(dict))
        if not all(isinstance(key, str) for key in items[::2]):
            raise LoadableError("keys of a dict are not text")
        values = [_OTHER if isinstance(value, dict) else value for value in items[1::2]]
        held.update(zip(cast(list[str], items[::2]), values, strict=True))

    def extend(self, items: list[object]) -> None:
        """Put values into the list on the stack."""
        numbers = (each if isinstance(each, int | float) else _OTHER for each in items)
        cast(list[object], self.top(list)).extend(numbers)

    def put(self, number: int) -> None:
        """Keep what was pushed last, to be pushed again."""
        self.memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        """Push what was kept; raises `ValueError` for what would have to hold the same values."""
        kept = self.memo[number]
        if isinstance(kept, list | dict) or (type(kept) is tuple and kept):
            raise ValueError(f"it holds the same {type(kept).__name__} twice")
        self.stack.append(kept)

    def reduce(self) -> object:
        """Return what a call of one of two names gives."""
        name, arguments = self.last(2)
        called = name.name if isinstance(name, _Name) else ""
        if called == ORDERED and arguments == ():
            return {}
        if called == TENSOR and isinstance(arguments, tuple):
            return _tensor(arguments)
        raise ValueError(f"it calls {called.replace(' ', '.')!r} with other arguments")


_ACTIONS: dict[str, Callable[[_Machine], object]] = {
    "MARK": lambda machine: machine.marks.append(len(machine.stack)),
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "TUPLE": lambda machine: machine.stack.append(_tuple(machine.to_mark())),
    "TUPLE1": lambda machine: machine.stack.append(_tuple(machine.last(1))),
    "TUPLE2": lambda machine: machine.stack.append(_tuple(machine.last(2))),
    "TUPLE3": lambda machine: machine.stack.append(_tuple(machine.last(3))),
    "SETITEM": lambda machine: machine.put_items(machine.last(2)),
    "SETITEMS": lambda machine: machine.put_items(machine.to_mark()),
    "APPEND": lambda machine: machine.extend(machine.last(1)),
    "APPENDS": lambda machine: machine.extend(machine.to_mark()),
    "BINPERSID": lambda machine: machine.stack.append(_storage(machine.last(1)[0])),
    "REDUCE": lambda machine: machine.stack.append(machine.reduce()),
}


_KNOWN = VALUES | CONSTANTS.keys() | IGNORED | _PUT | _GET | {"GLOBAL"} | _ACTIONS.keys()


def saved(data: bytes, storages: int = 0) -> object:
    """Return what a pickle holds, a `SavedTensor` for each tensor.

    Raises `ValueError` for what is not of the opcodes and names known here.

    Args:
        data: the pickle.
        storages: beside it.
    """
    if len(data) > max(MOST_BYTES, BYTES_A_STORAGE * storages):
        raise LoadableError(f"its pickle has {len(data):,} bytes")
    machine = _Machine()
    try:
        for name, argument in _steps(io.BytesIO(data), max(MOST_STEPS, STEPS_A_STORAGE * storages)):
            _step(machine, name, argument)
        return machine.last(1)[0]
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"its pickle is damaged: {error!r}") from None


def _steps(file: IO[bytes], most: int) -> Iterator[tuple[str, object]]:
    """Yield opcodes and arguments; those that no tensor has are refused before they are decoded."""
    for _ in range(most):
        code = file.read(1)
        if code not in _OPCODES:
            raise ValueError("its pickle is damaged, or ends early")
        opcode = _OPCODES[code]
        if opcode.name not in _KNOWN:
            raise ValueError(f"its pickle has the opcode {opcode.name}")
        read = _global if opcode.name == "GLOBAL" else opcode.arg and opcode.arg.reader
        yield opcode.name, read(file) if read else None
        if opcode.name == "STOP":
            return
    raise LoadableError(f"its pickle has more than {most:,} steps")


def _global(file: IO[bytes]) -> str:
    """Read a module and a name as they are: the library's reader takes escapes, with a warning."""
    lines = [file.readline(), file.readline()]
    if not all(line.endswith(b"\n") for line in lines):
        raise ValueError("its pickle is damaged, or ends early")
    return " ".join(line[:-1].decode("ascii") for line in lines)


def _step(machine: _Machine, name: str, argument: object) -> None:
    if name in VALUES:
        machine.stack.append(argument)
    elif name in CONSTANTS:
        machine.stack.append(CONSTANTS[name])
    elif name in _ACTIONS:
        _ACTIONS[name](machine)
    elif name == "GLOBAL":
        machine.stack.append(_name(str(argument)))
    elif name in _PUT:
        machine.put(cast(int, argument))
    elif name in _GET:
        machine.get(cast(int, argument))


def _tuple(values: list[object]) -> tuple[object, ...]:
    """Return a tuple, which holds tuples of numbers and names at most."""
    return tuple(_OTHER if _is_deep(value) else value for value in values)


def _is_deep(value: object) -> bool:
    if type(value) is not tuple:
        return isinstance(value, list | dict | SavedTensor)
    return len(value) > MOST_AXES or any(isinstance(each, tuple) for each in value)


def _name(name: str) -> _Name:
    if name not in (TENSOR, ORDERED) and name not in DTYPES:
        loadable = name in LOADABLE or name.startswith(("numpy.", "numpy "))
        kind = LoadableError if loadable else ValueError
        raise kind(f"it holds {name.replace(' ', '.')!r}")
    return _Name(name)


def _storage(told: object) -> _Storage:
    if isinstance(told, tuple) and len(told) == 5 and told[0] == "storage":
        kind, key = told[1:3]
        if isinstance(kind, _Name) and kind.name in DTYPES and isinstance(key, str):
            return _Storage(DTYPES[kind.name], key)
    raise ValueError("its pickle names a storage that is none")


def _tensor(arguments: tuple[object, ...]) -> SavedTensor:
    if len(arguments) != 6:
        raise ValueError("it holds a tensor that is conjugated, negated, or of another version")
    storage, first, shape, strides = arguments[:4]
    if not (isinstance(storage, _Storage) and isinstance(shape, tuple)):
        raise ValueError("its pickle holds a tensor that is none")
    numbers = (first, *shape, *cast(tuple[object, ...], strides))
    if len(shape) > MOST_AXES or not all(
        type(number) is int and 0 <= number < MOST_NUMBERS for number in numbers
    ):
        raise ValueError("its pickle holds a tensor that is none")
    axes = _axes(shape, cast(tuple[int, ...], strides))
    return SavedTensor(storage.dtype, shape, storage.key, cast(int, first), axes)


def _axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of axes in which numbers lie side by side, () in C order."""
    if len(strides) != len(shape):
        raise ValueError("its pickle holds a tensor that is none")
    in_c_order = tuple(range(len(shape)))
    if 0 in shape:
        return ()
    axes = sorted(in_c_order, key=lambda axis: (-strides[axis] if shape[axis] > 1 else 0, axis))
    step = 1
    for axis in axes[::-1]:
        if shape[axis] > 1 and strides[axis] != step:
            raise LoadableError("it holds a part of a larger tensor, whose numbers have gaps")
        step *= shape[axis]
    long = [axis for axis in axes if shape[axis] > 1]
    return () if long == sorted(long) else tuple(axes)


# Folders of files of `torch.save`: a tensor an utterance, or a dict of tensors by name.
#
# Such a file is a zip of stored members (torch 1.6 and later)::
#
#     <name>/data.pkl     a pickle, which `torch_pickles` reads without running it
#     <name>/data/<key>   the storage of a tensor, little-endian if <name>/byteorder says so
#
# The id is the path below the folder without `.pt`, `.pth` or `.ckpt`. A single tensor is the
# feature that the user names, or the pattern; of a dict each tensor is a feature, each text and
# number an annotation. Of one file that the user names, a dict has an utterance a tensor. Files of
# torch before 1.6 are no zip; torch itself reads them for a copy, and tensors with gaps.

_log = logging.getLogger("featcache")
LOOK_AT = 100
ENDS = (".pt", ".pth", ".ckpt")
OTHERS = (".npy", ".npz", ".h5", ".hdf5", ".safetensors")  # arrays that would be left out
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch's number, pickled
LOCAL = struct.Struct("<4s22xHH")  # of a local header: its signature, bytes of name and extra field
BROKEN = (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError, KeyError)


class PtKind:
    """Tensors in files of `torch.save`."""

    name = "pt"
    takes_pattern = True

    def recognises(self, place: Place, what: str) -> bool:
        """Whether this is a folder of such files, or one."""
        if what:
            return what.lower().endswith(ENDS)
        first = [path.lower() for path in islice(place.files(), LOOK_AT)]
        beside = any(path.endswith(OTHERS) for path in first)
        return any(path.endswith(ENDS) for path in first) and not beside

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find the tensors of all files."""
        if what and (found := _of_one(place, what, options)) is not None:
            return found
        names = Names(options)
        paths, named = _named(place, what, names)
        ids = list(next(iter(named.values())))
        containers: list[str] = []
        tensors: dict[str, ArrayColumns] = {}
        values, left_out = GatheredValues(), set[str]()
        for feature, places in named.items():
            for row, id in enumerate(ids):
                path = paths[places[id]]
                with place.open(path) as source:
                    held = _held(source, id)
                    _check_content(held.value, names)
                    if not names.is_given:
                        _refuse_cut(held.where, held.content(feature))
                    for name, value in held.content(feature).items():
                        if isinstance(value, SavedTensor):
                            mine = tensors.setdefault(name, _columns(name, options))
                            mine.add(id, len(containers), held.placed(value))
                        else:
                            values.add(row, {name: value})
                            left_out |= {name} if value is _OTHER else set()
                containers.append(path)
        features = found_features(place.name, tensors, ids, is_named=names.is_given)
        if left_out:
            _log.warning(
                "%r: %s, in files beside tensors, are no tensor, text or number, and left out",
                place.name, ", ".join(map(repr, sorted(left_out)[:9])),
            )  # fmt: skip
        if not names.is_given:
            _refuse_one(place, paths, features)
        if not features:
            raise AdoptionError(f"{place.name!r} holds no tensors in its files; {CONVERT}")
        return Found(containers, ids, features, values.columns(len(ids), without=features))

    def readable(
        self, place: Place, what: str, options: Options
    ) -> AbstractContextManager[Readable]:
        """Read by torch, with `weights_only`: older files, parts of tensors, dicts in dicts."""
        return FILES.readable(place, what, options)


KIND = PtKind()


def _load(path: Path) -> LoadedArrays:
    return torch_load(path, repr(str(path)))


# what is not adopted: before torch 1.6, dicts in dicts, whose keys `/` joins, parts of tensors
FILES = FilesOfArrays("pt", (".pt", ".pth", ".ckpt"), _load)


def _named(place: Place, what: str, names: Names) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Return the files, and their places by feature and id."""
    paths = [what] if what else files_called(place, ENDS)
    if not paths:
        raise AdoptionError(f"{place.name!r} holds no tensors in {', '.join(ENDS)} files")
    for end in ENDS:
        ids_of(
            [path for path in paths if path.lower().endswith(end)], end
        )  # refuses one without a name
    stems = [path.rpartition(".")[0] for path in paths]
    return paths, names.by_feature(stems, place.name, paths)


def _check_content(value: object, names: Names) -> None:
    if names.has_feature and isinstance(value, dict):
        raise ConfigError(
            f"pattern {names.pattern!r}: the dicts in files of this source name features; give "
            "one without {feature}"
        )


def _of_one(place: Place, path: str, options: Options) -> Found | None:
    """Find the tensors of a file that holds a dict of ids; None if it holds a single tensor."""
    with place.open(path) as source:
        held = _held(source, path)
        content = held.content("")
        if "" in content:
            return None
        _refuse_cut(held.where, content)
        tensors = {id: each for id, each in content.items() if isinstance(each, SavedTensor)}
        columns = _columns(options.feature, options)
        for id, each in tensors.items():
            columns.add(id, 0, held.placed(each))
    if len(tensors) < len(content) or not tensors:
        other = next((id for id in content if id not in tensors), "")
        way = CONVERT if tensors or not all(each is _OTHER for each in content.values()) else COPY
        raise AdoptionError(
            f"{place.name!r} holds more than tensors by id, such as {other!r}; if these are the "
            f"features of one utterance, name the folder, and give pattern={EACH!r}; else {way}"
        )
    ids = list(tensors)
    return Found([path], ids, {options.feature: columns.found(ids)})


def _refuse_cut(where: str, content: Mapping[str, object]) -> None:
    """Raise `AdoptionError` for tensors of all utterances, beside offsets, lengths or ids."""
    names = flat_names(content)
    for name in names[1:] if names else ():
        each = content.get(name or "")
        is_column = isinstance(each, SavedTensor) and len(each.shape) == 1 and each.shape[0] > 1
        if is_column or (isinstance(each, list) and name == (names and names.ids)):
            raise AdoptionError(
                f"{where} has {name!r}, as tensors of several utterances have; {COPY}"
            )


def _columns(feature: str, options: Options) -> ArrayColumns:
    return ArrayColumns(feature, options.time_axis, CONVERT, copies=True)


def _refuse_one(place: Place, paths: list[str], features: Mapping[str, object]) -> None:
    """Raise `AdoptionError` for one file with several tensors, which may be utterances."""
    if len(paths) == 1 and len(features) > 1:
        raise AdoptionError(
            f"{place.name!r}: {paths[0]!r} alone holds {len(features)} tensors, such as "
            f"{next(iter(features))!r}; name the file itself if these are utterances, and give "
            f"pattern={EACH!r} if they are features of one"
        )


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
        kind = type(self.value).__name__
        if isinstance(self.value, list | tuple):
            raise AdoptionError(
                f"{self.where} holds a {kind}, whose tensors have no names; say whether these are "
                f"ids or features; {CONVERT}"
            )
        raise AdoptionError(f"{self.where} holds {kind}, no tensor; {CONVERT}")

    def placed(self, tensor: SavedTensor) -> PlacedArray:
        """Return where a tensor lies."""
        itemsize = storage_dtype(tensor.dtype).itemsize
        first, nbytes = tensor.first * itemsize, math.prod(tensor.shape) * itemsize
        member = self.storages.get(tensor.storage)
        if member is None or first + nbytes > member.nbytes:
            raise AdoptionError(f"{self.where} is damaged: a tensor of it lacks bytes")
        extents = ((member.begin + first, nbytes),) if nbytes else ()
        return PlacedArray(tensor.dtype, tensor.shape, extents, axes=tensor.axes)


def _held(source: ByteSource, id: str) -> _Held:
    where = f"utterance {id!r}, {source.path!r},"
    try:
        if source.size > len(LEGACY) and source.read(0, len(LEGACY)) == LEGACY:
            raise LoadableError("it is in the format of torch before 1.6, no zip")
        members = _members(source)
        if "byteorder" in members and _content(source, members["byteorder"]) != b"little":
            raise LoadableError("its numbers are big-endian")
        value = saved(_content(source, members["data.pkl"], len(members)), len(members))
        storages = {
            name.removeprefix("data/"): _member(source, info)
            for name, info in members.items()
            if name.startswith("data/")
        }
    except BROKEN as error:
        if isinstance(error, AdoptionError):
            raise
        way = COPY if isinstance(error, LoadableError) else CONVERT
        raise AdoptionError(f"{where} is not adopted: {error}; {way}") from None
    return _Held(value, storages, where)


def _members(source: ByteSource) -> dict[str, zipfile.ZipInfo]:
    """Return the members of a file by name, without the folder that they lie in."""
    with zipfile.ZipFile(io.BufferedReader(SourceFile(source), 1024)) as file:
        found = file.infolist()
        places = [*(info.header_offset for info in found), file.start_dir]
    if len({*places}) < len(places):  # from Python 3.14 on zipfile warns of it
        raise zipfile.BadZipFile("members lie at the same place")
    members = {info.filename.partition("/")[2]: info for info in found}
    if len(members) < len(found):
        raise zipfile.BadZipFile("it has two members of one name")
    return members


def _content(source: ByteSource, info: zipfile.ZipInfo, storages: int = 0) -> bytes:
    """Return the bytes of a member; sizes come first, so that nothing is read that is too much."""
    if info.file_size > max(MOST_BYTES, BYTES_A_STORAGE * storages):
        raise LoadableError(f"its member {info.filename!r} has {info.file_size:,} bytes")
    data = source.read(*_member(source, info))
    if zlib.crc32(data) != info.CRC:
        raise ValueError(f"its member {info.filename!r} is damaged")
    return data


def _member(source: ByteSource, info: zipfile.ZipInfo) -> _Member:
    """Return where the bytes of a stored member lie."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"its member {info.filename!r} is compressed, or encrypted")
    signature, name, extra = LOCAL.unpack(source.read(info.header_offset, LOCAL.size))
    begin = info.header_offset + LOCAL.size + name + extra
    if signature != b"PK\3\4" or begin + info.file_size > source.size:
        raise ValueError("it is damaged")
    return _Member(begin, info.file_size)
