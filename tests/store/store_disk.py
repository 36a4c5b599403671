"""A disk that can lose power: what of a directory would be left after a crash at each step of what
is done in it.

While it watches, every call that makes or unmakes something durable (fsync, rename, mkdir, unlink,
...) first records what the directory would hold if all ended there:

- killed: everything that reached the system is there; what waits in buffers of the process is not,
- power cut: only synced contents are there, under names whose directory was synced since,
- reordered: any mix of both, name by name and block by block: what was not synced may be there or
  not.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

BLOCK = 512  # bytes that a disk writes whole
Tree = dict[str, Any]  # name -> bytes or Tree
CALLS = ("fsync", "replace", "rename", "mkdir", "link", "unlink", "remove", "rmdir")


@dataclass(eq=False)
class Node:
    """A file or directory: as it is, and as it would be after a power cut."""

    is_directory: bool
    entries: dict[str, Node] = field(default_factory=dict)
    durable_entries: dict[str, Node] = field(default_factory=dict)
    content: bytes = b""
    durable_content: bytes = b""


@dataclass(frozen=True)
class Crash:
    """What is left after a crash, and what the writer had promised by then."""

    step: str
    tree: Tree
    promise: Any

    def restore(self, directory: Path) -> None:
        """Make the directory as it would be found."""
        _restore(self.tree, directory)


class Disk:
    """Watches a directory, which counts as durable itself as it is at first."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.crashes: list[Crash] = []
        self.promise: Any = None
        self._root = root
        self._random = random.Random(seed)
        self._nodes: dict[int, Node] = {}
        self._lock = threading.RLock()
        self._seen: set[tuple[str, Any]] = set()
        self._scan(root)
        for node in self._nodes.values():
            node.durable_content, node.durable_entries = node.content, dict(node.entries)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record a crash before each call, and one at the end."""
        with contextlib.ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(patch.object(os, name, self._watched(name, getattr(os, name))))
            stack.enter_context(patch.object(io, "open", self._watched_open(io.open)))
            yield
        self._record("end")

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                file = Path(f"/proc/self/fd/{args[0]}").readlink() if name == "fsync" else args[0]
                self._record(f"{name} {file}")
                node = self._nodes.get(os.fstat(args[0]).st_ino) if name == "fsync" else None
                if name in ("unlink", "remove", "rmdir"):  # another file may get the same number
                    self._forget(args[0], kwargs.get("dir_fd"))
                if name in ("replace", "rename"):
                    self._forget(args[1], None)
                result = call(*args, **kwargs)
                if node is not None:
                    node.durable_content, node.durable_entries = node.content, dict(node.entries)
                return result

        return watched

    def _watched_open(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                opened = call(file, mode, *args, **kwargs)
                if mode not in ("r", "rb"):
                    self._record(f"open {file}")
                return opened

        return watched

    def _forget(self, path: Any, dir_fd: int | None) -> None:
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path, dir_fd=dir_fd)
            if status.st_nlink == 1 or not stat.S_ISREG(status.st_mode):  # it has no other name
                self._nodes.pop(status.st_ino, None)

    def _scan(self, path: Path) -> Node:
        status = path.lstat()
        node = self._nodes.setdefault(status.st_ino, Node(path.is_dir()))
        if node.is_directory:
            node.entries = {name: self._scan(path / name) for name in os.listdir(path)}  # noqa: PTH208
        else:
            descriptor = os.open(path, os.O_RDONLY)
            node.content = os.pread(descriptor, status.st_size, 0)
            os.close(descriptor)
        return node

    def _record(self, step: str) -> None:
        root = self._scan(self._root)
        for kind, tree in (
            ("killed", _latest(root)),
            ("power cut", _durable(root)),
            ("reordered", self._mixed(root)),
        ):
            key = (repr(tree), repr(self.promise))
            if key not in self._seen:
                self._seen.add(key)
                self.crashes.append(
                    Crash(f"{kind} at {len(self.crashes)}: {step}", tree, self.promise)
                )

    def _mixed(self, node: Node) -> Tree:
        tree: Tree = {}
        for name in sorted({*node.entries, *node.durable_entries}):
            child = self._random.choice((node.entries, node.durable_entries)).get(name)
            if child is not None:
                tree[name] = self._mixed(child) if child.is_directory else self._torn(child)
        return tree

    def _torn(self, node: Node) -> bytes:
        old, new = node.durable_content, node.content
        if old == new:
            return new
        longest = max(len(old), len(new))
        versions = (old.ljust(longest, b"\0"), new.ljust(longest, b"\0"))
        blocks = (
            self._random.choice(versions)[start : start + BLOCK]
            for start in range(0, longest, BLOCK)
        )
        return b"".join(blocks)[
            : self._random.choice((len(old), len(new), self._random.randint(len(old), longest)))
        ]


def _latest(node: Node) -> Tree:
    return {
        name: _latest(child) if child.is_directory else child.content
        for name, child in node.entries.items()
    }


def _durable(node: Node) -> Tree:
    return {
        name: _durable(child) if child.is_directory else child.durable_content
        for name, child in node.durable_entries.items()
    }


def _restore(tree: Tree, directory: Path) -> None:
    directory.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (directory / name).write_bytes(content)
        else:
            _restore(content, directory / name)
