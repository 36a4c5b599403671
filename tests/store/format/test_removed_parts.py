"""Parts are removed while others look at their locks, which makes files in their directories."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from featcache.format.lock import is_locked
from featcache.format.part import remove_part

PARTS = 300


@pytest.fixture
def quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_turns")
def test_a_part_is_removed_while_others_look_at_its_lock(tmp_path: Path) -> None:
    parts = [tmp_path / str(number) for number in range(PARTS)]
    for part in parts:
        part.mkdir()
    at = [parts[0]]
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):  # it is gone
                is_locked(at[0])

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for part in parts:
            at[0] = part
            (part / "data").write_bytes(b"some")
            remove_part(part)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not any((part / "data").exists() for part in parts)
