"""`IdNumbers`: the numbers of a dataset's utterances by their ids, in 16 bytes an utterance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DuplicateIdError
from featcache.interface import Ints
from featcache.store.format.committed import committed
from featcache.store.format.ids import check_id
from featcache.store.format.index import hash_of

_AT_ONCE = 65536  # ids that are looked up together


class IdNumbers:
    """Finds utterances by id: in sorted hashes, then by the id itself.

    Args:
        ids: of the dataset; may make each when asked for it.

    Raises `DuplicateIdError` if two utterances share an id.

    >>> IdNumbers(["b", "a"]).find(["a", "c"]).tolist()
    [1]
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        hashes = np.fromiter(map(_hash, ids), np.uint64, len(ids))
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]
        alike = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        for number in np.sort(self._order[alike]).tolist():
            same = self.find([ids[number]]).tolist()
            if len(same) > 1:
                raise DuplicateIdError(
                    f"utterance {ids[number]!r} was given twice: as number {same[0]} and as number "
                    f"{same[1]} of the dataset (counted from 0), which has {len(same)} utterances "
                    f"of the id {ids[number]!r}; ids name one utterance each"
                )

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the numbers of those of some ids that the dataset has."""
        found: list[int] = []
        rest = iter(ids)
        while some := list(islice(rest, _AT_ONCE)):
            hashes = np.fromiter(map(_hash, some), np.uint64, len(some))
            places = np.searchsorted(self._hashes, hashes)
            for id, place, hash_ in zip(some, places.tolist(), hashes.tolist(), strict=True):
                found += (number for number in self._alike(place, hash_) if self._ids[number] == id)
        return np.array(found, np.int64)

    def by_hash(self) -> Iterator[int]:
        """Iterate over all utterances in the order of their ids' hashes, which never changes."""
        return map(int, self._order)

    def committed(self, cache: Path, parts: Iterable[str] | None = None) -> NDArray[np.bool_]:
        """Say which utterances are committed in the build under way, or in some of its parts."""
        stored = np.zeros(len(self._ids), bool)
        stored[self.find(committed(cache, parts))] = True
        return stored

    def _alike(self, place: int, hash_: int) -> Iterator[int]:
        """Iterate over the utterances of a hash, the first of which is at `place`."""
        while place < len(self._hashes) and self._hashes[place] == hash_:
            yield int(self._order[place])
            place += 1


def check_ids(ids: Iterable[str]) -> None:
    """Raise `FeatureError` for what can be no id."""
    for id in ids:
        check_id(id)


def _hash(id: str) -> int:
    return hash_of(id.encode("utf-8", "surrogatepass"))
