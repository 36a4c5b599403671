"""Copies what a dead writer had committed into a new part, its blocks as they are.

For parts whose files cannot be finished where they lie.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from featcache.errors import CorruptCacheError, StorageFullError
from featcache.interface import EncodedArray
from featcache.store.format.journal import Journal
from featcache.store.format.journal_lines import Placed, Utterance
from featcache.store.format.manifest import PARTS
from featcache.store.format.part import SEAL, checksum, remove_part
from featcache.store.reading.containers import Containers
from featcache.store.writing.free_space import margin
from featcache.store.writing.open_part import Declarations, OpenPart
from featcache.store.writing.seal import extents_of

RECOVERED = "-recovered"
SPARE_BYTES = 1 << 18  # what must remain beside the copy of a part and its index


class DeadPart:
    """A part whose writer died: its journal, and the bytes of its containers."""

    def __init__(self, cache: Path, name: str, journal: Journal) -> None:
        self.cache = cache
        self.name = name
        self.directory = cache / PARTS / name
        self.journal = journal
        paths = sorted({extent.container for extent in extents_of(journal.utterances)})
        files = (self.directory / path for path in paths)
        sizes = [file.stat().st_size if file.is_file() else -1 for file in files]
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._containers = Containers(self.directory, paths.__getitem__, sizes)

    def holds(self, utterance: Utterance) -> bool:
        """Tell whether an utterance has all features, with the bytes that the journal says."""
        if utterance.arrays.keys() != self.journal.header.dims.keys():
            return False
        arrays = utterance.arrays.values()
        try:
            return all(checksum(self._blocks(placed)) == placed.checksum for placed in arrays)
        except CorruptCacheError:
            return False

    def encoded(self, utterance: Utterance) -> dict[str, EncodedArray]:
        """Return the blocks of an utterance's arrays as they lie there, by feature."""
        return {
            name: EncodedArray(placed.rows, self._blocks(placed))
            for name, placed in utterance.arrays.items()
        }

    def let_go(self) -> None:
        """Close the files until they are needed again: not all systems remove open ones."""
        self._containers.let_go()

    def _blocks(self, placed: Placed) -> tuple[memoryview, ...]:
        places = ((self._numbers[e.container], e.offset, e.nbytes) for e in placed.extents)
        return tuple(self._containers.view(*place).data for place in places)


def copy_part(
    dead: DeadPart, features: Declarations, utterances: Sequence[Utterance], *, whole: bool
) -> None:
    """Copy utterances of a part into a new one and seal that.

    Statistics are computed again unless the journal is `whole`.
    """
    target = dead.directory.with_name(dead.name + RECOVERED)
    if (target / SEAL).exists():
        return
    if target.exists():
        remove_part(target)
    _check_space(dead, utterances)
    part = OpenPart(dead.cache, features, dead.journal.header, target.name)
    try:
        for utterance in utterances:
            encoded = dead.encoded(utterance)
            if not whole:
                part.add_to_stats({key: part.decode(key, each) for key, each in encoded.items()})
            part.append_encoded(utterance.id, encoded, utterance.stamps, utterance.annotations)
        if whole:
            part.stats = dict(dead.journal.stats)
        part.seal()
    except BaseException:
        part.discard()
        raise
    finally:
        dead.let_go()


def _check_space(dead: DeadPart, utterances: Sequence[Utterance]) -> None:
    needed = sum(extent.nbytes for extent in extents_of(utterances))
    needed += margin(len(utterances[0].arrays), 2 * len(utterances), SPARE_BYTES)
    free = shutil.disk_usage(dead.cache).free
    if needed > free:
        raise StorageFullError(
            f"{free:,} bytes are free on the disk of {str(dead.cache)!r}; to bring back what a "
            f"writer that died had committed, part {dead.name!r} is copied once, which needs "
            f"{needed:,}: free some space and run the same again"
        )
