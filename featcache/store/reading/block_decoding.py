"""Decoding of a codec's blocks, with its promises checked: any package may bring a codec."""

from __future__ import annotations

from typing import cast

import numpy as np

from featcache.errors import CorruptCacheError, FeatcacheError
from featcache.interface import Array, Codec, EncodedArray, FeatureSpec


def decoded(
    codec: Codec, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
) -> Array:
    """Decode a block, whoever wrote the codec; raises `CorruptCacheError` if it breaks its promise.

    Without this, a block of one row too many would be taken for the next one's, and one of other
    dims be repeated to fill a frame.
    """
    try:
        block = np.asanyarray(codec.decode(data, dtype, dims, rows))
    except FeatcacheError:
        raise
    except Exception as error:
        raise CorruptCacheError(
            f"codec {codec.name!r} cannot decode a block of {len(data)} bytes: {error!r}"
        ) from error
    if block.dtype != dtype or block.ndim == 0 or block.shape[1:] != dims or len(block) > rows:
        raise CorruptCacheError(
            f"codec {codec.name!r} decodes a block of {len(data)} bytes to {block.dtype} of shape "
            f"{block.shape}, not {dtype} of up to {(rows, *dims)}"
        )
    return block


def joined(spec: FeatureSpec, array: EncodedArray, block_rows: int) -> Array:
    """Return a whole array of shape (rows, *dims), storage dtype, from its blocks.

    Args:
        spec: the feature.
        array: its rows and its blocks.
        block_rows: rows a block of the codec; 0: the whole array is one block.
    """
    dtype, rows = spec.storage_dtype, array.rows
    if spec.codec is None or not array.blocks:
        flat = np.frombuffer(b"".join(array.blocks), dtype)
        return cast(Array, flat.reshape(rows, *spec.dims))
    size = block_rows or rows
    blocks = (memoryview(block) for block in array.blocks)
    frames = [decoded(spec.codec, block, dtype, spec.dims, size) for block in blocks]
    return np.concatenate(frames)[:rows]
