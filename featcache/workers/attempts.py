"""Attempts at tasks: each is one worker's alone, whatever Dask's scheduler believes.

No task is done twice, nor by two workers at once. Knows nothing of Dask.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from featcache.errors import CacheError, IncompleteError

# how long to wait for a worker that Dask lost contact with to finish its batch
PATIENCE_S = 60.0


class TaskTakenError(Exception):
    """An attempt that another worker has begun, or that has been revoked."""


class Notes(NamedTuple):
    """Notes of a worker on its attempt."""

    batch: int | None = None  # the one that it came to, -1: before the first; None: not begun
    lines: tuple[str, ...] = ()


class Attempt:
    """An exclusive, one-time right to attempt a task, and the worker's notes on it.

    The driver reads the notes if the worker dies.

    Raises `TaskTakenError` if another worker had the right, or it was revoked; `IncompleteError`
    if the run is over; `CacheError`, here and later, if the notes cannot be written.
    """

    def __init__(
        self, directory: Path, number: int, stopping: threading.Event | None = None
    ) -> None:
        self._notes, self._stopping = _notes(directory, number), stopping or threading.Event()
        with _written(self._notes), ExitStack() as stack:
            try:
                self._file = stack.enter_context(self._notes.open("xb", buffering=0))
                lock = FileLock(f"{self._notes}.lock", thread_local=False)
                stack.enter_context(lock.acquire(timeout=0))
                if not self._notes.exists():  # acquiring makes missing directories
                    raise FileNotFoundError(self._notes)
            except FileNotFoundError as error:
                raise IncompleteError(
                    f"{str(directory)!r} is gone: the run is over, or the cache was removed"
                ) from error
            except (FileExistsError, Timeout) as error:
                raise TaskTakenError(number) from error
            if self._is_revoked:
                raise TaskTakenError(number)
            self._open = stack.pop_all()

    def note_batch(self, batch: int) -> None:
        """Note the number of the next batch."""
        self._write(f"batch {batch}\n")

    def note(self, line: str) -> None:
        """Add a line to the notes."""
        self._write(f"line {line}\n")

    def _write(self, text: str) -> None:
        with _written(self._notes):
            self._file.write(text.encode())

    @property
    def is_wanted(self) -> bool:
        """Whether the task is still wanted from this worker and the run goes on."""
        return not self._stopping.is_set() and self._notes.exists() and not self._is_revoked

    @property
    def _is_revoked(self) -> bool:
        return Path(f"{self._notes}.back").exists()

    def close(self) -> None:
        """End the attempt; the notes stay."""
        self._file.close()  # before the lock goes: on NFS others see the notes from then on
        self._open.close()


class Attempts:
    """The attempts of one process, one at a time, until the run stops."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        # a worker may have several threads, its environment is made for one
        self._one_at_a_time = threading.Lock()

    @contextmanager
    def begin(self, directory: Path, number: int) -> Iterator[Attempt]:
        """Attempt a task in a `with` block.

        Raises what `Attempt` raises, and `IncompleteError` if the run is stopped.
        """
        with self._one_at_a_time:
            if self._stopping.is_set():
                raise IncompleteError("the run has been stopped")
            with closing(Attempt(directory, number, self._stopping)) as attempt:
                yield attempt

    def finish(self) -> None:
        """Wait until the attempt under way has ended, after its batch; there is none after it."""
        self._stopping.set()
        with self._one_at_a_time:
            pass


def revoke(directory: Path, number: int) -> Notes:
    """Revoke a worker's attempt at a task, and return its notes.

    A worker that lives ends the attempt after its batch, and is waited for; raises
    `IncompleteError` if that takes more than `PATIENCE_S`.
    """
    notes = _notes(directory, number)
    Path(f"{notes}.back").touch()
    try:
        with FileLock(f"{notes}.lock").acquire(timeout=PATIENCE_S):
            if not notes.exists():
                notes.touch()
                return Notes()
            # the last line may have been cut off
            lines = [line.partition(" ") for line in notes.read_text("utf-8").split("\n")[:-1]]
    except Timeout as error:
        raise IncompleteError(
            f"a worker that Dask's scheduler has lost still works on task {number}, after "
            f"{PATIENCE_S:.0f} s; end that process, or wait for it, and try again"
        ) from error
    batches = [-1, *(int(text) for kind, _, text in lines if kind == "batch")]
    return Notes(batches[-1], tuple(text for kind, _, text in lines if kind == "line"))


@contextmanager
def _written(notes: Path) -> Iterator[None]:
    """Raise an error of the disk as a `CacheError`: which file, what is kept, what to do."""
    try:
        yield
    except Timeout:  # an OSError of filelock's
        raise
    except OSError as error:
        raise CacheError(
            f"the notes of a worker, {str(notes)!r}, cannot be written: {error.strerror or error}; "
            "what was committed is kept: free some space or see to the disk, and run the same again"
        ) from error


def _notes(directory: Path, number: int) -> Path:
    return directory / f"attempt-{number:06d}"
