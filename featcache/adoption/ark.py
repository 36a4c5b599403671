"""Objects in Kaldi's archives: matrices, vectors, compressed ones; and the codec for them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError, CorruptCacheError
from featcache.interface import Array

# Objects of a Kaldi archive: where the numbers of one lie, told by its first bytes.
#
# On disk, behind the `<id> ` of the archive, or from the first byte of a file of one object::
#
#     matrix       00 "B" "FM " 04 <i32 rows> 04 <i32 columns>, rows * columns float32, C order
#                  "DM " in place of "FM ": float64
#     vector       00 "B" "FV " 04 <i32 length>, float32; "DV ": float64
#     compressed   00 "B" "CM " <f32 least> <f32 range> <i32 rows> <i32 columns>, then by column
#                  four u16 (percentiles), then by column one u8 a row
#                  "CM2 ": the same 16 bytes, then rows * columns u16, C order; "CM3 ": u8
#     integers     00 "B" 04 <i32 length>, then 04 <i32> for each number
#
# Behind an object the next `<id> ` begins, or the file ends. All is little-endian.
#
# Text archives, audio, pickles and kaldiio's own `NPY` are other objects. Posteriors, pairs and
# lists of lists begin as integers do; the end tells them apart (`check_end`), but where they are
# empty.

HEAD_BYTES = 22  # of the longest head
ID_BYTES = 4096
RAW = {b"FM ": "float32", b"DM ": "float64", b"FV ": "float32", b"DV ": "float64"}
ITEM_BYTES = {"float32": 4, "float64": 8}
COMPRESSED = {b"CM ": 1, b"CM2": 2, b"CM3": 1}  # bytes a number
OTHERS = {
    b"RIFF": "audio",
    b"fLaC": "audio",
    b"AUDI": "audio",
    b"PKL": "a pickle",
    b"NPY": "an array of NumPy's",
}
_INT, _TWO_INTS = struct.Struct("<Bi"), struct.Struct("<BiBi")
_GLOBAL = struct.Struct("<ffii")


class ArkObject(NamedTuple):
    """An object of an archive, by its head."""

    kind: bytes  # "FM ", "CM2" ..., or "\x04" for integers
    dtype: str
    shape: tuple[int, ...]  # (rows, columns) of a matrix, (length,) of a vector
    begin: int  # bytes in front of the numbers
    nbytes: int  # of the whole object

    @property
    def is_raw(self) -> bool:
        """Whether the numbers lie side by side, as they are."""
        return self.kind in RAW


def ark_object(head: bytes) -> ArkObject:
    """Return the object that begins with `head`: `HEAD_BYTES` of it, fewer at a file's end.

    Raises `ValueError` where it is no matrix or vector.
    """
    kind = head[2:5]
    try:
        if head[:2] != b"\0B":
            raise ValueError(f"it is {_other(head)}, no binary matrix or vector")
        if kind in RAW:
            return _raw(head, kind)
        if kind in COMPRESSED:
            return _compressed(head, kind)
        if kind[:1] == b"\4":
            return _integers(head)
    except struct.error:
        raise ValueError("the file ends within its head") from None
    raise ValueError(f"it is a binary object {kind!r}, no matrix or vector")


def _raw(head: bytes, kind: bytes) -> ArkObject:
    dtype = RAW[kind]
    if kind[1:2] == b"M":
        shape = _sizes(_TWO_INTS.unpack_from(head, 5))
        begin, numbers = 15, shape[0] * shape[1]
    else:
        shape = _sizes(_INT.unpack_from(head, 5))
        begin, numbers = 10, shape[0]
    return ArkObject(kind, dtype, shape, begin, begin + numbers * ITEM_BYTES[dtype])


def _compressed(head: bytes, kind: bytes) -> ArkObject:
    start = 5 if kind == b"CM " else 6
    if head[start - 1 : start] != b" ":
        raise ValueError(f"it is a binary object {head[2:start]!r}, no matrix or vector")
    rows, columns = _GLOBAL.unpack_from(head, start)[2:]
    if rows < 0 or columns < 0:
        raise ValueError(f"its head says {rows} rows and {columns} columns")
    begin = start + _GLOBAL.size
    nbytes = begin + rows * columns * COMPRESSED[kind]
    if kind == b"CM ":
        nbytes += 8 * columns
    return ArkObject(kind, "float32", (rows, columns), begin, nbytes)


def _integers(head: bytes) -> ArkObject:
    length = _sizes(_INT.unpack_from(head, 2))[0]
    if length and head[7:8] != b"\4":  # the size of the first number
        raise ValueError("it is a number, or a vector of something else than integers of 4 bytes")
    return ArkObject(b"\4", "int32", (length,), 7, 7 + 5 * length)


def check_end(behind: bytes) -> None:
    r"""Raise `ValueError` for bytes behind an object with which no other object begins.

    Args:
        behind: up to `ID_BYTES` bytes, fewer at the file's end.

    >>> check_end(b"utt-2 \x00BFM ")
    """
    id, space, head = behind.partition(b" ")
    is_text = min(id, default=0) > ord(" ")  # numbers, which posteriors go on with, are not
    is_whole = len(behind) < ID_BYTES or bool(space)
    known = not head or any(head.startswith(each[: len(head)]) for each in (b"\0B", *OTHERS))
    if behind and not (is_text and is_whole and known):
        raise ValueError(
            "no other object begins where it ends, so it is something else than its head says, "
            "such as posteriors or a list of lists, or it is damaged"
        )


def _sizes(fields: tuple[int, ...]) -> tuple[int, ...]:
    """Return every other number of (4, number, 4, number ...): Kaldi writes the size of each."""
    if set(fields[::2]) != {4} or min(fields[1::2]) < 0:
        raise ValueError(f"its head is damaged: {fields}")
    return fields[1::2]


def _other(head: bytes) -> str:
    for begin, what in OTHERS.items():
        if head.startswith(begin):
            return what
    return "text" if head.lstrip()[:1] == b"[" else f"bytes that begin with {head[:5]!r}"


# Codec of Kaldi's objects that do not hold their numbers as they are: compressed, integers.
#
# A block is one whole object of an archive, see `ark_objects`. Adopted archives are read with it;
# nothing is written. Numbers of compressed matrices are those of Kaldi itself, bit for bit. Caches
# of before have those of kaldiio, which computes in float32 throughout: a last bit may differ.

Floats = NDArray[np.float32]
LEVELS: Floats = np.arange(256, dtype=np.float32)
LEVEL_OF_KNOT = (0, 64, 192, 255)
INTEGER = np.dtype([("size", "u1"), ("number", "<i4")])


@dataclass(frozen=True)
class KaldiCodec:
    """Reads the compressed matrices and integer vectors of Kaldi's archives.

    Raises `ConfigError` for numbers of nobody known.

    Args:
        numbers: of compressed matrices, "kaldi" for those of Kaldi, "kaldiio" for those of kaldiio.
    """

    name: ClassVar[str] = "kaldi"
    lossless: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"float32", "float64", "int32"})

    numbers: str = "kaldiio"  # as caches have it that do not say it

    def __post_init__(self) -> None:
        if self.numbers not in ("kaldi", "kaldiio"):
            raise ConfigError(f"numbers are those of 'kaldi' or 'kaldiio', not {self.numbers!r}")

    def encode(self, block: Array) -> bytes:
        """Raise `ConfigError`: this codec only reads."""
        raise ConfigError("codec 'kaldi' reads what Kaldi wrote; choose another one to write")

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        """Return the matrix or vector that `data` holds, as rows of shape `dims`."""
        try:
            found = ark_object(bytes(data[:HEAD_BYTES]))
        except ValueError as error:
            raise CorruptCacheError(f"no object of Kaldi's: {error}") from None
        if found.nbytes != len(data) or dtype != np.dtype(found.dtype).newbyteorder("<"):
            raise CorruptCacheError(
                f"an object of Kaldi's of {found.nbytes} bytes and {found.dtype} lies in "
                f"{len(data)} bytes, as {dtype}"
            )
        held = 1 if found.shape == dims else found.shape[0]  # without a time axis one row is all
        if held > rows or found.shape not in (dims, (held, *dims)):
            raise CorruptCacheError(
                f"an object of Kaldi's has shape {found.shape}, not up to {(rows, *dims)}"
            )
        return _numbers(found, data, self.numbers == "kaldi").reshape(held, *dims)


def _numbers(found: ArkObject, data: memoryview, of_kaldi: bool) -> Array:
    body = data[found.begin :]
    if found.is_raw:
        return np.frombuffer(body, np.dtype(found.dtype).newbyteorder("<")).reshape(found.shape)
    if found.kind == b"\4":
        integers = np.frombuffer(body, INTEGER)
        if (integers["size"] != 4).any():
            raise CorruptCacheError("a vector of Kaldi's has integers that are not of 4 bytes")
        return np.ascontiguousarray(integers["number"])
    least, extent = struct.unpack("<ff", data[found.begin - 16 : found.begin - 8])
    rows, columns = found.shape
    with np.errstate(all="ignore"):  # a damaged head may say that numbers span infinity
        if found.kind != b"CM ":
            two = found.kind == b"CM2"
            values = np.frombuffer(body, "<u2" if two else np.uint8).astype(np.float32)
            most = 65535 if two else 255
            if of_kaldi:  # CompressedMatrix::CopyToMat of Kaldi: the step is rounded, once
                return _stepped(values, least, float(extent) * (1 / most)).reshape(found.shape)
            return _unscaled(values, least, extent, most).reshape(found.shape)
        knots = np.frombuffer(body[: 8 * columns], "<u2").astype(np.float32)
        if of_kaldi:  # Uint16ToFloat: its constant is a float32
            knots = _stepped(knots, least, np.float32(extent) * np.float32(1.52590218966964e-05))
        else:
            knots = _unscaled(knots, least, extent, 65535)
        knots = knots.reshape(columns, 4)
        levels = np.frombuffer(body[8 * columns :], np.uint8).reshape(columns, rows)
        each = _by_level(knots, of_kaldi)
    result = np.empty((columns, rows), np.float32)
    for column in range(columns):
        np.take(each[column], levels[column], out=result[column], mode="clip")
    return np.ascontiguousarray(result.T)


def _unscaled(values: Floats, least: float, extent: float, most: int) -> Floats:
    # GlobalHeader.uint_to_float of kaldiio, in float32 throughout
    result: Floats = np.float32(least) + values * np.float32(extent) / np.float32(most)
    return result


def _stepped(values: Floats, least: float, step: float | np.float32) -> Floats:
    result: Floats = np.float32(least) + values * np.float32(step)
    return result


def _by_level(knots: Floats, of_kaldi: bool) -> Floats:
    """Return the number of each level, a row a column: lines between the column's four knots."""
    # CompressedMatrix::CharToFloat of Kaldi, where 1/64.0 and what it meets are float64; and
    # PerColHeader.char_to_float of kaldiio, in float32 throughout
    wide = np.float64 if of_kaldi else np.float32
    pieces = []
    for number, (begin, end) in enumerate(((0, 65), (65, 193), (193, 256))):
        start = LEVEL_OF_KNOT[number]
        one, other = knots[:, number, None], knots[:, number + 1, None]
        step = wide(1 / (LEVEL_OF_KNOT[number + 1] - start))
        pieces.append(one + wide((other - one) * (LEVELS[begin:end] - np.float32(start))) * step)
    return np.concatenate(pieces, axis=1, dtype=np.float32, casting="same_kind")
