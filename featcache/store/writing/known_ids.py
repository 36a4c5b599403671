"""`KnownIds`: the utterances that a writer must not take once more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from featcache.errors import DuplicateIdError
from featcache.store.format.index import Index


class KnownIds:
    """Ids that are stored, by the indexes of what is sealed, and ids that a writer has taken.

    Args:
        cache: the cache directory.
        indexes: those of what was sealed before.
    """

    def __init__(self, cache: Path, indexes: Sequence[Index]) -> None:
        self._cache = cache
        self._indexes = list(indexes)
        self._numbers: dict[str, int] = {}  # of what is in no sealed part

    def __contains__(self, id: str) -> bool:
        return id in self._numbers or any(index.find(id) >= 0 for index in self._indexes)

    def check_new(self, id: str, number: int) -> None:
        """Raise `DuplicateIdError` for a known id, that of an utterance with this number."""
        earlier = self._numbers.get(id)
        if earlier is not None:
            raise DuplicateIdError(
                f"utterance {id!r} was given twice: as number {earlier} and as number {number} of "
                "this run (counted from 0)"
            )
        if id in self:
            raise DuplicateIdError(
                f"utterance {id!r} was given as number {number} of this run (counted from 0), "
                f"but is stored in {str(self._cache)!r} already; skip it (`id in writer` tells), "
                "or overwrite the cache"
            )

    def take(self, id: str, number: int) -> None:
        """Note an utterance that the writer has taken."""
        self._numbers[id] = number

    def sealed(self, ids: Iterable[str], index: Index) -> None:
        """Note that utterances are sealed: their index knows them, and ten million ids are let go.

        Called by another thread than the rest.
        """
        self._indexes.append(index)
        for id in ids:
            del self._numbers[id]
