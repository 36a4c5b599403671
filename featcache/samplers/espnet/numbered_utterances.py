"""Utterances to batch: of shape files, of arrays of lengths, or of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.key_table import PackedStrings, read_table
from featcache.samplers.espnet.shapes import read_shapes
from featcache.samplers.lengths import LengthsLike, Shapes, shapes_of
from featcache.tables.numbering import Numbering
from featcache.tables.table import FeatureTable

Labels = Sequence[str] | Sequence[int] | NDArray[np.generic]


@dataclass(frozen=True)
class NumberedUtterances:
    """Numbered utterances, with one `Shapes` a shape file, array or feature with a time axis.

    `ids` are the keys of a file, which batches name utterances by, or the table of row numbers.
    """

    name: str
    count: int
    shapes: list[Shapes]
    ids: PackedStrings | FeatureTable | None

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
        return self.ids.match(ids) if isinstance(self.ids, PackedStrings) else self.ids.find(ids)

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
    lengths: LengthsLike | None,
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
        found, table = shapes_of(lengths, axes=2)
        if table is not None:
            return NumberedUtterances("the cache", len(table), found[:shaped], table)
        return NumberedUtterances("lengths", len(found[0].lengths), found[:shaped], None)
    if isinstance(shape_files, str) or not shape_files:
        raise ConfigError(f"shape_files is a list of one or more files, not {shape_files!r}")
    first = f"shape file {str(shape_files[0])!r}"
    if shaped == 0:
        keys = read_table(shape_files[0]).keys
        return NumberedUtterances(first, len(keys), [], keys)
    keys, shapes = read_shapes(shape_files[0], separator)
    utterances = NumberedUtterances(first, len(keys), [shapes], keys)
    for path in shape_files[1:shaped]:
        others, more = read_shapes(path, separator)
        lines = np.arange(max(len(keys), len(others)))
        rows = others.match(keys)
        _require_all(rows, keys, lines, f"{first} has", more.name)
        if len(others) > len(keys):
            _require_all(keys.match(others), others, lines, f"{more.name} has", first)
        utterances.shapes.append(more.take(rows))
    return utterances


def codes_of(labels: Labels, count: int, argument: str) -> Ints:
    """Number the labels of all rows, in the order that they come in."""
    if len(labels) != count:
        raise ConfigError(f"{argument} has {len(labels)} labels for {count} utterances")
    if count == 0:
        raise ConfigError(f"there are no utterances to sample: {argument} is empty")
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
    rows = found.rows(table.keys, np.arange(len(table)), f"category file {path!r}")
    codes = np.full(found.count, -1)
    codes[rows] = codes_of([table.value(line) for line in range(len(table))], len(rows), path)
    if codes.min() < 0:
        row = int(codes.argmin())
        name = repr(found.ids[row]) if isinstance(found.ids, PackedStrings) else f"row {row}"
        raise ConfigError(
            f"category file {path!r} has no category for {np.count_nonzero(codes < 0)} utterances, "
            f"such as {name}"
        )
    return codes
