"""Members of a tar file: headers of ustar and pax."""

from __future__ import annotations

from functools import lru_cache

BLOCK_BYTES = 512  # of a tar: headers and data start at multiples of it
# what follows the checksum in the header of a file, and of a PAX record
_END = {kind: kind + bytes(100) + b"ustar\x0000" + bytes(247) for kind in (b"0", b"x")}


def tar_header(name: str, size: int) -> bytes:
    # The stdlib's TarInfo.tobuf does the same in 40 us, more than all the rest of an append
    if len(name) <= 100 and name.isascii():
        return _ustar_header(name.encode(), size, b"0")
    record = _pax_record("path", name)
    pax = _ustar_header(b"././@PaxHeader", len(record), b"x") + padded(record)
    return pax + _ustar_header(name.encode("ascii", "replace")[:100], size, b"0")


def _ustar_header(name: bytes, size: int, kind: bytes) -> bytes:
    middle, total = _fields(size, kind)
    # POSIX.1-1988: the sum of the header's bytes, with spaces for the checksum
    return b"%b%b%06o\0 %b" % (name.ljust(100, b"\0"), middle, total + sum(name), _END[kind])


@lru_cache(maxsize=4096)  # utterances have few lengths
def _fields(size: int, kind: bytes) -> tuple[bytes, int]:
    """Return the fields between name and checksum, and the sum of all bytes but the name's."""
    middle = b"0000644\x000000000\x000000000\0" + b"%011o\x0000000000000\0" % size
    return middle, sum(middle) + 8 * 0x20 + sum(_END[kind])


def _pax_record(key: str, value: str) -> bytes:
    # POSIX.1-2001: "<length> <key>=<value>\n", where the length counts its own digits
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK_BYTES)
