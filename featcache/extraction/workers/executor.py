"""Extraction on Dask's workers: tasks, and the part that each process writes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from featcache._closing import closed_after
from featcache._interval import Interval
from featcache.errors import ConfigError, IncompleteError
from featcache.extraction.computation import Computation
from featcache.extraction.dataset_batches import (
    AS_THEY_ARE,
    DatasetBatches,
    Loading,
    wanted_batches,
)
from featcache.extraction.datasets import as_ids, named, visible_ids
from featcache.extraction.destination import Destination
from featcache.extraction.outcomes import Failure, Outcome, ProgressBar, TaskProgress
from featcache.extraction.run import (
    LARGEST_TASK,
    TASKS_PER_WORKER,
    Publish,
    check_lengths,
    cut,
    digest_of,
    longest_first,
    make_run,
)
from featcache.extraction.while_filling import WhileFilling
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.staleness.watch import Watch
from featcache.workers.attempts import Attempt
from featcache.workers.config import ParallelConfig
from featcache.workers.pickling import returned
from featcache.writing.part_writer import PartWriter

if TYPE_CHECKING:
    from distributed import Client


# One process's state in a run: its open part, and a lock that lets one task run at a time.


class ProcessPart:
    """The part of the cache that a process writes, task after task.

    Attributes:
        filling: compares what features are made with, before anything is committed.
    """

    def __init__(self) -> None:
        self.filling: WhileFilling | None = None
        self.stopping = False  # whether the current task is to end after its batch
        # a worker may have several threads, its environment is made for one
        self._one_at_a_time = threading.Lock()
        self._writer: PartWriter | None = None

    @contextlib.contextmanager
    def attempt(self, directory: Path, number: int) -> Iterator[Attempt]:
        """Begin an attempt at a task; commits its utterances before the attempt can be revoked.

        Raises what `Attempt` raises, and `IncompleteError` if the run is stopped.
        """
        with self._one_at_a_time:
            if self.stopping:
                raise IncompleteError("the run has been stopped")
            self._attempt = Attempt(directory, number)
            with contextlib.closing(self._attempt), closed_after(self.commit):
                yield self._attempt

    def writer(self, open_part: Callable[[], PartWriter]) -> PartWriter:
        """Return the writer of this process's part, which is noted with the attempt under way.

        The first call opens it.
        """
        if self._writer is None:
            self._writer = open_part()
            if self.filling is not None:
                filling = self.filling
                self._writer.ask_before(commits=filling.vouch, seals=filling.may_seal)
        if self._writer.part is not None:
            self._attempt.note(self._writer.part)
        self._writer.on_part = self._attempt.note
        return self._writer

    def finish(self) -> None:
        """End the current task after its batch, and seal the part."""
        self.stopping = True
        with self._one_at_a_time:
            try:
                self._check(at_once=True)
            finally:
                writer, self._writer = self._writer, None
                if writer is not None:
                    writer.close()

    def commit(self) -> None:
        """Make durable what was written."""
        self._check(at_once=False)
        if self._writer is not None:
            self._writer.commit()

    def seal(self) -> None:
        """Finish the files of what was written, so that it can be published."""
        self._check(at_once=True)
        if self._writer is not None:
            self._writer.seal()
            self._writer.published()  # from now on that is not ours to remove

    def _check(self, *, at_once: bool) -> None:
        """Raise `StaleCacheError`, without what is in doubt, if features were of two states."""
        if self.filling is None:
            return
        try:
            self.filling.check(self._drop, at_once=at_once)
        finally:
            in_doubt = self.filling.is_in_doubt or self.filling.is_undecided
            if in_doubt and self._writer is not None:
                self._writer.leave()
                self._writer = None

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.published()
            writer.abort()


# `TaskRunner`: computes tasks in a worker process, which all add to one part of the cache.

REPORT_EVERY_S = 1.0
Environment = Mapping[str, Any]
# makes an environment, and what begins to compare what features are made with, if anything does
Build = Callable[[], tuple[Environment, Callable[[], Watch] | None]]


@dataclass(frozen=True)
class RunSettings:
    """Settings of all tasks of a run."""

    path: Path  # of the cache
    open_part: Callable[[], PartWriter]  # begins a part of the cache
    directory: Path  # of the run, with the notes on attempts
    ids: str  # digest of the dataset's ids: tasks name utterances by number
    skip_failures: bool
    retries: int
    seal_every_s: float | None  # so that parts can be published before the end
    loading: Loading = AS_THEY_ARE
    beside: frozenset[str] = frozenset()  # features that are computed, and stored elsewhere


class TaskRunner:
    """Computes tasks in this process: with one environment, into one part of the cache."""

    def __init__(self, settings: RunSettings, build: Build) -> None:
        self.settings = settings
        self._build = build
        self._env: Environment | None = None
        self.part = ProcessPart()
        self._sealing = Interval(settings.seal_every_s)

    def run(
        self, number: int, task: Batches, report: Callable[[TaskProgress], object]
    ) -> tuple[TaskProgress, list[Failure]]:
        """Compute the utterances of a task and commit them, in the attempt of this number.

        `report` is called about once a second.
        """
        # not inference_mode, as in `FeatureCacheMixin`
        with self.part.attempt(self.settings.directory, number) as attempt, torch.no_grad():
            return self._compute(number, task, attempt, report)

    def _built(self) -> Environment:
        env, watch = self._build()
        env = checked_environment(env)
        if digest_of(env["ids"]) != self.settings.ids:
            raise ConfigError(
                "the dataset of this process has other ids than that of the driver, or another "
                f"order; it has {len(env['ids'])} utterances; let each process build the same"
            )
        if watch is not None:
            self.part.filling = WhileFilling(self.settings.path, watch())
        return env

    def _compute(
        self, number: int, task: Batches, attempt: Attempt, report: Callable[[TaskProgress], object]
    ) -> tuple[TaskProgress, list[Failure]]:
        if self._env is None:
            self._env = self._built()
        settings, batches = self.settings, make_batches(self._env, task, self.settings.loading)
        writer = self.part.writer(settings.open_part)
        computation = Computation(
            self._env["compute_features"],
            batches,
            writer,
            skip_failures=settings.skip_failures,
            only_missing=True,
            retries=settings.retries,
            seed=settings.loading.seed,
            beside=settings.beside,
            filling=self.part.filling,
        )
        reporting = Interval(REPORT_EVERY_S)
        loaded = iter(batches)
        for batch_number in range(len(task)):
            attempt.note_batch(batch_number)  # loading can kill a worker, too
            for batch in islice(loaded, 1):
                computation.process(batch)
            if self.part.stopping or not attempt.is_wanted:
                break
            if reporting.due():
                report(computation.progress(number))
            if self._sealing.due():
                self.part.seal()
        else:
            attempt.note_batch(len(task))
        return computation.progress(number), computation.failures


def make_batches(env: Environment, task: Batches, loading: Loading) -> DatasetBatches:
    """Return the batches of a task as its dataset loads them."""
    options = loader_options(env)
    if "batch_size" not in options:
        options["batch_sampler"] = task
    return DatasetBatches(env["dataset"], task.items, options, env["ids"], loading)


def loader_options(env: Environment) -> dict[str, Any]:
    """Return the loader arguments of an environment that count in an extraction.

    "batch_size" is among them where it is None: then items come one by one.
    """
    kwargs = env["loader_kwargs"]
    # a worker of Dask is a daemon, which can start no processes
    left_out = {"num_workers", "prefetch_factor", "persistent_workers", "timeout"}
    left_out |= {"multiprocessing_context", "worker_init_fn"}
    left_out |= {"batch_size", "batch_sampler", "sampler"}
    options = {key: value for key, value in kwargs.items() if key not in left_out}
    return options | ({"batch_size": None} if kwargs.get("batch_size", 1) is None else {})


def checked_environment(env: Environment) -> Environment:
    """Fill in what an environment may leave out.

    Raises `ConfigError` if it lacks what it must have.
    """
    if not isinstance(env, Mapping):
        raise ConfigError(f"an environment is a dict by name, not {env!r}")
    for name in ("dataset", "compute_features"):
        if name not in env:
            raise ConfigError(
                f"the environment needs {name!r}; it has {', '.join(map(repr, env)) or 'nothing'}"
            )
    dataset, compute = env["dataset"], env["compute_features"]
    if not callable(compute):
        raise ConfigError(f"'compute_features' is a function of a batch, not {compute!r}")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"'dataset' needs a length and items by number, not {type(dataset).__name__!r}"
        )
    loader_kwargs = env.get("loader_kwargs")
    if loader_kwargs is None:
        loader_kwargs = {"collate_fn": env.get("collate_fn") or list}
    return {**env, "ids": _checked_ids(env.get("ids"), dataset), "loader_kwargs": loader_kwargs}


def _checked_ids(given: Any, dataset: Any) -> Sequence[str]:
    ids = visible_ids(dataset) if given is None else None
    if isinstance(given, str):
        raise ConfigError(f"'ids' are a list of strings, one for each utterance, not {given!r}")
    if hasattr(given, "__getitem__"):
        ids = as_ids(given)
        if ids is None:
            odd = next(id for id in given if as_ids([id]) is None)
            raise ConfigError(f"'ids' are strings or whole numbers, not {odd!r}; give str(id)")
        if len(ids) != len(dataset):
            raise ConfigError(
                f"there are {len(ids)} 'ids' ({named(ids, 3)}) for the {len(dataset)} items of the "
                f"dataset ({type(dataset).__name__!r}); give one id for each item, in their order"
            )
    if ids is None or len(ids) != len(dataset):
        raise ConfigError(
            f"the ids of {type(dataset).__name__!r} are not known before it is loaded; give it an "
            f"attribute `ids`, or put 'ids' into the environment: {len(dataset)} strings, one for "
            "each utterance"
        )
    return ids


# what Dask calls:


def run_task(
    number: int, task: Batches, env: str
) -> tuple[TaskProgress, list[Failure]] | Exception:
    """Run a task in this worker; returns what it raised, of which Dask would make much noise."""
    from distributed import get_worker

    from featcache.workers.worker_env import env_of

    def run() -> tuple[TaskProgress, list[Failure]]:
        worker = get_worker()
        runner = cast(TaskRunner, env_of(worker, env)["work"])
        return runner.run(number, task, partial(worker.log_event, env))

    return returned(run)


# `WorkersExecutor`: has an extraction computed by the workers of Dask.


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
    builder: Callable[[], Build]
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
        from featcache.workers.workers import number_of_workers

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
        from featcache.extraction.workers.driver import Driver
        from featcache.workers.workers import workers_of

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


def _environment(settings: RunSettings, build: Build) -> dict[str, object]:
    # built in the first task, which can fail as any other, and be counted
    runner = TaskRunner(settings, build)
    return {"work": runner, "part": runner.part}
