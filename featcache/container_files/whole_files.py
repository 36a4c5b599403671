"""Whole files: there with all their bytes or not at all, also after a power cut."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from featcache.container_files.system import sync_directory, sync_file, write_all


def write_durably(path: Path, data: bytes, *, alone: bool = False) -> None:
    """Write a whole file by way of a temporary one; its neighbours are durable before it.

    Not so with `alone`: what it names does not lie beside it.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # of this writer alone
    try:
        with aside.open("xb", buffering=0) as file:
            write_all(file, data)
            sync_file(file)
        if not alone:  # what the file names must not come after it
            sync_directory(path.parent)
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_directory(path.parent)


def create_durably(path: Path, data: bytes) -> None:
    """Write a whole file under a name that nobody else gives; nothing names it before this ends."""
    try:
        with path.open("xb", buffering=0) as file:
            write_all(file, data)
            sync_file(file)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    sync_directory(path.parent)
