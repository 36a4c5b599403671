"""The members of a tar file: names and where their bytes lie, told by the headers alone.

On disk, each member is a header of 512 bytes, then its bytes, then zeros up to a multiple of 512.
Before its header may stand headers of type `x` (PAX records of the name, the size, the times, as
webdataset's own writer makes them) or `L` (GNU: a long name), each with its bytes. Two blocks of
zeros end the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from featcache.adoption.place import Window
from featcache.errors import AdoptionError

BLOCK_BYTES = 512
MOST_RECORD_BYTES = 1 << 20
ZEROS = bytes(BLOCK_BYTES)
FILES = b"0\0" + b"7"  # types of an ordinary file
LINKS, SPARSE = b"12", b"S"


class TarMember(NamedTuple):
    """A member that is a file, or a link to one."""

    name: str
    offset: int  # of its first byte in the tar
    nbytes: int
    is_plain: bool  # False: a link, or its bytes are not side by side


def members(file: Window) -> Iterator[TarMember]:
    """Go through the members of a tar file; directories and the like are left out.

    Raises `AdoptionError` where the tar file is damaged, or has no end.
    """
    at = 0
    said: dict[str, bytes] = {}  # of the next member, by the headers before it
    while True:
        block = _block(file, at)
        if block == ZEROS:
            return
        kind = block[156:157]
        size = int(said["size"]) if "size" in said and kind not in b"xL" else _size(block, file, at)
        begin = at + BLOCK_BYTES
        at = begin + size + -size % BLOCK_BYTES
        if begin + size > file.size:
            raise _damaged(file, begin - BLOCK_BYTES, f"a member of {size:,} bytes is cut short")
        if kind in (b"x", b"L"):
            record = _record(file, begin, size)
            said |= _pax(record, file, begin) if kind == b"x" else {"path": record.rstrip(b"\0")}
        elif kind in FILES or kind in LINKS + SPARSE:
            name = said.get("path") or _name(block)
            is_plain = kind in FILES and not any(key.startswith("GNU.sparse") for key in said)
            yield TarMember(name.decode("utf-8", "replace"), begin, size, is_plain)
            said = {}
        elif kind not in (b"g", b"K"):
            said = {}


def _block(file: Window, at: int) -> bytes:
    if at + BLOCK_BYTES > file.size:
        raise _damaged(file, at, "it has no end: it is cut short, or still being written")
    block = file.read(at, BLOCK_BYTES)
    if block == ZEROS:
        return block
    try:
        stored = int(block[148:156].strip(b"\0 "), 8)
    except ValueError:
        stored = -1
    # POSIX.1-1988: the sum of all bytes, where those of the sum count as spaces
    if stored != sum(block) - sum(block[148:156]) + 8 * 0x20:
        raise _damaged(file, at, "there is no header of a member")
    return block


def _size(block: bytes, file: Window, at: int) -> int:
    field = block[124:136]
    try:
        if field[0] == 0x80:  # GNU: base 256, for what octal digits do not hold
            return int.from_bytes(field[1:], "big")
        size = int(field.strip(b"\0 ") or b"0", 8)
        if size < 0:
            raise ValueError
    except ValueError:
        raise _damaged(file, at, "the size of a member is no number") from None
    return size


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0":  # GNU's own headers have other things there
        prefix = block[345:500].partition(b"\0")[0]
        return prefix + b"/" + name if prefix else name
    return name


def _record(file: Window, begin: int, size: int) -> bytes:
    if size > MOST_RECORD_BYTES:
        raise _damaged(file, begin, f"a header has {size:,} bytes")
    return file.read(begin, size)


def _pax(record: bytes, file: Window, at: int) -> dict[str, bytes]:
    """Return PAX records: `<length> <key>=<value>\\n`, where the length counts all of that."""
    found: dict[str, bytes] = {}
    begin = 0
    while begin < len(record):
        length = record[begin : begin + 20].partition(b" ")[0]
        if not length.isdigit() or not 0 < int(length) <= len(record) - begin:
            raise _damaged(file, at, "a PAX header is damaged")
        end = begin + int(length)
        key, _, value = record[begin + len(length) + 1 : end - 1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value
        begin = end
    if not found.get("size", b"0").isdigit() or len(found.get("size", b"")) > 18:
        raise _damaged(file, at, "a PAX header is damaged")
    return found


def _damaged(file: Window, at: int, what: str) -> AdoptionError:
    return AdoptionError(f"tar {file.path!r}, byte {at}: {what}")
