"""`ProcessPart`: the part of a cache that one process writes, of one state of what computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from featcache._closing import closed_after
from featcache.extraction.while_filling import WhileFilling
from featcache.workers.attempts import Attempt, Attempts
from featcache.writing.part_writer import PartWriter

OpensPart = Callable[..., PartWriter]


class ProcessPart:
    """The part of the cache that a process writes, in one go or task after task."""

    def __init__(self) -> None:
        self._filling: WhileFilling | None = None
        self._attempts = Attempts()
        self._attempt: Attempt | None = None  # the last one
        self._writer: PartWriter | None = None

    @contextlib.contextmanager
    def attempt(self, directory: Path, number: int) -> Iterator[Attempt]:
        """Begin an attempt at a task; commits its utterances before the attempt can be revoked.

        Raises what `Attempts.begin` raises.
        """
        with self._attempts.begin(directory, number) as self._attempt, closed_after(self.commit):
            yield self._attempt

    def writer(self, open_part: OpensPart, filling: WhileFilling | None = None) -> PartWriter:
        """Return the writer of this process's part, which is noted with the attempt under way.

        The first call opens it, by a `PartWriter` that lacks but `on_part`. `filling` compares what
        features are made with, before anything is committed.
        """
        self._filling = filling
        if self._writer is None:
            self._writer = open_part(on_part=self._note)
            if filling is not None:
                self._writer.ask_before(commits=filling.vouch, seals=filling.may_seal)
        if self._writer.part is not None:
            self._note(self._writer.part)
        return self._writer

    def _note(self, part: str) -> None:
        if self._attempt is not None:
            self._attempt.note(part)

    def finish(self) -> None:
        """End the current task after its batch, and seal the part."""
        self._attempts.finish()
        try:
            self._check(at_once=True)
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def commit(self) -> None:
        """Make durable what was written."""
        self._check(at_once=False)
        if self._writer is not None:
            self._writer.commit()

    def seal(self) -> None:
        """Finish the files of what was written, so that it can be published."""
        self._check(at_once=True)
        if self._writer is not None:
            self._writer.seal()
            self._writer.published()  # from now on that is not ours to remove

    def _check(self, *, at_once: bool) -> None:
        """Raise `StaleCacheError`, without what is in doubt, if features were of two states."""
        if self._filling is None:
            return
        try:
            self._filling.check(self._drop, at_once=at_once)
        finally:
            in_doubt = self._filling.is_in_doubt or self._filling.is_undecided
            if in_doubt and self._writer is not None:
                self._writer.leave()
                self._writer = None

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.published()
            writer.abort()
