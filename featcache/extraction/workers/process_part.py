"""One process's state in a run: its open part, and a lock that lets one task run at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from featcache._closing import closed_after
from featcache.cluster.attempts import Attempt
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import IncompleteError
from featcache.store.writing.part_writer import PartWriter


class ProcessPart:
    """The part of the cache that a process writes, task after task."""

    def __init__(self) -> None:
        self.stopping = False  # whether the current task is to end after its batch
        # a worker may have several threads, its environment is made for one
        self._one_at_a_time = threading.Lock()
        self._writer: PartWriter | None = None

    @contextlib.contextmanager
    def attempt(self, directory: Path, number: int) -> Iterator[Attempt]:
        """Begin an attempt at a task; commits its utterances before the attempt can be revoked.

        Raises `TaskTakenError` if another process has, or had, this attempt, `IncompleteError` if
        the run is over.
        """
        with self._one_at_a_time:
            if self.stopping:
                raise IncompleteError("the run has been stopped")
            try:
                attempt = Attempt(directory, number)
            except FileNotFoundError as error:
                raise IncompleteError(
                    f"{str(directory)!r} is gone: the run is over, or the cache was removed"
                ) from error
            with contextlib.closing(attempt), closed_after(self.commit):
                yield attempt

    def writer(
        self,
        path: Path,
        features: Mapping[str, FeatureStorageConfig],
        fingerprint: Mapping[str, object],
    ) -> PartWriter:
        """Return the writer of this process's part; the first call opens it."""
        if self._writer is None:
            self._writer = PartWriter(path, features, fingerprint)
        return self._writer

    def finish(self) -> None:
        """End the current task after its batch, and seal the part."""
        self.stopping = True
        with self._one_at_a_time:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.close()

    def commit(self) -> None:
        """Make durable what was written."""
        if self._writer is not None:
            self._writer.commit()
