"""Origin of a cache: when and by what it was made, as far as that was recorded."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from featcache.errors import CorruptCacheError
from featcache.store.format.manifest import NAME
from featcache.store.reading.generation import Generation

ROLE = "made-from"  # of the file in a cache that holds its witnesses, JSON
WHEN, COMMAND = "when", "command"  # keys of the witnesses: a time as ISO 8601 has it; a list
_UNITS = {"day": 86400, "hour": 3600, "minute": 60}


def witnesses(opened: Generation) -> dict[str, object]:
    """Return what was recorded of the run that made a cache; empty where nothing was.

    Raises `CorruptCacheError` for a file that is not what was written.
    """
    data = opened.file(ROLE)
    if data is None:
        return {}
    try:
        return {**json.loads(data)}
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptCacheError(
            f"cache {str(opened.path)!r} is damaged: its witnesses ({ROLE!r}) are no JSON object; "
            "put a good copy of the cache back, or make it anew (overwrite=True)"
        ) from error


def made_at(opened: Generation, recorded: Mapping[str, object]) -> datetime:
    """Return when a cache was made; when it was last published where that was not recorded."""
    try:
        return datetime.fromisoformat(cast(str, recorded.get(WHEN))).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return datetime.fromtimestamp((opened.path / NAME).stat().st_mtime, UTC)


def origin(opened: Generation) -> str:
    """Say when and by what a cache was made: a part of a message, made as well as can be."""
    recorded: dict[str, object] = {}
    with contextlib.suppress(OSError):
        recorded = witnesses(opened)
    try:
        ago = _ago(time.time() - made_at(opened, recorded).timestamp())
    except (OSError, ValueError, OverflowError):
        ago = "at a time that cannot be read"
    words = _words(recorded.get(COMMAND))
    script = Path(next((word for word in words if word.endswith(".py")), "".join(words[:1]))).name
    return f"made {ago}" + (f" by {script}" if script.isprintable() and script else "")


def _words(command: object) -> list[str]:
    words = command.split() if isinstance(command, str) else command
    return [str(word) for word in words] if isinstance(words, list) else []


def _ago(seconds: float) -> str:
    """Say how long ago something was, in whole units.

    >>> _ago(3 * 86400 + 5), _ago(60), _ago(1)
    ('3 days ago', '1 minute ago', 'less than a minute ago')
    """
    for unit, length in _UNITS.items():
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "less than a minute ago"
