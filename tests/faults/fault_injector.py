"""Compiles the library that makes system calls fail, and tells it which, where it is preloaded."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path

from file_names import sort_of

SOURCE = Path(__file__).with_name("inject.c")
LIBRARY = "FEATCACHE_FAULT_LIBRARY"  # environment variable: where the compiled library is
SHORT = -1  # a write that takes only half of what it is given

# kinds in the order of inject.c, with the errors that they may end in
ERRORS: dict[str, tuple[int, ...]] = {
    "create": (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EACCES, errno.EROFS, errno.EIO),
    "open": (errno.EMFILE, errno.EACCES, errno.EIO),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, SHORT),
    "sync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "rename": (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS),
    "unlink": (errno.EIO, errno.EACCES, errno.EROFS),
    "mkdir": (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS),
    "rmdir": (errno.EIO, errno.EACCES, errno.EROFS),
    "mmap": (errno.ENOMEM, errno.EACCES),
    "truncate": (errno.ENOSPC, errno.EIO, errno.EFBIG),
    "stream": (errno.ENOSPC, errno.EIO),
}
KINDS = tuple(ERRORS)
READING = ("open", "mmap")  # faults that a reader meets too


def sites(log: str, root: Path) -> dict[str, dict[str, list[int]]]:
    """Return the numbers of the calls in a log, by kind and by the sort of their files."""
    found: dict[str, dict[str, list[int]]] = {kind: {} for kind in KINDS}
    counts = dict.fromkeys(KINDS, 0)
    for line in log.splitlines():
        number, _, path = line.partition(" ")
        kind = KINDS[int(number)]
        counts[kind] += 1
        found[kind].setdefault(sort_of(os.path.relpath(os.path.normpath(path), root)), []).append(
            counts[kind]
        )
    return found


def compiled(directory: Path) -> Path | None:
    """Compile the library; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = directory / "inject.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class Injector:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._library.inject_hits.restype = ctypes.c_long

    def arm(
        self,
        below: Path,
        kind: str | None = None,
        number: int = 1,
        code: int = 0,
        lasting: bool = False,
    ) -> None:
        """Let the `number`-th call of a kind below a directory fail, or count the calls alone."""
        which = -1 if kind is None else KINDS.index(kind)
        self._library.inject_arm(
            os.fsencode(below.resolve()), which, ctypes.c_long(number), code, int(lasting)
        )

    def off(self) -> None:
        """Let all calls through again."""
        self._library.inject_off()

    def log(self, file: int) -> None:
        """Write down the kind and the path of each call, in a file; -1 ends that."""
        self._library.inject_log(file)

    def hits(self) -> int:
        """Return how many calls failed since `arm`."""
        return int(self._library.inject_hits())
