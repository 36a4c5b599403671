"""Lines about utterances that are deleted, in files of whoever works in a cache.

The store knows none of their names. But in each `work-*.jsonl`, a line with an "id" is about that
utterance.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path

from featcache.store.format.files import write_durably


def forget_lines(cache: Path, ids: Collection[str]) -> None:
    """Take the lines about some utterances out; a file without lines goes."""
    for file in sorted(cache.glob("work-*.jsonl")):
        if file.is_symlink() or not file.is_file():
            continue
        lines = file.read_bytes().splitlines(keepends=True)
        left = [line for line in lines if _id_in(line) not in ids]
        if not left:
            file.unlink()
        elif len(left) < len(lines):
            write_durably(file, b"".join(left))


def _id_in(line: bytes) -> str | None:
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(line)
        found = content.get("id") if isinstance(content, dict) else None
        return found if isinstance(found, str) else None
    return None
