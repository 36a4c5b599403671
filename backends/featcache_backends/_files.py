"""What several formats share: a writer of one file a feature, new files with durable names, whole writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from featcache.interface import EncodedArray, Extent


class FeatureFile(Protocol):
    """The file, or files, of one feature; the methods are those of a `ContainerWriter`."""

    def append(self, id: str, array: EncodedArray) -> tuple[Extent, ...]:
        """Write the array of one utterance behind that of the one before."""
        ...

    def flush(self) -> None:
        """Make all arrays durable."""
        ...

    def close(self) -> None:
        """Finish the file, durably."""
        ...

    def abort(self) -> None:
        """Let go of the file as it is."""
        ...


class FeatureFilesWriter:
    """A `ContainerWriter` for formats in which each feature has files of its own."""

    def __init__(self, files: Mapping[str, FeatureFile]) -> None:
        self._files = files

    def append(self, id: str, arrays: Mapping[str, EncodedArray]) -> dict[str, tuple[Extent, ...]]:
        """Write the arrays of one utterance behind those of the one before."""
        return {name: self._files[name].append(id, array) for name, array in arrays.items()}

    def flush(self) -> None:
        """Make all arrays durable."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Finish all files, durably."""
        for file in self._files.values():
            file.close()

    def abort(self) -> None:
        """Let go of all files as they are."""
        for file in self._files.values():
            file.abort()


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
