"""The journal of a part that another process may be writing, read on as it grows."""

from __future__ import annotations

import os
from pathlib import Path

from featcache.container_files import bytes_at
from featcache.store.format.files import open_within
from featcache.store.format.journal import NAME
from featcache.store.format.journal_lines import Header, Utterance, record_of


class JournalTail:
    """Utterances as a journal notes them, committed or not: checksums tell which bytes are there.

    It is read to its end also when the part is sealed meanwhile and the journal removed.

    Attributes:
        header: that of the part; None until it was read.
        noted: how many utterances were read.
        committed: how many of these are durable, the first ones.

    Raises `FileNotFoundError` if the part has no journal.
    """

    def __init__(self, cache: Path, part: str) -> None:
        self.header: Header | None = None
        self.committed = 0
        self.noted = 0  # utterances
        self._read = 0  # bytes
        self._descriptor = open_within(cache, f"{part}/{NAME}")

    def look(self) -> list[Utterance]:
        """Return the utterances that were noted since the last look.

        Lines that do not check are passed over: recovery judges them.
        """
        size = os.fstat(self._descriptor).st_size
        if size <= self._read:
            return []
        data = bytes_at(self._descriptor, size - self._read, self._read)
        whole = data.rfind(b"\n") + 1  # the rest is being written
        self._read += whole
        found: list[Utterance] = []
        for line in data[:whole].splitlines(keepends=True):
            record = record_of(line)
            if record is not None:
                self.header = record.header or self.header
                found += record.utterances
                self.noted += len(record.utterances)
                if record.stats is not None:
                    self.committed = self.noted
        return found

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)
