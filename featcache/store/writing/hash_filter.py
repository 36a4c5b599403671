"""`HashFilter`: tells at once of nearly every new id that no part has it, be there a hundred."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from featcache.interface import Bytes
from featcache.store.format.index import Hashes

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
        """Tell whether a hash may be among those that were added; False is sure."""
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
