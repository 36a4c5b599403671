"""`AnnotatedRows`: annotations of the rows of a part or a generation, to be joined or copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from featcache.errors import FeatureError
from featcache.interface import Ints
from featcache.store.format.annotation_columns import Column
from featcache.store.format.annotations import wider_kind
from featcache.store.format.index import Index
from featcache.store.format.manifest import PARTS
from featcache.store.format.part import SealedPart


@dataclass(frozen=True, slots=True)
class AnnotatedRows:
    """Annotations of rows, which are read when they are asked for.

    Attributes:
        part: name of the part, for messages.
        count: number of rows.
        kinds: of the annotations, by name.
        column: returns one of them, of all rows.
        left_out: returns the rows that count no more.
    """

    part: str
    count: int
    kinds: Mapping[str, str]
    column: Callable[[str], Column]
    left_out: Callable[[], Ints]

    @classmethod
    def of_part(cls, cache: Path, part: SealedPart, index: Index) -> AnnotatedRows:
        """Return those of a sealed part."""

        def column(name: str) -> Column:
            return part.annotation(cache, name, index.annotations[name])

        return cls(
            part.entry.name, len(index), index.annotations, column, lambda: part.tombstones(cache)
        )

    def has_values(self, name: str) -> bool:
        """Tell whether any row that counts has a value of an annotation."""
        null = self.column(name).null
        missing = np.zeros(self.count, np.uint8) if null is None else null
        return not np.delete(missing, self.left_out()).all()

    def of_kind(self, name: str, kind: str) -> Column:
        """Return an annotation of all rows, of its own kind.

        Of `kind`, and without any value, where there is none that `kind` can hold.
        """
        own = self.kinds.get(name)
        if own is None or wider_kind(own, kind) != kind:
            return Column.missing(self.count, kind)
        return self.column(name)


def widest_kinds(
    cache: Path, parts: Sequence[AnnotatedRows], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the kinds of annotations that hold those of all parts, by name.

    A part whose rows that count have no value of an annotation has no say in its kind where that of
    others does not fit. `known` are kinds from elsewhere. Raises `FeatureError` for an annotation
    of several kinds.
    """
    kinds = dict(known)
    for name in dict.fromkeys(name for part in parts for name in part.kinds):
        having = [part for part in parts if name in part.kinds]
        try:
            kinds[name] = _widest(cache, having, name, known.get(name))
        except FeatureError:
            having = [part for part in having if part.has_values(name)]
            kinds[name] = _widest(cache, having, name, known.get(name))
    return kinds


def _widest(cache: Path, parts: Sequence[AnnotatedRows], name: str, known: str | None) -> str:
    widest = known
    for each in parts:
        wider = wider_kind(widest, each.kinds[name])
        if wider is None:
            raise FeatureError(
                f"annotation {name!r} is {each.kinds[name]} in part {each.part!r} of "
                f"{str(cache)!r} and {widest} in others, written at the same time; nothing is "
                f"lost, but nothing is published either: if {each.kinds[name]} is wrong, remove "
                f"'{cache / PARTS / each.part}', and its {each.count} utterances are written again "
                "by the next call, else the others; with one kind for all"
            )
        widest = wider
    return cast(str, widest)
