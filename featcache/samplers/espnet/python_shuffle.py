"""`random.shuffle`, element for element, at numpy's speed: ESPnet shuffles lists of a million ids.

CPython's `random.Random(seed).shuffle(x)` is, for lists of less than 2**32 elements::

    for i in n - 1, ..., 1:                        # step i
        p[i] = the first of the next numbers `word >> (32 - bits)` that is at most i
        x[i], x[p[i]] = x[p[i]], x[i]              # bits = (i + 1).bit_length()

Numpy's MT19937 gives the same 32-bit words from the same state. Two loops remain.

**Draws** (`swap_partners`). `bits` is the same for all i + 1 from 2**(bits - 1) to 2**bits - 1:
take these steps together, from i = high down to low. Word t is kept if it is at most high -
before[t], where before[t] counts the words kept before it. `_many` guesses `before`, decides,
counts, and repeats with the counts. Each round makes one more leading entry right, since before[t]
depends on the words before t only, and before[0] = 0. So the rounds end, and counts that equal the
guess are those of one word after the other (induction over t). Words behind the last one needed are
put back.

**Swaps** (`apply_swaps`). Since p[i] <= i, no step after step i touches place i: in the end it
holds what place p[i] held just before step i. Place q <= i was touched before that by the steps s >
i with p[s] = q, and the last of these in time, which is the lowest, put there what place s held
before it. So, with E(q, i) the element at place q just before step i::

    E(q, i) = E(s, s) with s = min(s > i: p[s] = q), or q if there is none
    x[i] in the end = E(p[i], i)

`earlier` is the s of the first turn. For the turns after it p[s] = q < s, no step is its own
partner, and s = min(s': p[s'] = s) = `first[s]`. These numbers only grow: all chains of them end,
and are followed at once. E needs steps from i on only: the end of a list is known without the rest.
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
    """Shuffles of one list after the other, as by one `random.Random(seed)`.

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
        partners = self.swap_partners(size)
        return apply_swaps(partners, np.arange(size))

    def swap_partners(self, size: int) -> Ints:
        """Return for each place i, from the last down to 1, the place up to i that it swaps with.

        That of place 0 is 0.
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
        """Take the decisions of `_each` for many numbers at once: see *Draws* above."""
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


def apply_swaps(partners: Ints, steps: Ints) -> Ints:
    """Return the element that each place of `steps` holds after all swaps: see *Swaps* above.

    Steps go from the last place to the first; each swaps its place with partners[place] <= place.
    With a place, `steps` has all later ones of the same list.
    """
    order = (partners[steps] << 32) | steps
    order.sort()  # by partner, then by step
    partner, step = (order >> 32).astype(np.int32), order.astype(np.int32)
    earlier = np.full(len(step), -1, np.int32)  # the lowest s > i with p[s] = p[i]
    np.copyto(earlier[:-1], step[1:], where=partner[1:] == partner[:-1])
    # the lowest step that has a place as its partner
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
