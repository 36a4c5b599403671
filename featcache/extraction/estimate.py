"""`estimate`: time, bytes and losses of a cache to be, from a few utterances in each format."""

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
from featcache._tensors import as_tensor
from featcache.declaration import Features, FeatureStorageConfig
from featcache.errors import ConfigError, FeatureError, MissingDependencyError, bytes_text, counted
from featcache.extraction.conversion_source import (
    ConversionSource,
    TableRow,
    arrays_nbytes,
)
from featcache.extraction.foreign_rows import LibraryRows, Source, opened_source, rows_of
from featcache.interface import Array, Ints, storage_dtype
from featcache.reading import Generation
from featcache.registry import backend_names, get_backend, is_lossless
from featcache.store import open as open_cache
from featcache.tables import FeatureTable, boxed, escaped, grid, tiles
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.part_writer import PartWriter

# A few utterances written for trial, to tell what all of them will take.

FILLING_BYTES = 4096  # of one value
BATCH = 16  # utterances that are read together
TIMES_READ = 2  # the quickest counts
ALONE = 32_000  # numbers: of more, torch hands a share to other threads
PREFIX = "work-trial-"  # of the directory of a trial


def chosen(sizes: NDArray[np.float64] | Ints, number: int) -> Ints:
    """Return rows of all sizes, some of the smallest and of the largest among them, ascending.

    >>> chosen(np.array([5, 1, 3, 2, 4, 6]), 3).tolist()
    [3, 4, 5]
    """
    order = np.argsort(sizes, kind="stable")
    places = ((np.arange(number) + 0.5) * len(sizes) / number).astype(np.int64)
    return np.sort(order[np.unique(places)])


@dataclass(frozen=True)
class TrialReading:
    """Numbers of a trial as they come back: how far off they are, and how fast they come."""

    largest_error: float = 0.0  # of a number
    rms_error: float = 0.0  # of all numbers
    rms_of_std: float = 0.0  # of numbers divided by the standard deviation of their dimension
    cosine: float = 1.0  # of an utterance with what was written: the least
    gb_s: float = 0.0  # 1e9 bytes a second of a thread's own time, floats as float32

    @classmethod
    def of(cls, path: Path, feature: str, sample: Sequence[TableRow]) -> TrialReading:
        """Read a feature of a cache of the sample, in batches of like lengths."""
        exact = {row.id: row.arrays[feature] for row in sample}
        ids = sorted(exact, key=lambda id: exact[id].size)
        largest, cosine, took_s = 0.0, 1.0, math.inf
        squares = np.zeros(())  # of errors, by dimension
        with open_cache(path) as cache:
            axis = slice(None) if cache.has_frames(feature) else None
            for id, array in exact.items():
                found = cache.read(id, feature)
                if not np.array_equal(found, array, equal_nan=True):
                    apart, like = _apart(array, found)
                    largest, cosine = max(largest, float(apart.max(initial=0))), min(cosine, like)
                    squares = squares + np.square(apart[axis]).sum(axis=0)
            for _ in range(TIMES_READ):
                begun = time.thread_time()
                for at in range(0, len(ids), BATCH):
                    _as_single(cache.read_batch(ids[at : at + BATCH], feature).data)
                took_s = min(took_s, time.thread_time() - begun)
        numbers = sum(array.size for array in exact.values())
        itemsize = 4 if found.dtype.kind == "f" else found.dtype.itemsize
        gb_s = numbers * itemsize / max(took_s, 1e-9) / 1e9
        rms = math.sqrt(float(squares.sum()) / max(numbers, 1))
        of_std = _of_std(squares, [array[axis] for array in exact.values()]) if rms else 0.0
        return cls(largest, rms, of_std, cosine, gb_s)


