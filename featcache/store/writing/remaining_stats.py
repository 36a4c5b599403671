"""Statistics of the rows of a part that remain when others are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from featcache.interface import Ints
from featcache.registry import RAW, get_codec
from featcache.stats import FeatureStats
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.manifest import Manifest
from featcache.store.format.part import SealedPart
from featcache.store.format.roots import NO_ROOTS, Roots
from featcache.store.reading.adopted_files import AdoptedFiles
from featcache.store.reading.containers import Containers
from featcache.store.reading.feature_arrays import FeatureArrays

# Subtracting multiplies the error of a variance by what it is divided by: ten at most. Where a mean
# is beyond 1,000 standard deviations, that error is no longer below 1e-12.
_LEAST_LEFT = 0.1
_MOST_DEVIATIONS = 1000.0


def remaining_stats(
    cache: Path,
    part: SealedPart,
    left_out: Ints,
    name: str,
    manifest: Manifest,
    roots: Roots = NO_ROOTS,
) -> FeatureStats:
    """Return the statistics of a feature over the rows of a part that remain.

    The smaller of what remains and what is left out is read, unless digits were lost then.
    """
    index = part.index(cache, [name])
    alone = dataclasses.replace(manifest, dims=part.header.dims, parts=(part.entry,))
    adopted = AdoptedFiles.of(cache, [part.entry], index.containers, roots)
    containers = Containers.of(cache / part.directory, index.containers, adopted=adopted)
    arrays = FeatureArrays(alone, name, index, containers)
    nbytes = index.features[name].nbytes  # of extents, which are in the order of the rows
    first = index.features[name].first
    gone = sum(int(nbytes[first[row] : first[row + 1]].sum()) for row in left_out.tolist())
    dims = part.header.dims[name]
    if 2 * gone < int(nbytes.sum()) and _is_lossless(manifest, name):
        found = without(index.stats[name], _stats_of(arrays, left_out.tolist(), dims))
        if found is not None:
            return found
    return _stats_of(arrays, np.setdiff1d(np.arange(len(index)), left_out).tolist(), dims)


def without(whole: FeatureStats, some: FeatureStats) -> FeatureStats | None:
    """Return the statistics of all frames but some of them; None if that would lose digits.

    >>> some = FeatureStats.of([[5.0]])
    >>> found = without(FeatureStats.of([[1.0], [3.0], [5.0]]), some)
    >>> (found.count, found.mean.tolist(), found.m2.tolist()) if found else None
    (2, [2.0], [2.0])
    """
    count = whole.count - some.count
    if not some.count or count <= 0:
        return whole if not some.count else None
    with np.errstate(over="ignore", invalid="ignore"):  # such as of damaged arrays
        # the merge of Chan, Golub & LeVeque, The American Statistician 37(3), 1983, solved for one
        mean = whole.mean + (whole.mean - some.mean) * (some.count / count)
        delta = mean - some.mean
        m2 = whole.m2 - some.m2 - delta * delta * (some.count * count / whole.count)
        near = mean * mean * count <= _MOST_DEVIATIONS**2 * m2
    if not (near & (m2 >= _LEAST_LEFT * whole.m2)).all():  # also where NaN is among them
        return None
    return FeatureStats(count, mean, m2)


def _stats_of(arrays: FeatureArrays, rows: Iterable[int], dims: tuple[int, ...]) -> FeatureStats:
    stats = FeatureStats.empty(dims)
    for row in rows:
        frames = from_storage(arrays.read(row), arrays.declared_dtype)
        stats = stats.merge(FeatureStats.of(frames if arrays.has_frames else frames[np.newaxis]))
    return stats


def _is_lossless(manifest: Manifest, name: str) -> bool:
    """Tell whether the statistics of a part are those of its arrays as they read back."""
    codec = manifest.features[name]["codec"]
    return codec == RAW or get_codec(codec).lossless
