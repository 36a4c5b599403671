"""Python's own shuffle, element for element, at numpy's speed, for samplers that shuffle lists of a million ids."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_AHEAD = 1 << 16  # random numbers looked at together
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
        self._ahead: NDArray[np.int64] = np.zeros(0, np.int64)  # drawn, not yet used

    def permutation(self, size: int) -> Ints:
        """Return where each element of a shuffled list of `size` was before."""
        partners = self.partners(size)
        return places(partners, np.arange(size))

    def partners(self, size: int) -> Ints:
        """Return the element up to i that each i, from the last one down to 1, changes places with; the 0th is 0."""
        partners = np.zeros(size, np.int64)
        high = size - 1
        while high > 0:
            bits = (high + 1).bit_length()  # random() draws so many bits, again until they are at most i
            low = max((1 << (bits - 1)) - 1, 1)
            draw = self._many if high >= _FEW else self._each
            partners[low : high + 1] = draw(low, high, 32 - bits)[::-1]
            high = low - 1
        return partners

    def _each(self, low: int, high: int, shift: int) -> list[int]:
        words = (self._look(4 * (high - low) + 64) >> shift).tolist()
        used, drawn = 0, []
        for largest in range(high, low - 1, -1):
            while used < len(words) and words[used] > largest:
                used += 1
            if used == len(words):  # a run of numbers too large: look further ahead
                words += (self._look(2 * used)[used:] >> shift).tolist()
                while words[used] > largest:
                    used += 1
            drawn.append(words[used])
            used += 1
        self._ahead = self._ahead[used:]
        return drawn

    def _many(self, low: int, high: int, shift: int) -> list[int] | Ints:
        """Take the same decisions for many numbers at once.

        The t-th number is kept if it is at most high - (how many were kept before it). Guess how many, decide, count,
        and again until the count is the guess: the decisions are then those of one after the other.
        """
        drawn = []
        while high >= low:
            words = self._look(min(_AHEAD, 2 * (high - low) + 64)) >> shift
            before: Ints = (np.arange(len(words)) * ((high + 1) / (1 << (32 - shift)))).astype(np.int64)
            while True:
                kept = words <= high - before
                counted: Ints = np.cumsum(kept) - kept
                if np.array_equal(counted, before):
                    break
                before = counted
            chosen = np.flatnonzero(kept)[: high - low + 1]
            drawn.append(words[chosen])
            high -= len(chosen)
            self._ahead = self._ahead[len(words) if high >= low else int(chosen[-1]) + 1 :]
        return np.concatenate(drawn)

    def _look(self, count: int) -> Ints:
        if len(self._ahead) < count:
            more = self._generator.random_raw(max(count - len(self._ahead), _AHEAD)).astype(np.int64)
            self._ahead = np.concatenate([self._ahead, more])
        return self._ahead[:count]


def places(partners: Ints, steps: Ints) -> Ints:
    """Return which element ends at each place of `steps` after all have changed places with their partners.

    Steps go from the last place to the first, and partners[i] <= i. With a place, `steps` has all later ones of the
    same list. What ends at i was at its partner before: put there by the step before with the same partner, which had
    it from its own place, where a step before may have put it, and so on upwards.
    """
    order = np.sort((partners[steps] << 32) | steps)  # by partner, then by step
    partner, step = order >> 32, order & 0xFFFFFFFF
    again = partner[1:] == partner[:-1]
    earlier = np.full(len(step), -1)  # the step before in time with the same partner
    earlier[:-1][again] = step[1:][again]
    heads = np.flatnonzero(np.concatenate([np.ones(min(1, len(step)), bool), ~again]))
    first = np.full(len(partners), -1)  # the last step in time that puts something at a place, after its own
    first[partner[heads]] = np.where(step[heads] == partner[heads], earlier[heads], step[heads])
    ends = np.where(earlier >= 0, earlier, partner)
    moving = np.flatnonzero(earlier >= 0)
    while len(moving):
        onward = first[ends[moving]]
        moving, onward = moving[onward >= 0], onward[onward >= 0]
        ends[moving] = onward
    found = np.empty(len(partners), np.int64)
    found[step] = ends
    return found[steps]
