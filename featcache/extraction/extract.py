"""`extract`: features of any dataset by any function, on any number of workers, into a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Literal

import torch

from featcache._checks import directory, whole_number
from featcache.declaration import Features
from featcache.extraction.datasets import (
    check_ids,
    check_source,
    kept_random_state,
    visible_lengths,
)
from featcache.extraction.destination import Destination
from featcache.extraction.fill import fill
from featcache.extraction.job import Build, Environment, Job, OnWorkers, RunOptions
from featcache.extraction.on_workers import checked_environment, loader_options
from featcache.staleness.provenance import Provenance, provenance
from featcache.staleness.watch import DriverCode, Watch, code_of_driver, refuse_other_code
from featcache.staleness.witnesses import witnesses
from featcache.storage import FeatureStorage
from featcache.tables import FeatureTable
from featcache.workers.config import ParallelConfig, config_or_client
from featcache.workers.pickling import pack, unpack

if TYPE_CHECKING:
    from dask.distributed import Client

# `EnvironmentProvider`: gives each process its data set, its model and what else it needs.


class EnvironmentProvider(ABC):
    """Builds what a process computes with, once: the data set, the model.

    The interface of ESPnet3's class of this name. An environment is a dict by name. Nothing of it
    travels from process to process: each one builds its own, workers as this process does unless
    `build_worker_setup_fn` says otherwise.

    >>> class Provider(EnvironmentProvider):
    ...     def build_env_local(self):
    ...         return {"dataset": [1, 2, 3], "model": abs}
    >>> sorted(Provider().build_env_local())
    ['dataset', 'model']
    """

    @abstractmethod
    def build_env_local(self) -> dict[str, object]:
        """Build the environment of this process."""

    def build_worker_setup_fn(self) -> Callable[[], dict[str, object]]:
        """Return a function that builds the environment of a worker; by default `build_env_local`.

        It is pickled, with the provider where it is a method, and runs once in each worker. It
        should hold no more than what it needs to build: names, paths, settings.
        """
        return self.build_env_local


def extract(
    provider: EnvironmentProvider,
    path: str | PathLike[str],
    features: Features,
    *,
    parallel: ParallelConfig | Mapping[str, object] | Client | None = None,
    fingerprint: Mapping[str, object] | None = None,
    batch_size: int = 1,
    retries: int = 2,
    on_error: Literal["raise", "skip"] = "raise",
    on_changed: Literal["raise", "recompute"] = "raise",
    publish_every_s: float | None = None,
    resume: bool = True,
    overwrite: bool = False,
    append: bool = False,
    annotations: str | Sequence[str] = (),
    check: int | Literal["probe", "all"] | None = "probe",
    accept: bool = False,
    progressbar: bool = True,
) -> FeatureTable:
    """Compute the features of a dataset that a cache lacks, on any number of workers.

    First the cache is compared with what would be computed now: code, weights, a few utterances
    computed again, and the recordings; see `docs/explanation/what-is-checked.md`. Then
    whatever is missing is computed. Stopped or killed at any moment, the same call goes on, with
    any number of workers. The cache is the same whoever computed it.

    Returns the view of this dataset's utterances. Its `cache` is the whole, which may hold others:
    a line in the log says so.

    The environments of `provider` hold "dataset", of a known length with items by number, and
    "compute_features": a function of a batch that returns for each utterance a dict of its "id" and
    all declared features. It is called without gradients; modules should be in evaluation mode. A
    batch is a list of items, or what "collate_fn" makes of that, or a DataLoader with
    "loader_kwargs" (of which those of batches and of its own processes do not count). "ids" are the
    dataset's `ids` or `data_ids`, unless given; "lengths" its `lengths` or durations, if it has
    any: long utterances come first, and batches hold similar ones.

    Args:
        provider: builds the environment, once in each worker, and here for ids, lengths and
            fingerprint.
        path: the cache directory.
        features: the declarations of all features.
        parallel: how many workers, and where: `ParallelConfig` or such a mapping; or a client of
            `get_client`, by which several caches share the workers. None computes in this process.
        fingerprint: what else the features are made from, JSON values. A key that featcache fills
            in itself ("source", "constants", "modules", ...; see `featcache.staleness.provenance`)
            is replaced by yours; None leaves it out.
        batch_size: utterances a batch.
        retries: further attempts at an utterance that fails, or that its worker dies of.
        on_error: "skip" goes on after an utterance that fails, and notes it in the cache's
            `work-failures.jsonl`. Later calls leave it out, or try it again with "raise".
        on_changed: of utterances whose recording or other input has changed since, "raise" names
            them in an error, "recompute" computes them again. The entries of the dataset are
            compared (`entries` if it has them, the items of a list, `data` of a
            `DynamicItemDataset`, rows) with the files that they name; then the items of those that
            are new. A recording that was moved or stored in another lossless format has not
            changed.
        publish_every_s: readers see what is there about every so many seconds; None: only at the
            end.
        resume: False begins an incomplete cache anew.
        overwrite: begins a complete cache anew; readers have the old one until the new one is
            whole.
        append: adds a dataset to a complete cache that holds none of its utterances; otherwise that
            is refused.
        annotations: names of what the dataset tells of its utterances, to store beside the
            features: keys of its `entries`, of the items of a list, of a `DynamicItemDataset`,
            columns; or what its method `annotation(name)` returns, a sequence. Utterances that are
            in the cache already get them, too.
        check: utterances to load and compute again, each alone, and to compare with the cache:
            "probe" takes the four that are kept with it, a number more, "all" all, None none.
        accept: keeps the cache after a change of code or settings, if the utterances kept with it
            come out the same to the bit. `featcache.inspect.made_from` tells what was accepted.
        progressbar: shows one bar over the utterances of all workers.

    Raises `StaleCacheError`, with what differs, if the cache was made from something else, or the
    input of utterances has changed; `CacheLockedError` if it is being written; `ComputeError` if
    computing fails; `FeatureError` for arrays that cannot be stored as declared; `DuplicateIdError`
    for an id that several utterances have; `IncompleteError` if workers are lost for good;
    `ConfigError` for what cannot work, such as code that was edited since it was loaded. What was
    computed before is kept in each case.

    >>> import numpy as np, tempfile, featcache
    >>> class Tones(featcache.EnvironmentProvider):
    ...     def build_env_local(self):
    ...         return {"dataset": [3, 4], "ids": ["a", "b"], "compute_features": self.compute}
    ...
    ...     def compute(self, items):
    ...         return [{"id": "ab"[n - 3], "tone": np.ones((n, 2), np.float32)} for n in items]
    >>> declared = [featcache.FeatureStorageConfig("tone")]
    >>> path = tempfile.mkdtemp() + "/tones"
    >>> tones = featcache.extract(Tones(), path, declared, progressbar=False)
    >>> tones.lengths("tone").tolist()
    [3, 4]
    """
    options = RunOptions(
        resume=resume,
        overwrite=overwrite,
        append=append,
        annotations=annotations,
        on_error=on_error,
        on_changed=on_changed,
        retries=retries,
        publish_every_s=publish_every_s,
        check=check,
        accept=accept,
        progressbar=progressbar,
    )
    whole_number("batch_size", batch_size, 1)
    where = directory(path, "a cache")
    # a path names one cache: those beside it may well be other features of the same ids
    storage = FeatureStorage(where.parent, features)
    to = Destination.of(storage, where.name, has_splits=False)
    parallel = None if parallel is None else config_or_client(parallel)
    with kept_random_state():
        return fill(_job_of(provider, parallel, fingerprint or {}, batch_size), to, options)


def _job_of(
    provider: EnvironmentProvider,
    parallel: ParallelConfig | Client | None,
    given: Mapping[str, object],
    batch_size: int,
) -> Job:
    """Return the job of an environment; nothing else holds what the provider has built here."""
    env = dict(checked_environment(provider.build_env_local()))
    dataset, compute = env["dataset"], env["compute_features"]
    check_source(dataset)
    check_ids(env["ids"])
    made_with = _provenance(env)
    watch = Watch([made_with], partial(_again, env), given)
    made_in = witnesses(made_with, getattr(compute, "__self__", compute), dataset)
    by: Watch | OnWorkers = watch
    if parallel is not None:
        by = OnWorkers(parallel, partial(_sent, provider, code_of_driver(made_with), given))
    return Job(
        source=dataset,
        ids=env["ids"],
        compute=partial(_computed, env),
        loader_kwargs={"batch_size": batch_size, **loader_options(env)},
        fingerprint=watch.fingerprint,
        witnesses=lambda: made_in,
        mentioned=made_with.mentioned,
        by=by,
        lengths=visible_lengths(dataset) if env.get("lengths") is None else env["lengths"],
        forget=env.clear,
    )


def _computed(env: Environment, batch: object) -> object:
    return env["compute_features"](batch)


def _sent(
    provider: EnvironmentProvider, made_with: DriverCode, given: Mapping[str, object]
) -> Build:
    sent = {"build_worker_setup_fn": provider.build_worker_setup_fn(), "made_with": made_with}
    return partial(_build, pack({**sent, "given": given}))


def _build(packed: bytes) -> tuple[Environment, Callable[[], Watch] | None]:
    sent = unpack(packed)
    env: Environment = sent["build_worker_setup_fn"]()
    if "compute_features" not in env:  # refused where it is checked
        return env, None
    made_with = _again(env)
    refuse_other_code(sent["made_with"], made_with[0])
    return env, partial(Watch, made_with, partial(_again, env), sent["given"])


def _again(env: Environment) -> list[Provenance]:
    return [_provenance(env)]


def _provenance(env: Environment) -> Provenance:
    """Return the provenance of features: of `compute_features`, and of all modules there."""
    named = {name: value for name, value in env.items() if isinstance(value, torch.nn.Module)}
    if callable(collate := env.get("collate_fn")):
        named["collate_fn"] = collate
    dataset = env["dataset"]
    shown = [getattr(dataset, name, None) for name in ("ids", "data_ids", "lengths")]
    found = (dataset, env.get("ids"), env.get("lengths"), *shown)
    data = [each for each in found if each is not None]
    return provenance(env["compute_features"], named=named, data=data)
