"""Files of columns, many strings as columns, in the canonical order of ids, and shared numbers."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from multiprocessing import context, reduction
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.container_files import bytes_at, sync_file, write_each
from featcache.container_files.system import WRITTEN_AT_ONCE
from featcache.errors import CorruptCacheError
from featcache.format.files import (
    NOT_AS_WRITTEN,
    FileSize,
    digest,
    newer,
    open_within,
    pack_json,
    remedy,
    unpack_json,
)
from featcache.interface import Array, Bytes, Ints

# Many strings as two columns: where each ends, and their UTF-8 one after the other.
#
# No Python object is made of any of them before it is asked for.

DAMAGED = "the index is damaged (open the cache with verify='columns' to see which file)"
_DECODED_AT_ONCE = 65536  # strings that are decoded at once: ten million are never all in memory


@dataclass(frozen=True)
class Strings:
    """String r is `data[ends[r]:ends[r + 1]]`.

    `ends` is one longer than the strings, and begins with 0.
    """

    ends: Ints
    data: Bytes

    def __len__(self) -> int:
        return len(self.ends) - 1

    @cached_property
    def views(self) -> tuple[memoryview, memoryview]:
        """`ends` and `data`: an item of a memoryview costs a third of one of an array."""
        return self.ends.data, self.data.data

    def __getitem__(self, row: int) -> str:
        return self.some([row])[0]

    def some(self, rows: Sequence[int]) -> list[str]:
        """Return the strings of some rows."""
        ends, data = self.views
        try:
            return [str(data[ends[row] : ends[row + 1]], "utf-8") for row in rows]
        except UnicodeDecodeError as error:
            raise CorruptCacheError(f"{DAMAGED}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _DECODED_AT_ONCE):
            ends = self.ends[start : start + _DECODED_AT_ONCE + 1].tolist()
            data = self.data[ends[0] : ends[-1]].tobytes()
            try:
                yield from [
                    data[begin - ends[0] : end - ends[0]].decode() for begin, end in pairwise(ends)
                ]
            except UnicodeDecodeError as error:
                raise CorruptCacheError(f"{DAMAGED}: {error}") from error

    def take(self, rows: Ints) -> Strings:
        """Return some of the strings, in the order of `rows`."""
        data, ends = take(self.data, self.ends, rows)
        return Strings(ends, data)

    @classmethod
    def of(cls, strings: Sequence[str]) -> Strings:
        """Pack strings."""
        return cls.of_bytes([string.encode() for string in strings])

    @classmethod
    def of_bytes(cls, encoded: Sequence[bytes]) -> Strings:
        """Pack strings that are UTF-8 already."""
        return cls(ends_of(list(map(len, encoded))), np.frombuffer(b"".join(encoded), np.uint8))

    @classmethod
    def joined(cls, parts: Sequence[Strings]) -> Strings:
        """Put strings one after the other."""
        data = np.concatenate([np.empty(0, np.uint8), *(each.data for each in parts)])
        return cls(joined_ends(each.ends for each in parts), data)


def are_equal(these: Strings, those: Strings) -> NDArray[np.bool_]:
    """Return for each string whether it is that of the same row of as many others."""
    same: NDArray[np.bool_] = np.diff(these.ends) == np.diff(those.ends)
    rows = np.flatnonzero(same)
    if len(rows) < len(same):
        these, those = these.take(rows), those.take(rows)
    wrong = np.append(0, np.cumsum(these.data != those.data))
    same[rows] = wrong[these.ends[1:]] == wrong[these.ends[:-1]]
    return same


def ends_of(counts: Sequence[int] | Ints) -> Ints:
    """Return the running sums of counts, with a zero before them."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def joined_ends(parts: Iterable[Ints]) -> Ints:
    """Return the ends of strings that were put together, given those of each part."""
    return ends_of(np.concatenate([np.empty(0, np.int64), *map(np.diff, parts)]))


# The canonical order of utterances: by the UTF-8 bytes of their ids.
#
# No Python object is made for any of them.

Number = TypeVar("Number", bound=np.generic)
# the first `width` bytes of a word
KEEP = ~np.array([(1 << 8 * (8 - width)) - 1 for width in range(9)], np.uint64)
_AT_ONCE = 4096  # ids whose bytes are moved at once: numbers of bytes take eight times their memory


