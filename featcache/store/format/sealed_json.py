"""JSON with a checksum in front, and checks of the values that a file gave."""

from __future__ import annotations

import json
from typing import cast

from featcache.errors import CacheError, CorruptCacheError
from featcache.store.format.files import MAX_JSON_BYTES, digest


def pack_json(content: object) -> bytes:
    r"""Return `["<digest>", <content>]` in UTF-8; the digest is of the bytes of <content>.

    >>> pack_json({"a": 1})
    b'["c5e3762ffc8453c6",{"a":1}]'
    """
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_JSON_BYTES - 64:
        raise CacheError(
            f"a record of {len(body):,} bytes is more than the {MAX_JSON_BYTES:,} that a cache can "
            "hold in one: cut the utterance, or write the cache anew in fewer parts"
        )
    return b'["' + digest(body).encode() + b'",' + body + b"]"


def unpack_json(data: bytes, where: str) -> object:
    """Return the content that `pack_json` wrote; raises `CorruptCacheError` if any byte differs."""
    body = data[20:-1]
    if (
        data[:2] != b'["'
        or data[18:20] != b'",'
        or data[-1:] != b"]"
        or digest(body).encode() != data[2:18]
    ):
        raise CorruptCacheError(f"{where} is damaged: its checksum does not match")
    try:
        return cast(object, json.loads(body))
    except (ValueError, RecursionError) as error:
        raise CorruptCacheError(f"{where} is damaged: {error}") from error


def within(path: object, depth: int = 100) -> str:
    """Return a path that a file gave.

    Raises `ValueError` if it leads out of the directory that it is relative to.
    """
    steps = path.split("/") if isinstance(path, str) else [""]
    if len(steps) > depth or "\0" in str(path) or any(step in ("", ".", "..") for step in steps):
        raise ValueError(f"{path!r} does not lead to a file of the cache")
    return cast(str, path)


def natural(number: object, most: int = (1 << 63) - 1) -> int:
    """Return a number that a file gave; raises `ValueError` unless it is a natural number."""
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError(f"{number!r} is not a natural number")
    return number


def text(value: object) -> str:
    """Return a string that a file gave; raises `ValueError` for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value
