"""Ids that a cache holds, and ids that a writer has taken: no utterance is stored twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.errors import DuplicateIdError, StaleCacheError
from featcache.format.annotations import wider_kind
from featcache.format.index import Hashes, Index, hash_of
from featcache.format.manifest import BuildState
from featcache.format.part import sealed_in
from featcache.interface import Bytes, Ints
from featcache.reading.generation import Generation
from featcache.writing.held import HeldCache

# `HashFilter`: tells at once of nearly every new id that no part has it, be there a hundred.

_SPARSE = 16  # bits a hash at least: of new ones, 1 in 70 or fewer look known


class HashFilter:
    """Two bits of each of some hashes (Bloom, Communications of the ACM 13(7), 1970).

    One thread may add while another looks.
    """

    def __init__(self) -> None:
        self._bits = np.zeros(1 << 10, np.uint8)  # a power of 2 of bytes
        self._view = self._bits.data
        self._count = 0

    def may_hold(self, hash_: int) -> bool:
        """Whether a hash may be among those that were added; False is sure."""
        view = self._view
        last = len(view) - 1
        other = hash_ >> 32
        found = view[hash_ >> 3 & last] >> (hash_ & 7) & view[other >> 3 & last] >> (other & 7)
        return bool(found & 1)

    def add(self, hashes: Hashes, all_hashes: Iterable[Hashes]) -> None:
        """Add hashes; `all_hashes` are these and all that were added before."""
        self._count += len(hashes)
        if self._count * _SPARSE <= len(self._bits) * 8:
            _set(self._bits, hashes)
            return
        size = len(self._bits)
        while self._count * _SPARSE > size * 8:
            size *= 4
        bits = np.zeros(size, np.uint8)
        for each in all_hashes:
            _set(bits, each)
        self._bits, self._view = bits, bits.data


def _set(bits: Bytes, hashes: Hashes) -> None:
    last = np.uint64(len(bits) - 1)
    for half in (hashes, hashes >> np.uint64(32)):
        places = (half >> np.uint64(3) & last).astype(np.int64)
        np.bitwise_or.at(bits, places, (1 << (half & np.uint64(7))).astype(np.uint8))


# `KnownIds`: the utterances that a writer must not take once more.


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Utterances that are stored: an index, and which of its rows count no more, ascending."""

    index: Index
    left_out: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def holds(self, id: str) -> bool:
        """Whether an id has a row that counts."""
        row = self.index.find(id)
        if row < 0 or not len(self.left_out):
            return row >= 0
        place = int(self.left_out.searchsorted(row))
        return place == len(self.left_out) or int(self.left_out[place]) != row


class KnownIds:
    """Ids that are stored, by the indexes of what is sealed, and ids that a writer has taken.

    Any thread may ask for an id, while another one notes some.

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
        stored, others = self._sealed
        if stored and stored[0].holds(id):
            return True
        if len(stored) < 2 or not others.may_hold(hash_of(id.encode("utf-8", "surrogatepass"))):
            return False
        return any(each.holds(id) for each in stored[1:])

    @property
    def count(self) -> int:
        """The number of indexes that are looked at."""
        return len(self._sealed[0])

    def check_new(self, ids: Sequence[str], number: int) -> None:
        """Raise `DuplicateIdError` for the first known id of some, of which none is there twice.

        `number` is that of the first one's utterance.
        """
        stored, others = self._sealed
        if self._numbers.keys().isdisjoint(ids):
            if not stored or (len(ids) == 1 and not self._is_stored(ids[0])):
                return
            if not (stored[0].index.find_many(ids) >= 0).any():
                hashes = (hash_of(id.encode("utf-8", "surrogatepass")) for id in ids)
                if len(stored) < 2 or not any(map(others.may_hold, hashes)):
                    return
        for count, id in enumerate(ids, number):
            earlier = self._numbers.get(id)
            if earlier is not None:
                raise DuplicateIdError(
                    f"utterance {id!r} was given twice: as number {earlier} and as number {count} "
                    "of this run (counted from 0)"
                )
            if self._is_stored(id):
                raise DuplicateIdError(
                    f"utterance {id!r} was given as number {count} of this run (counted from 0), "
                    f"but is stored in {str(self._cache)!r} already; skip it (`id in writer` "
                    "tells), or overwrite the cache"
                )

    def look_again(self, stored: Sequence[StoredRows]) -> None:
        """Forget what was sealed before for what is there now."""
        largest_first = sorted(stored, key=lambda each: -len(each.index))
        others = HashFilter()  # of all but the first
        for count, each in enumerate(largest_first[1:], 2):
            others.add(each.index.hashes, _hashes(largest_first[1:count]))
        # in one step: other threads may look meanwhile
        self._sealed = largest_first, others

    def take(self, id: str, number: int) -> None:
        """Note an utterance that the writer has taken."""
        self._numbers[id] = number

    def sealed(self, ids: Iterable[str], index: Index) -> None:
        """Note that utterances are sealed: their index knows them, and ten million ids are let go.

        Called by another thread than the rest.
        """
        stored, others = self._sealed
        stored.append(StoredRows(index))
        if len(stored) > 1:
            others.add(index.hashes, _hashes(stored[1:]))
        for id in ids:
            self._numbers.pop(id, None)  # an interrupt may have come before `take`


def _hashes(stored: Iterable[StoredRows]) -> Iterator[Hashes]:
    return (each.index.hashes for each in stored)


class SealedBuild(NamedTuple):
    """The build that is being written, as far as it is sealed."""

    build: int
    dims: Mapping[str, tuple[int, ...]]  # shapes of frames; none before there are any
    kinds: dict[str, str]  # of annotations, by name
    rows: list[StoredRows]

    @property
    def utterances(self) -> int:
        """The number of utterances in all parts."""
        return sum(len(each.index) for each in self.rows)


def find_stored(cache: Path, fingerprint: str, held: HeldCache | None = None) -> SealedBuild:
    """Return what is sealed, as the holder of the cache's lock knows it, or anybody sees it.

    Raises `StaleCacheError` if the build that is being written is made from something else than the
    digest `fingerprint` says.
    """
    current = Generation.at(cache) if held is None else held
    manifest = current.manifest
    if fingerprint != manifest.building_fingerprint:
        raise StaleCacheError(
            f"cache {str(cache)!r} is being written with other declarations or another "
            "fingerprint than given here; give those of its CacheWriter"
        )
    parts = sealed_in(cache, manifest) if held is None else held.sealed()
    published = {entry.name for entry in manifest.parts}
    if not published <= {part.entry.name for part in parts}:
        # they are of another build; or somebody removed one, to compute what it held again
        published = set()
    rest = [part for part in parts if part.entry.name not in published]
    stored = [StoredRows(part.index(cache, []), part.tombstones(cache)) for part in rest]
    # annotations that were given to the cache outlive an overwrite of it
    same = manifest.state is BuildState.CURRENT
    kinds = {name: e.kind for name, e in manifest.annotations.items() if same or e.carried}
    for each in stored:
        for name, kind in each.index.annotations.items():
            kinds[name] = wider_kind(kinds.get(name), kind) or kind
    if published:
        stored.append(StoredRows(current.index))
    return SealedBuild(manifest.building, parts[0].header.dims if parts else {}, kinds, stored)