def _apart(array: Array, found: Array) -> tuple[NDArray[np.float64], float]:
    """Return how far each number is off, if it is finite, and the cosine of both arrays."""
    finite = np.isfinite(array)
    a, b = (np.where(finite, each, 0).astype(np.float64) for each in (array, found))
    apart = np.abs(a - b)
    # not `@`, for which BLAS wakes threads
    pairs = ((a, b), (a, a), (b, b))
    like, of_a, of_b = (float(np.einsum("i,i", x.ravel(), y.ravel())) for x, y in pairs)
    norms = math.sqrt(of_a * of_b)
    return apart, like / norms if norms else float(not apart.any())


def _of_std(squares: NDArray[np.float64], exact: Sequence[Array]) -> float:
    """Return the rms error of numbers that are divided by the deviation of their dimension.

    `squares` are sums of squared errors by dimension, `exact` arrays of shape (frames, *dims). A
    dimension that is constant counts for nothing.
    """
    numbers = np.concatenate(exact).astype(np.float64)
    finite = np.isfinite(numbers)
    numbers[~finite] = 0
    count = np.maximum(finite.sum(axis=0), 1)
    numbers -= numbers.sum(axis=0) / count
    numbers[~finite] = 0
    spread = np.square(numbers, out=numbers).sum(axis=0)
    shares = squares[spread > 0] / spread[spread > 0]
    return math.sqrt(float(shares.mean())) if shares.size else 0.0


def _as_single(numbers: Array) -> object:
    """Return float16 as float32, by torch where it is there: NumPy takes 16 times as long."""
    if numbers.dtype != np.float16:
        return numbers
    pieces = [numbers.reshape(-1)[at : at + ALONE] for at in range(0, numbers.size, ALONE)]
    try:
        return [as_tensor(each, "float16", "float32", needed_by="estimate") for each in pieces]
    except MissingDependencyError:
        return numbers.astype(np.float32)


@dataclass(frozen=True)
class _Written:
    nbytes: int  # of all files
    stored: Mapping[str, int]  # bytes of arrays as they are stored
    raw: Mapping[str, int]
    took_s: float
    filling: int  # bytes at the ends of containers that say nothing, as the rest of a chunk
    found: TrialReading | None = None  # of its one feature, where that was asked for

    @property
    def beside(self) -> int:
        """Bytes that are neither arrays nor filling."""
        return self.nbytes - sum(self.stored.values()) - self.filling


def _written(
    sample: Sequence[TableRow],
    features: Mapping[str, FeatureStorageConfig],
    directory: Path | None,
    *,
    read: bool = False,
) -> _Written:
    raw = dict.fromkeys(features, 0)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=directory) as folder:
        path, begun = Path(folder) / "cache", time.perf_counter()
        with CacheWriter(path, features), PartWriter(path, features) as writer:
            writer.trust_shapes()
            for row in sample:
                arrays = {name: row.arrays[name] for name in features}
                writer.write(row.id, arrays, annotations=row.annotations, stamps=row.stamps)
                for name, feature in features.items():
                    size = math.prod(arrays[name].shape)
                    raw[name] += size * storage_dtype(feature.dtype).itemsize
        took_s = time.perf_counter() - begun
        opened = Generation.at(path)
        stored = {name: int(opened.index.features[name].nbytes.sum()) for name in features}
        filling = _filling(path, opened, features)
        opened.close()
        files = (file for file in path.rglob("*") if file.is_file())
        nbytes = sum(file.stat().st_size for file in files)
        found = TrialReading.of(path, next(iter(features)), sample) if read else None
        return _Written(nbytes, stored, raw, took_s, filling, found)


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
    found: TrialReading | None = None  # of the sample


@dataclass(frozen=True)
class Sample:
    """Some rows of a table.

    Args:
        rows: what they hold.
        byte_s: seconds that a stored byte took to be read.
    """

    rows: list[TableRow]
    byte_s: float


