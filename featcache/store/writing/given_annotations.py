"""Annotations that are given to rows of a cache, collected and checked many at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from featcache.errors import DuplicateIdError, FeatureError
from featcache.interface import Ints
from featcache.store.format.annotations import (
    MOST_BYTES,
    Value,
    check_annotations,
    check_name,
    kind_of_plain,
    most_bytes,
    wider_kind,
    with_kinds,
)
from featcache.store.format.index import Index
from featcache.store.writing.annotation_sources import Entry


@dataclass(frozen=True, slots=True)
class Given:
    """Values of one annotation, and the rows that they are given to; None takes one away."""

    rows: list[int] = field(default_factory=list)
    values: list[Value | None] = field(default_factory=list)


class GivenAnnotations:
    """Values that entries give to the rows of an index.

    Args:
        index: that the rows are of.
        kinds: of the annotations that the cache has, by name.
        features: names that no annotation may have.

    Attributes:
        given: by name.
        kinds: of all annotations, with those that are given.
        strangers: ids that the index does not have.
    """

    def __init__(self, index: Index, kinds: Mapping[str, str], features: Collection[str]) -> None:
        self.given: dict[str, Given] = {}
        self.kinds = dict(kinds)
        self.strangers: list[str] = []
        self._index = index
        self._features = features
        self._seen = np.zeros(len(index), bool)

    def add(self, entries: Sequence[Entry]) -> None:
        """Take entries.

        Raises `DuplicateIdError` for an utterance that had one before, `FeatureError` for what is
        no annotation.
        """
        rows = self._index.find_many([id for id, _ in entries])
        there = rows >= 0
        if not there.all():
            self.strangers += [entries[place][0] for place in np.flatnonzero(~there).tolist()]
            entries = [entries[place] for place in np.flatnonzero(there).tolist()]
            rows = rows[there]
        if not self._take_at_once(rows, entries):
            self._take_each(rows.tolist(), entries)  # which names what is wrong

    def _take_at_once(self, rows: Ints, entries: Sequence[Entry]) -> bool:
        """Take entries an annotation at a time; False, and nothing taken, unless all are plain."""
        if self._seen[rows].any() or len(np.unique(rows)) < len(rows):
            return False
        found = _by_name(rows.tolist(), entries)
        kinds = self._kinds_with(found)
        if kinds is None:
            return False
        self._seen[rows] = True
        self.kinds = kinds
        for name, each in found.items():
            known = self.given.setdefault(name, Given())
            known.rows.extend(each.rows)
            known.values.extend(each.values)
        return True

    def _kinds_with(self, found: Mapping[str, Given]) -> dict[str, str] | None:
        """Return the kinds with those of plain values; None for what must be looked at singly."""
        kinds = dict(self.kinds)
        if sum(most_bytes(name, each.values) for name, each in found.items()) > MOST_BYTES:
            return None
        for name, each in found.items():
            try:
                check_name(name, self._features)
            except FeatureError:
                return None
            kind = kind_of_plain(each.values)
            wider = wider_kind(kinds.get(name), kind or None)
            if kind is None or (kind and wider is None):
                return None
            if wider is not None:
                kinds[name] = wider
        return kinds

    def _take_each(self, rows: Sequence[int], entries: Sequence[Entry]) -> None:
        for row, (id, values) in zip(rows, entries, strict=True):
            if self._seen[row]:
                raise DuplicateIdError(f"utterance {id!r} is annotated twice in one source")
            self._seen[row] = True
            there = check_annotations(id, values, self._features)
            self.kinds = with_kinds(id, there, self.kinds)
            for name in values:
                each = self.given.setdefault(name, Given())
                each.rows.append(row)
                each.values.append(there.get(name))


def _by_name(rows: Sequence[int], entries: Sequence[Entry]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for row, (_, given) in zip(rows, entries, strict=True):
        values = cast(Mapping[str, Value], given)  # or what `_kinds_with` refuses
        for name, value in values.items():
            each = found.get(name)
            if each is None:
                each = found[name] = Given()
            each.rows.append(row)
            each.values.append(value)
    return found
