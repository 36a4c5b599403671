"""`PartsUnderWay`: the parts of a writer that are open or sealed, and not yet published."""

from __future__ import annotations

from pathlib import Path

from featcache.store.format.disk_errors import explained
from featcache.store.format.journal_lines import Header
from featcache.store.format.manifest import PARTS
from featcache.store.format.part import remove_part
from featcache.store.writing.known_ids import KnownIds
from featcache.store.writing.open_part import Declarations, OpenPart

MAPPED_PARTS = 128  # whose ids take no memory: ten million utterances; each keeps a file open


class PartsUnderWay:
    """Commits and seals the parts of a writer, in the thread that stores.

    Args:
        cache: the cache directory.
        known: told of the ids that are sealed.

    Attributes:
        unsealed: open parts, oldest first, as the thread works them off.
        committed: how many utterances of the writer are durable.
    """

    def __init__(self, cache: Path, known: KnownIds) -> None:
        self._cache = cache
        self._known = known
        self.unsealed: list[OpenPart] = []
        self._sealed: list[str] = []
        self._sealed_rows = 0
        self.committed = 0

    def kept(self) -> str:
        """Say what of the work is safe."""
        return f"{self.committed} utterances of this run are committed and kept"

    def start(self, features: Declarations, header: Header) -> OpenPart:
        """Open a part; in the thread of the one who writes, who is told what library is missing."""
        with explained(self._cache, self.kept):
            part = OpenPart(self._cache, features, header)
        self.unsealed.append(part)
        return part

    def commit(self) -> None:
        """Make what was stored durable."""
        if self.unsealed:
            self.committed = self._sealed_rows + self.unsealed[0].commit()

    def show(self) -> None:
        """Let other processes find what was stored, before it is durable."""
        for part in self.unsealed:
            part.show()

    def seal(self, part: OpenPart) -> None:
        """Finish the oldest part."""
        ids = part.ids()
        sealed = part.seal()
        self.unsealed.remove(part)
        if sealed is not None:
            self._sealed.append(sealed.entry.name)
            self._sealed_rows += sealed.entry.rows
            self.committed = self._sealed_rows
            mapped = self._known.count <= MAPPED_PARTS
            self._known.sealed(ids, sealed.index(self._cache, [], mapped=mapped))

    def published(self) -> None:
        """Take note that what was sealed is published: `discard` leaves it alone from now on."""
        self._sealed.clear()

    def release(self) -> None:
        """Let go of the open parts, once the thread has ended."""
        for part in self.unsealed:
            part.release()

    def discard(self) -> None:
        """Remove what is not published, once the thread has ended."""
        for part in self.unsealed:
            part.discard()
        for name in self._sealed:
            remove_part(self._cache / PARTS / name)
