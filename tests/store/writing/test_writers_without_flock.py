"""File systems without `flock`, and such where it counts on one host only: two writers at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    check_cache,
    id_of,
    make_cache,
    two_features,
    write,
)
from store_scripts import HEAD, TESTS, run_script

import featcache
from featcache import CacheWriter
from featcache.container_files import lock
from featcache.container_files.lock import SOFT_NAME, WriterLock, is_locked
from featcache.errors import CacheError, CacheLockedError
from featcache.writing.part_writer import PartWriter


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "_told", set())


@pytest.mark.usefixtures("no_flock")
def test_without_flock_one_writer_wins_and_the_other_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(3))
        with pytest.raises(CacheLockedError, match=rf"by process {os.getpid()} .*{SOFT_NAME}"):
            CacheWriter(tmp_path, two_features(), FINGERPRINT)
        assert is_locked(tmp_path)
        with PartWriter(tmp_path, two_features(), FINGERPRINT) as part:
            part.write(id_of(3), arrays_of(3))
            part.commit()
            with pytest.raises(CacheLockedError, match="is still being written"):
                writer.recover()
    assert not is_locked(tmp_path)
    make_cache(tmp_path, range(4, 6))
    make_cache(tmp_path, range(6), overwrite=True)
    check_cache(tmp_path, range(6))
    assert list(tmp_path.rglob(SOFT_NAME)) == []
    assert caplog.text.count("without flock") == 1


HOLD = """
import errno, fcntl, signal
def refuse(descriptor, operation):
    raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = refuse
"""


@pytest.mark.parametrize("backend", ["hdf5", "memmap"])
def test_without_flock_a_killed_writer_on_this_host_does_not_block(
    tmp_path: Path, backend: str
) -> None:
    script = (
        HOLD
        + """
if sys.argv[3] == "kill":
    writer = CacheWriter(path, two_features(sys.argv[2]), FINGERPRINT)
    write(writer, range(5))
    writer.commit()
    os.kill(os.getpid(), signal.SIGKILL)
make_cache(path, range(5, 8), two_features(sys.argv[2]))
"""
    )
    assert run_script(script, tmp_path, backend, "kill").returncode == -9
    assert len(list(tmp_path.rglob(SOFT_NAME))) == 2
    done = run_script(script, tmp_path, backend, "go on")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("without flock") == 1
    check_cache(tmp_path, range(8))


def test_without_flock_many_processes_may_start_at_once(tmp_path: Path) -> None:
    script = (
        HEAD
        + HOLD
        + """
try:
    make_cache(path, [int(sys.argv[2])])
except featcache.errors.CacheLockedError:
    sys.exit(12)
"""
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "cache"), str(number)],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        for number in range(4)
    ]
    codes = [child.wait(60) for child in children]
    assert {*codes} <= {0, 12}
    won = [number for number, code in enumerate(codes) if code == 0]
    assert won
    check_cache(tmp_path / "cache", won)


@pytest.mark.usefixtures("no_flock")
def test_a_lock_of_another_host_says_which_file_is_in_the_way(tmp_path: Path) -> None:
    held = WriterLock(tmp_path)
    marker = (tmp_path / SOFT_NAME).read_text()
    held.release()
    (tmp_path / SOFT_NAME).write_text(marker.replace(os.uname().nodename, "elsewhere"))
    os.utime(tmp_path / SOFT_NAME, (0, 0))
    (tmp_path / lock.HOLDER).write_text(
        json.dumps({"pid": 7, "host": "elsewhere", "since": "2026-11-22 03:00:00"})
    )
    message = rf"by process 7 on elsewhere since .*if it is gone, remove '{tmp_path / SOFT_NAME}'"
    with pytest.raises(CacheLockedError, match=message):
        CacheWriter(tmp_path, two_features(), FINGERPRINT)
    (tmp_path / SOFT_NAME).unlink()
    make_cache(tmp_path, range(3))
    check_cache(tmp_path, range(3))


@pytest.fixture
def local_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks count for nothing, as between two hosts that mount a file system with local locks."""
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)


@pytest.mark.usefixtures("local_flock")
@pytest.mark.parametrize("backend", ["hdf5", "memmap", "webdataset", "zarr"])
def test_of_two_writers_that_opened_at_once_nothing_is_lost_and_readers_see_whole_generations(
    tmp_path: Path, backend: str
) -> None:
    features = two_features(backend, backend)
    for seed in range(6):
        path = tmp_path / str(seed)
        random = np.random.default_rng(seed)
        make_cache(path, range(3), features)
        writers = [CacheWriter(path, features, FINGERPRINT) for _ in range(2)]
        written = 3
        for step in random.integers(0, 4, 16).tolist():
            writer = writers[int(random.integers(2))]
            if step < 2:
                write(writer, [written])
                written += 1
            elif step == 2:
                writer.commit()
            else:
                writer.publish()
                cache = featcache.open(path, verify="arrays")
                for id in cache:
                    number = int(id.split("-")[1])
                    np.testing.assert_array_equal(
                        cache.read(id, "fbank"), arrays_of(number)["fbank"]
                    )
        for writer in writers:
            writer.close()
        make_cache(path, [written], features)
        check_cache(path, range(written + 1))


@pytest.mark.usefixtures("local_flock")
@pytest.mark.parametrize("committed", [0, 3])
@pytest.mark.parametrize("backend", ["hdf5", "memmap", "webdataset", "zarr"])
def test_a_writer_that_another_took_for_dead_is_told_and_what_it_had_committed_stays(
    tmp_path: Path, backend: str, committed: int
) -> None:
    features = two_features(backend, backend)
    first = CacheWriter(tmp_path, features, FINGERPRINT)
    write(first, range(3))
    if committed:
        assert first.commit() == 3
    else:
        first._parts._thread.drain()
    with CacheWriter(tmp_path, features, FINGERPRINT) as second:
        check_cache(tmp_path, range(committed), complete=False)
        message = "another writer has taken the part for that of a dead one"
        with pytest.raises(CacheError, match=message):  # noqa: PT012
            write(first, range(10, 13))
            first.commit()
        with pytest.raises(CacheError, match=message):
            first.close()
        check_cache(tmp_path, range(committed), complete=False)
        write(second, range(20, 23))
    check_cache(tmp_path, [*range(committed), *range(20, 23)])
