"""`estimate`: time and bytes of a cache to be, from a few utterances in each format."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.adoption.adopt import as_cache, foreign_source
from featcache.declaration import Features, FeatureStorageConfig
from featcache.errors import ConfigError, FeatureError, MissingDependencyError
from featcache.extraction.converting.read_back import declared_as
from featcache.extraction.table_rows import TableRow, TableRows, table_of
from featcache.interface import Ints, storage_dtype
from featcache.reading.generation import Generation
from featcache.reading.opening import CachePath
from featcache.registry import backend_names, get_backend
from featcache.tables.table import FeatureTable
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.part_writer import PartWriter

# `Trial`: a few utterances written for trial, to tell what all of them will take.

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
        opened = Generation.at(path)
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


# `Forecast`: the bytes and the seconds that rows of a table will take, by a trial on some.

TRIAL_UTTERANCES = 64
TRIAL_BYTES = 16 << 20  # of arrays, at most, but for a few utterances
FEW = 4
# of small utterances so many are tried: what formats note beside each array tells only then
MANY_UTTERANCES, MANY_BYTES = 1024, 1 << 20


@dataclass(frozen=True)
class Forecast:
    """Sizes of a cache that is to be written."""

    nbytes: int  # on disk
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
    """Return what rows will take as `features` declare them; `directory` is on the disk tried.

    Raises what a `CacheWriter` raises, for the sample.
    """
    trial: Trial = trial_of(sample.rows, features, directory)
    raw = raw_of(source, rows, features)
    read_s = sample.byte_s * float(source.nbytes(rows).sum())
    return Forecast(trial.nbytes(len(rows), raw), read_s + trial.seconds(raw))


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
    """Return a number of bytes in the unit that fits.

    >>> said_bytes(1.5e9), said_bytes(20_000)
    ('1.5 GB', '20 kB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


# `Estimate`: a table of the ways to store features, with the bytes and hours of each.


@dataclass(frozen=True)
class StorageEstimate:
    """Bytes and hours of one feature, stored in one way."""

    feature: str
    backend: str
    codec: str
    dtype: str
    nbytes: int  # of all files of a cache of this feature alone
    hours: float  # in one process: until the arrays are there, and to write them
    declared: bool = False  # whether it is what was asked for
    lossless: bool = True  # of the codec


@dataclass(frozen=True, repr=False, kw_only=True)
class Estimate:
    """Bytes and hours of features; printed, a table.

    Attributes:
        utterances: how many there are.
        frames: of all utterances, by feature; 1 an utterance without a time axis.
        nbytes: of all files of the cache, as declared.
        hours: of one process, as declared.
        rows: each way to store each feature, as declared first.
    """

    utterances: int
    frames: Mapping[str, int]
    nbytes: int
    hours: float
    rows: tuple[StorageEstimate, ...]

    def __repr__(self) -> str:
        frames = ", ".join(f"{count:,} of {name}" for name, count in self.frames.items())
        head = (
            f"{self.utterances:,} utterances, frames: {frames}\n"
            f"as declared: {said_bytes(self.nbytes)}, {said_hours(self.hours)} in one process"
        )
        table = [("feature", "backend", "codec", "dtype", "size", "time", "")]
        for row in self.rows:
            what = "as declared" if row.declared else "" if row.lossless else "lossy"
            size, time = said_bytes(row.nbytes), said_hours(row.hours)
            table.append((row.feature, row.backend, row.codec, row.dtype, size, time, what))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
            for cells in table
        )
        return "\n".join([head, *lines])


def said_hours(hours: float) -> str:
    """Return a time in the unit that fits.

    >>> said_hours(2.5), said_hours(0.1), said_hours(0.001)
    ('2.5 h', '6 min', '3.6 s')
    """
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{hours * 60:.2g} min" if hours * 60 >= 1 else f"{hours * 3600:.2g} s"


# `estimate`: bytes and hours of features before they are computed or converted.


