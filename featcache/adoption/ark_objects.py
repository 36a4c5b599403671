"""Objects of a Kaldi archive: where the numbers of one lie, told by its first bytes.

On disk, behind the `<id> ` of the archive, or from the first byte of a file of one object::

    matrix       00 "B" "FM " 04 <i32 rows> 04 <i32 columns>, rows * columns float32, C order
                 "DM " in place of "FM ": float64
    vector       00 "B" "FV " 04 <i32 length>, float32; "DV ": float64
    compressed   00 "B" "CM " <f32 least> <f32 range> <i32 rows> <i32 columns>, then by column four
                 u16 (percentiles), then by column one u8 a row
                 "CM2 ": the same 16 bytes, then rows * columns u16, C order; "CM3 ": u8
    integers     00 "B" 04 <i32 length>, then 04 <i32> for each number

All is little-endian. Text archives, audio, pickles and kaldiio's own `NPY` are other objects.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HEAD_BYTES = 22  # of the longest head
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
        """Tell whether the numbers lie side by side, as they are."""
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
            length = _sizes(_INT.unpack_from(head, 2))[0]
            return ArkObject(b"\4", "int32", (length,), 7, 7 + 5 * length)
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
