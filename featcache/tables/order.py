"""The order that a seed gives: one rule for all samplers, the same in all releases of a version.

`VERSION` stands in the states of samplers and loaders. Version 1 computes with integers, so that no
library, machine or number of ranks changes it (where buckets of lengths begin is a power, float64):

- A key is the xxh3-64 of what it is drawn for, as text: `drawn(7, "epoch", 2)` that of "7/epoch/2".
- `mixed(numbers, key)`, the mixing of splitmix64, draws 64 bits for each of several numbers.
- Up to 4,096 numbers are in the order of the bits drawn for them.
- More go through a Feistel network over the least power of two that is not below their count, six
  rounds that change the two halves of a number by turns; what comes out beyond the count goes
  through it again until it does not (cycle walking: Black & Rogaway, CT-RSA 2002). So each place
  of the order is computed by itself, and a hundred million rows need no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import xxhash

from featcache._cached import cached_property
from featcache.errors import StateError
from featcache.format import Hashes, ends_of
from featcache.interface import Ints
from featcache.tables.columns import mixed

VERSION = 1
_FEW = 4096
ROUNDS = 6
AT_ONCE = 1 << 15  # places, whose arrays stay within a processor's cache


def drawn(*purpose: int | str) -> int:
    """Draw a number of 64 bits for a purpose: a seed, and what else tells draws apart."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, purpose)).encode())


def share_of(key: int) -> float:
    """Return a number from 0 to before 1 of a key: of its upper 53 bits."""
    return (key >> 11) * 2.0**-53


class Order:
    """Numbers below `count` in the order that a key draws, ascending for None; `order[3:9]`.

    Computed when they are asked for: none of them is held but those about the last places.

    >>> Order(6, None)[1:4].tolist()
    [1, 2, 3]
    >>> Order(6, drawn(7, "epoch", 2))[:].tolist()
    [4, 5, 0, 1, 3, 2]
    """

    def __init__(self, count: int, key: int | None) -> None:
        self._count = count
        self._key = key
        self._last: tuple[int, Ints] = -1, np.empty(0, np.int64)  # a piece, by its number

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: slice) -> Ints:
        begin, end, _ = places.indices(self._count)
        if self._key is None:
            return np.arange(begin, end)
        first, last = begin // AT_ONCE, max(end - 1, begin) // AT_ONCE
        if first == last:  # a batch is asked for after the other
            return self._piece(first)[begin - first * AT_ONCE : end - first * AT_ONCE]
        pieces = [self._piece(number) for number in range(first, last + 1)]
        return np.concatenate(pieces)[begin - first * AT_ONCE : end - first * AT_ONCE]

    def at(self, places: Ints) -> Ints:
        """Return the numbers at these places.

        >>> Order(6, drawn(7, "epoch", 2)).at(np.array([5, 0])).tolist()
        [2, 4]
        """
        if self._key is None:
            return places
        if self._count <= _FEW:
            return self._piece(0)[places]
        return self._many(places.astype(np.uint64))

    def _piece(self, number: int) -> Ints:
        found, piece = self._last
        if found != number:
            begin = number * AT_ONCE
            places = np.arange(begin, min(begin + AT_ONCE, self._count), dtype=np.uint64)
            piece = self._few(places) if self._count <= _FEW else self._many(places)
            self._last = number, piece
        return piece

    def _few(self, places: Hashes) -> Ints:
        return mixed(places, self._key or 0).argsort()  # no two are alike: it is one to one

    def _many(self, places: Hashes) -> Ints:
        found = self._network(places)
        over = np.flatnonzero(found >= self._count)
        while len(over):
            found[over] = self._network(found[over])
            over = over[found[over] >= self._count]
        return found.astype(np.int64)

    def _network(self, numbers: Hashes) -> Hashes:
        bits = (self._count - 1).bit_length()
        low = np.uint64(bits - bits // 2)  # bits of the lower half
        upper_mask, lower_mask = (np.uint64((1 << n) - 1) for n in (bits // 2, int(low)))
        upper, lower = numbers >> low, numbers & lower_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                lower = lower ^ (mixed(upper, key) & lower_mask)
            else:
                upper = upper ^ (mixed(lower, key) & upper_mask)
        return (upper << low) | lower

    @cached_property
    def _keys(self) -> list[int]:
        return [drawn(self._key or 0, number) for number in range(ROUNDS)]


def orders(counts: Ints, keys: Sequence[int]) -> Iterator[Ints]:
    """Yield `Order(count, key)[:]` of each: the bits of all that are few are drawn at once."""
    few = np.where(counts <= _FEW, counts, 0)
    ends = ends_of(few)
    places = np.arange(ends[-1]) - np.repeat(ends[:-1], few)
    bits = mixed(places.astype(np.uint64), np.repeat(np.array(keys, np.uint64), few))
    for count, key, begin, end in zip(counts.tolist(), keys, ends[:-1], ends[1:], strict=True):
        yield bits[begin:end].argsort() if count <= _FEW else Order(count, key)[:]


def check_version(state: Mapping[str, object]) -> None:
    """Raise `StateError` for a state of another version of the order than this."""
    found = state.get("version", VERSION)
    if found != VERSION:
        raise StateError(
            f"the state is of version {found!r} of the order that a seed gives, and this featcache "
            f"draws version {VERSION}: begin the epoch anew, without the state, or go on with the "
            "featcache that saved it"
        )
