"""`IdLookup`: finds ids among millions, which NumPy hashes all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache.interface import Ints
from featcache.store.format.id_order import KEEP
from featcache.store.format.index import Hashes
from featcache.store.format.strings import Strings, are_equal

_AT_ONCE = 65536
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: Knuth, TAOCP 3, 6.4
_SHIFT = np.uint64(32)


class IdLookup:
    """Finds the rows of ids.

    Args:
        ids: those of all rows.
    """

    def __init__(self, ids: Strings) -> None:
        self._ids = ids
        hashes = _hashes(ids)
        self._rows = np.argsort(hashes)
        self._hashes = hashes[self._rows]

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, -1 where there is none."""
        wanted = Strings.of_bytes([id.encode("utf-8", "surrogatepass") for id in ids])
        hashes = _hashes(wanted)
        rows = np.full(len(ids), -1, np.int64)
        left, places = np.arange(len(ids)), self._hashes.searchsorted(hashes)
        while len(left):
            alike = places < len(self._hashes)
            alike[alike] = self._hashes[places[alike]] == hashes[left[alike]]
            left, places = left[alike], places[alike]
            found = self._rows[places]
            same = are_equal(self._ids.take(found), wanted.take(left))
            rows[left[same]] = found[same]
            left, places = left[~same], places[~same] + 1  # the next id of that hash
        return rows


def _hashes(ids: Strings) -> Hashes:
    """Return hashes that are good for looking up alone: quick, and of no other program."""
    hashes = np.empty(len(ids), np.uint64)
    for start in range(0, len(ids), _AT_ONCE):
        ends = ids.ends[start : start + _AT_ONCE + 1]
        data = np.append(ids.data[ends[0] : ends[-1]], np.zeros(8, np.uint8))
        words = np.ndarray(len(data) - 7, ">u8", data, strides=(1,))
        begins, sizes = ends[:-1] - ends[0], np.diff(ends)
        some = sizes.astype(np.uint64) * _MULTIPLIER
        for at in range(0, int(sizes.max(initial=0)), 8):
            longer = np.flatnonzero(sizes > at)
            word = words[begins[longer] + at] & KEEP[np.minimum(sizes[longer] - at, 8)]
            mixed = (some[longer] ^ word) * _MULTIPLIER
            some[longer] = mixed ^ (mixed >> _SHIFT)
        hashes[start : start + len(some)] = some
    return hashes
