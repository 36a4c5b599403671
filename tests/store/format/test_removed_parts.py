"""Parts are removed while others look at their locks, which makes files in their directories."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from featcache.container_files.lock import WriterLock, is_locked
from featcache.format import remove_part

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


def test_a_directory_that_goes_while_its_lock_is_taken_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    part.mkdir()
    is_dir = Path.is_dir

    def gone(path: Path, **more: bool) -> bool:  # the lock's library makes sure that it is there
        if path == part:
            shutil.rmtree(part, ignore_errors=True)
        return is_dir(path, **more)

    monkeypatch.setattr(Path, "is_dir", gone)
    with pytest.raises(FileNotFoundError, match="part"):
        WriterLock(part)
