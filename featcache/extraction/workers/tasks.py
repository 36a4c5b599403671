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
from featcache.errors import ConfigError
from featcache.extraction.computation import Computation
from featcache.extraction.dataset_batches import AS_THEY_ARE, DatasetBatches, Loading
from featcache.extraction.datasets import as_ids, visible_ids
from featcache.extraction.failures import Failure
from featcache.extraction.progress import TaskProgress
from featcache.extraction.workers.plan import digest_of
from featcache.extraction.workers.process_part import ProcessPart
from featcache.samplers.batches import Batches
from featcache.store.writing.part_writer import PartWriter

REPORT_EVERY_S = 1.0
Environment = Mapping[str, Any]


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

    def __init__(self, settings: RunSettings, build: Callable[[], Environment]) -> None:
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
        env = checked_environment(self._build())
        if digest_of(env["ids"]) != self.settings.ids:
            raise ConfigError(
                "the dataset of this process has other ids than that of the driver, or another "
                f"order; it has {len(env['ids'])} utterances; let each process build the same"
            )
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
                writer.seal()
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
    if hasattr(given, "__getitem__"):
        ids = as_ids(given)
        if ids is None:
            odd = next(id for id in given if as_ids([id]) is None)
            raise ConfigError(f"'ids' are strings or whole numbers, not {odd!r}; give str(id)")
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

    from featcache.cluster.worker_env import env_of

    def run() -> tuple[TaskProgress, list[Failure]]:
        worker = get_worker()
        runner = cast(TaskRunner, env_of(worker, env)["work"])
        return runner.run(number, task, partial(worker.log_event, env))

    return returned(run)
