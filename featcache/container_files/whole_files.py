"""Whole files: there with all their bytes or not at all, also after a power cut."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from featcache.container_files.system import (
    sync_directory,
    sync_file,
    sync_path,
    sync_together,
    write_all,
)


def write_durably(
    path: Path,
    data: bytes,
    *,
    alone: bool = False,
    after: Sequence[Path] = (),
    copy: Path | None = None,
) -> None:
    """Write a whole file by way of a temporary one; its neighbours are durable before it.

    Args:
        path: of the file.
        data: its bytes.
        alone: its neighbours are not: what it names does not lie beside it.
        after: files and directories that are made durable before it is there, too.
        copy: a second file of these bytes, which is there, durably, before it is.
    """
    places = [path] if copy is None else [copy, path]
    asides = [_aside(place) for place in places]
    neighbours = [] if alone else [path.parent]  # what the file names must not come after it
    try:
        for aside in asides:
            with aside.open("xb", buffering=0) as file:
                write_all(file, data)
        sync_together(*(partial(sync_path, each) for each in [*asides, *after, *neighbours]))
        for aside, place in zip(asides, places, strict=True):
            aside.replace(place)
            sync_directory(place.parent)
    except BaseException:
        for aside in asides:
            with contextlib.suppress(OSError):
                aside.unlink()
        raise


def _aside(path: Path) -> Path:
    """Return a name beside a file that no other writer gives."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


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
