"""`random.shuffle`, element for element, at numpy's speed: ESPnet shuffles lists of a million ids.

CPython's `random.Random(seed).shuffle(x)` is, for lists of less than 2**31 elements::

    for i in n - 1, ..., 1:                        # step i
        p[i] = the first of the next numbers `word >> (32 - bits)` that is at most i
        x[i], x[p[i]] = x[p[i]], x[i]              # bits = (i + 1).bit_length()

`getrandbits(32 * n)` gives the next n words at once, the first one lowest. Two loops remain.

**Draws** (`swap_partners`). `bits` is the same for all i + 1 from 2**(bits - 1) to 2**bits - 1:
take these steps together, from i = high down to low. Word t is kept if it is at most high -
before[t], where before[t] counts the words kept before it. `_draw_many` guesses `before`, decides,
counts, and repeats with the counts. Each round makes one more leading entry right, since before[t]
depends on the words before t only, and before[0] = 0. So the rounds end, and counts that equal the
guess are those of one word after the other (induction over t). There are never more words than
steps to come: each step takes at least one, so none is wasted.

**Swaps** (`permutation_by`). Since p[i] <= i, no step after step i touches place i: in the end it
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

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Ints

_AHEAD = 1 << 15  # words looked at together
_FEW = 1 << 9  # below, element by element costs less


def permutation(generator: random.Random, size: int) -> Ints:
    """Return where each element of a list of `size` was before `generator` shuffled it.

    >>> letters = list("abcdefg")
    >>> random.Random(3).shuffle(letters)
    >>> "".join(letters), "".join("abcdefg"[place] for place in permutation(random.Random(3), 7))
    ('acdgfeb', 'acdgfeb')
    """
    return permutation_by(swap_partners(generator, size), np.arange(size))


def swap_partners(generator: random.Random, size: int) -> Ints:
    """Draw for each place i, from the last down to 1, the place up to i that it swaps with.

    That of place 0 is 0.
    """
    partners = np.zeros(size, np.int64)
    high = size - 1
    while high > 0:
        bits = (high + 1).bit_length()
        steps = min(high - max((1 << (bits - 1)) - 1, 1) + 1, _AHEAD)
        draw = _draw_each if steps < _FEW else _draw_many
        drawn = draw(generator, high, steps, bits)
        partners[high - len(drawn) + 1 : high + 1] = drawn[::-1]
        high -= len(drawn)
    return partners


def _draw_each(generator: random.Random, high: int, steps: int, bits: int) -> list[int]:
    drawn = []
    for place in range(high, high - steps, -1):
        while (word := generator.getrandbits(bits)) > place:
            pass
        drawn.append(word)
    return drawn


def _draw_many(generator: random.Random, high: int, steps: int, bits: int) -> NDArray[np.int32]:
    """Take the decisions of `_draw_each` for many words at once: see *Draws* above."""
    drawn = generator.getrandbits(32 * steps).to_bytes(4 * steps, "little")
    words = (np.frombuffer(drawn, "<u4") >> (32 - bits)).astype(np.int32)
    # as if all were kept with the chance of the first; 32 bits take half the time of 64
    before = ((np.arange(steps) * (high + 1)) >> bits).astype(np.int32)
    while True:
        kept = words <= high - before
        counted = np.cumsum(kept, dtype=np.int32)
        counted -= kept
        if np.array_equal(counted, before):
            return words[kept]
        before = counted


def permutation_by(partners: Ints, places: Ints) -> Ints:
    """Return the element that each of `places` holds after all swaps: see *Swaps* above.

    Steps go from the last place to the first; each swaps its place with partners[place] <= place.
    With a place, `places` has all later ones of the same list.
    """
    order = (partners[places] << 32) | places
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
    found = np.empty(len(partners), np.int64)
    found[step] = ends
    return found[places]
