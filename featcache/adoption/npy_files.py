"""`.npy` files where they lie: their headers, and folders and lists of them."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from featcache.adoptable import COMPLEX, CONVERT, MOST_AXES, FoundFeature, Place, TimeAxis
from featcache.adoptable.placed_arrays import ArrayColumns, PlacedArray
from featcache.adoption.scp import is_there
from featcache.errors import AdoptionError
from featcache.interface import storage_dtype

# Headers of `.npy` files and members, read without numpy's reader: 100,000 must take a second.

_MOST = 256  # bytes that hold the header of an ordinary array, with all before it
_MOST_HEADER = 10_000  # what NumPy evaluates, by default
_MAGIC = b"\x93NUMPY"
_PLAIN = re.compile(
    rb"\{'descr': '([<>|][biuf][1248])', 'fortran_order': (False|True), "
    rb"'shape': \((\d{1,18}(?:, \d{1,18})*)?,?\), \} *\n"
)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """A plain array in a `.npy` file: the array's bytes lie behind the header to the end."""

    dtype: str  # as declared: "float32", ...
    shape: tuple[int, ...]
    offset: int  # the first byte of the array
    nbytes: int
    in_fortran_order: bool = False
    big_endian: bool = False

    def placed(self, begin: int = 0) -> PlacedArray:
        """Return where the array lies in a file, in which the `.npy` file begins at a byte."""
        extents = ((begin + self.offset, self.nbytes),) if self.nbytes else ()
        axes = tuple(range(len(self.shape)))[::-1] if self.in_fortran_order else ()
        placed = PlacedArray(self.dtype, self.shape, extents, axes=axes)
        return placed._replace(big_endian=True) if self.big_endian else placed


def read_npy_header(
    read: Callable[[int, int], bytes], begin: int, size: int, where: str
) -> NpyHeader:
    """Read the header of a `.npy` file, which may be a member of another file.

    Args:
        read: gives bytes of the file that holds it: the first one, and how many.
        begin: the first byte of the `.npy` file.
        size: all bytes of the `.npy` file.
        where: names the file in messages, such as its id and path.

    Raises `AdoptionError` for what is no `.npy` file of a plain array, or cut short.
    """
    front = read(begin, min(_MOST, size))
    if len(front) >= 12 and _header_bytes(front, where) > len(front):
        front = read(begin, min(_header_bytes(front, where), size))
    return _header(front, size, where)


def _header(front: bytes, size: int, where: str) -> NpyHeader:
    begin = _begin(front, where)
    try:
        dtype, big_endian, fortran, shape = _parsed(front[begin : _header_bytes(front, where)])
        if len(shape) > MOST_AXES:
            raise ValueError(f"the array has {len(shape):,} axes")
    except ValueError as error:
        raise AdoptionError(f"{where}: {error}") from None
    offset = _header_bytes(front, where)
    nbytes = storage_dtype(dtype).itemsize * math.prod(shape)
    if offset + nbytes != size:
        raise AdoptionError(
            f"{where} has {size} bytes, but an array of shape {shape} and dtype {dtype} takes "
            f"{offset + nbytes}: it is damaged, or holds more than one array; remove it, or "
            f"{CONVERT}"
        )
    return NpyHeader(dtype, shape, offset, nbytes, fortran, big_endian)


def _header_bytes(front: bytes, where: str) -> int:
    """Return how many bytes lie before the array; `front` has 12 bytes at least, or the file."""
    begin = _begin(front, where)
    nbytes = int.from_bytes(front[8:begin], "little")
    if nbytes > _MOST_HEADER:
        raise AdoptionError(f"{where} has a header of {nbytes:,} bytes; {CONVERT}")
    return begin + nbytes


def _begin(front: bytes, where: str) -> int:
    if front[:6] != _MAGIC or len(front) < 12 or front[6] not in (1, 2, 3):
        raise AdoptionError(f"{where} is no .npy file; remove it, or write it again")
    return 10 if front[6] == 1 else 12


@lru_cache(maxsize=65536)  # arrays of a data set differ in their lengths alone
def _parsed(header: bytes) -> tuple[str, bool, bool, tuple[int, ...]]:
    """Return dtype, whether it is big-endian, whether in Fortran order, and shape."""
    plain = _PLAIN.fullmatch(header)
    if plain is None:
        descr, fortran, shape = _evaluated(header)
    else:
        descr, fortran = plain[1].decode(), plain[2] == b"True"
        shape = tuple(map(int, plain[3].split(b", "))) if plain[3] else ()
    return *_dtype(descr), fortran, shape


