"""Annotations of a data set: values of its utterances by name, taken without loading any item."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch.utils.data import Subset

from featcache.errors import ComputeError, ConfigError, FeatureError, describe, nearest
from featcache.extraction.datasets import is_map_style
from featcache.extraction.dynamic_items import DynamicItems, is_dynamic
from featcache.extraction.other_splits import rows_of
from featcache.extraction.stamping import Entries
from featcache.store.cache import Cache
from featcache.store.format.annotations import (
    Value,
    check_annotations,
    check_name,
    kind_of,
    wider_kind,
    with_kinds,
)
from featcache.store.format.feature_sets import stored_sets
from featcache.store.reading.reader import FeatureReader
from featcache.tables.has_table import HasTable

_Value = Callable[[int], object]  # of an utterance, by its number; None where it is missing


class DatasetAnnotations:
    """Annotations that a cache is to have, as a data set tells them.

    They are read and checked before anything is computed, and stored when all utterances are:
    those of utterances that were in the cache before, too, where they are new or other than stored.

    Args:
        source: the data set, or a loader, whose data set it is.
        names: of the annotations.
        features: names that no annotation can have.

    Raises `ConfigError` for names that the data set does not have, `FeatureError` for names that
    cannot be an annotation's.
    """

    def __init__(self, source: Any, names: str | Iterable[str], features: Iterable[str]) -> None:
        dataset = source if is_map_style(source) else getattr(source, "dataset", source)
        self.names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
        for name in self.names:
            check_name(name, list(features))
        self._values = {name: values_of(dataset, name) for name in self.names}
        self._known: dict[str, list[object]] = {}
        self._ids: Sequence[str] = ()

    @classmethod
    def of(
        cls, source: Any, names: str | Iterable[str], features: Iterable[str]
    ) -> DatasetAnnotations | None:
        """Return the annotations of these names; None where there is none."""
        return cls(source, names, features) if names else None

    def read(self, ids: Sequence[str] | None) -> None:
        """Read the annotations of all utterances of the data set, and check them.

        Raises `FeatureError` for a value that is no annotation, or of another kind than those of
        the other utterances, `ComputeError` where the data set fails to tell one, `ConfigError` for
        a data set that shows no ids.
        """
        if self.names and ids is None:
            raise ConfigError(
                "annotations belong to ids, and this data set shows none; give it an attribute "
                "`ids`, a list of strings"
            )
        self._ids = ids or ()
        self._known = {name: self._column(name, value) for name, value in self._values.items()}

    def _column(self, name: str, value_of: _Value) -> list[object]:
        kinds: dict[str, str] = {}
        values: list[object] = []
        for number, id in enumerate(self._ids):
            try:
                value = value_of(number)
            except Exception as error:
                text = f"annotation {name!r} of utterance {id!r} failed with {describe(error)}"
                raise ComputeError(text) from error
            checked = check_annotations(id, {name: value})
            kinds = with_kinds(id, checked, kinds)
            values.append(checked.get(name))
        return values

    def refuse_other_kinds(self, path: Path) -> None:
        """Raise `FeatureError` if a cache has an annotation of another kind, before any computing.

        Integers and floats are of one kind.
        """
        for directory, manifest in stored_sets(path):
            stored = {
                name: each.kind for name, each in manifest.annotations.items() if name in self.names
            }
            for name, kind in stored.items():
                values = (value for value in self._known[name] if value is not None)
                now = reduce(wider_kind, (kind_of(cast(Value, value)) for value in values), None)
                if now is not None and wider_kind(kind, now) is None:
                    raise FeatureError(
                        f"annotation {name!r} of the data set is {now}, but {kind} in cache "
                        f"{str(directory)!r}; give it another name, or make the cache anew"
                    )

    def unlike(self, cache: Cache) -> dict[str, dict[str, object]]:
        """Return what a cache is to be given, by id and name; None for what it is to forget."""
        rows = rows_of(cache.opened, self._ids)
        there = np.flatnonzero(rows >= 0)
        found: dict[str, dict[str, object]] = {}
        for name, values in self._known.items():
            stored: Sequence[object] = [None] * len(there)
            if name in cache.annotations:
                stored = cache.annotation(name).take(rows[there])
            for number, value in zip(there.tolist(), stored, strict=True):
                if values[number] != value:
                    found.setdefault(self._ids[number], {})[name] = values[number]
        return found


def values_of(dataset: Any, name: str) -> _Value:
    """Return what gives an annotation by the number of an utterance.

    A method `annotation(name)` of the data set tells them all; a `FeatureDataset` those of its
    caches; a `DynamicItemDataset` has keys and dynamic items, a `datasets.Dataset` columns; all
    else has entries, see `Entries`.

    Raises `ConfigError` where nothing is known of that name.
    """
    if isinstance(dataset, Subset):
        inner, indices = values_of(dataset.dataset, name), dataset.indices
        return lambda number: inner(indices[number])
    if isinstance(dataset, HasTable):
        dataset = dataset.table
    if callable(getattr(dataset, "annotation", None)):
        values: _Value = dataset.annotation(name).__getitem__
        return values
    if is_dynamic(dataset) and (dynamic := _dynamic(dataset, name)) is not None:
        return dynamic
    loaded = sys.modules.get("datasets")
    if loaded is not None and isinstance(dataset, loaded.Dataset):
        return _of_table(dataset, name)
    return _of_entries(dataset, name)


def _dynamic(dataset: Any, name: str) -> _Value | None:
    """Return what computes a dynamic item; None for a key of the entries."""
    if name not in dataset.pipeline.key_to_node and any(name in e for e in dataset.data.values()):
        return None  # of some of the entries, not of the first
    items, ids = DynamicItems(dataset, [name]), dataset.data_ids
    if not items.functions:
        return None
    if any(isinstance(function, FeatureReader) for function in items.functions):
        raise ConfigError(
            f"annotation {name!r} of the data set is made of cached features; take it from the "
            "data set before they are attached"
        )
    return lambda number: items.of(ids[number])[name]


def _of_table(dataset: Any, name: str) -> _Value:
    if name not in dataset.column_names:
        known = nearest(name, dataset.column_names)
        raise ConfigError(f"the data set has no column {name!r}; {known}")
    return list(dataset.with_format(None)[name]).__getitem__


def _of_entries(dataset: Any, name: str) -> _Value:
    entries = Entries(dataset)
    if not entries:
        kind = type(dataset).__name__
        raise ConfigError(
            f"{kind!r} does not show {name!r} of its utterances before they are loaded; give it an "
            "attribute `entries`, a list of dicts, one for each utterance, or add annotations to "
            "the cache with its method `annotate`"
        )
    if not any(_rows_with(name, entries[number]) for number in range(len(entries))):
        first = next((row for row in _rows(entries[0]) if isinstance(row, Mapping)), {})
        raise ConfigError(f"no utterance of the data set has {name!r}; {nearest(name, first)}")
    return lambda number: next((row[name] for row in _rows_with(name, entries[number])), None)


def _rows_with(name: str, entry: object) -> list[Mapping[str, object]]:
    return [row for row in _rows(entry) if isinstance(row, Mapping) and name in row]


def _rows(entry: object) -> Sequence[object]:
    # rows that an object holds, one or several for each utterance; or an entry itself
    return entry if isinstance(entry, list | tuple) else (entry,)
