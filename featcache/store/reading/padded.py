"""Arrays of several utterances in one, padded with zeros: NumPy, without any loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.interface import Ints
from featcache.store.format.bfloat16 import from_storage
from featcache.store.reading.generation import Generation


class PaddedFeatures(NamedTuple):
    """Arrays of several utterances in one, padded at the end of the frame axis.

    data: (utterances, longest, *dims), or (utterances, *dims) without a time axis.
    lengths: frames of each utterance, int64; ones without a time axis.
    """

    data: NDArray[Any]
    lengths: Ints


def read_padded(opened: Generation, ids: Iterable[str], feature: str) -> PaddedFeatures:
    """Return the arrays of several utterances, copied into one array padded with zeros."""
    arrays = opened.arrays(feature)
    rows = opened.rows(ids)
    lengths = arrays.lengths[rows]
    if len(rows):
        arrays.check_length(int(rows[lengths.argmax()]))
    longest = int(lengths.max(initial=0))
    data = arrays.empty(len(rows), longest)
    for out, row, length in zip(data, rows.tolist(), lengths.tolist(), strict=True):
        arrays.read_into(row, out[:length])
        out[length:] = 0
    if not arrays.has_frames:
        if (lengths != 1).any():
            raise CorruptCacheError(
                f"cache {str(opened.path)!r} is damaged: feature {feature!r} has no time axis, "
                "but its index tells of several frames"
            )
        data = data.reshape(len(rows), *arrays.dims)
    return PaddedFeatures(from_storage(data, arrays.declared_dtype), lengths)
