"""Arrays as the bytes that containers store: in blocks, encoded where there is a codec."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache.errors import FeatureError
from featcache.interface import Array, Blocks, EncodedArray, FeatureSpec


def encoded(id: str, array: Array, feature: FeatureSpec, blocks: Blocks | None) -> EncodedArray:
    """Return an array (rows, *dims), storage dtype, as it is stored.

    Raises `FeatureError`, naming utterance and feature, for numbers that a codec cannot hold.
    """
    rows = len(array)
    if feature.codec is None or blocks is None or array.size == 0:
        return bytes_of(array)
    size = blocks.rows or rows
    if blocks.padded and rows % size:
        filling = np.zeros((size - rows % size, *feature.dims), array.dtype)
        array = np.concatenate([array, filling])
    cut = (array[start : start + size] for start in range(0, len(array), size))
    try:
        return EncodedArray(rows, tuple(map(feature.codec.encode, cut)))
    except FeatureError as error:
        raise FeatureError(f"utterance {id!r}, feature {feature.name!r}: {error}") from error


def bytes_of(array: Array) -> EncodedArray:
    """Return an array (rows, *dims) as it is stored without a codec."""
    if array.size == 0:
        return EncodedArray(len(array), ())
    return EncodedArray(len(array), (array.reshape(-1).view(np.uint8).data,))


def pieces_of(packed: Array, lengths: Sequence[int]) -> list[EncodedArray]:
    """Return arrays that lie one behind the other, (rows, *dims), as `bytes_of` returns each."""
    row_bytes = packed.nbytes // max(len(packed), 1)
    octets = packed.reshape(-1).view(np.uint8).data
    pieces, begin = [], 0
    for rows in lengths:
        end = begin + rows * row_bytes
        pieces.append(EncodedArray(rows, (octets[begin:end],) if end > begin else ()))
        begin = end
    return pieces
