"""`HandOver`: utterances on their way from those who write to the thread that stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from featcache.errors import ClosedError
from featcache.interface import Array, EncodedArray
from featcache.store.format.annotations import Values
from featcache.store.format.disk_errors import explained
from featcache.store.format.stamps import Stamps
from featcache.store.writing.background import Background
from featcache.store.writing.copy_memory import CopyMemory
from featcache.store.writing.open_part import Declarations, OpenPart
from featcache.store.writing.parts_under_way import PartsUnderWay
from featcache.store.writing.staging import Staging
from featcache.store.writing.utterance_batch import UtteranceBatch

COMMIT_INTERVAL_S = 2.0  # what a killed writer loses at most, in time, of what has reached the disk
QUEUE_BYTES = 64 << 20  # arrays that wait for the disk; more would only cost fresh memory

NOTE_BYTES = 1 << 10  # of memory, beside the arrays of an utterance


class HandOver:
    """Gives utterances to the thread that stores: some together, which saves most of the work.

    Those that wait for more to come are stored with the next commit at the latest. One thread at a
    time may use it.

    Args:
        path: the cache directory.
        features: the declarations, by name.
        memory: takes the copies of arrays.
        under_way: the parts to store in.
    """

    def __init__(
        self, path: Path, features: Declarations, memory: CopyMemory, under_way: PartsUnderWay
    ) -> None:
        self._pid = os.getpid()
        self._path, self._kept, self._commit = path, under_way.kept, under_way.commit
        self._features, self._memory = features, memory
        self._waiting: Staging | None = None  # for more
        self._taking = threading.Lock()  # either thread takes what waits
        self._background = Background(self._idle, COMMIT_INTERVAL_S, QUEUE_BYTES)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays that are not stored yet."""
        waiting = self._waiting
        return self._background.queued_bytes + (waiting.nbytes if waiting else 0)

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
        arrays: Mapping[str, Array],
        encoded: Mapping[str, EncodedArray],
        stamps: Stamps,
        annotations: Values,
    ) -> None:
        """Copy an utterance, as `Staging.add` does, and hand it over, maybe with some to follow."""
        waiting = self._waiting
        if waiting is not None and not waiting.has_room(arrays):
            self._put_waiting()
        with self._taking:
            waiting = self._waiting
            if waiting is None:
                waiting = Staging(part, self._features, self._memory, arrays)
            waiting.add(id, arrays, encoded, stamps, annotations)
            self._waiting = waiting  # which is never empty, whatever interrupts this

    def put_batch(self, part: OpenPart, batch: UtteranceBatch) -> None:
        """Hand over utterances."""
        self._put_waiting()
        self._put(part, batch, batch.nbytes)

    def put(self, task: Callable[[], object]) -> None:
        """Have the thread run a task behind all that was handed over before."""
        self._put_waiting()
        with explained(self._path, self._kept):
            self._background.put(task, 0, 0)

    def drain(self) -> None:
        """Return once all that was handed over before is stored; raises what went wrong."""
        self._put_waiting()
        with explained(self._path, self._kept):
            self._background.drain()

    def stop(self, finish: bool) -> None:
        """End the thread, after what was handed over or before that; never raises."""
        self._background.stop(finish)
        self._waiting = None
        self._commit, self._kept = _nothing, str  # or those who gave them live on in a circle

    def _put_waiting(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            with explained(self._path, self._kept):
                self._background.wait_for_room(waiting.memory + NOTE_BYTES * len(waiting))
            with self._taking:
                # an interrupt (Ctrl-C) anywhere here leaves them waiting, to be put once more
                if self._waiting is not None:
                    self._put(waiting.part, waiting.batch(), waiting.memory)
                    self._waiting = None

    def _put(self, part: OpenPart, batch: UtteranceBatch, memory: int) -> None:
        with explained(self._path, self._kept):
            task = partial(_store, part, batch)
            self._background.put(task, batch.nbytes, memory + NOTE_BYTES * len(batch))

    def _idle(self) -> None:
        with self._taking:
            waiting, self._waiting = self._waiting, None
            batch = waiting.batch() if waiting is not None else None
        if waiting is not None and batch is not None:
            _store(waiting.part, batch)
        self._commit()


def _store(part: OpenPart, batch: UtteranceBatch) -> None:
    if not batch.is_stored:
        batch.is_stored = True
        part.append(batch)


def _nothing() -> None:
    pass
