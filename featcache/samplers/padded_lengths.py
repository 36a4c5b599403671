"""Lengths that batches are padded to: few of them, for what is compiled for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from featcache._checks import whole_number
from featcache.errors import ConfigError
from featcache.interface import Ints

PadTo = int | Sequence[int]  # all multiples of a number, or a list of lengths


def checked_pad_to(pad_to: PadTo) -> int | tuple[int, ...]:
    """Return what to pad to as plain numbers; raises `ConfigError` for what is none.

    >>> checked_pad_to(np.int64(8)), checked_pad_to([300, 800])
    (8, (300, 800))
    """
    if isinstance(pad_to, str) or not isinstance(pad_to, Sequence | np.ndarray):
        return whole_number("pad_to", pad_to, 1)
    steps = tuple(whole_number("pad_to", length, 1) for length in pad_to)
    if not steps or tuple(sorted(set(steps))) != steps:
        raise ConfigError(
            f"pad_to is a number, or a list of lengths, the shortest first, not {pad_to!r}"
        )
    return steps


def lengths_up_to(pad_to: PadTo, longest: int) -> Ints:
    """Return the lengths to pad to, ascending: those of a list, or multiples up to `longest`.

    >>> lengths_up_to(200, 500).tolist(), lengths_up_to([300, 800], 500).tolist()
    ([200, 400, 600], [300, 800])
    """
    steps = checked_pad_to(pad_to)
    if isinstance(steps, int):
        return np.arange(steps, max(longest, 1) + steps, steps)
    return np.array(steps)


def padded_length(longest: int, pad_to: PadTo | None) -> int:
    """Return the least length to pad to that is not below `longest`; `longest` itself for None.

    Raises `ConfigError` where all are shorter.
    """
    if pad_to is None:
        return longest
    if isinstance(pad_to, int):
        return -(-longest // pad_to) * pad_to
    for length in pad_to:
        if longest <= length:
            return length
    raise ConfigError(f"an utterance of {longest} frames is longer than all of pad_to={pad_to!r}")


@dataclass(frozen=True, eq=False)
class BatchShapes:
    """The lengths to pad to, and how many utterances a batch of each has; both of shape (n,)."""

    lengths: Ints
    sizes: Ints

    def padded(self, frames: Ints) -> Ints:
        """Return what lengths are padded to; the longest of all where that is too short."""
        return self.lengths[np.minimum(self.lengths.searchsorted(frames), len(self.lengths) - 1)]

    def bucket_ends(self, frames: Ints) -> Ints:
        """Return where sorted lengths pass from one length to pad to to the next."""
        return np.concatenate([[0], frames.searchsorted(self.lengths, "right")])

    def ends(self, frames: Ints) -> Ints:
        """Return the ends of batches of sorted lengths, each full but the first.

        A batch that the utterances of its length do not fill takes shorter ones.
        """
        sizes = self.sizes[self.lengths.searchsorted(frames)].tolist()
        ends = [len(frames)]
        while ends[-1] > 0:
            ends.append(max(ends[-1] - sizes[ends[-1] - 1], 0))
        return np.array(ends[::-1])
