"""The right to do a task: one attempt is one worker's, and a revoked one is nobody's."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from featcache.errors import CacheError, IncompleteError
from featcache.workers import attempts
from featcache.workers.attempts import Attempt, Notes, TaskTakenError, revoke


def test_an_attempt_is_claimed_once_and_says_how_far_it_came(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 7)
    assert attempt.is_wanted
    attempt.note("a part")
    attempt.note_batch(300)
    attempt.note("another")
    attempt.note_batch(4)
    with pytest.raises(TaskTakenError):
        Attempt(tmp_path, 7)
    attempt.close()
    with pytest.raises(TaskTakenError):
        Attempt(tmp_path, 7)
    assert revoke(tmp_path, 7) == Notes(4, ("a part", "another"))
    Attempt(tmp_path, 8).close()
    assert revoke(tmp_path, 8) == Notes(-1)


def test_the_notes_are_closed_before_others_may_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(tmp_path, 7)
    closed = []
    release = FileLock.release

    def note_and_release(lock: FileLock, force: bool = False) -> None:
        closed.append(attempt._file.closed)
        release(lock, force)

    monkeypatch.setattr(FileLock, "release", note_and_release)
    attempt.close()
    assert closed[0]


def test_a_note_that_is_cut_off_does_not_count(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 7)
    attempt.note_batch(1)
    attempt.note_batch(23)
    attempt.close()
    (path,) = tmp_path.glob("attempt-*7")
    for size, batch in ((len("batch 1\nbatch 2"), 1), (len("batch "), -1), (0, -1)):
        os.truncate(path, size)
        assert revoke(tmp_path, 7) == Notes(batch)


def test_what_was_taken_back_is_nobodys(tmp_path: Path) -> None:
    assert revoke(tmp_path, 7) == Notes()
    with pytest.raises(TaskTakenError):
        Attempt(tmp_path, 7)


def test_an_attempt_is_taken_back_when_its_worker_is_through_with_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(tmp_path, 7)
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "PATIENCE_S", 0.0)
        with pytest.raises(IncompleteError, match="still works on task 7, after 0 s; end that"):
            revoke(tmp_path, 7)
    assert not attempt.is_wanted
    attempt.note_batch(5)
    threading.Timer(0.3, attempt.close).start()
    assert revoke(tmp_path, 7) == Notes(5)


def test_nothing_is_claimed_of_a_run_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IncompleteError, match="gone' is gone: the run is over"):
        Attempt(tmp_path / "gone", 7)
    run, acquire = tmp_path / "run", FileLock.acquire
    run.mkdir()

    def too_late(lock: FileLock, timeout: float) -> object:
        shutil.rmtree(run)
        return acquire(lock, timeout)

    monkeypatch.setattr(FileLock, "acquire", too_late)
    with pytest.raises(IncompleteError):
        Attempt(run, 7)
    assert not any(
        name.is_symlink()
        for name in Path("/proc/self/fd").iterdir()
        if str(run) in os.path.realpath(name)
    )


def test_one_that_was_taken_back_while_it_was_begun_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = FileLock.acquire

    def too_late(lock: FileLock, timeout: float) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(FileLock, "acquire", acquire)
            assert revoke(tmp_path, 7) == Notes(-1)
        return acquire(lock, timeout)

    monkeypatch.setattr(FileLock, "acquire", too_late)
    with pytest.raises(TaskTakenError):
        Attempt(tmp_path, 7)


def test_notes_that_cannot_be_written_say_what_is_kept_and_what_to_do(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 7)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(
            CacheError, match=r"attempt-0+7.*what was committed is kept.*same again"
        ):
            attempt.note_batch(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        attempt.close()
