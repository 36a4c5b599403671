"""An edit of several feature sets, which comes into force for all of them at once.

The next manifest of each set lies beside its manifest, as `next.json`. Then the outer
`featcache.json` names, in one step, the `write_id`s of both:

    {..., "kind": "sets", "sets": ["fbank", "energy"],
     "next": {"fbank": [<of featcache.json>, <of next.json>], "energy": [...]}}

While a set's `featcache.json` is the one that is named, its `next.json` counts instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcache.container_files import sync_directory
from featcache.errors import CorruptCacheError
from featcache.store.format.files import read_within, write_durably
from featcache.store.format.sealed_json import pack_json, unpack_json

NEXT = "next.json"
KEY = "next"  # of the outer manifest
_NAME = "featcache.json"
_SETS = "sets"


def in_force(directory: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return what counts as the manifest of a set: `content`, its own, or what follows that.

    Raises `CorruptCacheError` where that cannot be told.
    """
    return _following(directory, content) or content


def settle(directory: Path) -> None:
    """Put the manifest that counts in its place; one that was never named goes.

    Only the holder of the set's lock may call this.
    """
    if directory.parent.name != _SETS or not os.path.lexists(directory / NEXT):
        return
    content = _read(directory, _NAME)
    following = None if content is None else _following(directory, content)
    if following is not None:  # first there, then gone: a power cut may undo half of a rename
        write_durably(directory / _NAME, pack_json(following))
    (directory / NEXT).unlink(missing_ok=True)
    sync_directory(directory)


def last_pairs(outer: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return, by set, the two `write_id`s that an outer manifest names."""
    found = outer.get(KEY, {})
    pairs = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in pairs):
        raise CorruptCacheError(f"the outer {_NAME!r} of feature sets is damaged: {KEY!r}")
    return {name: (before, after) for name, (before, after) in found.items()}


def _following(directory: Path, content: Mapping[str, Any]) -> dict[str, Any] | None:
    outer = _read(directory.parent.parent, _NAME) or {}
    before, after = last_pairs(outer).get(directory.name, (None, None))
    if before is None or content.get("write_id") != before:
        return None
    found = _read(directory, NEXT)
    if found is not None and found.get("write_id") == after:
        return found
    now = _read(directory, _NAME)  # it has come to its place meanwhile
    if now is None or now.get("write_id") == before:
        raise CorruptCacheError(
            f"{str(directory / NEXT)!r} is missing or another one, with the last edit of feature "
            f"set {directory.name!r}; put it back, or {_NAME!r} as it was after that edit"
        )
    return now


def _read(directory: Path, file: str) -> dict[str, Any] | None:
    try:
        data = read_within(directory, file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    content = unpack_json(data, repr(str(directory / file)))
    return content if isinstance(content, dict) else None
