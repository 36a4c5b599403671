"""Utterances to batch: of shape files, of arrays of lengths, or of a cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.key_table import PackedStrings, read_table
from featcache.samplers.espnet.shapes import Shapes, read_shapes, shapes_of
from featcache.store.reading.cache import Cache, CachePath
from featcache.tables.numbering import Numbering
from featcache.tables.table import FeatureTable, HasTable

Labels = Sequence[str] | Sequence[int] | NDArray[np.generic]


ShapesLike = ArrayLike | Sequence[ArrayLike] | Cache | CachePath | FeatureTable | HasTable


@dataclass(frozen=True)
class NumberedUtterances:
    """Numbered utterances, with one `Shapes` a shape file, array or feature with a time axis."""

    name: str
    count: int
    shapes: list[Shapes]
    ids: PackedStrings | FeatureTable | None

    @property
    def keys(self) -> PackedStrings | None:
        """The keys of the shape files, which batches name utterances by; None for row numbers."""
        return self.ids if isinstance(self.ids, PackedStrings) else None

    def batches(self, rows: Batches) -> Batches:
        """Return batches of rows by what they name utterances by.

        Row numbers know which utterances they count.
        """
        if isinstance(self.ids, PackedStrings):
            return Batches(rows.items, rows.ends, self.ids)
        lengths = [shapes.lengths for shapes in self.shapes]
        numbering = Numbering(self.count, self.ids, lengths)
        return Batches(rows.items, rows.ends, numbering=numbering)

    def find(self, ids: PackedStrings, where: str) -> Ints:
        """Return the row of each id, -1 where there is none.

        Raises `ConfigError` if rows have no ids.
        """
        if self.ids is None:
            raise ConfigError(
                f"{where} names utterances, but {self.name} has no ids: give a cache, or labels of "
                "rows"
            )
        if isinstance(self.ids, PackedStrings):
            return self.ids.match(ids)
        return self.ids.find(ids)

    def rows(self, ids: PackedStrings, lines: Ints, where: str) -> Ints:
        """Return the row of each id.

        Raises `ConfigError` for ids that are not there, with lines (from 0) of some.
        """
        rows = self.find(ids, where)
        _require_all(rows, ids, lines, f"{where} names", self.name)
        return rows


def _require_all(rows: Ints, ids: PackedStrings, lines: Ints, who: str, where: str) -> None:
    """Raise `ConfigError` with some of the ids whose row is -1, and their lines (from 0)."""
    absent = np.flatnonzero(rows < 0)
    if len(absent):
        some = ", ".join(f"{ids[at]!r} (line {lines[at] + 1})" for at in absent[:3].tolist())
        raise ConfigError(f"{who} {len(absent)} utterances that are not in {where}, such as {some}")


def utterances_of(
    shape_files: Sequence[str] | None,
    lengths: ShapesLike | None,
    separator: str = ",",
    shaped: int | None = None,
) -> NumberedUtterances:
    """Return the utterances of shape files or of `lengths`, of which one is given.

    The first `shaped` shape files are parsed (None: all; 0: only the ids of the first).
    """
    if (shape_files is None) == (lengths is None):
        raise ConfigError(
            "give either shape_files=[...] or lengths=, a cache or arrays, "
            + ("not both" if lengths is not None else "to a sampler")
        )
    if lengths is not None:
        found = _of_lengths(lengths)
        return replace(found, shapes=found.shapes[:shaped])
    if isinstance(shape_files, str) or not shape_files:
        raise ConfigError(f"shape_files is a list of one or more files, not {shape_files!r}")
    first = str(shape_files[0])
    if shaped == 0:
        keys = read_table(first).keys
        return NumberedUtterances(f"shape file {first!r}", len(keys), [], keys)
    keys, shapes = read_shapes(first, separator)
    all_shapes = [shapes]
    for path in shape_files[1:shaped]:
        others, more = read_shapes(path, separator)
        rows = others.match(keys)
        _require_all(rows, keys, np.arange(len(keys)), f"shape file {first!r} has", more.name)
        if len(others) > len(keys):
            lines = np.arange(len(others))
            _require_all(
                keys.match(others), others, lines, f"{more.name} has", f"shape file {first!r}"
            )
        all_shapes.append(more.take(rows))
    return NumberedUtterances(shapes.name, len(keys), all_shapes, keys)


def _of_lengths(lengths: ShapesLike) -> NumberedUtterances:
    if isinstance(lengths, Cache | str | os.PathLike):
        lengths = FeatureTable.of(lengths)
    if isinstance(lengths, FeatureTable):
        return _of_table(lengths, lengths.features)
    if isinstance(lengths, HasTable):
        return _of_table(lengths.table, lengths.features)
    several = isinstance(lengths, list | tuple) and len(lengths) > 0 and np.ndim(lengths[0]) > 0
    arrays = [np.asarray(array) for array in (lengths if several else [lengths])]  # type: ignore[union-attr]
    if len(sizes := {len(array) if array.ndim else 0 for array in arrays}) > 1:
        raise ConfigError(f"arrays of lengths are of different utterances: {sorted(sizes)} of them")
    if sizes == {0}:
        raise ConfigError("lengths are empty: there is nothing to batch")
    names = [f"lengths[{number}]" for number in range(len(arrays))] if several else ["lengths"]
    return NumberedUtterances("lengths", sizes.pop(), list(map(shapes_of, names, arrays)), None)


def _of_table(table: FeatureTable, features: Sequence[str]) -> NumberedUtterances:
    if len(table) == 0:
        raise ConfigError(f"{table!r} is empty: there is nothing to batch")
    shapes = [
        Shapes(
            f"feature {name!r}",
            table.lengths(name),
            np.array([table.dims(name)], np.int64).reshape(1, -1),
        )
        for name in features
        if table.has_frames(name)
    ]
    return NumberedUtterances("the cache", len(table), shapes, table)


def codes_of(labels: Labels, count: int, argument: str) -> Ints:
    """Number the labels of all rows, in the order that they come in."""
    if len(labels) != count:
        raise ConfigError(f"{argument} has {len(labels)} labels for {count} utterances")
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.ndim == 1:
        spread: Ints = labels.astype(np.int64, copy=False) - labels.min()
        if spread.max() < 4 * count:
            return spread
    listed = labels.tolist() if hasattr(labels, "tolist") else labels
    numbers = {label: number for number, label in enumerate(dict.fromkeys(listed))}
    return np.fromiter(map(numbers.__getitem__, listed), np.int64, count)


def category_codes(found: NumberedUtterances, path: str) -> Ints:
    """Return a number for the category of each row.

    The file has an utterance and its category on each line.
    """
    table = read_table(path)
    keys = table.keys
    rows = found.rows(keys, np.arange(len(keys)), f"category file {path!r}")
    missing = np.ones(found.count, bool)
    missing[rows] = False
    if missing.any():
        row = int(missing.argmax())
        name = repr(found.ids[row]) if isinstance(found.ids, PackedStrings) else f"row {row}"
        raise ConfigError(
            f"category file {path!r} has no category for {int(missing.sum())} utterances, such as "
            f"{name}"
        )
    codes = np.empty(found.count, np.int64)
    codes[rows] = codes_of([table.value(line) for line in range(len(table))], len(table), path)
    return codes
