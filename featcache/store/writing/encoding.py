"""Arrays as the bytes that containers store: in blocks, encoded where there is a codec."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache.container_files import EncodedArrays
from featcache.errors import FeatureError
from featcache.interface import Array, Blocks, EncodedArray, FeatureSpec
from featcache.store.writing.utterance_batch import PreparedArrays


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


def encoded_all(
    ids: Sequence[str],
    arrays: PreparedArrays,
    feature: FeatureSpec,
    blocks: Blocks | None,
) -> EncodedArrays:
    """Return arrays of several utterances as they are stored: those that are not are encoded."""
    if isinstance(arrays, EncodedArrays):
        return arrays
    return EncodedArrays.of(
        [
            each if isinstance(each, EncodedArray) else encoded(id, each, feature, blocks)
            for id, each in zip(ids, arrays, strict=True)
        ]
    )


def bytes_of(array: Array) -> EncodedArray:
    """Return an array (rows, *dims) as it is stored without a codec."""
    if array.size == 0:
        return EncodedArray(len(array), ())
    return EncodedArray(len(array), (array.reshape(-1).view(np.uint8).data,))


def pieces_of(packed: Array, lengths: Sequence[int]) -> EncodedArrays:
    """Return arrays that lie one behind the other, (rows, *dims), as they are stored raw."""
    rows = np.array(lengths, np.int64)
    nbytes = rows * (packed.nbytes // max(len(packed), 1))
    blocks = (nbytes > 0).astype(np.int64)
    return EncodedArrays(rows, blocks, nbytes[nbytes > 0], [packed.reshape(-1).view(np.uint8).data])
