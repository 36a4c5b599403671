"""Batches of a number of utterances: unsorted, sorted by length, or fewer where they are long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.cut import (
    Descending,
    by_appearance,
    even_ends,
    grouped,
    joined,
    spread_short_last,
)
from featcache.samplers.lengths import Shapes
from featcache.tables.ordering import stable_order


def unsorted_batches(
    count: int, categories: Ints | None, batch_size: int, drop_last: bool
) -> Batches:
    """Cut rows as they come; each category by itself, in the order of first rows."""
    return joined(
        [
            Descending().cut(rows, even_ends(len(rows), batch_size, drop_last))
            for rows in _by_category(np.arange(count), categories)
        ]
    )


def sorted_batches(
    lengths: Ints, batch_size: int, drop_last: bool, descending: Descending
) -> Batches:
    """Cut rows by length: batches come in the order of their utterances, or the other way round."""
    rows = stable_order(lengths.max() - lengths if descending.in_batches else lengths)
    ends = even_ends(len(rows), batch_size, drop_last)
    other_way = descending.in_batches != descending.batches
    return Descending(batches=other_way).cut(rows, ends)


def folded_batches(
    lengths: Ints,
    categories: Ints | None,
    sizes: Ints,
    min_batch_size: int,
    drop_last: bool,
    descending: Descending,
) -> Batches:
    """Cut rows by length, each category by itself; `sizes` are those of `folded_sizes`."""
    rows = stable_order(lengths)
    batches: list[Batches] = []
    for part in _by_category(rows, None if categories is None else categories[rows]):
        drop_short = drop_last and any(map(len, batches))
        ends = _folded_ends(sizes[part], drop_short)
        ends = spread_short_last(ends, min_batch_size, skip=1)
        batches.append(descending.cut(part, ends))
    return joined(batches)


def folded_sizes(
    shapes: list[Shapes], fold_lengths: Sequence[float], batch_size: int, min_batch_size: int
) -> Ints:
    """Return for each row the utterances of a batch that begins with it.

    They are batch_size / (1 + floor(length / fold)), but at least `min_batch_size`. Of several
    features the one that leaves the fewest decides.
    """
    if isinstance(fold_lengths, str) or not isinstance(fold_lengths, Sequence):
        raise ConfigError(
            f"fold_lengths is a list, a number for each shape file or feature, not {fold_lengths!r}"
        )
    if len(fold_lengths) != len(shapes):
        names = ", ".join(shape.name for shape in shapes)
        raise ConfigError(
            f"{len(fold_lengths)} fold_lengths for {len(shapes)} lengths: one is needed for each "
            f"of {names}"
        )
    if not min(fold_lengths) > 0:
        raise ConfigError(f"fold_lengths are greater than 0, not {list(fold_lengths)!r}")
    folds = [
        (shape.lengths / fold).astype(np.int64)
        for shape, fold in zip(shapes, fold_lengths, strict=True)
    ]
    sizes: Ints = (batch_size / (1 + np.max(folds, axis=0))).astype(np.int64)
    return np.maximum(sizes, min_batch_size)


def _by_category(rows: Ints, categories: Ints | None) -> list[Ints]:
    """Return the rows of each category (one for each of `rows`), in the order of first rows."""
    if categories is None:
        return [rows]
    order, ends = grouped(by_appearance(categories))
    return np.split(rows[order], ends[1:-1])


def _folded_ends(sizes: Ints, drop_short: bool) -> Ints:
    count, ends = len(sizes), [0]
    while ends[-1] < count:
        end = ends[-1] + sizes.item(ends[-1])
        if end > count and drop_short:
            break
        ends.append(min(end, count))
    return np.array(ends)
