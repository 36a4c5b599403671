"""Durability: what is on disk after a power cut, told by the syncs that a backend makes."""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from featcache.testing.backend_under_test import Storage
from featcache.testing.promises import append_all, assert_hold


class Durability:
    """Durable bytes are there after a power cut."""

    def test_what_was_flushed_survives_a_power_cut(
        self, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(tmp_path / "disk", monkeypatch)
        writer, written = append_all(storage, disk.directory)
        writer.flush()
        assert_hold(disk.after_a_power_cut(tmp_path / "flushed"), written)
        writer.abort()

    def test_what_was_closed_survives_a_power_cut(
        self, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(tmp_path / "disk", monkeypatch)
        writer, written = append_all(storage, disk.directory)
        writer.close()
        after = disk.after_a_power_cut(tmp_path / "closed")
        assert_hold(after, written)
        assert files_of(after) == files_of(disk.directory), (
            "close leaves nothing that is not durable"
        )


class Disk:
    """A directory, and what of it was synced since: the content of files, the names in directories.

    Sees `os.fsync` and `os.fdatasync`; a library that syncs in C must be given one of these, too.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory.mkdir()
        self.directory = directory
        self._content: dict[int, bytes] = {}  # by inode, as of the last sync
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}  # inode, whether a directory
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                monkeypatch.setattr(os, name, self._recorded(getattr(os, name)))

    def after_a_power_cut(self, copy: Path) -> Path:
        """Make a copy of what is durable, and of nothing else."""
        self._copy(self.directory.stat().st_ino, True, copy)
        return copy

    def _recorded(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(file: int) -> None:
            sync(file)
            inode = os.fstat(file if isinstance(file, int) else file.fileno()).st_ino
            for path in (self.directory, *self.directory.rglob("*")):
                if path.stat().st_ino == inode:
                    if path.is_dir():
                        self._names[inode] = {
                            below.name: (below.stat().st_ino, below.is_dir())
                            for below in path.iterdir()
                        }
                    else:
                        self._content[inode] = path.read_bytes()

        return recorded

    def _copy(self, inode: int, is_directory: bool, copy: Path) -> None:
        if not is_directory:
            copy.write_bytes(self._content.get(inode, b""))
            return
        copy.mkdir()
        for name, below in self._names.get(inode, {}).items():  # also of what was removed since
            self._copy(*below, copy / name)


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the content of all files by path."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
