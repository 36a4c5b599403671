"""Attempts at tasks, and who may make them.

Nobody does a task twice, nor two at once, whatever Dask's scheduler believes of its workers.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

PATIENCE_S = 60.0  # for a worker that the scheduler has lost to be through with its batch


class TaskTakenError(Exception):
    """An attempt at a task has been begun, or was taken back, before."""


class AtWorkError(Exception):
    """A worker is still at a task."""


class Claim:
    """A worker's right to make an attempt at a task, which nobody else has then or later.

    Beside it lies a note on the batch that the worker is at, for the case that it dies.

    Raises `TaskTakenError` if another worker had it, or `take_back` has been called;
    `FileNotFoundError` if the run is over, and its directory gone.
    """

    def __init__(self, directory: Path, attempt: int) -> None:
        self._note = _note(directory, attempt)
        try:
            self._file = os.open(self._note, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError as error:
            raise TaskTakenError(attempt) from error
        self._lock = FileLock(f"{self._note}.lock", thread_local=False)
        try:
            self._lock.acquire(timeout=0)
            if not self._note.exists():  # acquiring makes missing directories
                raise FileNotFoundError(str(directory))
            if not self.valid:
                raise TaskTakenError(attempt)
        except BaseException as error:
            self.close()
            if isinstance(error, Timeout):
                raise TaskTakenError(attempt) from error
            raise

    def at(self, batch: int) -> None:
        """Note which batch is next."""
        os.pwrite(self._file, batch.to_bytes(8, "little"), 0)

    @property
    def valid(self) -> bool:
        """Whether the task is still wanted from this worker, and the run goes on."""
        return self._note.exists() and not Path(f"{self._note}.back").exists()

    def close(self) -> None:
        """Let go; the note stays."""
        os.close(self._file)
        self._lock.release()


def take_back(directory: Path, attempt: int) -> int | None:
    """Take an attempt at a task from the worker that has it, if it lives.

    It ends when it is through with its batch.

    Returns the batch that it had come to, -1 if not even to the first, None if nobody had begun.

    Raises `AtWorkError` if it has not ended yet.
    """
    note = _note(directory, attempt)
    Path(f"{note}.back").touch()
    try:
        with FileLock(f"{note}.lock").acquire(timeout=0):
            if not note.exists():
                note.touch()
                return None
            data = note.read_bytes()
            return int.from_bytes(data, "little") if data else -1
    except Timeout as error:
        raise AtWorkError(attempt) from error


def _note(directory: Path, attempt: int) -> Path:
    return directory / f"attempt-{attempt:06d}"
