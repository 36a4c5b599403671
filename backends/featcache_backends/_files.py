"""What several formats need of the file system: new files with durable names, and whole writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def create(path: Path) -> BinaryIO:
    """Create a file that must not exist yet, unbuffered; its name is durable when this returns."""
    file = path.open("xb", buffering=0)
    sync_directory(path.parent)
    return file


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data`: an unbuffered file may take less than it is given, 2 GiB at most on Linux."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: syncing a file does not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
