"""The driver's side of an extraction: plans what is missing, has it computed here or by workers, and publishes."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.batches import wanted_batches
from featcache.destination import Destination, patiently
from featcache.errors import IncompleteError
from featcache.every import Every
from featcache.loading.batches import Batches, Ints
from featcache.parallel.account import Account
from featcache.parallel.config import ParallelConfig
from featcache.parallel.plan import (
    PLAN,
    TASKS_PER_WORKER,
    Task,
    batches_of,
    check_ids,
    check_lengths,
    cut,
    digest_of,
    hashes_of,
    missing_from,
    save_batches,
)
from featcache.parallel.worker import Environment, Job, Work
from featcache.store.cache import Cache
from featcache.store.closing import close_after, closed_after
from featcache.store.writer import RUN, CacheWriter

if TYPE_CHECKING:
    from distributed import Client

PATIENCE_S = 60.0  # for the workers of a killed driver, and those of this one at its end


@dataclass
class Run:
    """Computes what a cache lacks, on workers or in this process."""

    to: Destination
    ids: Sequence[str]  # of the whole dataset
    lengths: Sequence[float] | None
    builder: Callable[[], Callable[[], Environment]]  # makes what builds the environment of a process that computes
    loader_kwargs: Mapping[str, Any]
    fingerprint: Mapping[str, object]
    parallel: ParallelConfig | Client | None  # None: in this process
    skip_failures: bool
    retries: int
    publish_every_s: float | None
    progressbar: bool
    colour: str | None = None
    most_batches: int | None = None

    def run(self, *, resume: bool, overwrite: bool) -> Cache:
        """Do it, and open the cache."""
        self._hashes = hashes_of(self.ids)
        check_ids(self.ids, self._hashes)
        writer = self.to.open(self.fingerprint, resume=resume, overwrite=overwrite, patience_s=PATIENCE_S)
        if writer is not None:
            try:
                error = self._work(writer)
                close_after(error, partial(self._finish, writer, error))
                if error is not None:
                    raise error
            except BaseException as failure:
                self.to.say_how_to_go_on(failure)
                raise
        return self.to.storage.cache(self.to.split)

    def _work(self, writer: CacheWriter) -> BaseException | None:
        """Have all that is missing computed; returns the error that ended it."""
        self._left_out, self._cut_short = 0, False
        self._account = Account("", 0, 0, shown=False)
        self._publishing = Every(self.publish_every_s)
        try:
            missing = np.flatnonzero(missing_from(self.to.path, self._hashes))
            lengths = None if self.lengths is None else check_lengths(self.lengths, len(self.ids))
            batches = self._batches(missing, lengths)
            ranges = cut(batches, lengths, TASKS_PER_WORKER * self._number_of_workers())
            known = len(self.ids) - len(missing)
            self._account = Account(
                f"caching {self.to.split}", len(self.ids), known, shown=self.progressbar, colour=self.colour
            )
            job = self._start_job(batches)
            with self._account.bar:
                if self.parallel is None:
                    self._work_here(job, ranges, writer)
                else:
                    self._work_on_dask(self.parallel, job, ranges, writer)
        except BaseException as error:
            return error
        return None

    def _number_of_workers(self) -> int:
        if self.parallel is None:
            return 1
        from featcache.parallel.staff import number_of_workers

        return number_of_workers(self.parallel)

    def _batches(self, missing: Ints, lengths: NDArray[np.float64] | None) -> Batches:
        if "sampler" in self.loader_kwargs or "batch_sampler" in self.loader_kwargs:
            lists = wanted_batches(cast(Sequence[int], missing), len(self.ids), self.loader_kwargs)
            batches = Batches.of(lists)
        else:
            batches = batches_of(missing, lengths, self.loader_kwargs.get("batch_size", 1) or 1)
        self._left_out = len(missing) - len(batches.items)
        if self.most_batches is not None and len(batches) > self.most_batches:
            batches, self._cut_short = batches[: self.most_batches], True
        return batches

    def _start_job(self, batches: Batches) -> Job:
        """Write down what the workers need to know; what a killed run has left of that is removed."""
        for directory in self.to.path.glob(f"{RUN}*"):
            shutil.rmtree(directory)
        directory = self.to.path / f"{RUN}{secrets.token_hex(4)}"
        directory.mkdir()
        save_batches(directory, PLAN, batches)
        return Job(
            path=self.to.path.absolute(),
            features=self.to.storage.features,
            fingerprint=self.fingerprint,
            directory=directory.absolute(),
            ids=digest_of(self.ids),
            skip_failures=self.skip_failures,
            retries=self.retries,
            seal_every_s=self.publish_every_s,
        )

    def _work_here(self, job: Job, ranges: Sequence[tuple[int, int]], writer: CacheWriter) -> None:
        work = Work(job, self.builder())

        def tend(progress: Any) -> None:
            self._account.update(progress)
            self._publish_now_and_then(writer)

        with closed_after(work.finish):
            for number, (start, stop) in enumerate(ranges):
                self._account.end(*work.run(Task(number, PLAN, start, stop), tend))
                self._publish_now_and_then(writer)

    def _work_on_dask(
        self, parallel: ParallelConfig | Client, job: Job, ranges: Sequence[tuple[int, int]], writer: CacheWriter
    ) -> None:
        from featcache.parallel.crew import Crew
        from featcache.parallel.staff import staff_of

        if not ranges:
            return
        if isinstance(parallel, ParallelConfig) and parallel.env != "ssh":  # which has as many as there are hosts
            parallel = dataclasses.replace(parallel, n_workers=min(parallel.n_workers, len(ranges)))
        with staff_of(parallel, partial(_worker_environment, job, self.builder())) as staff:
            Crew(staff, job, self.ids, self._account, partial(self._publish_now_and_then, writer)).work(ranges)

    def _publish_now_and_then(self, writer: CacheWriter) -> None:
        if self._publishing.due():
            self.to.publish_early(writer)

    def _finish(self, writer: CacheWriter, error: BaseException | None) -> None:
        """Gather what all have written, those that died included, and publish it."""
        try:
            patiently(writer.recover, PATIENCE_S)
            for directory in self.to.path.glob(f"{RUN}*"):
                shutil.rmtree(directory)
            stopped = error is not None or self._cut_short
            lost = 0 if stopped else self._lost()
            self.to.publish(writer, self._account.failures, left_out=self._left_out, stopped=stopped or lost > 0)
        except BaseException:
            writer.abort()  # of nothing: what is sealed stays
            raise
        if lost:
            raise IncompleteError(
                f"{lost} utterances of {str(self.to.path)!r} are neither stored nor reported as failures: were parts "
                "of it removed? The cache is not complete; the same call computes them"
            )

    def _lost(self) -> int:
        """Count what nobody accounts for: a cache is complete only if everything is there."""
        missing = int(missing_from(self.to.path, self._hashes).sum())
        return missing - self._left_out - len({failure["id"] for failure in self._account.failures})


def _worker_environment(job: Job, build: Callable[[], Environment]) -> dict[str, object]:
    return {"work": Work(job, build)}  # built in the first task, which can fail as any other, and be counted

