"""Durable files, sealed JSON, values out of JSON, ids: what every other file of the format uses.

What is written here is either whole on disk or not there, also after a power cut. Files of a cache
are opened through `open_within`, which follows no link and waits for nobody.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import operator
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
import xxhash

from featcache._recycled import RECYCLED
from featcache.container_files import sync_directory
from featcache.container_files.system import O_NONBLOCK, open_unlinked
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    FeatcacheError,
    FeatureError,
    FormatVersionError,
    StorageFullError,
)
from featcache.interface import Array

# bfloat16 is stored as the uint16 of its bits; NumPy has no such dtype.


def from_storage(stored: Array, dtype: str, *, writable: bool = True) -> Array:
    """Return stored numbers as NumPy has them: bfloat16 as the float32 of the same value.

    Read-only unless they are to be `writable`.
    """
    array = from_bfloat16(stored) if dtype == "bfloat16" else stored
    if not writable:
        array.flags.writeable = False
    return array


def from_bfloat16(stored: Array) -> Array:
    """Return the float32 of the same values."""
    bits = RECYCLED.empty(stored.shape, np.dtype(np.uint32))
    np.copyto(bits, stored)
    bits <<= 16
    return bits.view(np.float32)


# Utterance ids: which strings are usable, and numbers as ids.


def as_id(value: object) -> object:
    """Return a whole number as text, be it a tensor or an array without axes; all else as it is.

    `DynamicItemDataset.from_arrow_dataset` numbers its utterances.

    >>> as_id(7), as_id("utt-7")
    ('7', 'utt-7')
    """
    if isinstance(value, str):  # first, and alone: a union is made anew each time
        return value
    if isinstance(value, bool) or getattr(value, "ndim", None):
        return value
    try:
        return str(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        return value


def check_id(id: str) -> None:
    """Raise `FeatureError` unless `id` is a non-empty Unicode string without NUL."""
    if not isinstance(id, str) or not id or "\0" in id:
        hint = "; give str(id)" if not isinstance(id, str) else ""
        raise FeatureError(
            f"utterance id {id!r} is not usable: a non-empty string without NUL is needed{hint}"
        )
    try:
        id.encode()
    except UnicodeEncodeError as error:
        raise FeatureError(
            f"utterance id {id!r} is not usable: it is not valid Unicode ({error.reason})"
        ) from error


# Errors of the disk, told as errors of a cache: which path, what is kept, what to do.

GO_ON = "run the same again, it goes on from there"
FREE_SPACE = f"free some space and {GO_ON}"
_REMEDIES = {
    errno.EACCES: (
        "get the right to write there (or open the cache with featcache.open to read it), and "
        f"{GO_ON}"
    ),
    errno.EPERM: f"get the right to write there, and {GO_ON}",
    errno.EROFS: "its file system is read-only: mount it for writing, or give another directory",
    errno.EMFILE: (
        f"this process has too many files open: close some or raise `ulimit -n`, and {GO_ON}"
    ),
    errno.ENFILE: f"this machine has too many files open: close some, and {GO_ON}",
    errno.EFBIG: f"the file is larger than is allowed (`ulimit -f`): raise that, and {GO_ON}",
}

_TO_READ = {
    errno.EACCES: "get the right to read it",
    errno.EPERM: "get the right to read it",
    errno.EMFILE: "close files of this process, or raise `ulimit -n`",
    errno.ENFILE: "close files of this machine",
}


def reading(path: Path) -> AbstractContextManager[None]:
    """Raise a system error while a cache is read as a `CacheError`: which path, what to do."""

    def tell(error: OSError, where: str) -> CacheError:
        return CacheError(f"cache {str(path)!r} cannot be read{where}: {read_remedy(error)}")

    return _told(path, tell)


def read_remedy(error: OSError) -> str:
    """Return what went wrong with reading, and what to do, as the end of a message."""
    remedy = _TO_READ.get(error.errno or 0, "see to the disk")
    return f"{error.strerror or error}; {remedy}, and try again"


def explained(path: Path, kept: Callable[[], str]) -> AbstractContextManager[None]:
    """Raise a system error while a cache is written as a `CacheError`, or `StorageFullError`.

    Args:
        path: the cache directory.
        kept: says what of the work is safe.
    """

    def tell(error: OSError, where: str) -> CacheError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFullError(
                f"the disk of {str(path)!r} is full{where}; {kept()}: {FREE_SPACE}"
            )
        remedy = _REMEDIES.get(error.errno or 0, f"see to the disk, and {GO_ON}")
        return CacheError(
            f"cache {str(path)!r} cannot be written{where}: {error.strerror or error}; "
            f"{kept()}: {remedy}"
        )

    return _told(path, tell)


@contextmanager
def _told(path: Path, tell: Callable[[OSError, str], CacheError]) -> Iterator[None]:
    """Raise a system error as what `tell` makes of it and of the file, if that is not `path`."""
    try:
        yield
    except FeatcacheError:
        raise
    except OSError as error:
        where = f" at {error.filename!r}" if error.filename not in (None, str(path)) else ""
        told = tell(error, where)
        told.errno = error.errno
        raise told from error


# Durable files: what is written here is either whole on disk or not there, also after a power
# cut.
#
# Files of a cache are opened through `open_within`, which follows no link and waits for nobody.

MAX_JSON_BYTES = 32 << 20  # a larger one is no manifest, seal or journal line of ours
_UNFINISHED = re.compile(r".*\.json\.[0-9a-f]{8}\.tmp")
_UNSYNCABLE = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOTSUP)


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-64 of `data`, 16 lower-case hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def make_directory(path: Path) -> None:
    """Make a directory and what is missing above it, durably.

    The name of each is durable before anything is put into it. So who is killed here leaves an
    empty one last, and where one is found empty, its name is made durable, too. Directories above
    that may not be opened, or cannot be synced, are others'.
    """
    if not path.exists():
        make_directory(path.parent)
    else:
        try:
            with os.scandir(path) as inside:
                if any(inside):
                    return
        except PermissionError:
            return
    path.mkdir(exist_ok=True)
    try:
        sync_directory(path.parent)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """List what lies in a directory, by name; nothing if there is none, or it goes meanwhile."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=operator.attrgetter("name"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_unfinished(directory: Path, names: Iterable[str] | None = None) -> None:
    """Remove what killed writers left in `write_durably` of a directory's JSON files.

    `names` are those of what lies in it, where they were listed.
    """
    if names is None:
        names = [entry.name for entry in entries(directory)]
    for name in filter(_UNFINISHED.fullmatch, names):
        (directory / name).unlink(missing_ok=True)


