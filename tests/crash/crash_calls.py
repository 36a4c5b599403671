"""System calls of several threads and processes become steps of a disk.

A call counts when it returns; but a descriptor is free as soon as its close begins (another thread
may be given the number before the close returns), and a sync covers what was there when it began.
Calls that are not modelled are refused where they touch a file of the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from crash_disk import ROOT, Disk
from crash_log import Call
from crash_steps import Step

MARK = "/crash-mark/"  # paths below it are looked for, in vain, to leave a mark in the log


@dataclass
class OpenFile:
    """What descriptors, duplicated or inherited, stand for: an inode and a place in it."""

    number: int
    offset: int = 0
    append: bool = False


Table = dict[int, OpenFile]  # by descriptor: files of the disk only


class Steps:
    """The steps that calls take a disk; the disk goes along with them.

    Args:
        root: the real path of the disk's root.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        self.steps: list[Step] = []
        self._disk, self._root = disk, root
        self._tables: dict[int, Table] = {}  # by thread; the threads of a process share one
        self._cloning: dict[int, Call] = {}  # by thread; a child may be seen before it returns
        self._syncing: dict[int, tuple[int, int]] = {}  # by thread: inode, and its age at the start

    def follow(self, calls: Iterable[Call]) -> list[Step]:
        """Return the steps of all calls."""
        for call in calls:
            if call.result is None:
                self._begin(call)
            elif call.result >= 0 or "access" in call.name:
                getattr(self, f"_{call.name}", self._unknown)(call)
        return self.steps

    def _begin(self, call: Call) -> None:
        if call.thread not in self._tables:
            self._tables[call.thread] = self._born()
        if call.name in ("clone", "clone3", "fork", "vfork"):
            self._cloning[call.thread] = call
        elif call.name == "close":
            self._table(call).pop(call.descriptor(0)[0] or 0, None)
        elif call.name in ("fsync", "fdatasync") and (file := self._file(call)):
            self._syncing[call.thread] = (file.number, self._disk.age(file.number))

    def _take(self, step: Step) -> Any:
        self.steps.append(step)
        return step(self._disk)

    # processes and descriptors

    def _born(self) -> Table:
        """Return the table of a thread that is seen before the call that made it has returned."""
        if not self._tables:
            return {}
        [call] = self._cloning.values()  # of two at once, neither would be known
        return self._child(call)

    def _child(self, call: Call) -> Table:
        table = self._tables[call.thread]
        return table if "CLONE_FILES" in call.text else dict(table)

    def _clone(self, call: Call) -> None:
        del self._cloning[call.thread]
        self._tables.setdefault(call.result or 0, self._child(call))

    _clone3 = _fork = _vfork = _clone

    def _table(self, call: Call) -> Table:
        return self._tables[call.thread]

    def _file(self, call: Call, position: int = 0) -> OpenFile | None:
        descriptor, _ = call.descriptor(position)
        return self._table(call).get(-1 if descriptor is None else descriptor)

    def _dup(self, call: Call) -> None:
        self._point(call, self._file(call))

    _dup2 = _dup3 = _dup

    def _fcntl(self, call: Call) -> None:
        if call.arguments[1].startswith("F_DUPFD"):
            self._dup(call)

    def _point(self, call: Call, file: OpenFile | None) -> None:
        """Let the descriptor that a call gave stand for a file; None: one outside of the disk."""
        assert call.result is not None
        self._table(call).pop(call.result, None)
        if file is not None:
            self._table(call)[call.result] = file

    def _close(self, call: Call) -> None:
        pass  # done when it began

    # paths

    def _find(self, call: Call, path: str, position: int | None) -> tuple[int, str] | None:
        """Return the directory and the name that a path means; None if that is not on the disk.

        Args:
            position: of the argument that a relative path starts from.
        """
        start = ""
        if position is not None:
            file = self._file(call, position)
            if file is not None and not path.startswith("/"):
                assert "/" not in path, path
                return file.number, path
            start = call.descriptor(position)[1]
        whole = os.path.normpath(os.path.join(start, path))  # noqa: PTH118
        if not whole.startswith(self._root + "/"):
            return None
        above, _, name = whole.removeprefix(self._root + "/").rpartition("/")
        parent = self._disk.find(above)
        assert parent is not None, whole
        return parent, name

    def _number(self, call: Call, path: str, position: int | None) -> int | None:
        if path in (".", "") and position is not None and (file := self._file(call, position)):
            return file.number
        if os.path.normpath(path) == self._root:
            return ROOT
        found = self._find(call, path, position)
        return None if found is None else self._disk.directory(found[0]).names.get(found[1])

    def _open(self, call: Call) -> None:
        self._opened(call, None, call.arguments[1])

    def _openat(self, call: Call) -> None:
        self._opened(call, 0, call.arguments[2])

    def _opened(self, call: Call, position: int | None, flags: str) -> None:
        assert "O_TMPFILE" not in flags
        number = self._number(call, call.path, position)
        if number is None and (found := self._find(call, call.path, position)):
            assert "O_CREAT" in flags, call.path
            number = self._take(partial(Disk.make_file, parent=found[0], name=found[1]))
        elif number is not None and "O_TRUNC" in flags and self._disk.file(number).now():
            self._take(partial(Disk.resize, number=number, size=0))
        file = None if number is None else OpenFile(number, 0, "O_APPEND" in flags)
        self._point(call, file)

    def _mkdir(self, call: Call, position: int | None = None) -> None:
        if found := self._find(call, call.path, position):
            self._take(partial(Disk.make_directory, parent=found[0], name=found[1]))

    def _mkdirat(self, call: Call) -> None:
        self._mkdir(call, 0)

    def _unlink(self, call: Call, position: int | None = None) -> None:
        if found := self._find(call, call.path, position):
            self._take(partial(Disk.name, parent=found[0], name=found[1], number=None))

    _rmdir = _unlink

    def _unlinkat(self, call: Call) -> None:
        self._unlink(call, 0)

    def _rename(self, call: Call, one: int | None = None, other: int | None = None) -> None:
        old, new = map(os.fsdecode, call.strings)
        source, target = self._find(call, old, one), self._find(call, new, other)
        if source and target:
            step = partial(Disk.rename, parent=source[0], name=source[1])
            self._take(partial(step, to=target[0], new=target[1]))
        else:
            assert source == target, f"a rename into the disk, or out of it: {old} {new}"

    def _renameat(self, call: Call) -> None:
        self._rename(call, 0, 2)

    def _renameat2(self, call: Call) -> None:
        assert "EXCHANGE" not in call.text
        self._rename(call, 0, 2)

    def _link(self, call: Call, one: int | None = None, other: int | None = None) -> None:
        old, new = map(os.fsdecode, call.strings)
        number, target = self._number(call, old, one), self._find(call, new, other)
        if number is not None and target is not None:
            self._take(partial(Disk.name, parent=target[0], name=target[1], number=number))

    def _linkat(self, call: Call) -> None:
        self._link(call, 0, 2)

    # data

    def _lseek(self, call: Call) -> None:
        if file := self._file(call):
            file.offset = call.result or 0

    def _read(self, call: Call) -> None:
        if file := self._file(call):
            file.offset += call.result or 0

    _readv = _read

    def _write(self, call: Call) -> None:
        if file := self._file(call):
            if file.append:
                file.offset = len(self._disk.file(file.number).now())
            self._put(call, file, file.offset)
            file.offset += call.result or 0

    _writev = _write

    def _pwrite64(self, call: Call) -> None:
        if file := self._file(call):
            assert not file.append  # Linux appends then, whatever the offset
            self._put(call, file, call.number(-1))

    _pwritev = _pwrite64

    def _put(self, call: Call, file: OpenFile, offset: int) -> None:
        data = b"".join(call.strings)[: call.result]
        assert len(data) == call.result
        self._take(partial(Disk.write, number=file.number, offset=offset, data=data))

    def _ftruncate(self, call: Call) -> None:
        if file := self._file(call):
            self._take(partial(Disk.resize, number=file.number, size=call.number(1)))

    def _truncate(self, call: Call) -> None:
        if (number := self._number(call, call.path, None)) is not None:
            self._take(partial(Disk.resize, number=number, size=call.number(1)))

    def _fallocate(self, call: Call) -> None:
        if file := self._file(call):
            assert call.arguments[1] == "0", call.text
            size = call.number(2) + call.number(3)
            if size > len(self._disk.file(file.number).now()):
                self._take(partial(Disk.resize, number=file.number, size=size))

    def _mmap(self, call: Call) -> None:
        shared = "PROT_WRITE" in call.arguments[2] and "MAP_SHARED" in call.arguments[3]
        assert not (shared and self._file(call, 4)), f"written by way of memory: {call.text}"

    # promises

    def _fsync(self, call: Call) -> None:
        if begun := self._syncing.pop(call.thread, None):
            self._take(partial(Disk.sync, number=begun[0], until=begun[1]))

    _fdatasync = _fsync

    def _sync_file_range(self, call: Call) -> None:
        pass  # makes nothing durable: its manual says so

    def _access(self, call: Call) -> None:
        if call.path.startswith(MARK):
            self._take(partial(Disk.mark, text=call.path.removeprefix(MARK)))

    _faccessat = _faccessat2 = _access

    def _unknown(self, call: Call) -> None:
        assert not self._table(call), f"not modelled: {call.name}({call.text[:200]})"
