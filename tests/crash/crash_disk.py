"""A file system in memory that knows what a power cut would leave: no real files, no system calls.

Each file and each directory is an inode with a durable state and the changes since, oldest first.
Syncing a file makes its data durable, syncing a directory its names, and nothing else is: the
name of a synced file is lost until its directory is synced too, and with a lost name goes all
that lies below it.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

Tree = dict[str, "bytes | Tree"]
ROOT = 0


@dataclass(frozen=True)
class Written:
    """Bytes that were written to a file."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class Resized:
    """A file's new size; what it grows by is zeros."""

    size: int


@dataclass(frozen=True)
class Named:
    """The inode that a name of a directory stands for from now on; None: the name is gone."""

    name: str
    number: int | None


@dataclass
class File:
    """A file: its durable data, and the changes since."""

    durable: bytes = b""
    changes: list[Written | Resized] = field(default_factory=list)
    synced: int = 0  # changes that were ever made durable

    def now(self) -> bytes:
        """Return what a reader sees."""
        return changed(self.durable, self.changes)

    def change(self, change: Written | Resized) -> None:
        """Note a change that is not durable yet."""
        self.changes.append(change)

    def sync(self, until: int) -> None:
        """Make the first `until` changes durable, counted from the file's beginning."""
        count = max(0, until - self.synced)
        self.durable = changed(self.durable, self.changes[:count])
        del self.changes[:count]
        self.synced += count


@dataclass
class Directory:
    """A directory: its durable names, and the changes since."""

    durable: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    changes: list[Named] = field(default_factory=list)
    synced: int = 0

    def change(self, change: Named) -> None:
        """Note a name that is not durable yet."""
        self.changes.append(change)
        _rename(self.names, change)

    def sync(self, until: int) -> None:
        """Make the first `until` changes durable, counted from the directory's beginning."""
        count = max(0, until - self.synced)
        for change in self.changes[:count]:
            _rename(self.durable, change)
        del self.changes[:count]
        self.synced += count


class Disk:
    """Files and directories below one directory, `ROOT`; numbers are given out in order."""

    def __init__(self) -> None:
        self.inodes: dict[int, File | Directory] = {ROOT: Directory()}
        self.marks: list[str] = []

    def copy(self) -> Disk:
        """Return a disk that goes its own way from here."""
        return copy.deepcopy(self)

    def find(self, path: str, start: int = ROOT) -> int | None:
        """Return the inode at a path below the directory `start`; None if there is none."""
        number: int | None = start
        for name in path.split("/") if path else []:
            if number is None:
                return None
            number = self.directory(number).names.get(name)
        return number

    def path(self, number: int, start: int = ROOT) -> str:
        """Return where an inode lies below a directory; "" for nowhere."""
        for name, child in self.directory(start).names.items():
            if child == number:
                return name
            inside = isinstance(self.inodes[child], Directory)
            if inside and (below := self.path(number, child)):
                return f"{name}/{below}"
        return ""

    def file(self, number: int) -> File:
        """Return the inode of a file."""
        inode = self.inodes[number]
        assert isinstance(inode, File)
        return inode

    def directory(self, number: int) -> Directory:
        """Return the inode of a directory."""
        inode = self.inodes[number]
        assert isinstance(inode, Directory)
        return inode

    def make_file(self, parent: int, name: str) -> int:
        """Make an empty file, and return its number."""
        return self._make(parent, name, File())

    def make_directory(self, parent: int, name: str) -> int:
        """Make an empty directory, and return its number."""
        return self._make(parent, name, Directory())

    def _make(self, parent: int, name: str, inode: File | Directory) -> int:
        number = len(self.inodes)
        self.inodes[number] = inode
        self.name(parent, name, number)
        return number

    def write(self, number: int, offset: int, data: bytes) -> None:
        """Write to a file."""
        self.file(number).change(Written(offset, data))

    def resize(self, number: int, size: int) -> None:
        """Cut a file, or let it grow by zeros."""
        self.file(number).change(Resized(size))

    def mark(self, text: str) -> None:
        """Keep what the writer told us between two system calls."""
        self.marks.append(text)

    def name(self, parent: int, name: str, number: int | None) -> None:
        """Let a name stand for an inode, or for nothing."""
        self.directory(parent).change(Named(name, number))

    def rename(self, parent: int, name: str, to: int, new: str) -> None:
        """Move a name, over another one if need be."""
        number = self.directory(parent).names[name]
        if self.directory(to).names.get(new) != number:  # else both are one file: nothing happens
            self.name(to, new, number)
            self.name(parent, name, None)

    def sync(self, number: int, until: int | None = None) -> None:
        """Make an inode durable as it was after `until` changes in all; None: as it is now."""
        self.inodes[number].sync(self.age(number) if until is None else until)

    def age(self, number: int) -> int:
        """Return how many changes an inode has seen."""
        inode = self.inodes[number]
        return inode.synced + len(inode.changes)

    def settle(self) -> None:
        """Make everything durable."""
        for number in self.inodes:
            self.sync(number)

    def tree(self, number: int = ROOT) -> Tree:
        """Return what a reader sees, which is what a killed process leaves."""
        return {name: self._below(child) for name, child in self.directory(number).names.items()}

    def _below(self, number: int) -> bytes | Tree:
        inode = self.inodes[number]
        return inode.now() if isinstance(inode, File) else self.tree(number)


def changed(data: bytes, changes: list[Written | Resized]) -> bytes:
    """Return a file's data after some changes."""
    result = bytearray(data)
    for change in changes:
        match change:
            case Written(offset, written):
                result.extend(bytes(max(0, offset - len(result))))
                result[offset : offset + len(written)] = written
            case Resized(size):
                del result[size:]
                result.extend(bytes(size - len(result)))
    return bytes(result)


def _rename(names: dict[str, int], change: Named) -> None:
    if change.number is None:
        names.pop(change.name, None)
    else:
        names[change.name] = change.number


def restarted(tree: Tree, marks: list[str]) -> Disk:
    """Return a disk that holds what a power cut has left, all of it durable."""
    disk = Disk()
    fill(disk, tree)
    disk.settle()
    disk.marks.extend(marks)
    return disk


def fill(disk: Disk, tree: Tree, parent: int = ROOT) -> None:
    """Make files and directories."""
    for name, content in tree.items():
        if isinstance(content, bytes):
            disk.write(disk.make_file(parent, name), 0, content)
        else:
            fill(disk, content, disk.make_directory(parent, name))


def read_tree(path: Path) -> Tree:
    """Return what lies in a real directory."""
    return {
        entry.name: read_tree(entry) if entry.is_dir() else entry.read_bytes()
        for entry in path.iterdir()
    }


def digest(tree: Tree) -> bytes:
    """Return what differs for trees that do."""
    state = hashlib.sha256()
    for name, content in sorted(tree.items()):
        inside = content if isinstance(content, bytes) else digest(content)
        state.update(f"{name} {type(content).__name__} {len(inside)}\n".encode() + inside)
    return state.digest()


def write_tree(tree: Tree, path: Path) -> None:
    """Make a real directory."""
    path.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            write_tree(content, path / name)
