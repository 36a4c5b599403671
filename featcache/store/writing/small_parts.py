"""Groups of small parts that become one, so that many appends leave few parts.

The fullness of a part is its share of the most that a part holds, in bytes or in rows. Parts whose
fullness is alike, within a factor of eight, are of one tier; eight of a tier become one, of the
next tier or near it. So n appends of the same size leave at most 7 log8(n) small parts, and copy
each utterance log8(n) times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from featcache.store.format.part import SealedPart
from featcache.store.writing import part_writer

FANOUT = 8
LARGE = 1 / FANOUT  # a part of this fullness is not small


@dataclass(frozen=True, slots=True)
class Sized:
    """A part with the rows that are to be copied of it, and the bytes of these."""

    part: SealedPart
    rows: int
    nbytes: int

    @property
    def fullness(self) -> float:
        """Its share of the most that a part holds."""
        return fullness(self.rows, self.nbytes)

    @property
    def shape(self) -> object:
        """Shape and cut of its arrays, which parts must share to become one."""
        header = self.part.header
        return tuple(sorted(header.dims.items())), tuple(sorted(header.block_rows.items()))

    @property
    def is_adopted(self) -> bool:
        """True if its bytes lie elsewhere, and stay there."""
        return self.part.entry.adopted is not None

    @property
    def is_tombstoned(self) -> bool:
        """True if rows of it count no more."""
        return self.part.entry.tombstones is not None


def fullness(rows: int, nbytes: int) -> float:
    """Return the share of rows and bytes of the most that a part holds."""
    return max(nbytes / part_writer.PART_BYTES, rows / part_writer.PART_ROWS)


def as_on_disk(cache: Path, part: SealedPart) -> Sized:
    """Return a part with the size of its files: a little more than that of its arrays."""
    files = (file for file in (cache / part.directory).rglob("*") if file.is_file())
    return Sized(part, part.entry.rows, sum(file.stat().st_size for file in files))


def tiers(parts: Iterable[Sized]) -> Iterator[list[Sized]]:
    """Give groups of small parts that are to become one, where a tier holds enough of them."""
    by_tier: dict[object, list[Sized]] = {}
    for part in parts:
        if part.is_adopted:
            continue
        if 0 < part.fullness < LARGE:
            tier = math.floor(math.log(part.fullness, FANOUT))
            by_tier.setdefault((tier, part.shape), []).append(part)
    yield from (alike for alike in by_tier.values() if len(alike) >= FANOUT)


def packed(parts: Iterable[Sized]) -> Iterator[list[Sized]]:
    """Give groups of parts that fit into one: those with tombstones, and small ones with them.

    A part without tombstones that would be alone in its group stays as it is. An adopted part is in
    a group of its own.
    """
    by_shape: dict[object, list[list[Sized]]] = {}
    for part in parts:
        if part.is_adopted:
            if part.is_tombstoned:
                yield [part]
        elif part.is_tombstoned or part.fullness < LARGE:
            groups = by_shape.setdefault(part.shape, [[]])
            if sum(each.fullness for each in groups[-1]) + part.fullness > 1:
                groups.append([])
            groups[-1].append(part)
    for group in itertools.chain(*by_shape.values()):
        if len(group) > 1 or any(part.is_tombstoned for part in group):
            yield group
