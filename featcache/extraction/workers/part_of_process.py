"""A process's share in a run: one task at a time, and one part of the cache from task to task."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from featcache._closing import closed_after
from featcache.cluster.attempts import Claim
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import IncompleteError
from featcache.store.writing.part_writer import PartWriter


class Share:
    """What a process does and writes in a run."""

    def __init__(self) -> None:
        self.stopping = False  # whether the task that runs is to end after its batch
        # a worker may have several threads, its environment is made for one
        self._one_at_a_time = threading.Lock()
        self._writer: PartWriter | None = None

    @contextlib.contextmanager
    def attempt(self, claims: Path, number: int) -> Iterator[Claim]:
        """Claim an attempt at a task.

        What was written is committed before anybody may take the task back.

        Raises `TaskTakenError` if another process has, or had, this attempt, `IncompleteError` if
        the run is over.
        """
        with self._one_at_a_time:
            if self.stopping:
                raise IncompleteError("the run has been stopped")
            try:
                claim = Claim(claims, number)
            except FileNotFoundError as error:
                raise IncompleteError(
                    f"{str(claims)!r} is gone: the run is over, or the cache was removed"
                ) from error
            with contextlib.closing(claim), closed_after(self.commit):
                yield claim

    def writer(
        self,
        path: Path,
        features: Mapping[str, FeatureStorageConfig],
        fingerprint: Mapping[str, object],
    ) -> PartWriter:
        """Return the writer of this process's part, which is opened when it is first asked for."""
        if self._writer is None:
            self._writer = PartWriter(path, features, fingerprint)
        return self._writer

    def finish(self) -> None:
        """End the task that runs after its batch, and seal the part."""
        self.stopping = True
        with self._one_at_a_time:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.close()

    def commit(self) -> None:
        """Make durable what was written."""
        if self._writer is not None:
            self._writer.commit()