def estimate(
    source: FeatureTable | CachePath,
    features: Features | Iterable[str | FeatureStorageConfig] | None = None,
    *,
    utterances: int = TRIAL_UTTERANCES,
    adopting: Mapping[str, object] | None = None,
) -> Estimate:
    """Return bytes and hours of features by backend, codec and dtype, from a few utterances.

    A sample of all lengths is read, and written for trial beside the system's temporary files: as
    declared, and in each other way that can hold it. Bytes are those of all files of the cache; raw
    ones are within 3 %, and those of codecs as far as the sample is like the rest. Hours are those
    of one process on this machine and that disk: reading, then writing. What is still to be
    computed is estimated by a cache of a part of it; a run shows its MB/s and the time left.

    Args:
        source: a cache, its path or a view. A file or folder of features that others wrote is
            adopted for the while.
        features: names of features, or declarations; None: all as they are.
        utterances: how many are tried; fewer where they are large, more where they are small.
        adopting: settings of `featcache.adopt` for a source that is no cache.

    Raises `ConfigError` where there is nothing to try, `AdoptionError` for what cannot be adopted;
    otherwise what writing raises.

    >>> import numpy as np, tempfile, featcache
    >>> path = tempfile.mkdtemp()
    >>> with featcache.CacheWriter(path, [featcache.FeatureStorageConfig("f")]) as writer:
    ...     for number in range(3):
    ...         writer.write(f"utt-{number}", {"f": np.ones((300, 80), np.float32)})
    >>> told = featcache.inspect.estimate(path)
    >>> told.utterances, told.frames, round(told.nbytes, -5)
    (3, {'f': 900}, 300000)
    """
    whole_number("utterances", utterances, 1)
    foreign = foreign_source(source)
    if foreign is None:
        return _of_stored(source, features, utterances)
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as beside,
        as_cache(foreign, Path(beside), adopting or {}, copies=False) as adopted,
    ):
        return _of_stored(adopted, features, utterances)


def _of_stored(
    source: FeatureTable | CachePath,
    features: Features | Iterable[str | FeatureStorageConfig] | None,
    utterances: int,
) -> Estimate:
    table = table_of(source)
    declared = declared_as(table, features)
    rows, everything = TableRows(table, tuple(declared)), np.arange(len(table))
    sample = sample_of(rows, everything, utterances)
    whole = forecast(rows, everything, declared, sample)
    alone = replace(sample, rows=[row._replace(annotations={}) for row in sample.rows])
    tried = [
        each
        for feature in declared.values()
        for way in (feature, *_other_ways(feature))
        if (each := _row(way, rows, alone, declared=way is feature)) is not None
    ]
    frames = {name: int(table.lengths(name).sum()) for name in declared}
    return Estimate(
        utterances=len(table),
        frames=frames,
        nbytes=whole.nbytes,
        hours=whole.seconds / 3600,
        rows=tuple(tried),
    )


def _row(
    feature: FeatureStorageConfig, source: TableRows, sample: Sample, *, declared: bool
) -> StorageEstimate | None:
    """Try one way to store a feature; None for one that cannot hold it, or lacks its library."""
    everything = np.arange(len(source.table))
    try:
        coming = forecast(source, everything, {feature.name: feature}, sample)
        codec = feature.make_codec()
    except (FeatureError, ConfigError, MissingDependencyError):
        if declared:
            raise
        return None
    return StorageEstimate(
        feature.name,
        feature.backend,
        feature.codec,
        feature.dtype,
        coming.nbytes,
        coming.seconds / 3600,
        declared=declared,
        lossless=codec is None or codec.lossless,
    )


def _other_ways(feature: FeatureStorageConfig) -> Iterator[FeatureStorageConfig]:
    """Iterate over the other ways to store a feature."""
    halves = ["float16"] if feature.dtype in ("float32", "float64") else []
    content = {**feature.to_json(), "options": {}, "codec_options": {}}
    for backend in backend_names():
        for codec in get_backend(backend).codecs:
            for dtype in (feature.dtype, *halves):
                way = {"backend": backend, "codec": codec, "dtype": dtype}
                if (feature.backend, feature.codec, feature.dtype) == tuple(way.values()):
                    continue
                try:
                    yield FeatureStorageConfig.from_json({**content, **way})
                except (ConfigError, MissingDependencyError):  # it cannot hold this dtype
                    continue
