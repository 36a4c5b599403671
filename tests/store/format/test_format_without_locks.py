"""Promises on file systems without `flock`, as `docs/format.md` gives them: without the lock."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from places import TESTS
from store_helpers import (
    FINGERPRINT,
    assert_holds,
    check_cache,
    id_of,
    make_cache,
    oracle,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter
from featcache.errors import CacheLockedError
from featcache.format import read_manifest, write_manifest

NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
DIES = """
import errno, fcntl, os, sys
from pathlib import Path
def refuse(*_): raise OSError(errno.ENOSYS, "no flock")
fcntl.flock = refuse
from store_helpers import FINGERPRINT, two_features, write
from featcache import CacheWriter
writer = CacheWriter(Path(sys.argv[1]), two_features(), FINGERPRINT)
write(writer, range(5, 9))
writer.commit()
os._exit(1)
"""


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system on which `flock` is not there: Lustre without its mount option."""
    refuse(monkeypatch, errno.ENOSYS)


@pytest.fixture
def local_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that do not see each other's locks: NFS mounted with `nolock`."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def opened(path: Path) -> CacheWriter:
    return CacheWriter(path, two_features(), FINGERPRINT)


# Without flock, a file is the lock


@pytest.mark.parametrize("number", NO_FLOCK)
def test_one_writer_at_a_time(
    tmp_path: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(monkeypatch, number)
    with opened(tmp_path) as writer:
        write(writer, range(3))
        writer.commit()
        with pytest.raises(CacheLockedError, match=f"process {os.getpid()}"):
            opened(tmp_path)
        write(writer, range(3, 5))
    with opened(tmp_path) as writer:
        write(writer, [5])
    check_cache(tmp_path, range(6))
    assert not list(tmp_path.rglob("*.soft"))


@pytest.mark.usefixtures("no_flock")
def test_what_a_killed_writer_of_this_host_held_is_taken_over(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    subprocess.run([sys.executable, "-c", DIES, tmp_path], cwd=TESTS, check=False)
    assert list(tmp_path.rglob("*.soft"))
    with opened(tmp_path) as writer:
        assert id_of(8) in writer
    check_cache(tmp_path, range(9))


@pytest.mark.usefixtures("no_flock")
def test_a_lock_of_another_host_is_held_until_it_is_removed(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    (tmp_path / "writer.lock.soft").write_text("4711\nnode17\n")
    with pytest.raises(CacheLockedError, match="end it and"):
        opened(tmp_path)
    check_cache(tmp_path, range(5))
    (tmp_path / "writer.lock.soft").unlink()
    with opened(tmp_path) as writer:
        write(writer, [5])
    check_cache(tmp_path, range(6))


# Where locks count for nothing


@pytest.mark.usefixtures("local_flock")
def test_what_two_writers_seal_is_there_and_no_id_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "featcache")
    make_cache(tmp_path, range(2))
    first, second = opened(tmp_path), opened(tmp_path)
    write(first, range(2, 6))
    write(second, range(4, 8))
    second.close()
    check_cache(tmp_path, [0, 1, *range(4, 8)])
    first.close()
    check_cache(tmp_path, range(8))


@pytest.mark.usefixtures("local_flock")
def test_what_a_living_writer_committed_outlives_another_that_takes_it_for_dead(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    write(first, range(3))
    first.commit()
    second = opened(tmp_path)
    assert id_of(2) in second
    with pytest.raises(featcache.errors.CacheError, match="for that of a dead one"), first:
        write(first, range(3, 5))
    write(second, range(5, 7))
    second.close()
    cache = featcache.open(tmp_path, verify="arrays")
    assert_holds(cache, oracle([0, 1, 2, 5, 6]))
    with opened(tmp_path) as writer:
        write(writer, [3, 4])
    check_cache(tmp_path, range(7))


def test_two_publishers_at_once_leave_whole_manifests(tmp_path: Path) -> None:
    manifest = read_manifest(make_cache(tmp_path, range(3)))
    failed: list[BaseException] = []

    def publish() -> None:
        try:
            for _ in range(100):
                write_manifest(tmp_path, manifest, keep=True)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=publish) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read_manifest(tmp_path).index == manifest.index
    assert not failed
    check_cache(tmp_path, range(3))
    assert not list(tmp_path.rglob("*.tmp"))
