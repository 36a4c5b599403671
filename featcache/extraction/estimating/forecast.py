"""`Forecast`: the bytes and the seconds that rows of a table will take, by a trial on some."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.extraction.estimating.trial_cache import Trial, chosen, trial_of
from featcache.extraction.table_rows import TableRow, TableRows
from featcache.interface import Ints, storage_dtype

TRIAL_UTTERANCES = 64
TRIAL_BYTES = 16 << 20  # of arrays, at most, but for a few utterances
FEW = 4
# of small utterances so many are tried: what formats note beside each array tells only then
MANY_UTTERANCES, MANY_BYTES = 1024, 1 << 20


@dataclass(frozen=True)
class Forecast:
    """Sizes of a cache that is to be written."""

    nbytes: int  # on disk
    raw: int  # of the arrays in the declared dtypes, before any codec
    seconds: float  # in one process


@dataclass(frozen=True)
class Sample:
    """Some rows of a table.

    Args:
        rows: what they hold.
        byte_s: seconds that a stored byte took to be read.
    """

    rows: list[TableRow]
    byte_s: float


def sample_of(source: TableRows, rows: Ints, number: int = TRIAL_UTTERANCES) -> Sample:
    """Read a sample of rows, of all lengths."""
    sizes = source.nbytes(rows)
    mean = max(float(sizes.mean()), 1.0)
    number = max(min(number, int(TRIAL_BYTES / mean)), FEW, many(mean))
    number = min(len(rows), number)
    picked = chosen(sizes, number)
    begun = time.perf_counter()
    found = list(source.read(rows[picked]))
    return Sample(found, (time.perf_counter() - begun) / max(int(sizes[picked].sum()), 1))


def many(mean: float) -> int:
    """Return how many utterances of a mean size in bytes are tried at least.

    >>> many(100), many(1e6)
    (1024, 1)
    """
    return min(MANY_UTTERANCES, int(MANY_BYTES / mean) or 1)


def forecast(
    source: TableRows,
    rows: Ints,
    features: Mapping[str, FeatureStorageConfig],
    sample: Sample,
    directory: Path | None = None,
) -> Forecast:
    """Say what rows will take as `features` declare them; `directory` is on the disk that is tried.

    Raises what a `CacheWriter` raises, for the sample.
    """
    trial: Trial = trial_of(sample.rows, features, directory)
    raw = raw_of(source, rows, features)
    read_s = sample.byte_s * float(source.nbytes(rows).sum())
    return Forecast(trial.nbytes(len(rows), raw), sum(raw.values()), read_s + trial.seconds(raw))


def raw_of(
    source: TableRows, rows: Ints, features: Mapping[str, FeatureStorageConfig]
) -> dict[str, int]:
    """Return the bytes of arrays in the declared dtypes, by feature."""
    return {
        name: int(source.table.lengths(name)[rows].sum())
        * math.prod(source.table.dims(name))
        * storage_dtype(feature.dtype).itemsize
        for name, feature in features.items()
    }


def said_bytes(nbytes: float) -> str:
    """Say a number of bytes in the unit that fits.

    >>> said_bytes(1.5e9), said_bytes(20_000)
    ('1.5 GB', '20 kB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