def open_within(root: Path, path: str) -> int:
    """Open a regular file of a cache for reading, and return its descriptor.

    Raises `CorruptCacheError` for a link on the way, or for what is no regular file: a cache holds
    all that it names, and a pipe would be waited for.
    """
    try:
        descriptor = open_unlinked(root, path, os.O_RDONLY | O_NONBLOCK)
    except OSError as error:
        of_root = str(error.filename) == str(root)  # no cache at all
        wrong = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG)
        if of_root or error.errno not in wrong:
            raise
        raise CorruptCacheError(
            f"{str(root / path)!r} is damaged: it is a link or lies behind one, is no file or can "
            "be none; a cache keeps all its files in its own directory"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptCacheError(f"{str(root / path)!r} is damaged: it is no regular file")
    return descriptor


def open_there(root: Path, path: str) -> int:
    """Open a file as `open_within` does; raises `CorruptCacheError` if it is missing."""
    try:
        return open_within(root, path)
    except FileNotFoundError as error:
        raise CorruptCacheError(
            f"{str(root / path)!r} is missing; put it back, or open the cache again if it was "
            "overwritten meanwhile"
        ) from error


def check_own_directory(directory: Path) -> None:
    """Raise `CorruptCacheError` if a directory to write in is a link, or no directory."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise CorruptCacheError(
            f"{str(directory)!r} is damaged: it is a link or no directory; a cache keeps all its "
            "files in its own directory: put back what was there"
        )


def read_within(root: Path, path: str) -> bytes:
    """Read a whole JSON file; raises `CorruptCacheError` for one that is too large to be right."""
    with open(open_within(root, path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read() if size <= MAX_JSON_BYTES else b""
    if size > MAX_JSON_BYTES:
        raise CorruptCacheError(
            f"{str(root / path)!r} is damaged: it has more than {MAX_JSON_BYTES:,} bytes"
        )
    return data


def remedy(cache: Path, path: str) -> str:
    """Return what to do about a damaged or lost file of a cache, as the end of a message."""
    if path.startswith("parts/"):
        part = str(cache / "/".join(path.split("/")[:2]))
        return f"put it back, or remove its part, {part!r}, to compute its utterances again"
    if path.startswith("index-"):
        return (
            "put it back, or make it anew from the parts with featcache.store.repair(path) "
            "(first with dry_run=True)"
        )
    return "put it back, or remove featcache.json and write the cache again: what is sealed is kept"


# JSON with a checksum in front.

OPTIONAL = {"optional": True}  # metadata of a field whose key may be absent


def fields_of(value: object) -> dict[str, object]:
    """Return the fields of a dataclass, as JSON has them: those that may be absent where empty."""
    pairs = ((each, getattr(value, each.name)) for each in dataclasses.fields(cast(Any, value)))
    return {each.name: item for each, item in pairs if item or each.metadata != OPTIONAL}


_encoder = json.JSONEncoder(
    ensure_ascii=False,
    separators=(",", ":"),
    allow_nan=False,
    check_circular=False,
    default=fields_of,
)


def pack_json(content: object) -> bytes:
    r"""Return `["<digest>", <content>]` in UTF-8; the digest is of the bytes of <content>.

    A dataclass in it becomes the object of its fields, as `read_as` reads it.

    >>> pack_json({"a": 1})
    b'["c5e3762ffc8453c6",{"a":1}]'
    """
    return _checked(_encoder.encode(content))


def pack_for_readers(content: Mapping[str, object]) -> bytes:
    r"""Return what `pack_json` does, laid out for people: each key and each entry has its line.

    >>> print(pack_for_readers({"rows": 2, "parts": [{"a": 1}, {"b": 2}]}).decode())
    ["41720f91f2adc93c",{
    "rows": 2,
    "parts": [
     {"a":1},
     {"b":2}
    ]
    }]
    """
    lines = (f"{_encoder.encode(key)}: {_laid_out(value)}" for key, value in content.items())
    return _checked("{\n" + ",\n".join(lines) + "\n}")


def _laid_out(value: object) -> str:
    if isinstance(value, dict) and value:
        entries = (
            f"{_encoder.encode(key)}: {_encoder.encode(each)}" for key, each in value.items()
        )
        return "{\n " + ",\n ".join(entries) + "\n}"
    if isinstance(value, list | tuple) and value:
        return "[\n " + ",\n ".join(map(_encoder.encode, value)) + "\n]"
    return _encoder.encode(value)


def _checked(text: str) -> bytes:
    body = text.encode()
    if len(body) > MAX_JSON_BYTES - 64:
        raise CacheError(
            f"a record of {len(body):,} bytes is more than the {MAX_JSON_BYTES:,} that a cache can "
            "hold in one: cut the utterance, or write the cache anew in fewer parts"
        )
    return _sealed(body)


def unpack_json(data: bytes, where: str) -> object:
    """Return the content that `pack_json` wrote; raises `CorruptCacheError` if any byte differs."""
    body = data[20:-1]
    if data != _sealed(body):
        raise CorruptCacheError(f"{where} is damaged: its checksum does not match")
    try:
        return cast(object, json.loads(body))
    except (ValueError, RecursionError) as error:
        raise CorruptCacheError(f"{where} is damaged: {error}") from error


def _sealed(body: bytes) -> bytes:
    return b'["' + digest(body).encode() + b'",' + body + b"]"


# Values out of JSON, checked: numbers, text, paths, and dataclasses made of objects.
#
# Each function returns the value, or raises an error of `NOT_AS_WRITTEN` for one of another kind.

NOT_AS_WRITTEN = (LookupError, TypeError, AttributeError, ValueError, OverflowError)
_Value = TypeVar("_Value")
Json = Mapping[str, Any]  # a document; each key is checked where it is read


def newer(where: str, what: str) -> FormatVersionError:
    """Return the error of what a later featcache wrote, and this one cannot read."""
    return FormatVersionError(
        f"{where} was written by a newer featcache: to read it one must know {what}; upgrade "
        "featcache"
    )


_NO_STEPS = frozenset(("", ".", ".."))


def within(path: object, depth: int = 100) -> str:
    """Return a path; raises `ValueError` if it leads out of the directory it is relative to."""
    if isinstance(path, str) and "\0" not in path:
        # on Windows a backslash begins a step; a colon ends a drive, or names a stream of a file
        is_strange = os.name == "nt" and ("\\" in path or ":" in path)
        steps = path.split("/")
        if not is_strange and len(steps) <= depth and _NO_STEPS.isdisjoint(steps):
            return path
    raise ValueError(f"{path!r} does not lead to a file of the cache")


def natural(number: object, most: int = (1 << 63) - 1) -> int:
    """Return a number; raises `ValueError` unless it is a natural number."""
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError(f"{number!r} is not a natural number")
    return number


class FileSize(NamedTuple):
    """Bytes of a file, and how many of them, at its end, are the footer of columns; 0: it has none.

    >>> read_as(dict[FilePath, Size], {"index-000001-5bc3169f.columns": [2048, 300]})
    {'index-000001-5bc3169f.columns': FileSize(nbytes=2048, footer_bytes=300)}
    """

    nbytes: int
    footer_bytes: int

    def __str__(self) -> str:
        footer = f", the last {self.footer_bytes:,} a footer" if self.footer_bytes else ""
        return f"{self.nbytes:,} bytes{footer}"


def file_size(value: object) -> FileSize:
    """Return a size; raises `ValueError` for one that no file can have."""
    nbytes, footer_bytes = map(natural, value if isinstance(value, list) else [])
    if footer_bytes > nbytes:
        raise ValueError(f"{footer_bytes} of {nbytes} bytes are no footer")
    return FileSize(nbytes, footer_bytes)


# types of fields, for `read_as`
Name = Annotated[str, partial(within, depth=1)]  # can be that of a file
NameOrNone = Annotated[str, lambda path: path if path == "" else within(path, depth=1)]
FilePath = Annotated[str, within]
Counter = Annotated[int, partial(natural, most=10**12)]  # can be counted up
Size = Annotated[FileSize, file_size]


def read_as(kind: type[_Value], value: object) -> _Value:
    """Return what `pack_json` made of a value of a type, as that type again.

    A type is a dataclass, `Mapping[..., ...]`, `tuple[..., ...]` of one type, `int` (from 0 on),
    `str`, `bool`, `Any`, one of the annotated types above, or one of these `| None`. Keys that are
    no field of a dataclass are passed over; a field with `optional` in its metadata may be absent.

    >>> read_as(dict[Name, tuple[int, ...]], {"fbank": [80]})
    {'fbank': (80,)}
    """
    return cast(_Value, _reader(cast(Any, kind))(value))


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what `read_as` calls for a type: put together once, as many parts have an entry."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return cast(Callable[[Any], Any], arguments[1])
    inner = [_reader(each) for each in arguments if each not in (type(None), ...)]
    if type(None) in arguments:
        return lambda value: None if value is None else inner[0](value)
    if origin is tuple:
        return lambda value: tuple(map(inner[0], value))
    if inner:
        return lambda value: {inner[0](key): inner[1](item) for key, item in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        fields = {name: _reader(each) for name, each in hints.items()}
        optional = {each.name for each in dataclasses.fields(kind) if each.metadata.get("optional")}
        return lambda value: kind(
            **{
                name: read(value[name])
                for name, read in fields.items()
                if name not in optional or name in value
            }
        )
    return natural if kind is int else partial(_instance, object if kind is Any else kind)


def _instance(kind: type, value: object) -> object:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value


# The program that writes a cache, as the cache says it.


def program() -> str:
    """Return the name of the program that runs."""
    path = Path(sys.argv[0] if sys.argv else "")
    named = {"": "Python", "-c": "python -c", "__main__.py": path.parent.name}
    return named.get(path.name, path.name)
