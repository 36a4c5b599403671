"""The driver's side of an extraction.

It plans what is missing, has it computed here or by workers, and publishes.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache._closing import closed_after
from featcache._interval import Interval
from featcache.cluster.config import ParallelConfig
from featcache.errors import ConfigError, IncompleteError
from featcache.extraction.dataset_batches import wanted_batches
from featcache.extraction.datasets import counted
from featcache.extraction.destination import Destination
from featcache.extraction.failures import Failure
from featcache.extraction.patience import retry_while_locked
from featcache.extraction.progress import ProgressBar, TaskProgress
from featcache.extraction.workers.plan import (
    PLAN,
    RUN,
    TASKS_PER_WORKER,
    Task,
    batches_of,
    check_ids,
    check_lengths,
    cut,
    digest_of,
    hashes_of,
    missing_from,
    remove_runs,
    save_batches,
)
from featcache.extraction.workers.tasks import Environment, RunSettings, TaskRunner
from featcache.samplers.batches import Batches, Ints
from featcache.store.reading.cache import Cache
from featcache.store.writing.cache_writer import CacheWriter

if TYPE_CHECKING:
    from distributed import Client

Ranges = Sequence[tuple[int, int]]


@dataclass
class Run:
    """Computes what a cache lacks, on workers or in this process."""

    to: Destination
    ids: Sequence[str]  # of the whole dataset
    lengths: Sequence[float] | None
    # makes what builds the environment of a process that computes
    builder: Callable[[], Callable[[], Environment]]
    loader_kwargs: Mapping[str, Any]
    fingerprint: Mapping[str, object]
    parallel: ParallelConfig | Client | None  # None: in this process
    skip_failures: bool
    retries: int
    publish_every_s: float | None
    progressbar: bool
    colour: str | None = None
    most_batches: int | None = None

    def __post_init__(self) -> None:
        self._failures: list[Failure] = []
        self._left_out = 0  # utterances that a given sampler did not ask for
        self._stopped = True  # before all was computed
        self._publishing = Interval(self.publish_every_s)

    def run(self, *, resume: bool, overwrite: bool) -> Cache:
        """Do it, and open the cache."""
        self._hashes = hashes_of(self.ids)
        check_ids(self.ids, self._hashes)
        writer = self.to.open(self.fingerprint, resume=resume, overwrite=overwrite)
        if writer is not None:
            try:
                with closed_after(partial(self._finish, writer)):
                    self._work(writer)
            except BaseException as error:
                self.to.add_resume_note(error)
                raise
        return self.to.storage.cache(self.to.split)

    def _work(self, writer: CacheWriter) -> None:
        """Have all that is missing computed."""
        missing = np.flatnonzero(self._missing())
        lengths = None if self.lengths is None else check_lengths(self.lengths, len(self.ids))
        batches = self._batches(missing, lengths)
        self._left_out = len(missing) - len(batches.items)
        computed = batches if self.most_batches is None else batches[: self.most_batches]
        ranges = cut(computed, lengths, TASKS_PER_WORKER * self._number_of_workers())
        settings = self._start_job(computed)
        bar = ProgressBar(
            f"caching {self.to.split}",
            len(self.ids),
            len(self.ids) - len(missing),
            self._failures,
            shown=self.progressbar,
            colour=self.colour,
        )
        with bar.bar:
            if self.parallel is None:
                self._work_here(settings, ranges, bar, writer)
            elif ranges:
                self._work_on_dask(self.parallel, settings, ranges, bar, writer)
        self._stopped = len(computed) < len(batches)

    def _missing(self) -> NDArray[np.bool_]:
        """Say which utterances are to be computed.

        They are not committed, nor left out because they failed before.
        """
        missing = missing_from(self.to.path, self._hashes)
        if self.to.accepted:
            missing &= np.fromiter(
                (id not in self.to.accepted for id in self.ids), bool, len(self.ids)
            )
        return missing

    def _number_of_workers(self) -> int:
        if self.parallel is None:
            return 1
        from featcache.cluster.workers import number_of_workers

        return number_of_workers(self.parallel)

    def _batches(self, missing: Ints, lengths: NDArray[np.float64] | None) -> Batches:
        if "sampler" in self.loader_kwargs or "batch_sampler" in self.loader_kwargs:
            batches = Batches.of(
                wanted_batches(cast(Sequence[int], missing), len(self.ids), self.loader_kwargs)
            )
            numbers, times = np.unique(batches.items, return_counts=True)
            if len(numbers) < len(batches.items):
                id = self.ids[int(numbers[times.argmax()])]
                raise ConfigError(
                    f"the given sampler asks for utterance {id!r} {times.max()} times; once is "
                    "enough"
                )
            return batches
        return batches_of(missing, lengths, self.loader_kwargs.get("batch_size", 1) or 1)

    def _start_job(self, batches: Batches) -> RunSettings:
        """Write down what the workers need to know; removes what a killed run has left of it."""
        remove_runs(self.to.path)
        directory = self.to.path / f"{RUN}{secrets.token_hex(4)}"
        directory.mkdir()
        save_batches(directory, PLAN, batches)
        return RunSettings(
            path=self.to.path.absolute(),
            features=self.to.storage.features,
            fingerprint=self.fingerprint,
            directory=directory.absolute(),
            ids=digest_of(self.ids),
            skip_failures=self.skip_failures,
            retries=self.retries,
            seal_every_s=self.publish_every_s,
        )

    def _work_here(
        self, settings: RunSettings, ranges: Ranges, bar: ProgressBar, writer: CacheWriter
    ) -> None:
        work = TaskRunner(settings, self.builder())

        def tend(progress: TaskProgress) -> None:
            bar.update(progress)
            self._publish_if_due(writer)

        with closed_after(work.part.finish):
            for number, (start, stop) in enumerate(ranges):
                bar.end(*work.run(Task(PLAN, start, stop, number), tend))
                self._publish_if_due(writer)

    def _work_on_dask(
        self,
        parallel: ParallelConfig | Client,
        settings: RunSettings,
        ranges: Ranges,
        bar: ProgressBar,
        writer: CacheWriter,
    ) -> None:
        from featcache.cluster.workers import workers_of
        from featcache.extraction.workers.driver import Driver

        # which has as many as there are hosts
        if isinstance(parallel, ParallelConfig) and parallel.env != "ssh":
            parallel = dataclasses.replace(parallel, n_workers=min(parallel.n_workers, len(ranges)))
        with workers_of(
            parallel, partial(_worker_environment, settings, self.builder())
        ) as workers:
            Driver(workers, settings, self.ids, bar, partial(self._publish_if_due, writer)).work(
                ranges
            )

    def _publish_if_due(self, writer: CacheWriter) -> None:
        if self._publishing.due():
            self.to.publish_early(writer)

    def _finish(self, writer: CacheWriter) -> None:
        """Gather what all have written, those that died included, and publish it."""
        try:
            retry_while_locked(writer.recover)
            remove_runs(self.to.path)
            lost = 0 if self._stopped else self._lost()
            stopped = self._stopped or lost > 0
            self.to.publish(
                writer, self._failures, seen=None, left_out=self._left_out, stopped=stopped
            )
        except BaseException:
            writer.abort()  # of nothing: what is sealed stays
            raise
        if lost:
            raise IncompleteError(
                f"{counted(lost)} of {str(self.to.path)!r} are neither stored nor reported as "
                "failures: were parts "
                "of it removed? The cache is not complete; the same call computes them"
            )

    def _lost(self) -> int:
        """Count what nobody accounts for: a cache is complete only if everything is there."""
        missing = int(self._missing().sum())
        return missing - self._left_out - len({failure["id"] for failure in self._failures})


def _worker_environment(
    settings: RunSettings, build: Callable[[], Environment]
) -> dict[str, object]:
    # built in the first task, which can fail as any other, and be counted
    runner = TaskRunner(settings, build)
    return {"work": runner, "part": runner.part}
