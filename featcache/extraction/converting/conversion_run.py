"""`ConversionRun`: converts the rows that a cache lacks, and reads all of them back."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from featcache.cluster.config import ParallelConfig
from featcache.errors import IncompleteError, StorageFullError
from featcache.extraction.converting.conversion import Conversion, ConversionTask
from featcache.extraction.converting.read_back import ReadBack
from featcache.extraction.estimating.forecast import (
    Forecast,
    forecast,
    raw_of,
    said_bytes,
    sample_of,
)
from featcache.extraction.estimating.trial_cache import PREFIX
from featcache.extraction.progress import ProgressBar, TaskProgress
from featcache.interface import Ints
from featcache.store.format.committed import committed
from featcache.store.format.fingerprint import cache_fingerprint, fingerprint_digest
from featcache.store.writing.cache_writer import CacheWriter
from featcache.store.writing.copied_parts import PartCopies, keeps_its_bytes

if TYPE_CHECKING:
    from distributed import Client

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

    def convert(self) -> dict[str, float]:
        """Convert what is missing, read all of it back; return the largest error by feature."""
        for left in self.writer.path.glob(f"{PREFIX}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        size = len(self.conversion.rows.table)
        there = [part.entry.name for part in self._back.sealed()]
        rows = np.arange(size)
        if there:
            rows = np.setdiff1d(rows, self._back.find(list(committed(self.writer.path))))
        coming = self._foretold(rows)
        text = f"converting to {self.writer.path.name} ({said_bytes(coming.nbytes)})"
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
        return self._back.errors

    def _copying(self) -> PartCopies | None:
        """Return what copies encoded blocks; None where any array is to be stored otherwise."""
        opened = self.conversion.rows.plain()
        features, path = self.conversion.features, self.writer.path
        if opened is None or not all(keeps_its_bytes(opened, each) for each in features.values()):
            return None
        content = cache_fingerprint(features, self.conversion.fingerprint)
        return PartCopies(opened, path, features, fingerprint_digest(content))

    def _copy(self, copies: PartCopies, rows: Ints, bar: ProgressBar) -> None:
        done = _Done(bar)
        for some in copies.groups(self.conversion.rows.rows_below(rows)):
            self._back.copied(*copies.copy(some, done.tell))
        done.end()

    def _write(self, rows: Ints, coming: Forecast, bar: ProgressBar) -> None:
        done = _Done(bar)
        with self.conversion.open_part() as part:
            for task in self.conversion.tasks(rows, coming.nbytes, 1):
                found = self.conversion.do(part, task, done.tell)
                self._merge(found.errors, found.compared)
        done.end()

    def _on_workers(
        self,
        workers: ParallelConfig | Client,
        rows: Ints,
        there: Collection[str],
        coming: Forecast,
        bar: ProgressBar,
    ) -> None:
        from featcache.cluster.workers import number_of_workers  # which bring in torch
        from featcache.extraction.converting.conversion_workers import WorkersRun
        from featcache.extraction.patience import retry_while_locked
        from featcache.extraction.workers.plan import remove_runs

        tasks = self.conversion.tasks(rows, coming.nbytes, number_of_workers(workers))
        tasks += [ConversionTask(rows[:0], (name,)) for name in there]
        run = WorkersRun(self.conversion, bar)
        try:
            if tasks:
                run.work(workers, tasks)
            self._merge(run.errors, run.compared)
        finally:
            retry_while_locked(self.writer.recover)
            remove_runs(self.writer.path)

    def _merge(self, errors: Mapping[str, float], compared: Collection[str]) -> None:
        """Take over what was compared elsewhere."""
        self._back.compared |= {*compared}
        for name, error in errors.items():
            self._back.errors[name] = max(error, self._back.errors[name])

    def _foretold(self, rows: Ints) -> Forecast:
        """Log how many bytes and seconds rows will take, and return it.

        Raises `StorageFullError` if they do not fit on the disk.
        """
        coming, path = self._forecast(rows), str(self.writer.path)
        free = shutil.disk_usage(self.writer.path).free
        if coming.nbytes > free:
            raise StorageFullError(
                f"{free:,} bytes are free on the disk of {path!r}, and converting {len(rows):,} "
                f"utterances takes about {coming.nbytes:,}: free some space, or declare a codec or "
                "a smaller dtype"
            )
        about = f", in about {coming.seconds:,.0f} s in one process" if coming.seconds >= 1 else ""
        _log.info(
            "converting %d utterances to %r: %s%s",
            len(rows),
            path,
            said_bytes(coming.nbytes),
            about,
        )
        return coming

    def _forecast(self, rows: Ints) -> Forecast:
        source, features = self.conversion.rows, self.conversion.features
        raw = sum(raw_of(source, rows, features).values())
        if self._copies is not None:
            nbytes = int(self._copies.nbytes(source.rows_below(rows)).sum())
            return Forecast(nbytes, raw, 0.0)
        if raw < SMALL_BYTES:
            return Forecast(raw, raw, 0.0)
        return forecast(source, rows, features, sample_of(source, rows), self.writer.path)


class _Done:
    """Counts of what this process has done, for the bar."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar, self._counts = bar, [0, 0]
        bar.begin()

    def tell(self, utterances: int, nbytes: int) -> None:
        """Count utterances that are written."""
        self._counts[0] += utterances
        self._counts[1] += nbytes
        self._bar.update(TaskProgress(0, *self._counts))

    def end(self) -> None:
        """Tell that all is written."""
        self._bar.end(TaskProgress(0, *self._counts))