def sample_of(source: ConversionSource, rows: Ints, number: int = TRIAL_UTTERANCES) -> Sample:
    """Read a sample of rows, of all lengths."""
    sizes = arrays_nbytes(source, rows)
    mean = max(float(sizes.mean()), 1.0)
    many = min(MANY_UTTERANCES, int(MANY_BYTES / mean) or 1)
    number = max(min(number, int(TRIAL_BYTES / mean)), FEW, many)
    number = min(len(rows), number)
    picked = chosen(sizes, number)
    begun = time.perf_counter()
    found = list(source.read(rows[picked]))
    return Sample(found, (time.perf_counter() - begun) / max(int(sizes[picked].sum()), 1))


def forecast(
    source: ConversionSource,
    rows: Ints,
    features: Mapping[str, FeatureStorageConfig],
    sample: Sample,
    directory: Path | None = None,
    *,
    read: bool = False,
) -> Forecast:
    """Return what rows will take as `features` declare them, by writing half the sample, then all.

    `directory` is on the disk that is tried; what was written is removed, and with `read`, of one
    feature, read before. Raises what a `CacheWriter` raises, for the sample.
    """
    some = sample.rows
    half = _written(some[::2], features, directory)
    all = _written(some, features, directory, read=read)
    more = len(some) - len(some[::2])
    of_utterance = (all.beside - half.beside) / more if more else 0.0  # beside its arrays
    of_cache = all.beside - of_utterance * len(some) + all.filling
    bytes_tried = sum(all.raw.values()) - sum(half.raw.values())
    took_s = all.took_s - half.took_s
    if bytes_tried <= 0 or took_s <= 0:
        bytes_tried, took_s = sum(all.raw.values()), all.took_s
    raw = raw_of(source, rows, features)
    # in the declared dtypes, before any codec, to what is stored of them
    arrays = sum(raw[name] * all.stored[name] / max(all.raw[name], 1) for name in features)
    read_s = sample.byte_s * float(arrays_nbytes(source, rows).sum())
    write_s = sum(raw.values()) * took_s / max(bytes_tried, 1)
    nbytes = round(of_cache + of_utterance * len(rows) + arrays)
    return Forecast(nbytes, read_s + write_s, all.found)


def raw_of(
    source: ConversionSource, rows: Ints, features: Mapping[str, FeatureStorageConfig]
) -> dict[str, int]:
    """Return the bytes of arrays in the declared dtypes, by feature."""
    return {
        name: int(source.lengths(name)[rows].sum())
        * math.prod(source.dims(name))
        * storage_dtype(feature.dtype).itemsize
        for name, feature in features.items()
    }


# `Estimate`: a table of the ways to store features, with the bytes, hours and losses of each.


_LOSSES = ("largest error", "rms error", "of std", "cosine", "read GB/s")
_HEAD = ("feature", "backend", "codec", "dtype", "size", "time", *_LOSSES, "")
MOST_SHOWN = 20  # ways in HTML
LEAST_COSINE = 0.9999  # of a way that is advised
MOST_OF_STD = 0.014  # rms error by deviation: sqrt(2 - 2 * LEAST_COSINE), its bound with means of 0
LEAST_GB_S = 1.0  # or a third of the fastest way, where all are slower
NEAR = 1.25  # of ways that differ by no more the smaller one: how fast they are is noisy


@dataclass(frozen=True)
class StorageEstimate:
    """Bytes, hours and losses of one feature, stored in one way.

    Losses are those of the sample, against the numbers that the source has.
    """

    feature: str
    backend: str
    codec: str
    dtype: str
    nbytes: int  # of all files of a cache of this feature alone
    hours: float  # in one process: until the arrays are there, and to write them
    declared: bool = False  # whether it is what was asked for
    lossless: bool = True  # of the codec
    largest_error: float = 0.0  # of a number
    rms_error: float = 0.0  # of all numbers
    rms_of_std: float = 0.0  # of numbers divided by the standard deviation of their dimension
    cosine: float = 1.0  # of an utterance with what the source has: the least
    read_gb_s: float = 0.0  # 1e9 bytes a second of a thread, in batches, floats as float32


