"""`HandOver`: utterances on their way from those who write to the thread that stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from featcache.errors import ClosedError
from featcache.store.format.annotations import Values
from featcache.store.format.disk_errors import explained
from featcache.store.format.stamps import Stamps
from featcache.store.writing.background import Background
from featcache.store.writing.open_part import OpenPart
from featcache.store.writing.utterance_batch import Gathered, Prepared, UtteranceBatch

COMMIT_INTERVAL_S = 2.0  # what a killed writer loses at most, in time, of what has reached the disk
QUEUE_BYTES = 64 << 20  # arrays that wait for the disk; more would only cost fresh memory

NOTE_BYTES = 1 << 10  # of memory, beside the arrays of an utterance


class HandOver:
    """Gives utterances to the thread that stores: short ones together, which saves most of it.

    Those that wait for more to come are stored with the next commit at the latest. One thread at a
    time may use it.

    Args:
        path: the cache directory.
        kept: says what of the work is safe, for errors.
        commit: makes durable what was stored; called in the thread, by itself too.
    """

    def __init__(self, path: Path, kept: Callable[[], str], commit: Callable[[], object]) -> None:
        self._pid = os.getpid()
        self._path, self._kept, self._commit = path, kept, commit
        self._waiting = UtteranceBatch()  # for more
        self._waiting_for: OpenPart | None = None  # that takes them; None: there are none
        self._taking = threading.Lock()  # either thread takes what waits
        self._background = Background(self._idle, COMMIT_INTERVAL_S, QUEUE_BYTES)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays that are not stored yet."""
        return self._background.queued_bytes + self._waiting.nbytes

    def check_process(self) -> None:
        """Raise `ClosedError` in a child: the thread is not there, what it is given were lost."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the writer of {str(self._path)!r} belongs to process {self._pid}, and this is "
                f"{os.getpid()}, forked from it; let one process write, give each a cache of its "
                "own, or use featcache.extract(parallel=...)"
            )

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self._background.error is not None:
            self.drain()

    def add(
        self,
        part: OpenPart,
        id: str,
        arrays: Prepared,
        stats: Gathered,
        stamps: Stamps,
        annotations: Values,
        nbytes: int,
    ) -> None:
        """Hand over an utterance, maybe with some that follow."""
        with self._taking:
            self._waiting.add(id, arrays, stamps, annotations)
            self._waiting.add_stats(stats, nbytes)
            self._waiting_for = part
            is_full = self._waiting.is_full
        if is_full:
            self._put_waiting()

    def put_batch(self, part: OpenPart, batch: UtteranceBatch) -> None:
        """Hand over utterances."""
        self._put_waiting()
        self._put_batch(part, batch)

    def put(self, task: Callable[[], object]) -> None:
        """Have the thread run a task behind all that was handed over before."""
        self._put_waiting()
        with explained(self._path, self._kept):
            self._background.put(task, 0)

    def drain(self) -> None:
        """Return once all that was handed over before is stored; raises what went wrong."""
        self._put_waiting()
        with explained(self._path, self._kept):
            self._background.drain()

    def stop(self, finish: bool) -> None:
        """End the thread, after what was handed over or before that; never raises."""
        self._background.stop(finish)
        self._waiting, self._waiting_for = UtteranceBatch(), None
        self._commit, self._kept = _nothing, str  # or those who gave them live on in a circle

    def _put_waiting(self) -> None:
        part, batch = self._take_waiting()
        if part is not None:
            self._put_batch(part, batch)

    def _put_batch(self, part: OpenPart, batch: UtteranceBatch) -> None:
        with explained(self._path, self._kept):
            task = partial(part.append, batch)
            self._background.put(task, batch.nbytes, NOTE_BYTES * len(batch))

    def _take_waiting(self) -> tuple[OpenPart | None, UtteranceBatch]:
        with self._taking:
            taken = self._waiting_for, self._waiting
            self._waiting_for, self._waiting = None, UtteranceBatch()
        return taken

    def _idle(self) -> None:
        part, batch = self._take_waiting()
        if part is not None:
            part.append(batch)
        self._commit()


def _nothing() -> None:
    pass
