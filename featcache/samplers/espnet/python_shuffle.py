"""Python's own shuffle, element for element, at numpy's speed.

It is for samplers that shuffle lists of a million ids.
"""

from __future__ import annotations

import random
from operator import length_hint

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Ints

_AHEAD = 1 << 15  # random numbers looked at together
_FEW = 1 << 9  # below, element by element costs less


class Shuffles:
    """What `random.Random(seed).shuffle` does to one list after the other.

    >>> letters = list("abcdefg")
    >>> random.Random(3).shuffle(letters)
    >>> "".join(letters), "".join("abcdefg"[place] for place in Shuffles(3).permutation(7))
    ('acdgfeb', 'acdgfeb')
    """

    def __init__(self, seed: int) -> None:
        *key, position = random.Random(seed).getstate()[1]
        self._generator = np.random.MT19937()
        self._generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
        self._ahead = np.zeros(0, np.uint32)  # drawn, not yet used

    def permutation(self, size: int) -> Ints:
        """Return where each element of a shuffled list of `size` was before."""
        partners = self.partners(size)
        return places(partners, np.arange(size))

    def partners(self, size: int) -> Ints:
        """Return the element up to i that each i, from the last one down to 1, changes places with.

        The 0th is 0.
        """
        partners = np.zeros(size, np.int64)
        high = size - 1
        while high > 0:
            # random() draws so many bits, again until they are at most i
            bits = (high + 1).bit_length()
            low = max((1 << (bits - 1)) - 1, 1)
            draw = self._many if high >= _FEW else self._each
            partners[low : high + 1] = draw(low, high, 32 - bits)[::-1]
            high = low - 1
        return partners

    def _each(self, low: int, high: int, shift: int) -> list[int]:
        drawn: list[int] = []
        while high >= low:
            words = (self._look(2 * (high - low) + 64) >> shift).tolist()
            left = iter(words)
            for word in left:
                if word <= high:
                    drawn.append(word)
                    high -= 1
                    if high < low:
                        break
            self._ahead = self._ahead[len(words) - length_hint(left) :]
        return drawn

    def _many(self, low: int, high: int, shift: int) -> Ints:
        """Take the same decisions for many numbers at once.

        The t-th number is kept if it is at most high - (how many were kept before it). Guess how
        many, decide, count, and again until the count is the guess: the decisions are then those of
        one after the other.
        """
        drawn = []
        while high >= low:
            words = self._look(min(_AHEAD, 3 * (high - low) // 2 + 64)) >> shift
            seen = np.arange(len(words), dtype=np.float32) / np.float32(1 << (32 - shift))
            # expected: 1 - exp(-seen)
            before = ((high + 1) * seen * (1 - seen / 2 * (1 - seen / 3))).astype(np.int32)
            while True:
                kept = words <= high - before
                counted = np.cumsum(kept, dtype=np.int32)
                counted -= kept.view(np.int8)
                if np.array_equal(counted, before):
                    break
                before = counted
            chosen = np.flatnonzero(kept)[: high - low + 1]
            drawn.append(words[chosen])
            high -= len(chosen)
            self._ahead = self._ahead[len(words) if high >= low else int(chosen[-1]) + 1 :]
        return np.concatenate(drawn)

    def _look(self, count: int) -> NDArray[np.uint32]:
        if len(self._ahead) < count:
            more = self._generator.random_raw(max(count - len(self._ahead), _AHEAD)).astype(
                np.uint32
            )
            self._ahead = np.concatenate([self._ahead, more])
        return self._ahead[:count]


def places(partners: Ints, steps: Ints) -> Ints:
    """Return which element ends at each place of `steps` after all changes of places.

    Each changes places with its partner.

    Steps go from the last place to the first, and partners[i] <= i. With a place, `steps` has all
    later ones of the same list. What ends at i was at its partner before: put there by the step
    before with the same partner, which had it from its own place, where a step before may have put
    it, and so on upwards.
    """
    order = (partners[steps] << 32) | steps
    order.sort()  # by partner, then by step
    partner, step = (order >> 32).astype(np.int32), order.astype(np.int32)
    earlier = np.full(len(step), -1, np.int32)  # the step before in time with the same partner
    np.copyto(earlier[:-1], step[1:], where=partner[1:] == partner[:-1])
    # the last step in time that puts something at a place
    first = np.full(len(partners), -1, np.int32)
    first[partner[::-1]] = step[::-1]  # of several the last stays, which is the lowest step
    ends = np.where(earlier >= 0, earlier, partner)
    moving = np.flatnonzero(earlier >= 0)
    while len(moving):
        onward = first[ends[moving]]
        further = onward >= 0
        moving = moving[further]
        ends[moving] = onward[further]
    found = np.empty(len(partners), np.int32)
    found[step] = ends
    return found[steps].astype(np.int64)