@dataclass(frozen=True, repr=False, kw_only=True)
class Estimate:
    """Bytes, hours and losses of features; printed, a table.

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
        smallest = min(self.rows, key=lambda row: row.nbytes, default=None)
        least = f"; least {bytes_text(smallest.nbytes)}" if smallest is not None else ""
        way = f" of {smallest.feature} in {smallest.backend} {smallest.codec}" if smallest else ""
        return (
            f"<Estimate: {counted(self.utterances, 'utterance')}, as declared "
            f"{bytes_text(self.nbytes)}, {said_hours(self.hours)}{least}{way}>"
        )

    def __str__(self) -> str:
        table = [_HEAD, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
            for cells in table
        )
        return "\n".join([*self._told(), *lines, self.advice])

    @property
    def advice(self) -> str:
        """One sentence: the smallest way of each feature that loses little and is read quickly."""
        taken = [_advised(name, self.rows) for name in self.frames]
        if not taken:
            return ""
        loses = "" if all(row.largest_error == 0 for row, _ in taken) else _ONLY_TRAINING
        listed = "; ".join(
            f"{row.feature} as {row.dtype} {row.codec} in {row.backend}, "
            + ("as declared" if row.declared else f"{share:.2f} of the bytes as declared")
            for row, share in taken
        )
        return (
            f"smallest with a cosine of {LEAST_COSINE} or more, an rms error of "
            f"{MOST_OF_STD:.1%} of the standard deviation or less, and read at {LEAST_GB_S:g} GB/s "
            f"or a third of the fastest (slower counts as larger): {listed}{loses}"
        )

    def _repr_html_(self) -> str:
        declared = [number for number, row in enumerate(self.rows) if row.declared]
        rows = [*self._cells()]
        most = rows[:MOST_SHOWN]
        figures = [
            (f"{self.utterances:,}", "utterances"),
            (bytes_text(self.nbytes), "as declared"),
            (said_hours(self.hours), "in one process"),
        ]
        return boxed(
            tiles(figures),
            grid(_HEAD, most, bold=declared, more=len(rows) - len(most)),
            f"<div>{escaped(self.advice, len(self.advice))}</div>",
        )

    def _told(self) -> list[str]:
        frames = ", ".join(f"{count:,} of {name}" for name, count in self.frames.items())
        return [
            f"{self.utterances:,} utterances, frames: {frames}",
            f"as declared: {bytes_text(self.nbytes)}, {said_hours(self.hours)} in one process",
        ]

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            what = "as declared" if row.declared else "" if row.lossless else "lossy"
            size, time = bytes_text(row.nbytes), said_hours(row.hours)
            yield row.feature, row.backend, row.codec, row.dtype, size, time, *losses(row), what


_ONLY_TRAINING = "; whether that is enough, only training tells"


def _advised(feature: str, rows: Iterable[StorageEstimate]) -> tuple[StorageEstimate, float]:
    """Return the way that is advised, and its share of the bytes as declared."""
    ways = [row for row in rows if row.feature == feature]
    (declared,) = (row for row in ways if row.declared)
    fast = min(LEAST_GB_S, max(row.read_gb_s for row in ways) / 3)
    good = [row for row in ways if row.cosine >= LEAST_COSINE and row.rms_of_std <= MOST_OF_STD]
    # no edge at which what is as good as read quickly is out: speeds differ from run to run
    costs = [row.nbytes * max(1.0, fast / max(row.read_gb_s, 1e-9)) for row in good]
    near = [row for row, cost in zip(good, costs, strict=True) if cost <= min(costs) * NEAR]
    # bytes are those of a sample: what is about as small is no reason to change
    best = min(near, key=lambda row: row.nbytes * (0.97 if row.declared else 1), default=declared)
    return best, best.nbytes / max(declared.nbytes, 1)


def losses(row: StorageEstimate) -> tuple[str, str, str, str, str]:
    """Return the cells of a way's errors, cosine and speed; exact ones are short.

    >>> losses(StorageEstimate("f", "memmap", "int8", "float32", 9, 0.1, cosine=0.99998765))
    ('0', '0', '0 %', '0.999987', '0')
    """
    cosine = f"{math.floor(row.cosine * 1e6) / 1e6:.6f}" if row.cosine < 1 else "1"
    errors = f"{row.largest_error:.2g}", f"{row.rms_error:.2g}", f"{row.rms_of_std * 100:.2g} %"
    return *errors, cosine, f"{row.read_gb_s:.2g}"


def said_hours(hours: float) -> str:
    """Return a time in the unit that fits.

    >>> said_hours(2.5), said_hours(0.1), said_hours(0.001)
    ('2.5 h', '6 min', '3.6 s')
    """
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{hours * 60:.2g} min" if hours * 60 >= 1 else f"{hours * 3600:.2g} s"


# `estimate`: bytes, hours and losses of features before they are computed or converted.


def estimate(
    source: Source,
    features: Features | Iterable[str | FeatureStorageConfig] | None = None,
    *,
    utterances: int = TRIAL_UTTERANCES,
    adopting: Mapping[str, object] | None = None,
) -> Estimate:
    """Return bytes, hours and losses of features by backend, codec, dtype, from a few utterances.

    A sample of all lengths is read, and written for trial beside the system's temporary files: as
    declared, and in each other way that can hold it. Bytes are those of all files of the cache; raw
    ones are within 3 %, and those of codecs as far as the sample is like the rest. Hours are those
    of one process on this machine and that disk: reading, then writing. What is still to be
    computed is estimated by a cache of a part of it; a run shows its MB/s and the time left.

    Each way is read back, too: its largest and its rms error against the source's numbers, the
    latter also of numbers that are divided by the standard deviation of their dimension, the least
    cosine of an utterance, and the speed in batches of floats as float32, one thread, nothing from
    the disk. `advice` is a sentence about them.

    Args:
        source: a cache, its path or a view. What `featcache.convert` takes of others is
            adopted for the while, or read by its library.
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
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as beside,
        opened_source(source, Path(beside), adopting or {}) as opened,
    ):
        return _of_opened(opened, features, utterances)


