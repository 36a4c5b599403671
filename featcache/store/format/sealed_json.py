"""JSON with a checksum in front."""

from __future__ import annotations

import json
from typing import cast

from featcache.errors import CacheError, CorruptCacheError
from featcache.store.format.files import MAX_JSON_BYTES, digest

_encoder = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False
)


def pack_json(content: object) -> bytes:
    r"""Return `["<digest>", <content>]` in UTF-8; the digest is of the bytes of <content>.

    >>> pack_json({"a": 1})
    b'["c5e3762ffc8453c6",{"a":1}]'
    """
    body = _encoder.encode(content).encode()
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
