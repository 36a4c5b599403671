"""`Trial`: a few utterances written for trial, to tell what all of them will take."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.extraction.table_rows import TableRow
from featcache.interface import Ints, storage_dtype
from featcache.store.reading.generation import Generation
from featcache.store.writing.cache_writer import CacheWriter
from featcache.store.writing.part_writer import PartWriter

FILLING_BYTES = 4096  # of one value
PREFIX = "work-trial-"  # of the directory of a trial


@dataclass(frozen=True)
class Trial:
    """Sizes and time, as a trial tells them.

    Args:
        of_cache: bytes of an empty cache.
        of_utterance: bytes of an utterance beside its arrays.
        shares: stored bytes of a byte of the arrays before any codec, by feature.
        byte_s: seconds that a byte of the arrays takes to be written.
    """

    of_cache: float
    of_utterance: float
    shares: Mapping[str, float]
    byte_s: float

    def nbytes(self, utterances: int, raw: Mapping[str, float]) -> int:
        """Return the bytes of a cache of so many utterances; `raw` are those of their arrays."""
        arrays = sum(share * raw[name] for name, share in self.shares.items())
        return round(self.of_cache + self.of_utterance * utterances + arrays)

    def seconds(self, raw: Mapping[str, float]) -> float:
        """Return the seconds that writing takes."""
        return self.byte_s * sum(raw.values())


def chosen(sizes: NDArray[np.float64] | Ints, number: int) -> Ints:
    """Return rows of all sizes, some of the smallest and of the largest among them, ascending.

    >>> chosen(np.array([5, 1, 3, 2, 4, 6]), 3).tolist()
    [3, 4, 5]
    """
    order = np.argsort(sizes, kind="stable")
    places = ((np.arange(number) + 0.5) * len(sizes) / number).astype(np.int64)
    return np.sort(order[np.unique(places)])


def raw_bytes(
    arrays: Mapping[str, NDArray[np.generic]], features: Mapping[str, FeatureStorageConfig]
) -> dict[str, int]:
    """Return the bytes of an utterance's arrays in the declared dtypes, before any codec."""
    return {
        name: math.prod(arrays[name].shape) * storage_dtype(feature.dtype).itemsize
        for name, feature in features.items()
    }


def trial_of(
    sample: Sequence[TableRow],
    features: Mapping[str, FeatureStorageConfig],
    directory: Path | None = None,
) -> Trial:
    """Write utterances for trial, half of them and then all; what was written is removed.

    Args:
        sample: the utterances.
        features: the declarations.
        directory: the disk that is tried; None: that of temporary files.

    Raises what a `CacheWriter` raises.
    """
    tried = [_written(some, features, directory) for some in (sample[::2], sample)]
    half, whole = tried
    rest = [each.nbytes - sum(each.stored.values()) - each.filling for each in tried]
    more = len(sample) - len(sample[::2])
    of_utterance = (rest[1] - rest[0]) / more if more else 0.0
    raw = sum(whole.raw.values()) - sum(half.raw.values())
    took_s = whole.took_s - half.took_s
    if raw <= 0 or took_s <= 0:
        raw, took_s = sum(whole.raw.values()), whole.took_s
    return Trial(
        of_cache=rest[1] - of_utterance * len(sample) + whole.filling,
        of_utterance=of_utterance,
        shares={name: whole.stored[name] / max(whole.raw[name], 1) for name in features},
        byte_s=took_s / max(raw, 1),
    )


@dataclass(frozen=True)
class _Written:
    nbytes: int  # of all files
    stored: Mapping[str, int]  # bytes of arrays as they are stored
    raw: Mapping[str, int]
    took_s: float
    filling: int  # bytes at the ends of containers that say nothing, as the rest of a chunk


def _written(
    sample: Sequence[TableRow],
    features: Mapping[str, FeatureStorageConfig],
    directory: Path | None,
) -> _Written:
    raw = dict.fromkeys(features, 0)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=directory) as folder:
        path, begun = Path(folder) / "cache", time.perf_counter()
        with CacheWriter(path, features), PartWriter(path, features) as writer:
            writer.trust_shapes()
            for row in sample:
                arrays = {name: row.arrays[name] for name in features}
                writer.write(row.id, arrays, annotations=row.annotations, stamps=row.stamps)
                for name, nbytes in raw_bytes(arrays, features).items():
                    raw[name] += nbytes
        took_s = time.perf_counter() - begun
        opened = Generation(path)
        stored = {name: int(opened.index.features[name].nbytes.sum()) for name in features}
        filling = _filling(path, opened, features)
        opened.close()
        files = (file for file in path.rglob("*") if file.is_file())
        return _Written(sum(file.stat().st_size for file in files), stored, raw, took_s, filling)


def _filling(path: Path, opened: Generation, features: Iterable[str]) -> int:
    """Count the bytes behind the last array of each container that repeat one value for long."""
    containers, total = opened.index.containers, 0
    ends = np.zeros(len(containers), np.int64)
    for name in features:
        columns = opened.index.features[name]
        np.maximum.at(ends, columns.container, columns.offset + columns.nbytes)
    for number in np.flatnonzero(ends).tolist():
        tail = np.fromfile(path / containers.path(number), np.uint8, offset=int(ends[number]))
        bounds = np.flatnonzero(np.diff(tail.astype(np.int16), prepend=-1, append=-1))
        runs = np.diff(bounds)
        total += int(runs[runs >= FILLING_BYTES].sum())
    return total