def _of_opened(
    source: FeatureTable | LibraryRows,
    features: Features | Iterable[str | FeatureStorageConfig] | None,
    utterances: int,
) -> Estimate:
    rows, declared = rows_of(source, features)
    everything = np.arange(len(rows.ids))
    sample = sample_of(rows, everything, utterances)
    whole = forecast(rows, everything, declared, sample)
    alone = replace(sample, rows=[row._replace(annotations={}) for row in sample.rows])
    tried = [
        each
        for feature in declared.values()
        for way in (feature, *_other_ways(feature))
        if (each := _row(way, rows, alone, declared=way is feature)) is not None
    ]
    frames = {name: int(rows.lengths(name).sum()) for name in declared}
    return Estimate(
        utterances=len(rows.ids),
        frames=frames,
        nbytes=whole.nbytes,
        hours=whole.seconds / 3600,
        rows=tuple(tried),
    )


def _row(
    feature: FeatureStorageConfig, source: ConversionSource, sample: Sample, *, declared: bool
) -> StorageEstimate | None:
    """Try one way to store a feature; None for one that cannot hold it, or lacks its library."""
    everything = np.arange(len(source.ids))
    try:
        coming = forecast(source, everything, {feature.name: feature}, sample, read=True)
    except (FeatureError, ConfigError, MissingDependencyError):
        if declared:
            raise
        return None
    found = coming.found or TrialReading()
    return StorageEstimate(
        feature.name,
        feature.backend,
        feature.codec,
        feature.dtype,
        coming.nbytes,
        coming.seconds / 3600,
        declared=declared,
        lossless=is_lossless(feature.codec),
        largest_error=found.largest_error,
        rms_error=found.rms_error,
        rms_of_std=found.rms_of_std,
        cosine=found.cosine,
        read_gb_s=found.gb_s,
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
