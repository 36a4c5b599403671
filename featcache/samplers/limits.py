"""`BatchLimits`: the most that a batch may hold, padding included, and cuts that keep to it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.errors import ConfigError
from featcache.interface import Ints


@dataclass(frozen=True)
class BatchLimits:
    """The most frames, the most numbers of all features, and the most utterances of a batch."""

    max_frames: int | None
    max_elements: int | None
    batch_size: int | None

    @classmethod
    def of(
        cls, max_frames: int | None, max_elements: int | None, batch_size: int | None
    ) -> BatchLimits:
        """Check limits: whole numbers from 1 on, at least one of them."""
        if max_frames is max_elements is batch_size is None:
            raise ConfigError("a batch needs a limit: max_frames, max_elements or batch_size")
        return cls(
            _checked("max_frames", max_frames),
            _checked("max_elements", max_elements),
            _checked("batch_size", batch_size),
        )

    def named(self, *names: str) -> list[str]:
        """Return those of some limits that are set, as "max_frames=2000"."""
        return [f"{name}={vars(self)[name]}" for name in names if vars(self)[name] is not None]

    def fits(self, columns: Sequence[Ints], frame_elements: Sequence[int]) -> NDArray[np.bool_]:
        """Tell for each utterance whether it is within the limits by itself.

        `columns` are the lengths of each feature, `frame_elements` the numbers of its frames.
        """
        fits = np.ones(len(columns[0]), bool)
        if self.max_frames is not None:
            fits &= longest_of(columns) <= self.max_frames
        if self.max_elements is not None:
            elements = [n * column for n, column in zip(frame_elements, columns, strict=True)]
            fits &= np.sum(elements, axis=0) <= self.max_elements
        return fits

    def ends(self, columns: Sequence[Ints], frame_elements: Sequence[int]) -> Iterator[int]:
        """Yield the ends of batches that take utterances in order until one would break a limit."""
        count = len(columns[0])
        size = count if self.batch_size is None else self.batch_size
        if len(columns) > 1 and self.max_elements is not None:
            return self._ends_of_several(columns, frame_elements, size)
        frames = longest_of(columns)
        cap = int(frames.max()) * count if self.max_frames is None else self.max_frames
        if self.max_elements is not None:
            cap = min(cap, self.max_elements // max(frame_elements[0], 1))
        return _ends(frames, cap, size)

    def _ends_of_several(
        self, columns: Sequence[Ints], frame_elements: Sequence[int], size: int
    ) -> Iterator[int]:
        end = count = 0
        longest = [0] * len(columns)
        for lengths in zip(*(column.data for column in columns), strict=True):
            count += 1
            longest = list(map(max, longest, lengths))
            elements = sum(map(operator.mul, frame_elements, longest))
            too_long = self.max_frames is not None and count * max(longest) > self.max_frames
            if too_long or count * elements > (self.max_elements or 0) or count > size:
                end += count - 1
                yield end
                count, longest = 1, list(lengths)
        yield len(columns[0])


def _checked(name: str, limit: int | None) -> int | None:
    return None if limit is None else whole_number(name, limit, 1)


def longest_of(columns: Sequence[Ints]) -> Ints:
    """Return the length of each utterance's longest feature."""
    longest: Ints = columns[0] if len(columns) == 1 else np.max(columns, axis=0)
    return longest


def _ends(frames: Ints, cap: int, size: int) -> Iterator[int]:
    end = count = longest = 0
    # a loop over plain numbers takes 70 ns for each, whatever the size of the batches
    for length in frames.data:
        count += 1
        if length > longest:
            longest = length
        if longest * count > cap or count > size:
            end += count - 1
            yield end
            count, longest = 1, length
    yield len(frames)
