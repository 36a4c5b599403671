"""`featcache.convert`: a cache, or what others wrote, in another format, codec or dtype."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from featcache._checks import directory, named_settings
from featcache._progress import Interval
from featcache.declaration import Features, FeatureStorageConfig
from featcache.errors import (
    ConfigError,
    CorruptCacheError,
    FeatureError,
    IncompleteError,
    KeyNotFoundError,
    bytes_text,
)
from featcache.extraction.conversion_source import (
    ConversionSource,
    arrays_nbytes,
    bring_annotations,
    carried_fingerprint,
    is_exact,
    keep_record,
)
from featcache.extraction.estimate import PREFIX, Forecast, forecast, raw_of, sample_of
from featcache.extraction.foreign_rows import (
    LibraryRows,
    Source,
    opened_source,
    rows_of,
)
from featcache.extraction.job import ProgressBar, TaskProgress
from featcache.format import (
    FeatureColumns,
    SealedPart,
    cache_fingerprint,
    checksum,
    committed,
    fingerprint_digest,
    from_storage,
    read_manifest,
    read_part,
    sealed_in,
)
from featcache.interface import Array, Ints
from featcache.reading import OpenedPart, stored_blocks
from featcache.registry import RAW, is_lossless
from featcache.store import Cache
from featcache.store import open as open_cache
from featcache.tables import FeatureTable
from featcache.workers.config import ParallelConfig, config_or_client
from featcache.workers.pickling import pack, unpack
from featcache.writing import part_writer
from featcache.writing.arrays import to_storage
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.copies import LARGE, PartCopies, StoredArrays, keeps_its_bytes
from featcache.writing.free_space import check_free
from featcache.writing.part_writer import PartWriter

if TYPE_CHECKING:
    from distributed import Client

    from featcache.workers.workers import LostAttempt, WorkerReport

# `ReadBack`: sealed parts compared with the rows of the source that they were converted from.

SAMPLED = 64  # of so many arrays one is read, where digests tell of the bytes


@dataclass
class ReadBack:
    """Reads what is sealed, and compares it with the source.

    Args:
        rows: the source.
        cache: the directory of the cache that is written.
        features: the declarations there.

    Attributes:
        errors: the largest difference of a number from the source's, by feature that is not
            exact.
        compared: names of the parts that are compared.
    """

    rows: ConversionSource
    cache: Path
    features: Mapping[str, FeatureStorageConfig]
    errors: dict[str, float] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        was = {name: self.rows.declaration(name) for name in self.features}
        self._exact = {name: is_exact(was[name], each) for name, each in self.features.items()}
        self._same = {name: _same_bytes(was[name], each) for name, each in self.features.items()}
        self._declared = {name: feature.to_json() for name, feature in self.features.items()}
        self.errors |= {name: 0.0 for name, exact in self._exact.items() if not exact}

    def merge(self, errors: Mapping[str, float], compared: Collection[str]) -> None:
        """Take over what was compared elsewhere."""
        self.compared |= {*compared}
        for name, error in errors.items():
            self.errors[name] = max(error, self.errors[name])

    def sealed(self) -> list[SealedPart]:
        """List the sealed parts of the cache, with their tombstones."""
        manifest = read_manifest(self.cache)
        return sealed_in(self.cache, manifest)

    def rest(self) -> int:
        """Compare all parts that were not compared yet; return how many rows there are in all."""
        parts = self.sealed()
        self.parts(part for part in parts if part.entry.name not in self.compared)
        return sum(part.entry.rows - len(part.tombstones(self.cache)) for part in parts)

    def copied(self, sealed: SealedPart, hashed: Collection[str]) -> None:
        """Compare a part with the arrays that were copied into it just now.

        These were compared with their checksums on the way. Files in `hashed` have the digests of
        the very bytes that were written then, so only some of their arrays are read, to see
        that they lie where the index says; of other files all.

        Raises what `parts` raises.
        """
        index = sealed.index(self.cache, [*self.features])
        rows = self.find([*index.ids])
        every = np.arange(len(index))
        for name, columns in index.features.items():
            if not self._has_the_bytes(columns, every, name, rows):
                self.parts([sealed])
                return
        arrays = StoredArrays(self.cache, sealed.directory, index, self.features)
        in_order = arrays.in_order_of_bytes(every)
        read = np.zeros(len(index), bool)
        read[in_order[::SAMPLED]] = read[in_order[-1]] = True
        paths = index.containers.paths
        told = np.array([path in hashed for path in paths], bool)
        for columns in index.features.values():
            extents = np.flatnonzero(~told[columns.container])
            read[columns.first.searchsorted(extents, "right") - 1] = True
        arrays.check(in_order[read[in_order]])
        self.compared.add(sealed.entry.name)

    def parts(self, parts: Iterable[SealedPart]) -> None:
        """Compare parts.

        Raises `CorruptCacheError` for an array that is not what the source has,
        `KeyNotFoundError` for an utterance that it has not.
        """
        for sealed in parts:
            index = sealed.index(self.cache, [*self.features])
            inner = np.setdiff1d(np.arange(sealed.entry.rows), sealed.tombstones(self.cache))
            rows = self.find([*index.ids.take(inner)])
            same = {
                name: feature
                for name, feature in self.features.items()
                if self._has_the_bytes(index.features[name], inner, name, rows)
            }
            if same:
                arrays = StoredArrays(self.cache, sealed.directory, index, same)
                arrays.check(arrays.in_order_of_bytes(inner))
            part = OpenedPart.of(self.cache, sealed, self._declared, index)
            ordered = self.rows.in_order_of_bytes(rows)
            places = inner[np.argsort(rows)][np.searchsorted(np.sort(rows), ordered)]
            for row, place in zip(ordered.tolist(), places.tolist(), strict=True):
                for name in self.features.keys() - same.keys():
                    self._compare(sealed, part, place, row, name)
            part.containers.close()
            self.compared.add(sealed.entry.name)

    def _has_the_bytes(self, columns: FeatureColumns, inner: Ints, name: str, rows: Ints) -> bool:
        """Whether arrays are to have the very bytes that rows of the source have."""
        source = self.rows.plain()
        if source is None or not self._same[name]:
            return False
        theirs, below = source.index.features[name], self.rows.rows_below(rows)
        return np.array_equal(columns.rows[inner], theirs.rows[below]) and np.array_equal(
            columns.checksum[inner], theirs.checksum[below]
        )

    def find(self, ids: list[str]) -> Ints:
        """Return the rows of ids; raises `KeyNotFoundError` for those that the source has not."""
        found = self.rows.find(ids)
        if missing := [ids[place] for place in np.flatnonzero(found < 0)]:
            shown = ", ".join(map(repr, missing[:3])) + ", ..." * (len(missing) > 3)
            raise KeyNotFoundError(
                f"cache {str(self.cache)!r} holds {len(missing)} utterances that the source has "
                f"not ({shown}); give another directory, or overwrite it (overwrite=True)"
            )
        return found

    def _compare(
        self, sealed: SealedPart, part: OpenedPart, place: int, row: int, name: str
    ) -> None:
        """Compare an array with the source's, and its bytes with their checksum."""
        columns, id = part.index.features[name], part.index.id(place)
        blocks = stored_blocks(columns, place, part.containers)
        if checksum(blocks.blocks) != int(columns.checksum[place]):
            raise self._unlike(sealed, id, name, "its bytes are not what was written")
        source = self.rows.array(row, name)
        stored = part.arrays[name].read(place)
        wanted = to_storage(id, source, self.features[name])
        if self.features[name].time_axis is None:
            wanted = wanted[0]
        if stored.shape != wanted.shape:
            raise self._unlike(sealed, id, name, f"its shape is {stored.shape}, not {wanted.shape}")
        if is_lossless(self.features[name].codec) and not _same_bits(stored, wanted):
            raise self._unlike(sealed, id, name, "it is another array")
        if not self._exact[name]:
            found = from_storage(stored, self.features[name].dtype)
            self.errors[name] = max(self.errors[name], _largest_difference(found, source))

    def _unlike(self, part: SealedPart, id: str, name: str, why: str) -> CorruptCacheError:
        return CorruptCacheError(
            f"utterance {id!r}, feature {name!r}, in part {part.entry.name!r} of "
            f"{str(self.cache)!r} is not what the source has: {why}; if the source has changed "
            "since, convert it anew (overwrite=True), else see to the disk"
        )


