"""Who may do a task: one attempt is one worker's, and what is taken back is nobody's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from featcache.cluster.attempts import Attempt, AtWorkError, TaskTakenError, revoke


def test_an_attempt_is_claimed_once_and_says_how_far_it_came(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 7)
    assert attempt.is_wanted
    attempt.note_batch(300)
    attempt.note_batch(4)
    with pytest.raises(TaskTakenError):
        Attempt(tmp_path, 7)
    attempt.close()
    with pytest.raises(TaskTakenError):
        Attempt(tmp_path, 7)
    assert revoke(tmp_path, 7) == 4
    Attempt(tmp_path, 8).close()
    assert revoke(tmp_path, 8) == -1


def test_what_was_taken_back_is_nobodys(tmp_path: Path) -> None:
    assert revoke(tmp_path, 7) is None
    with pytest.raises(TaskTakenError):
        Attempt(tmp_path, 7)


def test_an_attempt_is_taken_back_when_its_worker_is_through_with_its_batch(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 7)
    with pytest.raises(AtWorkError):
        revoke(tmp_path, 7)
    assert not attempt.is_wanted
    attempt.note_batch(5)
    attempt.close()
    assert revoke(tmp_path, 7) == 5


def test_nothing_is_claimed_of_a_run_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError):
        Attempt(tmp_path / "gone", 7)
    run, acquire = tmp_path / "run", FileLock.acquire
    run.mkdir()

    def too_late(lock: FileLock, timeout: float) -> object:
        shutil.rmtree(run)
        return acquire(lock, timeout)

    monkeypatch.setattr(FileLock, "acquire", too_late)
    with pytest.raises(FileNotFoundError):
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
            assert revoke(tmp_path, 7) == -1
        return acquire(lock, timeout)

    monkeypatch.setattr(FileLock, "acquire", too_late)
    with pytest.raises(TaskTakenError):
        Attempt(tmp_path, 7)