def argsort_ids(data: Bytes, ends: Ints) -> Ints:
    """Return the rows in ascending order of their bytes; equal ones in the order of their rows.

    Args:
        data: the ids in UTF-8, without NUL, one after the other; then 8 bytes more, so that words
            can be read anywhere.
        ends: id r is `data[ends[r]:ends[r + 1]]`.
    """
    words: NDArray[np.uint64] = np.ndarray(len(data) - 7, ">u8", data, strides=(1,))
    lengths = np.diff(ends).astype(np.int32)
    order = np.arange(len(lengths))
    # eight bytes at a time, the last ones first: each turn keeps what those behind it decided
    for begin in reversed(range(0, int(lengths.max(initial=0)), 8)):
        longer = lengths[order] > begin  # the others come first
        rows = order[longer]
        word = KEEP[np.minimum(lengths[rows] - begin, 8)]
        word &= words[ends[rows] + begin]
        order[: len(order) - len(rows)] = order[~longer]
        order[len(order) - len(rows) :] = rows[np.argsort(word, kind="stable")]
    return order


def take(data: NDArray[Number], ends: Ints, rows: Ints) -> tuple[NDArray[Number], Ints]:
    """Return the ids of some rows, in that order, as `argsort_ids` takes them.

    Other things that lie one after the other, too: that of row r is `data[ends[r]:ends[r + 1]]`.
    """
    counts = ends[rows + 1] - ends[rows]
    new_ends = ends_of(counts)
    taken = np.empty(int(new_ends[-1]), data.dtype)
    for start in range(0, len(rows), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        first, last = new_ends[start], new_ends[min(start + _AT_ONCE, len(rows))]
        shifts = ends[rows[some]] - new_ends[:-1][some]
        if (shifts == shifts[0]).all():  # they lie together
            taken[first:last] = data[first + shifts[0] : last + shifts[0]]
        else:
            taken[first:last] = data[np.repeat(shifts, counts[some]) + np.arange(first, last)]
    return taken, new_ends


# Strings of which few differ: a number each, and every text once.

FEW = 4  # text becomes codes where each of its values is in so many rows, on average
TRIED = 65536  # rows of text that are compared with all others to see whether they are few


@dataclass(frozen=True, slots=True)
class Codes:
    """Text r is `texts[codes[r]]`; no text is there twice."""

    codes: NDArray[np.int32]
    texts: Strings

    def __len__(self) -> int:
        return len(self.codes)


def joined_texts(bodies: Sequence[Strings | Codes]) -> Strings | Codes:
    """Join text: as codes where most of it is, and the rest is not too much to be compared."""
    count = sum(map(len, bodies))
    plain = sum(len(each) for each in bodies if isinstance(each, Strings))
    if plain > max(count // 2, TRIED):
        return Strings.joined(
            [each if isinstance(each, Strings) else spelled(each) for each in bodies]
        )
    numbers: dict[str, int] = {}
    codes = [np.empty(0, np.int32)]
    for each in bodies:
        texts_of = each.texts if isinstance(each, Codes) else each
        new = [numbers.setdefault(text, len(numbers)) for text in texts_of]
        into = np.array(new, np.int32)
        codes.append(into[each.codes] if isinstance(each, Codes) and len(into) else into)
    together = Codes(np.concatenate(codes), Strings.of(list(numbers)))
    return together if len(numbers) * FEW <= count else spelled(together)


def few(texts: Sequence[str]) -> Strings | Codes:
    """Pack text, as codes where its values are few."""
    numbers: dict[str, int] = {}
    for start in range(0, len(texts), TRIED):
        numbers |= dict.fromkeys(texts[start : start + TRIED], 0)
        if len(numbers) * FEW > len(texts):
            return Strings.of(texts)
    different = list(numbers)
    numbers = dict(zip(different, range(len(different)), strict=True))
    codes = np.fromiter(map(numbers.__getitem__, texts), np.int32, len(texts))
    return Codes(codes, Strings.of(different)) if different else Strings.of(texts)


def used(body: Codes, null: Bytes | None) -> Codes:
    """Leave out texts that no row has: those of deleted rows must not stay."""
    counts = np.bincount(body.codes if null is None else body.codes[null == 0], minlength=1)
    used = np.flatnonzero(counts)
    if len(used) == len(body.texts):
        return body
    numbers = np.zeros(len(body.texts), np.int32)
    numbers[used] = np.arange(len(used), dtype=np.int32)
    codes = numbers[body.codes]
    if null is not None:
        codes[null != 0] = 0
    return Codes(codes, body.texts.take(used))


def spelled(codes: Codes) -> Strings:
    """Turn codes into text again."""
    return codes.texts.take(codes.codes.astype(np.int64))


# A sealed file of columns: any number of arrays of numbers, mapped at once, with checksums.
#
# On disk::
#
#     columns     little-endian numbers, each column at a multiple of 64 bytes, zeros up to the next
#     footer      sealed JSON: {"columns": {name: [dtype, length, offset, digest], ...}}
#     8 bytes     u64, where the footer begins
#
# The digest of a column is the xxh3-64 of all bytes from its offset up to the next column, or the
# footer. Whoever names the file keeps the xxh3-64 of the footer and the 8 bytes behind it, and so
# knows each byte of the file.

ALIGNMENT = 64
JOINED_BYTES = 1 << 12  # of columns that are copied, so that they are one piece with what fills up
# bytes at the end that are read at once, in the hope that they hold the footer
FOOTER_GUESS = 1 << 16
MOST_FOOTER_BYTES = 64 << 20
# files up to this are read as a whole: a mapping takes one of the files that a process may open
SMALL_BYTES = FOOTER_GUESS
DTYPE = re.compile(r"[|<][biuf][1248]")  # of a column; of those that a reader does not know, too


@lru_cache(maxsize=64)
def _item_bytes(dtype: str) -> int:
    """Return the bytes of a number of a dtype; 0 for what is no dtype of a column."""
    return np.dtype(dtype).itemsize if DTYPE.fullmatch(dtype) else 0


def save_columns(path: Path, columns: Iterable[tuple[str, Array]], *, durably: bool = True) -> str:
    """Write a new file of columns, and return its digest; sync its directory afterwards.

    Not `durably`, the file itself is to be synced afterwards, too.

    The columns are taken one by one, so that they need not be in memory together. Digests are of
    what was in memory, and the size on disk is compared: a write that went wrong unseen is an error
    here.
    """
    with path.open("xb", buffering=0) as file:
        named: dict[str, tuple[str, int, int, str]] = {}
        waiting: list[memoryview] = []  # small columns, to be written with few calls
        end = written = 0
        for name, column in columns:
            data = np.ascontiguousarray(column, column.dtype.newbyteorder("<"))
            pieces = [data.reshape(-1).view(np.uint8).data]
            pieces.append(memoryview(bytes(-data.nbytes % ALIGNMENT)))
            if data.nbytes <= JOINED_BYTES:
                pieces = [memoryview(b"".join(pieces))]
            state, begin = xxhash.xxh3_64(), end
            for piece in pieces:
                state.update(piece)
                end += len(piece)
            waiting += pieces
            named[name] = (data.dtype.str, len(data), begin, state.hexdigest())
            if end - written >= WRITTEN_AT_ONCE:
                write_each(file, waiting)
                waiting, written = [], end
        footer = pack_json({"columns": named}) + end.to_bytes(8, "little")
        write_each(file, [*waiting, memoryview(footer)])
        if durably:
            sync_file(file)
        size = os.fstat(file.fileno()).st_size
        if size != end + len(footer):
            what = f"it has {size} bytes after {end + len(footer)} were written"
            raise OSError(errno.EIO, what, str(path))
    return digest(footer)


class ColumnFile:
    """An open file of columns: `column` maps or reads one of them, valid also once it is closed.

    Args:
        root: the cache directory.
        path: the file, relative to it.
        mapped: map the file into memory; False reads each column when it is asked for.
        expected: the digest of the footer; None takes any footer.
        size: of the file and its footer, where a manifest tells it.

    Attributes:
        dtypes: that of each column, by name.

    Raises `CorruptCacheError` for what `save_columns` did not write, `FileNotFoundError` without a
    file.
    """

    def __init__(
        self,
        root: Path,
        path: str,
        *,
        mapped: bool = True,
        expected: str | None = None,
        size: FileSize | None = None,
    ) -> None:
        self.path = root / path
        self._remedy = remedy(root, path)
        self._file = open(open_within(root, path), "rb", buffering=0)  # noqa: PTH123, SIM115
        try:
            descriptor = self._file.fileno()
            self._size = os.fstat(descriptor).st_size
            last = self._read(max(self._size - FOOTER_GUESS, 0), min(self._size, FOOTER_GUESS))
            footer = self._footer(last)
            if expected is not None and digest(footer) != expected:
                raise self._damaged("its checksum does not match")
            if size not in (None, found := FileSize(self._size, len(footer))):
                raise self._damaged(f"it has {found}; {size} were written")
            self._columns = self._read_footer(footer)
            self.dtypes = {name: kind for name, (kind, *_) in self._columns.items()}
            self._mapping: mmap.mmap | bytes | None = None
            if self._size <= SMALL_BYTES:
                self._mapping = last
            elif mapped:
                with contextlib.suppress(OSError):  # too many mappings or open files: read it then
                    self._mapping = mmap.mmap(descriptor, self._size, access=mmap.ACCESS_READ)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ColumnFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def until_read(self, *, later: bool) -> AbstractContextManager[object]:
        """Close the file after a block; if columns are read from it `later`, once it is dropped."""
        if later and self._mapping is None:
            weakref.finalize(self, self._file.close)
            return contextlib.nullcontext()
        return self

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str, dtype: type[Number]) -> NDArray[Number]:
        """Return a column, read-only; raises `CorruptCacheError` without one of that dtype."""
        if name not in self._columns:
            raise self._damaged(f"it has no column {name!r}")
        kind, length, offset, _, _ = self._columns[name]
        if np.dtype(kind) != np.dtype(dtype):
            raise self._damaged(f"column {name!r} is of {kind}, not of {np.dtype(dtype)}")
        if self._mapping is not None:
            return np.frombuffer(self._mapping, dtype, length, offset)
        return np.frombuffer(self._read(offset, length * np.dtype(dtype).itemsize), dtype)

    def columns(
        self, prefix: str, dtypes: Mapping[str, type[np.generic]], optional: Container[str] = ()
    ) -> dict[str, NDArray[Any]]:
        """Return columns by what follows a prefix; those of `optional` where they are there."""
        return {
            name: self.column(prefix + name, dtype)
            for name, dtype in dtypes.items()
            if name not in optional or prefix + name in self._columns
        }

    def strings(self, name: str) -> Strings:
        """Return a column of strings; raises `CorruptCacheError` if its two do not fit."""
        ends, data = self.column(f"{name}_ends", np.int64), self.column(f"{name}_bytes", np.uint8)
        if not len(ends) or ends[0] != 0 or ends[-1] != len(data):
            raise self._damaged(f"the columns of {name!r} do not fit each other")
        return Strings(ends, data)

    def digests(self, *names: str) -> str:
        """Return length and digest of some columns, as the footer has them."""
        columns = (self._columns[name] for name in names)
        return "".join(f"{length}:{expected} " for _, length, _, _, expected in columns)

    def damaged(self, names: Iterable[str] | None = None) -> list[str]:
        """Compare all columns with their digests, or some; return the names of those that differ.

        The file must not be closed.
        """
        found = []
        for name in self._columns if names is None else names:
            _, _, begin, end, expected = self._columns[name]
            state = xxhash.xxh3_64()
            for start in range(begin, end, 1 << 20):
                state.update(self._read(start, min(1 << 20, end - start)))
            if state.hexdigest() != expected:
                found.append(name)
        return found

    def damage(self, names: Iterable[str] | None = None) -> list[str]:
        """Compare columns as `damaged` does; return a sentence for each that differs."""
        return [
            str(self._damaged(f"the checksum of column {name!r} does not match"))
            for name in self.damaged(names)
        ]

    def _footer(self, last: bytes) -> bytes:
        """Return the footer, which is in the last bytes of the file unless it is large."""
        self._end = int.from_bytes(last[-8:], "little")
        length = self._size - self._end
        if self._size < 8 or not 8 <= length <= min(self._size, MOST_FOOTER_BYTES):
            raise self._damaged("it has no footer")
        return last[-length:] if length <= len(last) else self._read(self._end, length)

    def _read_footer(self, footer: bytes) -> dict[str, tuple[str, int, int, int, str]]:
        """Return of each column the dtype, the length, where it begins and ends, and the digest."""
        content = cast(Any, unpack_json(footer[:-8], repr(str(self.path))))
        columns = {}
        end = 0
        try:
            for name, (kind, length, offset, expected) in content["columns"].items():
                if not (item_bytes := _item_bytes(kind)):
                    raise newer(repr(str(self.path)), f"columns of {kind!r} such as {name!r}")
                if offset != end or type(length) is not int or length < 0:
                    raise ValueError(f"column {name!r} has {length!r} values from {offset!r} on")
                begin, end = end, end + length * item_bytes
                end += -end % ALIGNMENT
                columns[name] = (str(kind), length, begin, end, str(expected))
            if end != self._end:
                raise ValueError(f"columns end at {end}")
        except NOT_AS_WRITTEN as error:
            raise self._damaged(str(error)) from error
        return columns

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = bytes_at(self._file.fileno(), nbytes, offset)
        if len(data) < nbytes:
            raise self._damaged(f"it ends before byte {offset + nbytes}")
        return data

    def _damaged(self, what: str) -> CorruptCacheError:
        return CorruptCacheError(f"{str(self.path)!r} is damaged: {what}; {self._remedy}")


def size_of(root: Path, path: str) -> FileSize | None:
    """Return the size of a file of a cache; None for what is not there, or is damaged at its end.

    Files of columns, and they alone, have names that end in ".columns", and a footer.
    """
    with contextlib.suppress(FileNotFoundError, CorruptCacheError):
        with open(open_within(root, path), "rb", buffering=0) as file:  # noqa: PTH123
            nbytes = os.fstat(file.fileno()).st_size
            if not path.endswith(".columns"):
                return FileSize(nbytes, 0)
            last = bytes_at(file.fileno(), 8, max(nbytes - 8, 0))
        footer_bytes = nbytes - int.from_bytes(last, "little")
        if 8 < footer_bytes <= nbytes:
            return FileSize(nbytes, footer_bytes)
    return None


# `SharedArray`: numbers that processes share: none of them has a copy of its own.

PICKLED_BYTES = 1 << 20  # less is pickled by value: a file costs a descriptor in each process


class SharedArray(Generic[Number]):
    """A read-only array of one axis that workers of this machine share.

    A forked process has the pages of this one. To one that is spawned, an array over 1 MiB goes as
    an open file without a name, which both map; there is nothing that could be left behind. All
    other pickles hold the numbers: they may be read later, or on another machine.
    """

    def __init__(self, values: NDArray[Number]) -> None:
        self.values: NDArray[Number] = np.ascontiguousarray(values).view()
        self.values.flags.writeable = False
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def digest(self) -> str:
        """A digest of the numbers."""
        return digest(self.values.data)

    def __reduce__(self) -> tuple[object, ...]:
        if (
            self.values.nbytes <= PICKLED_BYTES
            or os.name != "posix"
            or context.get_spawning_popen() is None
        ):
            return SharedArray, (self.values,)
        return _mapped, (cast(Any, reduction).DupFd(self._in_file()), self.values.dtype)

    def _in_file(self) -> int:
        """Return a file that holds the numbers, which are mapped from it then."""
        if self._file is None:
            self._file = _nameless_file()
            with os.fdopen(os.dup(self._file), "wb") as file:
                file.write(self.values.data)
            self.values = _map(self._file, self.values.dtype)
        return self._file

    def __del__(self, close: Callable[[int], object] = os.close) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            close(file)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("featcache-rows")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _map(file: int, dtype: np.dtype[Number]) -> NDArray[Number]:
    return np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), dtype)


def _mapped(file: Any, dtype: np.dtype[Number]) -> SharedArray[Number]:
    descriptor = file.detach()
    try:
        return SharedArray(_map(descriptor, dtype))
    finally:
        os.close(descriptor)
