"""Statistics of a view: exact, by reading its arrays, or those that a cache has beside them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from functools import reduce

import numpy as np

from featcache.interface import Ints
from featcache.registry import RAW, get_codec
from featcache.stats import FeatureStats
from featcache.store.cache import Cache
from featcache.store.format.bfloat16 import from_storage
from featcache.store.reading.feature_arrays import FeatureArrays
from featcache.tables.selection import Selection

_log = logging.getLogger("featcache")
LONG_S = 5.0  # reading for longer is told
AT_ONCE_BYTES = 16 << 20
# Statistics are merged within 1e-12 (see `FeatureStats`). As many digits as the variance of what is
# left is smaller are lost when statistics are taken away; at most these leave 9 of them.
MOST_LOST = 1e3


def stats_of_rows(selection: Selection, feature: str) -> FeatureStats:
    """Return the statistics of a feature over all rows; a frame in two segments counts twice.

    Raises `KeyNotFoundError` if a cache has collected none.
    """
    began = time.monotonic()
    parts, read_bytes = [], 0
    all_rows = np.arange(len(selection))
    span = selection.span(feature, all_rows)
    for block, places, inner in selection.blocks.split(selection.below(all_rows)):
        member = block.features[feature]
        rows = member.inner(inner)
        if selection.cuts is None:
            stats, nbytes = _of_whole_rows(member.as_opened, feature, rows)
        else:  # a recording may come several times
            member.as_opened.stats(feature)
            arrays = member.opened.arrays(feature)
            starts, lengths = np.zeros_like(rows), arrays.lengths[rows]
            if span is not None:
                starts, lengths = span[0][places], span[1][places]
            stats, nbytes = _read(arrays, rows, starts, lengths)
        parts.append(stats)
        read_bytes += nbytes
    took_s = time.monotonic() - began
    if took_s > LONG_S:
        _log.info(
            "statistics of feature %r over %d utterances: %.1f GB read in %.0f s; keep the table, "
            "which knows them now",
            feature,
            len(selection),
            read_bytes / 1e9,
            took_s,
        )
    return reduce(FeatureStats.merge, parts, FeatureStats.empty(selection.blocks.dims(feature)))


def without(stats: FeatureStats, part: FeatureStats) -> FeatureStats | None:
    """Return the statistics of the frames that are not in `part`; None where digits would be lost.

    >>> whole = FeatureStats.of([[1.0], [3.0], [8.0]])
    >>> rest = without(whole, FeatureStats.of([[8.0]]))
    >>> rest.count, rest.mean.tolist(), rest.m2.tolist()
    (2, [2.0], [2.0])
    """
    count = stats.count - part.count
    if not count or not part.count:
        return stats if not part.count else None
    with np.errstate(invalid="ignore", over="ignore"):
        # merge two (n, mean, M2): Chan, Golub & LeVeque, The American Statistician 37(3), 1983,
        # solved for one of them
        mean = stats.mean + (stats.mean - part.mean) * (part.count / count)
        delta = part.mean - mean
        m2 = stats.m2 - part.m2 - delta * delta * (count * part.count / stats.count)
        spread = np.sqrt(stats.m2 / stats.count)
        kept = (m2 * MOST_LOST >= stats.m2) & (np.abs(stats.mean) <= MOST_LOST * spread)
        kept |= (stats.m2 == 0) & (part.m2 == 0) & (mean == stats.mean)  # it never changes
    return FeatureStats(count, mean, m2) if bool(kept.all()) else None


def _of_whole_rows(cache: Cache, feature: str, rows: Ints) -> tuple[FeatureStats, int]:
    """Return the statistics of some rows of a cache, and how many bytes were read for them."""
    whole, (opened, rows) = cache.stats(feature), cache.opened.in_set(feature, rows)
    arrays, number = opened.arrays(feature), len(opened.index)  # all that `whole` is about
    if len(rows) == number:
        return whole, 0
    lengths = arrays.lengths
    rest = np.delete(np.arange(number), rows)
    read_bytes = 0
    if _is_lossless(cache, feature) and lengths[rest].sum() < lengths[rows].sum():
        others, read_bytes = _read(arrays, rest, np.zeros_like(rest), lengths[rest])
        left = without(whole, others)
        if left is not None:
            return left, read_bytes
    rows = np.sort(rows)  # about the order that they lie in
    stats, nbytes = _read(arrays, rows, np.zeros_like(rows), lengths[rows])
    return stats, nbytes + read_bytes


def _is_lossless(cache: Cache, feature: str) -> bool:
    """Tell whether what is read is what the statistics of the cache were taken of."""
    codec = cache.opened.manifest.features[feature]["codec"]
    return codec == RAW or get_codec(codec).lossless


def _read(
    arrays: FeatureArrays, rows: Ints, starts: Ints, lengths: Ints
) -> tuple[FeatureStats, int]:
    """Read frames of rows; return their statistics, and how many bytes they have."""
    frame_bytes = arrays.dtype.itemsize * math.prod(arrays.dims)
    parts = [FeatureStats.empty(arrays.dims)]
    for begin, end in _pieces(lengths * frame_bytes):
        some, sizes = slice(begin, end), lengths[begin:end] * frame_bytes
        for row in rows[some].tolist():
            arrays.check_length(row)
        ends = np.cumsum(sizes)
        data = np.empty(int(ends[-1]), np.uint8)
        outs = [data[e - n : e] for e, n in zip(ends.tolist(), sizes.tolist(), strict=True)]
        arrays.read_many(rows[some], starts[some], lengths[some], outs)
        frames = data.view(arrays.dtype).reshape(int(lengths[some].sum()), *arrays.dims)
        parts.append(FeatureStats.of(from_storage(frames, arrays.declared_dtype)))
    return reduce(FeatureStats.merge, parts), int(lengths.sum()) * frame_bytes


def _pieces(sizes: Ints) -> Iterator[tuple[int, int]]:
    """Cut rows into pieces of about `AT_ONCE_BYTES`."""
    ends, begin = np.cumsum(sizes), 0
    while begin < len(sizes):
        done = int(ends[begin]) - int(sizes[begin])
        end = max(int(ends.searchsorted(done + AT_ONCE_BYTES, side="right")), begin + 1)
        yield begin, end
        begin = end
