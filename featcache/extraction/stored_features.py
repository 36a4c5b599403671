"""Stored features compared with the same ones computed alone, and what makes them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.extraction.datasets import counted
from featcache.extraction.probe_source import ProbeSource
from featcache.interface import Array
from featcache.staleness.comparison import worst
from featcache.staleness.probe import Probed, as_rows, seen_frames
from featcache.staleness.unlike import Tolerance, Unlike, spread, unlike
from featcache.store.cache import Cache

_BLOCK_ROWS = 500  # that a lossy codec is tried with
_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
_SMALLEST = {"float16": 2.0**-24}  # below these, numbers become zero


def spreads_of(utterances: Mapping[str, Probed], features: Sequence[str]) -> dict[str, float]:
    """Return the spread of each feature over some utterances."""
    return {name: spread(seen_frames(utterances, name)) for name in features}


def unlike_stored(
    cache: Cache,
    id: str,
    alone: Probed,
    spreads: Mapping[str, float],
    tolerance: Tolerance,
    declared: Mapping[str, FeatureStorageConfig],
) -> Iterator[Unlike]:
    """Iterate over the features of an utterance that are stored otherwise than computed alone.

    The rounding of the declared dtype and the loss of the declared codec are no difference.
    """
    for name, config in declared.items():
        stored, computed = as_rows(cache.read(id, name)), alone.features[name]
        slack = _loss(computed.array, config) if computed.array.dtype.kind == "f" else 0.0
        found = unlike((id, name), computed, stored, spreads[name], tolerance, slack)
        if found is not None:
            yield found


def _loss(array: Array, config: FeatureStorageConfig) -> Array:
    """Return what storing as declared may move each number by."""
    rounding = np.abs(array.astype(np.float64)) * _EPSILON.get(config.dtype, 0.0)
    rounding += _SMALLEST.get(config.dtype, 0.0)
    codec = config.make_codec()
    if codec is None or codec.lossless or config.dtype != "float32":
        return rounding
    lost = 0.0
    rows = np.ascontiguousarray(array if config.time_axis == 0 else array[None], np.float32)
    for start in range(0, len(rows) if rows.size else 0, _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        data = memoryview(codec.encode(block))
        decoded = codec.decode(data, block.dtype, block.shape[1:], len(block))
        lost = max(lost, float(np.abs(np.subtract(decoded, block)).max()))
    return rounding + 2 * lost


def cause_of(found: Sequence[Unlike], source: ProbeSource, in_batch: Sequence[Unlike]) -> str:
    """Return why stored features differ: "batches", "workers", "either" or "neither".

    Args:
        found: the differences.
        source: knows batch size and workers.
        in_batch: differences of utterances that were computed here, as one batch and alone.
    """
    rounded = any(each.shapes is not None for each in found)
    if in_batch or (source.batch_size > 1 and (rounded or not source.in_workers)):
        return "batches"
    if source.in_workers:
        return "either" if source.batch_size > 1 else "workers"
    return "neither"


def told(compared: int, found: Sequence[Unlike], cause: str) -> str:
    """Return the warning about stored features that are others than those computed alone.

    Args:
        compared: utterances that were compared.
        found: the differences.
        cause: as `cause_of` gives it.
    """
    number = len({each.id for each in found})
    each = "; ".join(f"{one.feature} of {one.id!r} {one.told()}" for one in worst(found))
    are = "is" if number == 1 else "are"
    cures = {"batches": [_of_batches(found)], "workers": [_WORKERS], "neither": [_NEITHER]}
    cure = " Or: ".join(cures.get(cause, [_of_batches(found), _WORKERS]))
    of = f"{number} of {counted(compared)}"
    return f"{of} {are} stored otherwise than computed alone ({each}). {cure}"


_WORKERS = (
    "Workers compute in another state than this process: globals that were set, or classes that "
    "were patched after their import, environment variables, another device; set these where "
    "workers set them, too, and overwrite the cache"
)
_NEITHER = (
    "Something has changed while they were computed, or computing one utterance changes the next; "
    "keep no state between utterances, and overwrite the cache"
)


def _of_batches(found: Sequence[Unlike]) -> str:
    if any(each.shapes is not None for each in found):
        how = "count frames from absolute lengths, since relative ones are rounded,"
    elif all(each.at_the_end for each in found):
        how = "keep the padding out of the last frames (zero it in each layer),"
    else:
        how = "give the model a mask of the lengths and take means within each utterance only,"
    return (
        "Features depend on the other utterances of their batch, through the padding: "
        f"{how} or compute one utterance at a time (batch_size 1), and overwrite the cache"
    )
