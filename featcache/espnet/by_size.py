"""ESPnet's batches by size: sorted, folded, of so many bins or elements, cut from sorted keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from featcache.errors import ConfigError
from featcache.espnet.shapes import Ints, Shapes, ends_of, stable_order
from featcache.samplers import Batches

# Cuts of a sorted or shuffled list of utterances into batches.


def grouped(codes: Ints, groups: int = 0) -> tuple[Ints, Ints]:
    """Return the rows group by group, in order, and where each group ends, after a 0.

    Group g holds the rows of code g; a code without rows, up to `groups`, gives an empty group.
    """
    return stable_order(codes), ends_of(np.bincount(codes, minlength=groups))


def by_appearance(codes: Ints) -> Ints:
    """Number the codes anew, in the order of their first rows."""
    first = np.full(int(codes.max(initial=-1)) + 1, len(codes))
    # of several values for one place the last stays
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    return np.argsort(np.argsort(first, kind="stable"))[codes]


def even_ends(count: int, batch_size: int, drop_last: bool) -> Ints:
    """Return the ends of batches of at least `batch_size`; with drop_last of exactly `batch_size`.

    Fewer utterances than that give one batch.
    """
    batches = np.arange(max(count // batch_size, 1) + 1)
    return np.minimum(batches * batch_size, count) if drop_last else batches * count // batches[-1]


def ends_over_sum(
    sizes: Ints, most: int, min_batch_size: int, max_batch_size: int | None = None
) -> Ints:
    """Return for each start the end of a batch: its last utterance brings its sum above `most`.

    It has at least `min_batch_size` utterances, at most `max_batch_size`; len(sizes) + 1 where it
    does not get there.
    """
    until = ends_of(sizes)
    starts = np.arange(len(sizes))
    ends = np.searchsorted(until, until[:-1] + min(most, 2**62), side="right")
    ends = np.maximum(ends, starts + min_batch_size)
    if max_batch_size is not None:
        ends = np.minimum(ends, starts + max_batch_size)
    return np.minimum(ends, len(sizes) + 1)


def ends_over_area(sizes: Ints, most: int, min_batch_size: int) -> Ints:
    """Return for each start the end of a batch: count * size of its last utterance > `most`.

    It has at least `min_batch_size` utterances; len(sizes) + 1 where it does not get there.
    """
    count = len(sizes)
    needed = np.full(count, count + 1)  # utterances of a batch that closes with this one
    np.floor_divide(min(most, 2**62), sizes, out=needed, where=sizes > 0)
    needed = np.clip(needed + 1, min_batch_size, count + 1)
    # a batch that starts here or before is closed by now
    latest = np.maximum.accumulate(np.arange(count) + 1 - needed)
    closed_before = np.cumsum(np.bincount(np.maximum(latest + 1, 0), minlength=count + 1))
    return closed_before[:count] + 1


def chain(ends: Ints) -> Ints:
    """Follow batches from the first utterance on, as long as they close: their ends, after a 0."""
    count, chained = len(ends), [0]
    while chained[-1] < count and (end := ends.item(chained[-1])) <= count:
        chained.append(end)
    return np.array(chained)


def spread_short_last(ends: Ints, min_batch_size: int, skip: int) -> Ints:
    """Share a last batch of fewer than `min_batch_size` among the batches before it.

    One after the other from the last of them backwards, and around; `skip` 1 begins with the second
    to last.
    """
    sizes = np.diff(ends)
    if len(sizes) < 2 or sizes[-1] >= min_batch_size:
        return ends
    rest, sizes = int(sizes[-1]), sizes[:-1]
    every, more = divmod(rest, len(sizes))
    sizes += every
    sizes[(-1 - skip - np.arange(more)) % len(sizes)] += 1
    return ends_of(sizes)


@dataclass(frozen=True)
class Descending:
    """The longest come first: utterances within each batch, batches in the list."""

    in_batches: bool = False
    batches: bool = False

    @classmethod
    def of(cls, sort_in_batch: str, sort_batch: str) -> Descending:
        """Read ESPnet's two arguments, each "ascending" or "descending"."""
        for argument, value in (("sort_in_batch", sort_in_batch), ("sort_batch", sort_batch)):
            if value not in ("ascending", "descending"):
                raise ConfigError(f"{argument} is 'ascending' or 'descending', not {value!r}")
        return cls(sort_in_batch == "descending", sort_batch == "descending")

    def cut(self, rows: Ints, ends: Ints) -> Batches:
        """Cut ascending `rows` at `ends`, then reverse each batch, the list of batches, or both."""
        rows = rows[: ends[-1]]
        if self.in_batches:  # the whole list of rows, and with it the list of batches
            rows, ends = rows[::-1], ends[-1] - ends[::-1]
        batches = Batches(rows, ends)
        return batches[::-1] if self.in_batches != self.batches else batches


def joined(batches: list[Batches]) -> Batches:
    """Put lists of batches one after the other."""
    sizes = np.concatenate([part.sizes for part in batches])
    return Batches(np.concatenate([part.items for part in batches]), ends_of(sizes))


# Batches of about one size in frames (length) or in numbers (numel).


def binned_batches(
    lengths: Ints,
    counts: Ints,
    bins: int,
    min_batch_size: int,
    drop_last: bool,
    padding: bool,
    descending: Descending,
) -> Batches:
    """Cut rows by length: a batch ends with the utterance that makes it larger than `bins`.

    An utterance counts `counts`. Padded, a batch has its utterances times those of its last one,
    which is the longest.
    """
    rows = stable_order(lengths)
    measure = ends_over_area if padding else ends_over_sum
    ends = chain(measure(counts[rows], bins, min_batch_size))
    if ends[-1] < len(rows) and (not drop_last or len(ends) == 1):
        ends = np.append(ends, len(rows))
    return descending.cut(rows, spread_short_last(ends, min_batch_size, skip=0))


# Batches of a number of utterances: unsorted, sorted by length, or fewer where they are long.


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
    as_202511: bool,
) -> Batches:
    """Cut rows by length, each category by itself; `sizes` are those of `folded_sizes`.

    `as_202511`: `drop_last` counts the batches of the categories before, not of this one, and a
    short last batch is shared from the second to last on, as in ESPnet until release 202611.
    """
    rows = stable_order(lengths)
    batches: list[Batches] = []
    for part in _by_category(rows, None if categories is None else categories[rows]):
        kept = (0 if any(map(len, batches)) else len(part)) if as_202511 else 1
        ends = _folded_ends(sizes[part], kept if drop_last else len(part))
        ends = spread_short_last(ends, min_batch_size, skip=int(as_202511))
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


def _folded_ends(sizes: Ints, kept: int) -> Ints:
    """Return the ends of batches of `sizes`; a short last one is dropped after `kept` others."""
    count, ends = len(sizes), [0]
    while ends[-1] < count:
        end = ends[-1] + sizes.item(ends[-1])
        if end > count and len(ends) > kept:
            break
        ends.append(min(end, count))
    return np.array(ends)
