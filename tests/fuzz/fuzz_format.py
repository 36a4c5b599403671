"""All that the fuzzing knows of the format: seals, columns, digests."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.format import columns, digest, journal, unpack_json

Columns = dict[str, NDArray[Any]]
UNSEALED = re.compile(r"(^|/)(writer\.(lock|json)|work-[^/]*|README\.txt)$")  # no digest has them
DEEP = '"deep deep deep"'  # in JSON, stands for a nesting that json.dumps would refuse
DEEP_JSON = b"[" * 100_000 + b"]" * 100_000
PART = "parts/20200101T000000-deadbeef"  # a part's name


def seal_body(body: bytes) -> bytes:
    """Seal the bytes of a JSON text, or of what is none."""
    return b'["' + digest(body).encode() + b'",' + body + b"]"


def seal(content: object) -> bytes:
    """Seal JSON values, in which the string DEEP stands for a deep nesting."""
    body = json.dumps(content, ensure_ascii=True, separators=(",", ":")).encode()
    return seal_body(body.replace(DEEP.encode(), DEEP_JSON))


def unseal(data: bytes) -> object | None:
    """Return the content of sealed JSON; None for other bytes."""
    try:
        return unpack_json(data, "")
    except CorruptCacheError:
        return None


def is_journal(path: Path) -> bool:
    return path.name == "journal.jsonl"


def unpack_columns(data: bytes) -> Columns | None:
    """Return the arrays of a file of columns; None for other bytes."""
    footer = int.from_bytes(data[-8:], "little")
    content = unseal(data[footer:-8]) if footer < len(data) else None
    if not isinstance(content, dict) or "columns" not in content:
        return None
    return {
        name: np.frombuffer(data, kind, length, offset).copy()
        for name, (kind, length, offset, _) in content["columns"].items()
    }


def pack_columns(
    columns: Columns, change: Callable[[Any], object] = lambda footer: footer
) -> bytes:
    """Return a file of columns, sealed rightly; `change` gets the footer before."""
    out = io.BytesIO()
    footer: dict[str, object] = {}
    for name, column in columns.items():
        filled = column.tobytes() + bytes(-column.nbytes % 64)
        footer[name] = [column.dtype.str, len(column), out.tell(), digest(filled)]
        out.write(filled)
    end = out.tell()
    return out.getvalue() + seal(change({"columns": footer})) + end.to_bytes(8, "little")


def digests(data: bytes) -> list[str]:
    """Return the digests by which others may name a file."""
    footer = int.from_bytes(data[-8:], "little")
    found = [xxhash.xxh3_64_hexdigest(data), xxhash.xxh3_128_hexdigest(data)]
    return [*found, xxhash.xxh3_64_hexdigest(data[footer:] if footer < len(data) else data)]


def sizes(data: bytes) -> str:
    """Return what a manifest tells of the size of a file, and of its footer."""
    footer = len(data) - int.from_bytes(data[-8:], "little")
    return f"{len(data)},{footer if 8 < footer <= len(data) else 0}"


def reseal_parents(root: Path, before: bytes, after: bytes, depth: int = 4) -> None:
    """Name the digests and sizes of a changed file in place of the old ones, and so on upwards."""
    if depth == 0:
        return
    renamed = {
        old.encode(): new.encode() for old, new in zip(digests(before), digests(after), strict=True)
    }
    renamed[f": [{sizes(before)}]".encode()] = f": [{sizes(after)}]".encode()
    for path in root.rglob("*.json"):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        body = data[20:-1]
        for old, new in renamed.items():
            body = body.replace(old, new)
        if body != data[20:-1]:
            path.write_bytes(seal_body(body))
            reseal_parents(root, data, path.read_bytes(), depth - 1)


def read_journal(cache: Path, directory: str) -> None:
    """Read the journal of a part."""
    journal.read_journal(cache, directory)


def map_everything() -> None:
    """Have readers map columns however small they are."""
    columns.SMALL_BYTES = 0
