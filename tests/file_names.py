"""Sorts of files of a cache, by their names."""

from __future__ import annotations

import re


def sort_of(path: str) -> str:
    """Return a path without what is random in it; of a file below a directory only the suffix."""
    *directories, name = path.split("/")
    if directories:
        name = name[name.rfind(".") :] if "." in name else "*"
    return re.sub(r"[0-9]{8}T[0-9]{6}|[0-9a-f]{6,}|[0-9]+", "*", "/".join([*directories, name]))
