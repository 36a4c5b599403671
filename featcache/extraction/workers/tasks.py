"""`TaskRunner`: computes tasks in a worker process, which all add to one part of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch

from featcache._interval import Interval
from featcache.cluster.attempts import Attempt
from featcache.cluster.pickling import returned
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import ConfigError
from featcache.extraction.computation import Computation
from featcache.extraction.dataset_batches import DatasetBatches
from featcache.extraction.datasets import as_ids, visible_ids
from featcache.extraction.failures import Failure
from featcache.extraction.progress import TaskProgress
from featcache.extraction.workers.plan import Task, digest_of, load_batches
from featcache.extraction.workers.process_part import ProcessPart
from featcache.store.writing.part_writer import PartWriter

REPORT_EVERY_S = 1.0
# DataLoader options of worker processes: Dask workers are daemonic and cannot start any
_OF_LOADER_WORKERS = (
    *(
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "multiprocessing_context",
        "timeout",
        "worker_init_fn",
    ),
    *("batch_size", "batch_sampler", "sampler"),
)
Environment = Mapping[str, Any]


@dataclass(frozen=True)
class RunSettings:
    """Settings of all tasks of a run."""

    path: Path  # of the cache
    features: Mapping[str, FeatureStorageConfig]
    fingerprint: Mapping[str, object]
    directory: Path  # of the run: the plan, and notes on attempts
    ids: str  # digest of the dataset's ids: tasks name utterances by number
    skip_failures: bool
    retries: int
    seal_every_s: float | None  # so that parts can be published before the end


class TaskRunner:
    """Computes tasks in this process: with one environment, into one part of the cache."""

    def __init__(self, settings: RunSettings, build: Callable[[], Environment]) -> None:
        self.settings = settings
        self._build = build
        self._env: Environment | None = None
        self.part = ProcessPart()
        self._sealing = Interval(settings.seal_every_s)

    def run(
        self, task: Task, report: Callable[[TaskProgress], object]
    ) -> tuple[TaskProgress, list[Failure]]:
        """Compute the utterances of a task and commit them.

        Tells `report` how far it is, about once a second.
        """
        # not inference_mode, as in `FeatureCacheMixin`
        with self.part.attempt(self.settings.directory, task.number) as attempt, torch.no_grad():
            return self._compute(task, attempt, report)

    def _compute(
        self, task: Task, attempt: Attempt, report: Callable[[TaskProgress], object]
    ) -> tuple[TaskProgress, list[Failure]]:
        if self._env is None:
            self._env = self._checked(checked_environment(self._build()))
        writer = self._writer(attempt)
        batches = make_batches(self._env, self.settings.directory, task)
        computation = Computation(
            self._env["compute_features"],
            batches,
            writer,
            skip_failures=self.settings.skip_failures,
            only_missing=True,
            retries=self.settings.retries,
        )
        before, reporting = writer.bytes_written, Interval(REPORT_EVERY_S)

        def progress() -> TaskProgress:
            nbytes = writer.bytes_written - before
            return TaskProgress(
                task.number, computation.processed, nbytes, len(computation.failures)
            )

        loaded = iter(batches)
        for number in range(task.start, task.stop):
            attempt.note_batch(number)
            for batch in islice(loaded, 1):
                computation.process(batch)
            if self.part.stopping or not attempt.is_wanted:
                break
            if reporting.due():
                report(progress())
            if self._sealing.due():
                writer.seal()
        else:
            attempt.note_batch(task.stop)
        return progress(), computation.failures

    def _writer(self, attempt: Attempt) -> PartWriter:
        """Return the writer of this process's part, whose name is noted with the attempt."""
        settings = self.settings
        writer = self.part.writer(settings.path, settings.features, settings.fingerprint)
        if writer.part is not None:
            attempt.note(writer.part)
        writer.on_part = attempt.note
        return writer

    def _checked(self, env: Environment) -> Environment:
        if digest_of(env["ids"]) != self.settings.ids:
            raise ConfigError(
                "the dataset of this process has other ids than that of the driver, or another "
                f"order; it has {len(env['ids'])} utterances; let each process build the same"
            )
        return env


def make_batches(env: Environment, directory: Path, task: Task) -> DatasetBatches:
    """Return the batches of a task as its dataset loads them."""
    wanted = load_batches(directory, task.name)[task.start : task.stop]
    options = loader_options(env)
    if "batch_size" not in options:
        options["batch_sampler"] = wanted
    return DatasetBatches(env["dataset"], wanted.items, options, env["ids"])


def loader_options(env: Environment) -> dict[str, Any]:
    """Return the loader arguments of an environment that count in an extraction.

    "batch_size" is among them where it is None: then items come one by one.
    """
    kwargs = env["loader_kwargs"]
    options = {key: value for key, value in kwargs.items() if key not in _OF_LOADER_WORKERS}
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
    dataset = env["dataset"]
    if not callable(env["compute_features"]):
        raise ConfigError(
            f"'compute_features' is a function of a batch, not {env['compute_features']!r}"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"'dataset' needs a length and items by number, not {type(dataset).__name__!r}"
        )
    ids = env.get("ids")
    if ids is None:
        ids = visible_ids(dataset)
    elif isinstance(ids, Sequence) and as_ids(ids) is None:
        odd = next(id for id in ids if as_ids([id]) is None)
        raise ConfigError(f"'ids' are strings or whole numbers, not {odd!r}; give str(id)")
    elif hasattr(ids, "__getitem__"):
        ids = as_ids(ids)
    if ids is None or not hasattr(ids, "__getitem__") or len(ids) != len(dataset):
        raise ConfigError(
            f"the ids of {type(dataset).__name__!r} are not known before it is loaded; give it an "
            f"attribute `ids`, or put 'ids' into the environment: {len(dataset)} strings, one for "
            "each utterance"
        )
    loader_kwargs = env.get("loader_kwargs")
    if loader_kwargs is None:
        loader_kwargs = {"collate_fn": env.get("collate_fn") or _as_list}
    return {**env, "ids": ids, "loader_kwargs": loader_kwargs}


def _as_list(items: list[Any]) -> list[Any]:
    return items


# what Dask calls:


def run_task(task: Task, env: str) -> tuple[TaskProgress, list[Failure]] | Exception:
    """Run a task in this worker; returns what it raised, of which Dask would make much noise."""
    from distributed import get_worker

    from featcache.cluster.worker_env import env_of

    def run() -> tuple[TaskProgress, list[Failure]]:
        worker = get_worker()
        return cast(TaskRunner, env_of(worker, env)["work"]).run(
            task, partial(worker.log_event, env)
        )

    return returned(run)
