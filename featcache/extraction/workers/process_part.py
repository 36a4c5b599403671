"""One process's state in a run: its open part, and a lock that lets one task run at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from featcache._closing import closed_after
from featcache.cluster.attempts import Attempt
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

        Raises what `Attempt` raises, and `IncompleteError` if the run is stopped.
        """
        with self._one_at_a_time:
            if self.stopping:
                raise IncompleteError("the run has been stopped")
            self._attempt = Attempt(directory, number)
            with contextlib.closing(self._attempt), closed_after(self.commit):
                yield self._attempt

    def writer(self, open_part: Callable[[], PartWriter]) -> PartWriter:
        """Return the writer of this process's part, which is noted with the attempt under way.

        The first call opens it.
        """
        if self._writer is None:
            self._writer = open_part()
        if self._writer.part is not None:
            self._attempt.note(self._writer.part)
        self._writer.on_part = self._attempt.note
        return self._writer

    def finish(self) -> None:
        """End the current task after its batch, and seal the part."""
        self.stopping = True
        with self._one_at_a_time:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def commit(self) -> None:
        """Make durable what was written."""
        if self._writer is not None:
            self._writer.commit()
