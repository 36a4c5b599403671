"""Batches of about one size in frames (length) or in numbers (numel)."""

from __future__ import annotations

import numpy as np

from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.cut import (
    Descending,
    chain,
    ends_over_area,
    ends_over_sum,
    spread_short_last,
)
from featcache.tables.ordering import stable_order


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
