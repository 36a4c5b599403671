"""Attempts at tasks: each is one worker's alone, whatever Dask's scheduler believes.

No task is done twice, nor by two workers at once. Knows nothing of Dask.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

# how long to wait for a worker that Dask lost contact with to finish its batch
PATIENCE_S = 60.0


class TaskTakenError(Exception):
    """An attempt that another worker has begun, or that has been revoked."""


class AtWorkError(Exception):
    """A worker that is still at a task."""


class Attempt:
    """An exclusive, one-time right to attempt a task.

    A file holds the number of the batch that the worker is at, for the case that it dies.

    Raises `TaskTakenError` if another worker had the right, or it was revoked;
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
            if not self.is_wanted:
                raise TaskTakenError(attempt)
        except BaseException as error:
            self.close()
            if isinstance(error, Timeout):
                raise TaskTakenError(attempt) from error
            raise

    def note_batch(self, batch: int) -> None:
        """Note the number of the next batch."""
        os.pwrite(self._file, batch.to_bytes(8, "little"), 0)

    def note(self, line: str) -> None:
        """Add a line to the notes, which `notes_on` returns."""
        with Path(f"{self._note}.notes").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    @property
    def is_wanted(self) -> bool:
        """True while the task is still wanted from this worker and the run goes on."""
        return self._note.exists() and not Path(f"{self._note}.back").exists()

    def close(self) -> None:
        """End the attempt; the note stays."""
        os.close(self._file)
        self._lock.release()


def revoke(directory: Path, attempt: int) -> int | None:
    """Revoke a worker's attempt at a task; a worker that lives ends it after its batch.

    Returns the number of the batch that the worker had come to, -1 before the first, None if no
    worker had begun.

    Raises `AtWorkError` until the attempt has ended.
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


def notes_on(directory: Path, attempt: int) -> list[str]:
    """Return the lines that a worker noted in an attempt."""
    notes = Path(f"{_note(directory, attempt)}.notes")
    return notes.read_text("utf-8").splitlines() if notes.exists() else []


def _note(directory: Path, attempt: int) -> Path:
    return directory / f"attempt-{attempt:06d}"