def _same_bytes(was: FeatureStorageConfig, now: FeatureStorageConfig) -> bool:
    """Whether equal checksums of stored bytes tell of equal arrays."""
    same = (was.dtype, was.codec) == (now.dtype, now.codec)
    return same and (now.codec == RAW or was.make_codec() == now.make_codec())


def _same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _largest_difference(a: Array, b: Array) -> float:
    """Return the largest difference of two arrays' finite numbers."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(apart.max(initial=0.0, where=np.isfinite(apart)))


# `Conversion`: rows of a table become parts of a cache, task by task, in whichever process.

FILLED = 1.25 * LARGE  # of what a part holds at most, so that parts of tasks are not small

Tell = Callable[[int, int], object]


class ConversionTask(NamedTuple):
    """Rows to be converted, and names of sealed parts that are only to be compared."""

    rows: Ints
    parts: tuple[str, ...] = ()


@dataclass
class Conversion:
    """Converts rows, and reads back what it wrote.

    Args:
        rows: the source.
        path: the directory of the cache.
        features: the declarations there.
        fingerprint: what they are made from.
    """

    rows: ConversionSource
    path: Path
    features: dict[str, FeatureStorageConfig]
    fingerprint: dict[str, object]

    @property
    def open_part(self) -> Callable[..., PartWriter]:
        """Function that begins a part of the cache."""
        return partial(PartWriter, self.path, self.features, self.fingerprint)

    def read_back(self) -> ReadBack:
        """Return what compares parts of the cache with the source."""
        return ReadBack(self.rows, self.path, self.features)

    def write(self, writer: PartWriter, rows: Ints, tell: Tell) -> None:
        """Write rows, in the order of their bytes; `tell` is called with counts of each."""
        for row in self.rows.read(self.rows.in_order_of_bytes(rows)):
            before = writer.bytes_written
            try:
                writer.write(
                    row.id, row.arrays, annotations=row.annotations or None, stamps=row.stamps
                )
            except FeatureError as error:
                raise FeatureError(f"{error}; nothing of this utterance is converted") from error
            tell(1, writer.bytes_written - before)

    def do(self, writer: PartWriter, task: ConversionTask, tell: Tell) -> ReadBack:
        """Convert the rows of a task into sealed parts, and compare these and those it names."""
        before = len(writer.parts)
        writer.trust_shapes()
        self.write(writer, task.rows, tell)
        writer.seal()
        back = self.read_back()
        if task.parts:
            back.parts(part for part in back.sealed() if part.entry.name in task.parts)
        back.parts(
            part
            for name in writer.parts[before:]
            if (part := read_part(self.path, name)) is not None
        )
        return back

    def tasks(self, rows: Ints, nbytes: int, least: int) -> list[ConversionTask]:
        """Cut rows, in the order of their bytes, into tasks that fill parts well.

        Args:
            rows: the rows.
            nbytes: what they will take on disk.
            least: tasks that there are to be, where there are rows enough.
        """
        rows = self.rows.in_order_of_bytes(rows)
        sizes = arrays_nbytes(self.rows, rows)
        share = nbytes / max(int(sizes.sum()), 1) / part_writer.PART_BYTES
        full = np.maximum(sizes * share, 1 / part_writer.PART_ROWS)
        filled = np.cumsum(full)
        total = float(filled[-1]) if len(rows) else 0.0
        number = max(int(total / FILLED), min(least, len(rows)), 1)
        bounds = np.searchsorted(filled, total * np.arange(1, number) / number)
        return [ConversionTask(some) for some in np.split(rows, bounds) if len(some)]


# Conversion on workers: tasks are handed out, those of a worker that is lost once more.

REPORT_EVERY_S = 1.0
DEATHS_WITHOUT_PROGRESS = 20  # of workers, with no task done in between


class TaskResult(NamedTuple):
    """The end of a task: what was compared, as `ReadBack` has it."""

    progress: TaskProgress
    errors: dict[str, float]
    compared: set[str]


class TaskConverter:
    """Converts tasks in a worker process."""

    def __init__(self, packed: bytes, directory: Path) -> None:
        from featcache.extraction.process_part import ProcessPart  # which brings in torch

        self._packed, self._directory = packed, directory
        self._conversion: Conversion | None = None
        self.part = ProcessPart()

    def run(
        self, number: int, task: ConversionTask, report: Callable[[TaskProgress], object]
    ) -> TaskResult:
        """Convert a task in the attempt of this number; `report` is called about once a second."""
        with self.part.attempt(self._directory, number) as attempt:
            if self._conversion is None:
                self._conversion = cast(Conversion, unpack(self._packed)["conversion"])
            attempt.note_batch(0)
            writer = self.part.writer(self._conversion.open_part)
            done, reporting = [0, 0], Interval(REPORT_EVERY_S)

            def tell(utterances: int, nbytes: int) -> None:
                done[0], done[1] = done[0] + utterances, done[1] + nbytes
                if reporting.due():
                    report(TaskProgress(number, *done))
                    if not attempt.is_wanted:
                        raise IncompleteError("the conversion has been stopped")

            back = self._conversion.do(writer, task, tell)
            return TaskResult(TaskProgress(number, *done), back.errors, back.compared)


def convert_on_workers(
    conversion: Conversion,
    parallel: ParallelConfig | Client,
    tasks: Sequence[ConversionTask],
    bar: ProgressBar,
) -> Iterator[TaskResult]:
    """Do tasks on workers, those of a lost one on another; yields the end of each.

    Raises what a worker raised, `IncompleteError` if they die again and again.
    """
    from featcache.extraction.run import make_run
    from featcache.workers.workers import Dispatch, LostAttempt, workers_of

    run = make_run(conversion.path).absolute()
    setup = partial(_environment, pack({"conversion": conversion}), run)
    with workers_of(parallel, setup) as workers:
        dispatch = Dispatch[ConversionTask](workers, run)
        for task in tasks:
            dispatch.add(task)
        bar.begin()
        deaths = 0
        with dispatch:
            for task, outcome in dispatch.outcomes():
                if isinstance(outcome, LostAttempt):
                    deaths += 1
                    if deaths > DEATHS_WITHOUT_PROGRESS * max(len(workers.addresses), 1):
                        raise IncompleteError(
                            f"workers die before a task is done, the last one so: {outcome.error}"
                        ) from outcome.error
                    bar.drop(outcome.number)
                    rest = _rest(conversion, task, outcome)
                    bar.add(len(task.rows) - len(rest.rows))
                    dispatch.add(rest)
                elif isinstance(outcome, TaskResult):
                    bar.end(outcome.progress)
                    deaths = 0
                    yield outcome
                else:
                    bar.update(TaskProgress(*cast("WorkerReport", outcome).message))


def _rest(conversion: Conversion, task: ConversionTask, lost: LostAttempt) -> ConversionTask:
    """Return what is left of a task whose worker was lost."""
    if lost.batch is None:  # it was not begun
        return task
    there = conversion.rows.find(list(committed(conversion.path, lost.lines)))
    return task._replace(rows=np.setdiff1d(task.rows, there))


def _environment(packed: bytes, directory: Path) -> dict[str, object]:
    converter = TaskConverter(packed, directory)
    return {"work": converter.run, "part": converter.part}


# `ConversionRun`: converts the rows that a cache lacks, and reads all of them back.

SMALL_BYTES = 64 << 20  # below, nothing is tried before it begins
_log = logging.getLogger("featcache")


@dataclass
class ConversionRun:
    """One call's work, while the cache is open for writing.

    Args:
        writer: the cache.
        conversion: what becomes of each row.
        workers: the processes that encode; None: this one.
        progressbar: whether there is a bar.
    """

    writer: CacheWriter
    conversion: Conversion
    workers: ParallelConfig | Client | None
    progressbar: bool

    def __post_init__(self) -> None:
        self._back: ReadBack = self.conversion.read_back()
        self._copies = self._copying()

    def convert(self) -> tuple[dict[str, float], bool]:
        """Convert what is missing, and read all of it back.

        Returns the largest error by feature, and whether some of it was there before.
        """
        for left in self.writer.path.glob(f"{PREFIX}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        size = len(self.conversion.rows.ids)
        there = [part.entry.name for part in self._back.sealed()]
        rows = np.arange(size)
        if there:
            rows = np.setdiff1d(rows, self._back.find(list(committed(self.writer.path))))
        coming = self._foretold(rows)
        text = f"converting to {self.writer.path.name} ({bytes_text(coming.nbytes)})"
        bar = ProgressBar(text, size, size - len(rows), [], shown=self.progressbar)
        with bar.bar:
            if self._copies is not None:
                self._copy(self._copies, rows, bar)
            elif self.workers is None:
                self._write(rows, coming, bar)
            else:
                self._on_workers(self.workers, rows, there, coming, bar)
        if self._back.rest() != size:
            raise IncompleteError(
                f"cache {str(self.writer.path)!r} lacks utterances of its source: were parts of it "
                "removed meanwhile? The same call converts them"
            )
        return self._back.errors, len(rows) < size

    def _copying(self) -> PartCopies | None:
        """Return what copies encoded blocks; None where any array is to be stored otherwise."""
        opened = self.conversion.rows.plain()
        features, path = self.conversion.features, self.writer.path
        if opened is None or not all(keeps_its_bytes(opened, each) for each in features.values()):
            return None
        content = cache_fingerprint(features, self.conversion.fingerprint)
        return PartCopies(opened, path, features, fingerprint_digest(content))

    def _copy(self, copies: PartCopies, rows: Ints, bar: ProgressBar) -> None:
        bar.begin()
        for some in copies.groups(self.conversion.rows.rows_below(rows)):
            self._back.copied(*copies.copy(some, bar.count))

    def _write(self, rows: Ints, coming: Forecast, bar: ProgressBar) -> None:
        bar.begin()
        with self.conversion.open_part() as part:
            for task in self.conversion.tasks(rows, coming.nbytes, 1):
                found = self.conversion.do(part, task, bar.count)
                self._back.merge(found.errors, found.compared)

    def _on_workers(
        self,
        workers: ParallelConfig | Client,
        rows: Ints,
        there: Collection[str],
        coming: Forecast,
        bar: ProgressBar,
    ) -> None:
        from featcache.extraction.destination import retry_while_locked
        from featcache.extraction.run import remove_runs
        from featcache.workers.workers import number_of_workers  # which bring in torch

        tasks = self.conversion.tasks(rows, coming.nbytes, number_of_workers(workers))
        tasks += [ConversionTask(rows[:0], (name,)) for name in there]
        try:
            if tasks:
                for done in convert_on_workers(self.conversion, workers, tasks, bar):
                    self._back.merge(done.errors, done.compared)
        finally:
            retry_while_locked(self.writer.recover)
            remove_runs(self.writer.path)

    def _foretold(self, rows: Ints) -> Forecast:
        """Log how many bytes and seconds rows will take, and return it.

        Raises `StorageFullError` if they do not fit on the disk.
        """
        coming, path = self._forecast(rows), self.writer.path
        why = f"converting {len(rows):,} utterances takes about {coming.nbytes:,}: "
        why += "free some space, or declare a codec or a smaller dtype"
        check_free(path, coming.nbytes, why)
        about = f", in about {coming.seconds:,.0f} s in one process" if coming.seconds >= 1 else ""
        text, size = "converting %d utterances to %r: %s%s", bytes_text(coming.nbytes)
        _log.info(text, len(rows), str(path), size, about)
        return coming

    def _forecast(self, rows: Ints) -> Forecast:
        source, features = self.conversion.rows, self.conversion.features
        raw = sum(raw_of(source, rows, features).values())
        if self._copies is not None:
            nbytes = int(self._copies.nbytes(source.rows_below(rows)).sum())
            return Forecast(nbytes, 0.0)
        if raw < SMALL_BYTES:
            return Forecast(raw, 0.0)
        return forecast(source, rows, features, sample_of(source, rows), self.writer.path)


# `convert`: a cache, or a view of caches, in other formats, codecs or dtypes; read back.

_DECLARED = (
    "say it of a feature: features=[featcache.FeatureStorageConfig('fbank', 'float16', "
    "backend='hdf5')]"
)


@named_settings("convert", dict.fromkeys(("backend", "codec", "options", "dtype"), _DECLARED))
def convert(
    src: Source,
    dst: str | PathLike[str],
    *,
    features: Features | Iterable[str | FeatureStorageConfig] | None = None,
    parallel: ParallelConfig | Mapping[str, object] | Client | None = None,
    adopting: Mapping[str, object] | None = None,
    overwrite: bool = False,
    progressbar: bool = True,
) -> Cache:
    """Store what a cache or a table holds once more, in other formats, codecs or dtypes.

    Values stay as they are, to the bit, unless a declaration asks for less: a smaller dtype, or a
    lossy codec. Then the largest difference of a number is measured, and kept under "converted" in
    `featcache.inspect.made_from(dst)["recorded"]`. All that was written is compared with the source
    before the cache is published as complete. Stopped or killed at any moment, the same call goes
    on. Called again, it brings what was added to the source, and annotations that were corrected
    there; an array that has changed is an error.

    Annotations, stamps, failed ids, the record of what made the features and the fingerprint are
    those of the source. So `extract` and `cache_features`, with the new declarations, go on with a
    converted cache, unless numbers were rounded on their way that would not have been otherwise:
    then the fingerprint has the key "converted". Where no byte of an array changes, encoded blocks
    are copied as they are, and compared with their checksums on the way. A log line tells bytes and
    time before it begins.

    A source that is no cache is adopted for the while, as by `featcache.adopt`. What cannot be
    adopted as it lies is read by its own library, where featcache knows one: `.npz`, `.pth`,
    safetensors, Parquet, HuggingFace's data sets, LMDB, HDF5 whose chunks cut frames; see
    `docs/guides/converting.md`. Each process opens the source itself. Files such as `.ark.gz` and
    `.tar.gz` are unpacked first, which takes room at `dst`. What neither does, load yourself, and
    give the arrays as a mapping of ids, or as pairs.

    Returns the new cache. One that is not complete stays so.

    Args:
        src: a cache or its path; a view, segments or caches put together, whose rows become
            utterances; or a file or folder of features that others wrote; or a mapping: of an id,
            an array or a tensor, or several by feature, beside texts and numbers. It is asked for
            each value three times, so it may load them when asked. Or such pairs, as `dict` takes
            them, of which no two may have one id.
        dst: the directory of the new cache.
        features: names of features that stay as they are declared, and declarations of those that
            change; `frame_s` and `dims` need not be said again. None: all as they are.
        parallel: encodes on Dask's workers, as `extract` does; None: in this process.
        adopting: settings of `featcache.adopt` for a source that is no cache, such as
            `{"pattern": "{feature}/{id}"}`, or `{"time_axis": 1}` where it is transposed.
        overwrite: begins a cache at `dst` anew; readers have the old one until the new one is
            whole.
        progressbar: shows one bar over the utterances.

    Raises `KeyNotFoundError` for a feature that the source has not; `FeatureError`, naming the
    utterance, for numbers that do not fit what is declared; `CorruptCacheError` for damage of the
    source, and where what is read back is not what the source holds; `StaleCacheError` if `dst`
    was made from something else; `StorageFullError` before it begins if the disk is too small.

    >>> import numpy as np, tempfile, featcache
    >>> folder = tempfile.mkdtemp()
    >>> with featcache.CacheWriter(f"{folder}/a", [featcache.FeatureStorageConfig("f")]) as writer:
    ...     writer.write("utt-1", {"f": np.ones((300, 80), np.float32)})
    >>> half = featcache.FeatureStorageConfig("f", "float16", backend="hdf5")
    >>> new = featcache.convert(f"{folder}/a", f"{folder}/b", features=[half], progressbar=False)
    >>> new["utt-1"]["f"].dtype
    dtype('float16')
    >>> mels = {"utt-1": np.ones((200, 80)), "utt-2": np.ones((300, 80))}
    >>> featcache.convert(mels, f"{folder}/c", progressbar=False).lengths("feats").tolist()
    [200, 300]
    """
    path = directory(dst, "a cache").absolute()
    workers = None if parallel is None else config_or_client(parallel)
    with opened_source(src, path, adopting or {}) as source:
        return convert_opened(source, path, features, workers, overwrite, progressbar)


def convert_opened(
    source: FeatureTable | LibraryRows,
    path: Path,
    features: Features | Iterable[str | FeatureStorageConfig] | None,
    workers: ParallelConfig | Client | None,
    overwrite: bool,
    progressbar: bool,
) -> Cache:
    """Do what `convert` does, with a source that is open."""
    if isinstance(source, FeatureTable):
        _refuse_source(source, path)
    rows, declared = rows_of(source, features)
    made_from = carried_fingerprint(rows, declared)
    with CacheWriter(path, declared, made_from, overwrite=overwrite) as writer:
        conversion = Conversion(rows, writer.path, declared, made_from)
        errors, went_on = ConversionRun(writer, conversion, workers, progressbar).convert()
        keep_record(writer, rows, errors)
        if rows.complete:
            failed = rows.failed()
            writer.expect([*rows.ids, *failed])
            for id in failed:
                writer.fail(id)
        writer.close(complete=rows.complete)
    if went_on:
        bring_annotations(rows, path)
    if not rows.complete:
        _log.warning("cache %r is incomplete, as what it was converted from", str(path))
    return open_cache(path)


def _refuse_source(table: FeatureTable, path: Path) -> None:
    """Raise `ConfigError` for a cache that would be converted onto itself, or into itself."""
    for source in table.paths:
        if path.resolve().is_relative_to(source.resolve()):
            where = "is" if path.resolve() == source.resolve() else "lies in"
            raise ConfigError(f"{str(path)!r} {where} the source itself; give another directory")
