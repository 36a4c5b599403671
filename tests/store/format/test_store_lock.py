"""One writer a cache; others are told who it is, and a killed one is in nobody's way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from interrupts import STORE, Interrupt, interrupted
from places import TESTS
from store_helpers import FINGERPRINT, check_cache, id_of, make_cache, two_features, write

import featcache
from featcache import CacheWriter
from featcache.container_files.lock import WriterLock, is_locked
from featcache.errors import CacheLockedError

HOLD = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from featcache import CacheWriter
from store_helpers import FINGERPRINT, two_features, write
writer = CacheWriter(sys.argv[2], two_features(), FINGERPRINT)
write(writer, range(5))
writer.commit()
# as the workers of a DataLoader do, which may outlive a killed parent
if "fork" in sys.argv and os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
if "fork" not in sys.argv:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@contextmanager
def held(path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Have another process write a cache; gives it and the process that it printed."""
    command = [sys.executable, "-c", HOLD, str(TESTS), str(path), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_second_writer_is_told_who_holds_the_cache(tmp_path: Path) -> None:
    with held(tmp_path) as (process, _):
        host = socket.gethostname()
        message = rf"{str(tmp_path)!r} is being written by process {process.pid} on {host} since "
        for overwrite in (False, True):
            with pytest.raises(CacheLockedError, match=message):
                CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=overwrite)
        assert len(featcache.open(tmp_path)) == 0  # readers are welcome


def test_a_second_writer_in_the_same_process_is_told_too(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        with pytest.raises(
            CacheLockedError, match=rf"is being written by process {os.getpid()} on"
        ):
            CacheWriter(tmp_path, two_features(), FINGERPRINT)
        write(writer, range(3))
    make_cache(tmp_path, range(3, 5))
    check_cache(tmp_path, range(5))


def test_the_lock_of_a_killed_writer_does_not_block(tmp_path: Path) -> None:
    with held(tmp_path) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
            assert [number for number in range(9) if id_of(number) in writer] == [0, 1, 2, 3, 4]
    check_cache(tmp_path, range(5))


def test_the_workers_of_a_killed_writer_do_not_hold_its_lock(tmp_path: Path) -> None:
    with held(tmp_path, "fork") as (process, worker):
        process.send_signal(signal.SIGKILL)
        process.wait()
        try:
            make_cache(tmp_path, range(5, 7))
        finally:
            os.kill(worker, signal.SIGKILL)
    check_cache(tmp_path, range(7))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_that_ends_does_not_release_the_lock(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(2))
        child = os.fork()
        if child == 0:
            del writer
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(CacheLockedError):
            CacheWriter(tmp_path, two_features(), FINGERPRINT)
    check_cache(tmp_path, range(2))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_of_many_writers_that_start_at_once_one_wins_and_the_others_are_told(
    tmp_path: Path,
) -> None:
    for attempt in range(5):
        path, start = tmp_path / str(attempt) / "train", time.monotonic() + 0.05
        children = []
        for number in range(6):
            child = os.fork()
            if child == 0:
                try:
                    os._exit(try_to_write(path, number, start))
                finally:
                    os._exit(1)  # an error here must not run the rest of the tests twice
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(codes) <= {WON, TOLD}
        won = [number for number, code in enumerate(codes) if code == WON]
        assert won
        check_cache(path, won)


WON, TOLD = 11, 12


def try_to_write(path: Path, number: int, start: float) -> int:
    time.sleep(max(start - time.monotonic(), 0))
    try:
        make_cache(path, [number])
    except CacheLockedError:
        return TOLD
    return WON


def test_a_lock_without_a_readable_holder_is_told_all_the_same(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    for content in ("", "{", "[]", '{"pid": 1}', "null"):
        (tmp_path / "writer.json").write_text(content)
        with pytest.raises(CacheLockedError, match="is being written by another process"):
            WriterLock(tmp_path)
    lock.release()
    lock.release()
    assert not is_locked(tmp_path)
    assert not (tmp_path / "writer.json").exists()


def test_an_error_while_opening_releases_the_lock(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    with pytest.raises(featcache.FeatcacheError, match="was made from something else"):
        CacheWriter(tmp_path, two_features(), {"model": "other"})
    assert not is_locked(tmp_path)
    make_cache(tmp_path, range(3, 5))
    check_cache(tmp_path, range(5))


def test_a_lock_whose_holder_cannot_be_noted_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> int:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        # keeps the lock itself from being collected
        with pytest.raises(OSError, match="no space left") as error:
            WriterLock(tmp_path)
    assert not is_locked(tmp_path)
    assert error.value is not None


def test_readers_need_no_permission_to_write(tmp_path: Path) -> None:
    make_cache(tmp_path / "train", range(3))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    time.sleep(0.01)
    check_cache(tmp_path / "train", range(3))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_interrupt_at_any_line_lets_go_of_the_lock_though_its_traceback_is_kept(
    tmp_path: Path,
) -> None:
    kept: list[KeyboardInterrupt] = []
    for line in count(1):
        try:
            with interrupted(Interrupt(line, *STORE)), WriterLock(tmp_path):
                pass
        except KeyboardInterrupt as error:
            kept.append(error)
        else:
            break
        assert not is_locked(tmp_path), error_line(kept[-1])
    assert len(kept) > 10


def error_line(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-2:])


def test_the_lock_of_a_directory_that_is_gone_does_not_make_it_again(tmp_path: Path) -> None:
    for ask in (WriterLock, is_locked):
        with pytest.raises(FileNotFoundError):
            ask(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
