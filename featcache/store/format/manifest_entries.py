"""Entries of a manifest: parts and what changed of them, annotations, ids that are expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from featcache.store.format import checked
from featcache.store.format.checked import OPTIONAL


@dataclass(frozen=True, slots=True)
class Tombstones:
    """A file of columns: the rows of a part that count no more, the statistics of the others."""

    file: checked.Name  # in the part's directory
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class Restamps:
    """A file of columns: stamps of a part's rows, which count in place of those in its index."""

    file: checked.Name  # in the part's directory
    digest: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """The source that a part's containers lie in: a cache names it by a key, see `roots`."""

    root: checked.Name  # the key
    collected: bool  # checksums and statistics are there


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A sealed part: how many utterances it holds, and how its arrays are cut."""

    name: checked.Name
    rows: int
    block_rows: Mapping[checked.Name, int]  # of the codec; 0: one block an array, or raw
    digest: str  # xxh3-64 of its part.json
    tombstones: Tombstones | None = None
    stamps: Restamps | None = field(default=None, metadata=OPTIONAL)
    adopted: Adopted | None = field(default=None, metadata=OPTIONAL)

    @property
    def is_collected(self) -> bool:
        """True if checksums and statistics are there."""
        return self.adopted is None or self.adopted.collected


@dataclass(frozen=True, slots=True)
class AnnotationEntry:
    """An annotation of which some utterances have a value."""

    kind: str
    # its values were given to a generation, not to the parts alone: each one takes them from the
    # generation before
    carried: bool


@dataclass(frozen=True, slots=True)
class Expected:
    """Ids that a cache is to hold: their number, and a digest of them."""

    count: int
    digest: str  # xxh3-128 of the ids' UTF-8 in ascending order, a zero byte behind each
