"""Many utterances at once: their arrays on the way to disk, and where they lie, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from featcache.interface import ContainerWriter, EncodedArray, Extent, Ints

Piece = bytes | memoryview


def cut(pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[Piece]:
    """Cut bytes that lie in pieces, one behind the other, anew; what two pieces share is copied."""
    rest = iter(pieces)
    piece, begin = memoryview(b""), 0
    for size in sizes:
        before: list[Piece] = []
        end = begin + size
        while end > len(piece):
            before.append(piece[begin:])
            end -= len(piece)
            piece, begin = memoryview(next(rest)), 0
        last = piece[begin:end]
        begin = end
        yield b"".join([*before, last]) if any(map(len, before)) else last


@dataclass(frozen=True, slots=True)
class EncodedArrays:
    """Arrays of several utterances on their way to disk, in the order in which they are appended.

    `pieces` are the caller's again once they are.
    """

    rows: Ints  # of each array, as in `EncodedArray`
    blocks: Ints  # of each array: how many it has; without a codec 1, or 0 if it has no bytes
    nbytes: Ints  # of each block
    pieces: Sequence[Piece]  # all blocks, one behind the other: one or more of them a piece

    @classmethod
    def of(cls, arrays: Sequence[EncodedArray]) -> EncodedArrays:
        """Put arrays together, without a copy."""
        blocks = [block for array in arrays for block in array.blocks]
        return cls(
            rows=np.array([array.rows for array in arrays], np.int64),
            blocks=np.array([len(array.blocks) for array in arrays], np.int64),
            nbytes=np.array([*map(len, blocks)], np.int64),
            pieces=blocks,
        )

    def __iter__(self) -> Iterator[EncodedArray]:
        blocks = iter(self.each_block())
        for rows, count in zip(self.rows.tolist(), self.blocks.tolist(), strict=True):
            yield EncodedArray(rows, tuple(islice(blocks, count)))

    def each_block(self) -> Sequence[Piece]:
        """Return the blocks of all arrays."""
        if len(self.pieces) == len(self.nbytes):
            return self.pieces
        return [*cut(self.pieces, self.nbytes.tolist())]


@dataclass(frozen=True, slots=True)
class Extents:
    """Extents of several arrays, as columns."""

    counts: Ints  # of each array: how many extents it has
    containers: Sequence[str]  # as in `Extent`, each of them once
    container: Ints  # of each extent: the number of its container in these
    offset: Ints
    nbytes: Ints

    @classmethod
    def of(cls, arrays: Sequence[Sequence[Extent]]) -> Extents:
        """Put extents into columns, given those of each array."""
        numbers: dict[str, int] = {}
        every = [extent for extents in arrays for extent in extents]
        container = [numbers.setdefault(each.container, len(numbers)) for each in every]
        return cls(
            counts=np.array([*map(len, arrays)], np.int64),
            containers=tuple(numbers),
            container=np.array(container, np.int64),
            offset=np.array([each.offset for each in every], np.int64),
            nbytes=np.array([each.nbytes for each in every], np.int64),
        )

    def each(self) -> Iterator[tuple[Extent, ...]]:
        """Yield the extents of one array after the other."""
        paths = [self.containers[number] for number in self.container.tolist()]
        extents = map(Extent, paths, self.offset.tolist(), self.nbytes.tolist())
        return (tuple(islice(extents, count)) for count in self.counts.tolist())


@runtime_checkable
class AppendsMany(Protocol):
    """A `ContainerWriter` that appends many utterances at once faster than one by one."""

    def append_many(
        self, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
    ) -> Mapping[str, Extents]:
        """Write what `append` writes for each of the ids in turn; returns where that lies."""


def append_alone(
    container: AppendsMany, id: str, arrays: Mapping[str, EncodedArray]
) -> dict[str, tuple[Extent, ...]]:
    """Append one utterance to a container whose `append` is no other than its `append_many`."""
    many = {name: EncodedArrays.of([array]) for name, array in arrays.items()}
    placed = container.append_many([id], many)
    return {name: next(extents.each()) for name, extents in placed.items()}


def append_many(
    container: ContainerWriter, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
) -> Mapping[str, Extents]:
    """Append utterances at once where a format can, else one by one."""
    if isinstance(container, AppendsMany):
        return container.append_many(ids, arrays)
    each = (dict(zip(arrays, of_one, strict=True)) for of_one in zip(*arrays.values(), strict=True))
    extents = [container.append(id, of_one) for id, of_one in zip(ids, each, strict=True)]
    return {name: Extents.of([placed[name] for placed in extents]) for name in arrays}
