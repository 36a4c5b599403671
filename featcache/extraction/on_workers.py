"""Extraction on Dask workers: tasks, who hands them out, and how often again if workers die."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache._progress import Interval
from featcache.errors import ComputeError, ConfigError, IncompleteError
from featcache.extraction.computation import (
    AS_THEY_ARE,
    Computation,
    DatasetBatches,
    Loading,
    wanted_batches,
)
from featcache.extraction.datasets import DataSet, IdNumbers, as_ids, named, visible_ids
from featcache.extraction.job import (
    Build,
    Environment,
    Failure,
    OnWorkers,
    Outcome,
    ProgressBar,
    TaskProgress,
    failure_of,
)
from featcache.extraction.process_part import ProcessPart, WhileFilling
from featcache.extraction.run import (
    LARGEST_TASK,
    TASKS_PER_WORKER,
    Publish,
    Run,
    check_lengths,
    cut,
    digest_of,
    longest_first,
    make_run,
)
from featcache.interface import Ints
from featcache.samplers.batches import Batches
from featcache.workers.attempts import Attempt
from featcache.workers.config import ParallelConfig
from featcache.writing.part_writer import PartWriter

if TYPE_CHECKING:
    from featcache.workers.workers import LostAttempt, Workers


# `TaskRunner`: computes tasks in a worker process, which all add to one part of the cache.

REPORT_EVERY_S = 1.0


@dataclass(frozen=True)
class RunSettings:
    """Settings of all tasks of a run."""

    path: Path  # of the cache
    open_part: Callable[..., PartWriter]  # begins a part of the cache
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
        self._built: tuple[Environment, WhileFilling | None] | None = None
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

    def _environment(self) -> tuple[Environment, WhileFilling | None]:
        if self._built is not None:
            return self._built
        env, watch = self._build()
        env = checked_environment(env)
        if digest_of(env["ids"]) != self.settings.ids:
            raise ConfigError(
                "the dataset of this process has other ids than that of the driver, or another "
                f"order; it has {len(env['ids'])} utterances; let each process build the same"
            )
        filling = None if watch is None else WhileFilling(self.settings.path, watch())
        self._built = env, filling
        return self._built

    def _compute(
        self, number: int, task: Batches, attempt: Attempt, report: Callable[[TaskProgress], object]
    ) -> tuple[TaskProgress, list[Failure]]:
        env, filling = self._environment()
        settings, batches = self.settings, make_batches(env, task, self.settings.loading)
        writer = self.part.writer(settings.open_part, filling)
        computation = Computation(
            env["compute_features"],
            batches,
            writer,
            skip_failures=settings.skip_failures,
            only_missing=True,
            retries=settings.retries,
            seed=settings.loading.seed,
            beside=settings.beside,
            filling=filling,
        )
        reporting = Interval(REPORT_EVERY_S)
        loaded = iter(batches)
        for batch_number in range(len(task)):
            attempt.note_batch(batch_number)  # loading can kill a worker, too
            for batch in islice(loaded, 1):
                computation.process(batch)
            if not attempt.is_wanted:
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


def loader_options(env: Environment) -> dict[str, object]:
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


def _checked_ids(given: Any, dataset: DataSet) -> Sequence[str]:
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


# `Driver`: gives tasks to workers, and requeues those whose worker is lost.

DEATHS_WITHOUT_PROGRESS = 20  # of each worker, with nothing computed in between


@dataclass
class Driver:
    """Gives tasks to workers.

    Args:
        workers: the workers.
        settings: of the run.
        ids: of the whole dataset.
        bar: progress and failures are reported to it.
        tend: called about once a second.
    """

    workers: Workers
    settings: RunSettings
    ids: Sequence[str]
    bar: ProgressBar
    tend: Callable[[], None]

    def __post_init__(self) -> None:
        from featcache.workers.workers import Dispatch

        self._dispatch = Dispatch[Batches](self.workers, self.settings.directory)
        self._deaths = Counter[int]()  # of workers, by the utterance that they were at
        self._deaths_without_progress = 0  # workers' deaths since anything was computed

    def work(self, tasks: Iterable[Batches]) -> None:
        """Run all tasks on the workers; whatever happens, their parts are sealed in the end.

        Raises what a worker raised, `ComputeError` if workers die of an utterance,
        `IncompleteError` if they die before they compute anything.
        """
        from featcache.workers.workers import LostAttempt, WorkerReport

        for task in tasks:
            self._dispatch.add(task)
        self.bar.begin()
        with self._dispatch:
            for task, outcome in self._dispatch.outcomes(self.tend):
                if isinstance(outcome, LostAttempt):
                    self.bar.drop(outcome.number)
                    self._replace(task, outcome)
                    continue
                self._deaths_without_progress = 0
                if isinstance(outcome, WorkerReport):
                    self.bar.update(TaskProgress(*outcome.message))
                else:
                    self.bar.end(*outcome)

    def _replace(self, task: Batches, lost: LostAttempt) -> None:
        """Requeue what is left of a task whose worker has died."""
        if lost.batch is None:  # the task was waiting there, the worker was at another one
            self._dispatch.add(task)
        else:
            self._requeue_rest(task, lost.batch, lost)
        if lost.batch is not None and lost.batch >= 0:
            self._deaths_without_progress = 0
            return
        self._deaths_without_progress += 1
        most = DEATHS_WITHOUT_PROGRESS * max(len(self.workers.addresses), 1)
        if self._deaths_without_progress > most:
            raise IncompleteError(
                f"workers die before they compute anything, the last one so: {lost.error}"
            ) from lost.error

    def _requeue_rest(self, task: Batches, batch: int, lost: LostAttempt) -> None:
        """Requeue what is not committed of a task: the utterances of one batch one by one."""
        at = np.repeat(np.arange(len(task)) == batch, task.sizes)
        ids = [self.ids[index] for index in task.items.tolist()]
        # nobody else has stored any of them: other parts need not be read
        missing = ~IdNumbers(ids).committed(self.settings.path, lost.lines)
        self.bar.add(int((~missing).sum()))
        self._requeue(_some_of(task, missing & ~at))
        suspected: list[int] = task.items[missing & at].tolist()
        if len(suspected) != 1 or self._is_retried(suspected[0], lost.error):
            self._requeue(Batches(suspected, np.arange(len(suspected) + 1)))

    def _requeue(self, task: Batches) -> None:
        if len(task):
            self._dispatch.add(task)

    def _is_retried(self, index: int, error: Exception) -> bool:
        """Count a death against an utterance; False if it is one of the failures now."""
        self._deaths[index] += 1
        if self._deaths[index] <= self.settings.retries:
            return True
        id = self.ids[index]
        times = "once" if self._deaths[index] == 1 else f"{self._deaths[index]} times"
        failure = ComputeError(
            f"the worker that computed {id!r} died {times}: out of memory, or a crash in a "
            "library; its log may say more"
        )
        if not self.settings.skip_failures:
            raise failure from error
        self.bar.add(0, [failure_of(id, failure)])
        return False


def _some_of(batches: Batches, wanted: NDArray[np.bool_]) -> Batches:
    """Return batches less some utterances, without the batches that become empty."""
    kept = np.append(0, np.cumsum(wanted))[batches.ends]
    return Batches(batches.items[wanted], np.unique(kept))


# Tasks of a run, planned here and computed by the workers of Dask.


def compute_on_workers(
    run: Run, workers: OnWorkers, missing: Ints, bar: ProgressBar, publish_if_due: Publish
) -> Outcome:
    """Plan tasks and have workers compute them; see `compute_here`."""
    from featcache.workers.workers import number_of_workers, workers_of

    ids, parallel, most = run.opened.ids or (), workers.parallel, run.options.most_batches
    lengths = None if run.job.lengths is None else check_lengths(run.job.lengths, len(ids))
    batches = _batches(run, ids, missing, lengths)
    computed = batches if most is None else batches[:most]
    number = TASKS_PER_WORKER * number_of_workers(parallel)
    tasks = cut(computed, lengths, max(number, len(missing) // LARGEST_TASK))
    if tasks:
        settings = _settings(run)
        # ssh has as many workers as there are hosts
        if isinstance(parallel, ParallelConfig) and parallel.env != "ssh":
            parallel = dataclasses.replace(parallel, n_workers=min(parallel.n_workers, len(tasks)))
        with workers_of(parallel, partial(_environment, settings, workers.builder())) as started:
            # workers seal their own parts
            tend = partial(publish_if_due, lambda: None)
            Driver(started, settings, ids, bar, tend).work(tasks)
    left_out = len(missing) - len(batches.items)
    return Outcome(left_out, stopped=len(computed) < len(batches))


def _batches(
    run: Run, ids: Sequence[str], missing: Ints, lengths: NDArray[np.float64] | None
) -> Batches:
    order, singly = longest_first(missing, lengths), run.opened.seed is not None
    batches = wanted_batches(order, len(ids), run.job.loader_kwargs, singly=singly)
    times = np.bincount(batches.items, minlength=1)
    if times.max() > 1:
        raise ConfigError(
            f"the given sampler asks for utterance {ids[int(times.argmax())]!r} {times.max()} "
            "times; once is enough"
        )
    return batches


def _settings(run: Run) -> RunSettings:
    """Return what the workers need to know."""
    to = run.destination
    return RunSettings(
        path=to.path.absolute(),
        open_part=run.open_part,
        directory=make_run(to.path).absolute(),
        ids=digest_of(run.opened.ids or ()),
        skip_failures=run.options.skips_failures,
        retries=run.options.retries,
        seal_every_s=run.options.publish_every_s,
        loading=run.loading,
        beside=to.beside,
    )


def _environment(settings: RunSettings, build: Build) -> dict[str, object]:
    # built in the first task, which can fail as any other, and be counted
    runner = TaskRunner(settings, build)
    return {"work": runner.run, "part": runner.part}
