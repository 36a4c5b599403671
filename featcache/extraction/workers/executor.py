"""`WorkersExecutor`: has an extraction computed by the workers of Dask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache.cluster.config import ParallelConfig
from featcache.errors import ConfigError
from featcache.extraction.dataset_batches import wanted_batches
from featcache.extraction.destination import Destination
from featcache.extraction.outcome import Outcome
from featcache.extraction.progress import ProgressBar
from featcache.extraction.run import Publish
from featcache.extraction.workers.plan import (
    LARGEST_TASK,
    TASKS_PER_WORKER,
    check_lengths,
    cut,
    digest_of,
    longest_first,
    make_run,
)
from featcache.extraction.workers.tasks import Environment, RunSettings, TaskRunner
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.store.writing.part_writer import PartWriter

if TYPE_CHECKING:
    from distributed import Client


@dataclass
class WorkersExecutor:
    """Computes on workers.

    Args:
        destination: the cache, with the ids of the dataset.
        parallel: workers to be started, or a client, whose workers stay.
        builder: makes the function that builds the environment of a worker.
        loader_kwargs: arguments of a DataLoader.
        retries: how often an utterance is tried again that fails, or that its worker dies of.
        publish_every_s: how often workers seal their parts; None: at the end.
        lengths: of all utterances: the longest come first; None keeps the dataset's order.
        most_batches: a run ends after these.
    """

    destination: Destination
    parallel: ParallelConfig | Client
    builder: Callable[[], Callable[[], Environment]]
    loader_kwargs: Mapping[str, Any]
    retries: int
    publish_every_s: float | None
    lengths: Sequence[float] | None = None
    most_batches: int | None = None

    def __post_init__(self) -> None:
        self._ids: Sequence[str] = self.destination.ids or ()
        self.by_number, self.size = True, len(self._ids)

    def learn_ids(self) -> Sequence[str] | None:
        """Return the ids of the dataset, which shows them."""
        return self._ids

    def compute(self, missing: Ints | None, bar: ProgressBar, publish_if_due: Publish) -> Outcome:
        """Plan tasks and have workers compute them; see `Executor`."""
        from featcache.cluster.workers import number_of_workers

        wanted = np.arange(self.size) if missing is None else missing
        lengths = None if self.lengths is None else check_lengths(self.lengths, self.size)
        batches = self._batches(wanted, lengths)
        computed = batches if self.most_batches is None else batches[: self.most_batches]
        number = TASKS_PER_WORKER * number_of_workers(self.parallel)
        tasks = cut(computed, lengths, max(number, len(wanted) // LARGEST_TASK))
        if tasks:
            # workers seal their own parts
            self._work(tasks, bar, lambda: publish_if_due(lambda: None))
        left_out = len(wanted) - len(batches.items)
        return Outcome(left_out, stopped=len(computed) < len(batches))

    def _batches(self, missing: Ints, lengths: NDArray[np.float64] | None) -> Batches:
        order = longest_first(missing, lengths)
        singly = self.destination.seed is not None
        batches = wanted_batches(order, self.size, self.loader_kwargs, singly=singly)
        times = np.bincount(batches.items, minlength=1)
        if times.max() > 1:
            raise ConfigError(
                f"the given sampler asks for utterance {self._ids[int(times.argmax())]!r} "
                f"{times.max()} times; once is enough"
            )
        return batches

    def _work(self, tasks: Sequence[Batches], bar: ProgressBar, tend: Callable[[], None]) -> None:
        from featcache.cluster.workers import workers_of
        from featcache.extraction.workers.driver import Driver

        parallel, settings = self.parallel, self._settings()
        # ssh has as many workers as there are hosts
        if isinstance(parallel, ParallelConfig) and parallel.env != "ssh":
            parallel = dataclasses.replace(parallel, n_workers=min(parallel.n_workers, len(tasks)))
        with workers_of(parallel, partial(_environment, settings, self.builder())) as workers:
            Driver(workers, settings, self._ids, bar, tend).work(tasks)

    def _settings(self) -> RunSettings:
        """Return what the workers need to know."""
        to = self.destination
        path, directory = to.path.absolute(), make_run(to.path).absolute()
        return RunSettings(
            path=path,
            open_part=partial(PartWriter, path, to.features, to.fingerprint),
            directory=directory,
            ids=digest_of(self._ids),
            skip_failures=to.skip_failures,
            retries=self.retries,
            seal_every_s=self.publish_every_s,
            loading=to.loading,
            beside=to.beside,
        )


def _environment(settings: RunSettings, build: Callable[[], Environment]) -> dict[str, object]:
    # built in the first task, which can fail as any other, and be counted
    runner = TaskRunner(settings, build)
    return {"work": runner, "part": runner.part}
