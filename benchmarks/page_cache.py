"""Have the system forget what it read from files, and see that it did."""

from __future__ import annotations

import os
import time
from pathlib import Path

ATTEMPTS = 10
LOOK_AT = 256  # pages of all files together
PAGE = os.sysconf("SC_PAGE_SIZE")


def evict(path: Path) -> float:
    """Drop a file, or all files below a directory, from the page cache; returns the share that is
    still in memory.

    A page that any process has mapped stays: drop mappings before.
    """
    os.sync()  # what is not written yet stays, too
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for _ in range(ATTEMPTS):  # pages that are just being written or read stay
        _drop(files)
        share = resident(files)
        if share < 0.01:
            break
        time.sleep(0.2)
        os.sync()
    _drop(files)  # looking has the system read ahead on some kernels
    return share


def _drop(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(files: list[Path]) -> float:
    """Return the share of sampled pages that can be read without waiting for the disk."""
    sizes = [file.stat().st_size for file in files]
    step = max(sum(sizes) // LOOK_AT, 1)
    found = looked_at = 0
    next_at = step // 2
    begin = 0
    for file, size in zip(files, sizes, strict=True):
        descriptor = os.open(file, os.O_RDONLY)
        # a look at one page must not bring its neighbours
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            while next_at < begin + size:
                found += _in_memory(descriptor, (next_at - begin) // PAGE * PAGE)
                looked_at += 1
                next_at += step
        finally:
            os.close(descriptor)
        begin += size
    return found / max(looked_at, 1)


def _in_memory(descriptor: int, offset: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
