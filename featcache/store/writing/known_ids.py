"""`KnownIds`: the utterances that a writer must not take once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featcache.errors import DuplicateIdError, StaleCacheError
from featcache.interface import Ints
from featcache.store.format.annotations import wider_kind
from featcache.store.format.index import Hashes, Index, hash_of
from featcache.store.format.part import as_known
from featcache.store.reading.generation import Generation
from featcache.store.writing.hash_filter import HashFilter
from featcache.store.writing.publish import sealed_parts


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Utterances that are stored: an index, and which of its rows count no more, ascending."""

    index: Index
    left_out: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def holds(self, id: str) -> bool:
        """Tell whether an id has a row that counts."""
        row = self.index.find(id)
        if row < 0 or not len(self.left_out):
            return row >= 0
        place = int(self.left_out.searchsorted(row))
        return place == len(self.left_out) or int(self.left_out[place]) != row


class KnownIds:
    """Ids that are stored, by the indexes of what is sealed, and ids that a writer has taken.

    Args:
        cache: the cache directory.
        stored: what was sealed before.
    """

    def __init__(self, cache: Path, stored: Sequence[StoredRows]) -> None:
        self._cache = cache
        self._numbers: dict[str, int] = {}  # of what is in no sealed part
        self.look_again(stored)

    def __contains__(self, id: str) -> bool:
        return id in self._numbers or self._is_stored(id)

    def _is_stored(self, id: str) -> bool:
        if self._stored and self._stored[0].holds(id):
            return True
        if len(self._stored) < 2 or not self._others.may_hold(
            hash_of(id.encode("utf-8", "surrogatepass"))
        ):
            return False
        return any(each.holds(id) for each in self._stored[1:])

    @property
    def count(self) -> int:
        """The number of indexes that are looked at."""
        return len(self._stored)

    def check_new(self, id: str, number: int) -> None:
        """Raise `DuplicateIdError` for a known id, that of an utterance with this number."""
        earlier = self._numbers.get(id)
        if earlier is not None:
            raise DuplicateIdError(
                f"utterance {id!r} was given twice: as number {earlier} and as number {number} of "
                "this run (counted from 0)"
            )
        if self._is_stored(id):
            raise DuplicateIdError(
                f"utterance {id!r} was given as number {number} of this run (counted from 0), "
                f"but is stored in {str(self._cache)!r} already; skip it (`id in writer` tells), "
                "or overwrite the cache"
            )

    def check_all_new(self, ids: Sequence[str], number: int) -> None:
        """Raise `DuplicateIdError` for the first known id of some, of which none is there twice.

        `number` is that of the first one's utterance.
        """
        largest = self._stored[0].index if self._stored else None
        if self._numbers.keys().isdisjoint(ids) and (
            largest is None or not (largest.find_many(ids) >= 0).any()
        ):
            if len(self._stored) < 2:
                return
            if not any(
                self._others.may_hold(hash_of(id.encode("utf-8", "surrogatepass"))) for id in ids
            ):
                return
        for place, id in enumerate(ids):
            self.check_new(id, number + place)

    def look_again(self, stored: Sequence[StoredRows]) -> None:
        """Forget what was sealed before for what is there now."""
        self._stored = sorted(stored, key=lambda each: -len(each.index))
        self._others = HashFilter()  # of all but the first
        for count, each in enumerate(self._stored[1:], 2):
            self._others.add(each.index.hashes, self._hashes(count))

    def _hashes(self, count: int) -> Iterator[Hashes]:
        return (each.index.hashes for each in self._stored[1:count])

    def take(self, id: str, number: int) -> None:
        """Note an utterance that the writer has taken."""
        self._numbers[id] = number

    def sealed(self, ids: Iterable[str], index: Index) -> None:
        """Note that utterances are sealed: their index knows them, and ten million ids are let go.

        Called by another thread than the rest.
        """
        self._stored.append(StoredRows(index))
        if len(self._stored) > 1:
            self._others.add(index.hashes, self._hashes(len(self._stored)))
        for id in ids:
            self._numbers.pop(id, None)  # an interrupt may have come before `take`


def find_stored(
    cache: Path, fingerprint: str
) -> tuple[int, Mapping[str, tuple[int, ...]], dict[str, str], list[StoredRows]]:
    """Return the build that is being written, the frame shapes, and what of it is sealed.

    Before the last the kinds of annotations, by name.

    Raises `StaleCacheError` if it is made from something else than the digest `fingerprint` says.
    """
    current = Generation(cache)
    manifest = current.manifest
    if fingerprint != manifest.building_fingerprint:
        raise StaleCacheError(
            f"cache {str(cache)!r} is being written with other declarations or another "
            "fingerprint than given here; give those of its CacheWriter"
        )
    parts = as_known(sealed_parts(cache, manifest), manifest)
    published = {entry.name for entry in manifest.parts}
    if not published <= {part.entry.name for part in parts}:
        # they are of another build; or somebody removed one, to compute what it held again
        published = set()
    rest = [part for part in parts if part.entry.name not in published]
    stored = [StoredRows(part.index(cache, []), part.tombstones(cache)) for part in rest]
    dims = parts[0].header.dims if parts else {}
    # annotations that were given to the cache outlive an overwrite of it
    same = manifest.building == manifest.build
    kinds = {name: e.kind for name, e in manifest.annotations.items() if same or e.carried}
    for each in stored:
        for name, kind in each.index.annotations.items():
            kinds[name] = wider_kind(kinds.get(name), kind) or kind
    return manifest.building, dims, kinds, stored + [StoredRows(current.index)] * bool(published)