def _evaluated(header: bytes) -> tuple[str, bool, tuple[int, ...]]:
    try:
        content = ast.literal_eval(header.decode("utf-8").strip())
        descr, fortran, shape = (content[key] for key in ("descr", "fortran_order", "shape"))
        natural = all(type(length) is int and 0 <= length < 1 << 62 for length in shape)
        if not (isinstance(fortran, bool) and isinstance(shape, tuple) and natural):
            raise ValueError
    except (ValueError, SyntaxError, LookupError, TypeError, MemoryError, RecursionError):
        raise ValueError("the header is damaged") from None
    return str(descr), fortran, shape


_NAMES = {"b": "bool", "i": "int", "u": "uint", "f": "float"}


_LOADED = f"its pickles are never run here; if you trust it, {CONVERT}"


def _dtype(descr: str) -> tuple[str, bool]:
    """Return the declared dtype of numpy's description of one, and whether it is big-endian."""
    order, kind, bits = descr[:1], descr[1:2], descr[2:]
    if descr == "|b1":
        return "bool", False
    sizes = {"i": ("1", "2", "4", "8"), "u": ("1", "2", "4", "8"), "f": ("2", "4", "8")}
    if bits in sizes.get(kind, ()) and order in ("<>" if bits != "1" else "<>|"):
        return f"{_NAMES[kind]}{int(bits) * 8}", order == ">"
    way = {"O": _LOADED, "c": COMPLEX}
    raise ValueError(f"arrays of dtype {descr!r} are not adopted; {way.get(kind, CONVERT)}")


# Files of `.npy` of one array each, many of them: where the arrays lie.

LENGTHS = (".len", ".lengths")  # of files beside an array that is cut into utterances
THREADS = 8  # network file systems answer many at once
FILES_A_TASK = 256


def npy_header_of(place: Place, path: str, id: str) -> NpyHeader:
    """Return the header of a file; raises `AdoptionError`, naming the id, if it has none."""
    where = f"utterance {id!r}, {path!r}"
    with place.open(path) as source:
        return read_npy_header(source.read, 0, source.size, where)


def check_in_rows(path: str, header: NpyHeader) -> None:
    """Raise `AdoptionError` for an array that cannot be cut along its first axis."""
    order = header.placed().order
    if not header.shape or order != tuple(sorted(order)):
        raise AdoptionError(
            f"{path!r}, of shape {header.shape}, has not frame after frame (in Fortran order: "
            f"{header.in_fortran_order}); {CONVERT}"
        )


def lengths_beside(place: Place, path: str) -> str:
    """Return the file beside an array that has the lengths of utterances; "" if there is none."""
    stem = path.removesuffix(".npy")
    return next((stem + end for end in LENGTHS if is_there(place, stem + end)), "")


def npy_headers(place: Place, ids: Sequence[str], paths: Sequence[str]) -> list[NpyHeader]:
    """Return the headers of files of one array each."""

    def headers(begin: int) -> list[NpyHeader]:
        some = slice(begin, begin + FILES_A_TASK)
        return [
            npy_header_of(place, path, id) for path, id in zip(paths[some], ids[some], strict=True)
        ]

    place.expect(paths)
    with ThreadPoolExecutor(THREADS) as pool:
        chunks: Iterator[list[NpyHeader]] = pool.map(headers, range(0, len(ids), FILES_A_TASK))
        return [header for chunk in chunks for header in chunk]


def npy_feature(
    place: Place,
    name: str,
    ids: Sequence[str],
    paths: Sequence[str],
    numbers: Sequence[int],
    time_axis: TimeAxis,
    *,
    copies: bool = False,
) -> FoundFeature:
    """Return a feature whose arrays are files.

    Args:
        place: of the source.
        name: of the feature.
        ids: of the utterances.
        paths: of their files.
        numbers: of the files in `Found.containers`.
        time_axis: as in `Options`.
        copies: as of `ArrayColumns`.
    """
    columns = ArrayColumns(name, time_axis, copies=copies)
    for id, number, header in zip(ids, numbers, npy_headers(place, ids, paths), strict=True):
        columns.add(id, number, header.placed())
    return columns.found(ids)
