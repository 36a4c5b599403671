"""Batches of a number of utterances.

Unsorted, sorted by length, or fewer where they are long (folded).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.cut import (
    by_appearance,
    even_ends,
    grouped,
    joined,
    reversed_batches,
    spread_short_last,
    stable_order,
)


def unsorted_batches(
    count: int, batch_size: int, drop_last: bool, categories: Ints | None
) -> Batches:
    """Cut rows as they come.

    With categories each category by itself, in the order of their first rows.
    """
    codes = np.zeros(count, np.int64) if categories is None else by_appearance(categories)
    rows, ends = grouped(codes)
    return joined(
        [
            reversed_batches(
                rows[start:end],
                even_ends(end - start, batch_size, drop_last),
                inside=False,
                order=False,
            )
            for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
    )


def sorted_batches(
    lengths: Ints, batch_size: int, drop_last: bool, inside: str, order: str
) -> Batches:
    """Cut rows by length.

    Batches come in the order that they are sorted in inside, or turned around.
    """
    rows = stable_order(lengths.max() - lengths if inside == "descending" else lengths)
    return reversed_batches(
        rows, even_ends(len(rows), batch_size, drop_last), inside=False, order=inside != order
    )


def folded_batches(
    lengths: list[Ints],
    folds: Sequence[float],
    batch_size: int,
    min_batch_size: int,
    drop_last: bool,
    inside: str,
    order: str,
    categories: Ints | None,
) -> Batches:
    """Cut rows by length, with fewer in a batch where they are long.

    With each `fold` that the shortest of a batch is longer, the batch holds fewer of them.
    """
    factors = np.max(
        [(length / fold).astype(np.int64) for length, fold in zip(lengths, folds, strict=True)],
        axis=0,
    )
    sizes = np.maximum((batch_size / (1 + factors)).astype(np.int64), min_batch_size)
    by_length = stable_order(lengths[0])
    codes = (
        np.zeros(len(by_length), np.int64)
        if categories is None
        else by_appearance(categories[by_length])
    )
    rows, ends = grouped(codes)
    rows = by_length[rows]
    batches: list[Batches] = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        group = rows[start:end]
        cut = _folded_ends(sizes[group], drop_last and any(len(part) for part in batches))
        cut = spread_short_last(cut, min_batch_size, skip=1)
        batches.append(reversed_batches(group, cut, inside == "descending", order == "descending"))
    return joined(batches)


def _folded_ends(sizes: Ints, drop_short: bool) -> Ints:
    count, ends = len(sizes), [0]
    while ends[-1] < count:
        end = ends[-1] + sizes.item(ends[-1])
        if end > count and drop_short:
            break
        ends.append(min(end, count))
    return np.array(ends)
