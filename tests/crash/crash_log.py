r"""The log of `strace -f -y -xx`, line by line, as calls: when each began and what it gave back.

A line is a whole call, or, where threads take turns, one half of it::

    71 write(4<\x2f\x61>, "\x62\x63", 2) = 2
    71 fsync(4<\x2f\x61> <unfinished ...>
    72 close(5<\x2f\x64>) = 0
    71 <... fsync resumed>) = 0
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TRACED = (
    *("open", "openat", "openat2", "creat", "close", "dup", "dup2", "dup3", "fcntl", "lseek"),
    *("read", "readv", "write", "writev", "pwrite64", "pwritev", "pwritev2"),
    *("truncate", "ftruncate", "fallocate", "mmap", "sendfile", "copy_file_range", "splice"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
    *("fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "msync"),
    *("clone", "clone3", "fork", "vfork", "access", "faccessat", "faccessat2"),
)
_LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>)?(.*)", re.DOTALL)
_RESULT = re.compile(r"\)\s+= (-?\d+|0x[0-9a-f]+|\?)[^=]*$")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_DESCRIPTOR = re.compile(r"(-?\d+|AT_FDCWD)(?:<([^>]*)>)?")
UNFINISHED = " <unfinished ...>"


@dataclass
class Call:
    """A system call of a thread.

    Args:
        text: all arguments, as they are in the log.
        result: a descriptor, a number of bytes, ...; negative: it failed; None: it has begun.
    """

    thread: int
    name: str
    text: str
    result: int | None = None

    @property
    def strings(self) -> list[bytes]:
        """Its arguments that are strings or bytes."""
        found = _STRING.findall(self.text)
        assert not any(cut for _, cut in found), f"the log lacks data of {self.name}"
        return [bytes.fromhex(text.replace("\\x", "")) for text, _ in found]

    @property
    def path(self) -> str:
        """Its first string."""
        return os.fsdecode(self.strings[0])

    @property
    def arguments(self) -> list[str]:
        """All arguments, where none of them is a structure."""
        return [argument.strip() for argument in self.text.split(", ")]

    def number(self, position: int) -> int:
        """Return an argument that is a number."""
        return int(self.arguments[position], 0)

    def descriptor(self, position: int) -> tuple[int | None, str]:
        """Return a descriptor of the arguments, None for AT_FDCWD, and the path it stands for."""
        found = _DESCRIPTOR.match(self.arguments[position])
        assert found is not None, f"{self.name}({self.text})"
        path = os.fsdecode(bytes.fromhex((found[2] or "").replace("\\x", "")))
        return None if found[1] == "AT_FDCWD" else int(found[1]), path


def calls(lines: Iterable[str]) -> Iterator[Call]:
    """Iterate over a log: each call comes when it begins, without a result, and when it returns."""
    begun: dict[int, Call] = {}
    for line in lines:
        found = _LINE.match(line.rstrip("\n"))
        assert found is not None, line
        thread, resumed, text = int(found[1]), found[2], found[3]
        if text.startswith(("+++", "---")):
            continue
        if resumed:
            call = begun.pop(thread)
            yield _returned(thread, call.name, call.text, text)
        else:
            name, _, text = text.partition("(")
            if text.endswith(UNFINISHED):
                begun[thread] = Call(thread, name, text.removesuffix(UNFINISHED))
                yield begun[thread]
            else:
                call = _returned(thread, name, "", text)
                yield Call(thread, name, call.text)
                yield call


def _returned(thread: int, name: str, begun: str, rest: str) -> Call:
    found = _RESULT.search(rest)
    assert found is not None, f"{name} without a result: {rest[-100:]}"
    result = -1 if found[1] == "?" else int(found[1], 0)
    return Call(thread, name, begun + rest[: found.start()], result)
