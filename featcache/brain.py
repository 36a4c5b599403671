"""`FeatureCacheMixin`: a SpeechBrain `Brain`, or the like, that computes and caches features."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from featcache.errors import ConfigError
from featcache.extraction.computation import check_loader_kwargs, features_of
from featcache.extraction.datasets import (
    check_ids,
    check_source,
    is_map_style,
    kept_random_state,
    visible_ids,
    visible_lengths,
)
from featcache.extraction.destination import Destination
from featcache.extraction.fill import compare, fill
from featcache.extraction.job import Build, Environment, Job, OnWorkers, RunOptions
from featcache.extraction.on_workers import checked_environment
from featcache.extraction.run import Ranks
from featcache.loading.loader import FeatureLoader
from featcache.staleness.provenance import (
    Provenance,
    hparams_of,
    noting_changes,
    provenance,
    roots_of,
)
from featcache.staleness.values import left_out_of
from featcache.staleness.watch import Watch, code_of_driver, refuse_other_code
from featcache.staleness.witnesses import witnesses
from featcache.storage import FeatureStorage
from featcache.tables import FeatureTable
from featcache.workers.config import ParallelConfig, config_or_client
from featcache.workers.pickling import pack, unpack

if TYPE_CHECKING:
    from distributed import Client


class FeatureCacheMixin:
    """Gives a `Brain` the method `cache_features`; the class itself defines `compute_features`.

    `Brain.fit` and `Brain.evaluate` then take a `FeatureLoader`, too: see `make_dataloader`.

    It may stand before or after `Brain` among the bases. Any other object needs `modules` (a
    `ModuleDict` or a dict) and `device`; `hparams`, `evaluation_ctx`, `eval_precision`,
    `noprogressbar`, `debug` and `debug_batches` are used if it has them::

        class MyBrain(featcache.FeatureCacheMixin, sb.Brain):
            def compute_features(self, batch, stage):
                fbank = self.modules.fbank(batch.sig.data)
                frames = batch.num_samples // 160 + 1
                return featcache.unpad(batch.id, frames, {"fbank": fbank})

        brain = MyBrain(modules, hparams=hparams)
        train = brain.cache_features(train_set, sb.Stage.TRAIN)
        valid = brain.cache_features(valid_set, sb.Stage.VALID)
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        first = next(base for base in cls.__mro__ if "make_dataloader" in vars(base))
        # a Brain before the mixin: its own method would be found
        if not issubclass(first, FeatureCacheMixin):
            theirs, ours = vars(first)["make_dataloader"], FeatureCacheMixin.make_dataloader
            cls.make_dataloader = taking_loaders(theirs, ours)  # type: ignore[method-assign]

    def compute_features(self, batch: Any, stage: Any) -> list[dict[str, Any]]:
        """Compute the features of a batch, which has been moved to `self.device`.

        A class defines it. Called without gradients, all modules in evaluation mode, in the
        precision of evaluation.

        Returns for each utterance of the batch a dict of its "id" and all declared features, cut to
        the utterance's own length: tensors or arrays of shape (frames, *dims), on any device.
        `featcache.unpad` makes it of padded ones.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has to define compute_features(batch, stage)"
        )

    def cache_features(
        self,
        dataset: object,
        stage: object = None,
        *,
        split: str | None = None,
        storage: FeatureStorage | None = None,
        loader_kwargs: Mapping[str, object] | None = None,
        progressbar: bool | None = None,
        resume: bool = True,
        overwrite: bool = False,
        append: bool = False,
        annotations: str | Sequence[str] = (),
        on_error: Literal["raise", "skip"] = "raise",
        on_changed: Literal["raise", "recompute"] = "raise",
        retries: int = 2,
        publish_every_s: float | None = None,
        fingerprint: Mapping[str, object] | None = None,
        check: int | Literal["probe", "all"] | None = "probe",
        accept: bool = False,
        parallel: ParallelConfig | Mapping[str, object] | Client | None = None,
    ) -> FeatureTable:
        """Compute the features that the cache of a split lacks; return the dataset's part of it.

        First the cache is compared with what would be computed now: code, weights, settings, a few
        utterances computed again, and the recordings; see `docs/explanation/what-is-checked.md`.
        Then whatever is missing is computed. Stopped at any moment, the same call goes on.
        Utterances in the cache are not loaded again if the dataset shows its ids (`data_ids` or
        `ids`), else not computed again. The cache is complete when each utterance of the dataset is
        stored or has failed (`cache.failed`). Under torchrun each rank computes its share. With
        `--debug` a few batches are cached, as incomplete. The global random generators are left as
        they were.

        Returns the view of this dataset's utterances. Its `cache` is the whole, which may hold
        others: a line in the log says so.

        Args:
            dataset: a dataset; or a loader, which is used as it is.
            stage: given to `compute_features`; by default that of the split. "train" is
                `Stage.TRAIN` to a Brain.
            split: names the cache, `storage.path(split)`; by default after the stage, "train"
                without one.
            storage: by default the one `FeatureStorage` in `self.hparams`.
            loader_kwargs: arguments of the DataLoader: batch_size, num_workers, ... Never shuffles
                or drops anything. By default each utterance is computed by itself.
            progressbar: by default shown unless `self.noprogressbar`.
            resume: False begins an incomplete cache anew.
            overwrite: begins a complete cache anew; readers have the old one until the new one is
                whole.
            append: adds a dataset to a complete cache that holds none of its utterances; otherwise
                that is taken for a mistake in the split, and refused.
            annotations: keys of the dataset to store beside the features, such as "text", "speaker"
                or "duration": of its entries, or dynamic items that need no features. Utterances
                that are in the cache already get them, too.
            on_error: "skip" goes on after an utterance that fails, and notes it in the cache's
                `work-failures.jsonl`. Later calls leave it out, or try it again with "raise".
            on_changed: of utterances whose recording or other input has changed since, "raise"
                names them in an error, "recompute" computes them again. A recording that was moved
                or stored in another lossless format has not changed.
            retries: further attempts at an utterance that fails, or that its worker dies of; needs
                a dataset with items by number.
            publish_every_s: readers see what is there about every so many seconds; None: only at
                the end.
            fingerprint: what else the features are made from, JSON values. A key that featcache
                fills in itself ("modules", "source", "hparams", ...; see
                `featcache.staleness.provenance`) is replaced by yours; None leaves it out.
            check: utterances to load and compute again, each alone, and to compare with the cache:
                "probe" takes the four that are kept with it, a number more, "all" all, None none.
            accept: keeps the cache after a change of code or settings, if the utterances kept with
                it come out the same to the bit; `featcache.inspect.made_from` tells what was.
            parallel: computes on Dask's workers: a `ParallelConfig` or such a mapping, or a client
                of `get_client`, by which several splits share the workers. Each gets a copy of this
                object as it is now, and uses its GPU if it has one. The dataset must show its ids;
                where it shows lengths ("duration"), long utterances come first.

        Raises `StaleCacheError`, with what differs, if the cache was made from something else, or
        the input of utterances has changed; `ComputeError` if computing fails; `FeatureError` for
        arrays that cannot be stored as declared; `IncompleteError` if it failed on another rank;
        `ConfigError` for code that was edited since it was loaded, and for a dataset that is empty
        or belongs to another split; `CacheError` for a cache that lacks something and cannot be
        written to. What was computed before is kept in each case.
        """
        debug = getattr(self, "debug_batches", 2) if getattr(self, "debug", False) else None
        if progressbar is None:
            progressbar = not getattr(self, "noprogressbar", False)
        split, stage = split_and_stage(self, split, stage)
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
            colour=getattr(self, "tqdm_barcolor", {}).get(name_of(stage).lower()),
            most_batches=debug,
        )
        to = Destination.of(storage or find_storage(self), split)
        given = loader_kwargs or {}, fingerprint or {}
        workers = None if parallel is None else config_or_client(parallel)
        with (
            kept_random_state(),
            Ranks() as ranks,
            job_of(self, dataset, stage, *given, workers, ranks.size) as job,
        ):
            return fill(job, to, options, ranks)

    def check_features(
        self,
        dataset: object,
        stage: object = None,
        *,
        split: str | None = None,
        storage: FeatureStorage | None = None,
        loader_kwargs: Mapping[str, object] | None = None,
        fingerprint: Mapping[str, object] | None = None,
        check: int | Literal["probe", "all"] = "probe",
    ) -> None:
        """Compare the cache of a split as `cache_features` does, and write nothing.

        Code, weights and settings are compared, and utterances computed again: all with
        `check="all"`. The arguments are those of `cache_features`.

        Raises `StaleCacheError` with what differs, `NotACacheError` if nothing is cached.
        """
        split, stage = split_and_stage(self, split, stage)
        to = Destination.of(storage or find_storage(self), split)
        options = RunOptions(check=check)
        given = loader_kwargs or {}, fingerprint or {}
        with kept_random_state(), job_of(self, dataset, stage, *given) as job:
            compare(job, to, options)

    def expectation(
        self,
        stage: object = None,
        *,
        collate_fn: object = None,
        fingerprint: Mapping[str, object] | None = None,
    ) -> dict[str, object]:
        """Return the fingerprint of the features that this object computes now, as plain data.

        For the `expect` of `featcache.open`, `FeatureStorage.attach`, `cache` and `reader`, where
        the features are not computed but read: a cache that was made from something else is refused
        there. It holds for all splits, unless `stage` names one. Reads all weights that count.

        Args:
            stage: that of `cache_features`; by default none is expected.
            collate_fn: that of the dataset or of `loader_kwargs` there, if there was one.
            fingerprint: as it was given there.
        """
        made_with = provenance_of(self, collate_fn)
        made_from = {} if stage is None else {"stage": name_of(stage_of(self, stage))}
        with kept_random_state(), evaluating(self, made_with.modules.values()):
            return made_with.fingerprint({**made_from, **settings_of(self), **(fingerprint or {})})

    def make_dataloader(
        self,
        dataset: object,
        stage: object,
        ckpt_prefix: str | None = "dataloader-",
        **loader_kwargs: object,
    ) -> Any:
        """Return a `FeatureLoader` as it is, as `Brain.fit` and `evaluate` do with a DataLoader.

        SpeechBrain tells it each epoch and saves it with its checkpoints: a training stopped in the
        middle of an epoch goes on with the very next batch. Its samplers share out their batches
        over ranks. `loader_kwargs` do not concern it. Any other dataset is left to SpeechBrain.
        """
        if isinstance(dataset, FeatureLoader):
            from featcache.interop.speechbrain import use_loader

            use_loader(self, dataset, stage, ckpt_prefix)
            return dataset
        return super().make_dataloader(dataset, stage, ckpt_prefix, **loader_kwargs)  # type: ignore[misc]


# Split, stage, storage and settings of a run, as a `Brain` or the like tells them.


def split_and_stage(extractor: object, split: str | None, stage: object) -> tuple[str, Any]:
    """Return the split and the stage; what is not given follows from the other."""
    if split is None:
        split = "train" if stage is None else name_of(stage).lower()
    stages = _stages_of(extractor)
    if stage is not None:
        return split, stage_of(extractor, stage)
    if stages is None:
        return split, split
    kinds = {"valid": "VALID", "dev": "VALID", "test": "TEST"}
    found = [name for prefix, name in kinds.items() if split.lower().startswith(prefix)]
    return split, stages[found[0] if found else "TRAIN"]


def stage_of(extractor: object, stage: object) -> Any:
    """Return the stage that a Brain's method gets: SpeechBrain's for its name, in any case."""
    stages = _stages_of(extractor)
    if isinstance(stage, str) and stages is not None and stage.upper() in stages.__members__:
        return stages[stage.upper()]
    return stage


def _stages_of(extractor: object) -> Any:
    """Return SpeechBrain's `Stage` for one of its Brains, else None."""
    core = sys.modules.get("speechbrain.core")  # a Brain can only come from a loaded SpeechBrain
    return core.Stage if core is not None and isinstance(extractor, core.Brain) else None


def name_of(stage: object) -> str:
    """Return the name of a stage, SpeechBrain's or any other."""
    return str(getattr(stage, "name", stage))


def find_storage(extractor: object) -> FeatureStorage:
    """Return the one storage in the hparams; raises `ConfigError` if that is not to be found."""
    hparams = hparams_of(extractor)
    found = {name: value for name, value in hparams.items() if isinstance(value, FeatureStorage)}
    if len(set(map(id, found.values()))) == 1:
        return next(iter(found.values()))
    there = "there are no hparams"
    if found:
        there = f"they have several: {', '.join(map(repr, found))}"
    elif hparams:
        there = f"they have none, only {', '.join(map(repr, hparams))}"
    for name, value in hparams.items():  # above all a declaration whose `!new:` was forgotten
        if not found and isinstance(value, Mapping) and {"root", "features"} <= value.keys():
            there = f"{name!r} is a plain dict: in YAML write {name}: !new:featcache.FeatureStorage"
    raise ConfigError(
        f"give storage=, a FeatureStorage, or declare exactly one in hparams; {there}"
    )


def settings_of(extractor: object) -> dict[str, object]:
    """Return what counts for features whatever `compute_features` names."""
    settings: dict[str, object] = {}
    if isinstance(precision := getattr(extractor, "eval_precision", None), str):
        settings["precision"] = precision
    hparams = hparams_of(extractor)
    if isinstance(sample_rate := hparams.get("sample_rate"), int | float):
        settings["sample_rate"] = sample_rate
    return settings


# A `Brain`, or the like, as features are computed with it: here alone, or by copies in workers.

# what a Brain has for training only, some of it large
_FOR_TRAINING = (
    "checkpointer",
    "optimizers_dict",
    "optimizer",
    "scaler",
    "train_loader",
    "train_sampler",
    "profiler",
)


def ids_for_workers(dataset: object, ranks: int) -> Sequence[str]:
    """Return the ids of a dataset; raises `ConfigError` for what workers cannot share."""
    if ranks > 1:
        raise ConfigError(
            "under torchrun the ranks share the work; leave out parallel, or do without torchrun"
        )
    if not is_map_style(dataset):
        raise ConfigError(
            "parallel needs a map-style dataset, to give each worker utterances of it, not "
            f"{type(dataset).__name__!r}"
        )
    env = checked_environment({"dataset": dataset, "compute_features": features_of})
    check_ids(env["ids"])
    return cast(Sequence[str], env["ids"])


def _copied(dataset: object) -> object:
    """Return a copy as workers get one: files that it opens are not those of what is sent later."""
    try:
        return unpack(pack({"dataset": dataset}))["dataset"]
    except ConfigError:  # the run says so, if it comes to workers
        return dataset


@contextlib.contextmanager
def evaluating(extractor: object, others: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put all modules into evaluation mode, without gradients; then each has its own mode again."""
    modules = [*roots_of(extractor), *others]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        # not inference_mode: what modules keep of it could not be trained on later
        with torch.no_grad():
            yield
    finally:
        # by `train`, which some modules define anew; parents come before their children
        for part, training in modes:
            if part.training != training:
                part.train(training)


@contextlib.contextmanager
def computing(made_with: Provenance, again: Callable[[], Provenance]) -> Iterator[None]:
    """Set an object's modules to evaluation, and note which of its settings that changes."""
    with (
        noting_changes(made_with, again),
        evaluating(made_with.extractor, made_with.modules.values()),
    ):
        yield


def collate_fn_of(dataset: object, loader_kwargs: Mapping[str, object]) -> object:
    """Return the collate function in use; None: the default."""
    return loader_kwargs.get("collate_fn") or getattr(dataset, "collate_fn", None)


def provenance_of(extractor: Any, collate: object) -> Provenance:
    """Return the provenance of the features of an object, with the collate function in use."""
    named = {} if collate is None else {"collate_fn": collate}
    return provenance(extractor.compute_features, extractor, named=named)


def environment_of(
    extractor: object,
    dataset: object,
    stage: object,
    loader_kwargs: Mapping[str, object],
    made_with: Provenance,
    given: Mapping[str, object],
) -> Build:
    """Return a function that builds, in a worker, an environment with a copy of `extractor`.

    The copy is the extractor as it is now, without what only training needs.

    Args:
        extractor: the object, whose modules are to be evaluated.
        dataset: the whole dataset.
        stage: given to `compute_features`.
        loader_kwargs: arguments of a DataLoader.
        made_with: its provenance, with the modules that it uses beside its own.
        given: what the user has given for the fingerprint.

    Raises `ConfigError` if something of it cannot be sent.
    """
    sent = copy.copy(extractor)
    cls: Any = type(sent)
    unread = left_out_of(cls) | ({*_FOR_TRAINING} - made_with.mentioned)
    for name in _FOR_TRAINING:  # of an object that is no Brain these may be something else
        if name in vars(sent) and name in unread:
            setattr(sent, name, None)
    named = {"brain": sent, "dataset": dataset, "stage": stage, "loader_kwargs": loader_kwargs}
    others = {"others": dict(made_with.modules), "made_with": code_of_driver(made_with)}
    return partial(_build, pack({**named, **others, "given": given}))


def _build(packed: bytes) -> tuple[Environment, Callable[[], Watch]]:
    found = unpack(packed)
    extractor = found["brain"]
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    for module in [*roots_of(extractor), *found["others"].values()]:
        module.to(device)
    _tell_device(extractor, device)
    collate = collate_fn_of(found["dataset"], found["loader_kwargs"])
    made_with = provenance_of(extractor, collate)
    refuse_other_code(found["made_with"], made_with)
    compute = partial(features_of, extractor, found["stage"])
    env = {name: found[name] for name in ("dataset", "loader_kwargs")}
    again = partial(_again, extractor, collate)
    watch = partial(Watch, [made_with], again, found["given"])
    return {**env, "compute_features": compute}, watch


def _again(extractor: object, collate: object) -> list[Provenance]:
    return [provenance_of(extractor, collate)]


def _tell_device(extractor: Any, device: str) -> None:
    """Set where an object's modules are now; the precision of evaluation stays."""
    before, now = torch.device(extractor.device).type, torch.device(device).type
    if str(extractor.device) != device:
        extractor.device = device
    autocast = getattr(getattr(extractor, "evaluation_ctx", None), "context", None)
    if isinstance(autocast, torch.autocast) and now != before:
        dtype, enabled = autocast.fast_dtype, autocast._enabled  # noqa: SLF001  # no public name
        extractor.evaluation_ctx = torch.autocast(now, dtype=dtype, enabled=enabled)


# Loaders of a `Brain`: its own method makes them, but of a `FeatureLoader`, which is one.


def taking_loaders(
    make: Callable[..., object], of_loader: Callable[..., object]
) -> Callable[..., Any]:
    """Return a method `make_dataloader`: `of_loader` for a `FeatureLoader`, else `make`."""

    @functools.wraps(make)
    def make_dataloader(self: Any, dataset: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
        method = of_loader if isinstance(dataset, FeatureLoader) else make
        return method(self, dataset, stage, *args, **kwargs)

    return make_dataloader


# The job of a `Brain`, or the like.


@contextlib.contextmanager
def job_of(
    extractor: Any,
    dataset: object,
    stage: object,
    loader_kwargs: Mapping[str, object],
    fingerprint: Mapping[str, object],
    parallel: ParallelConfig | Client | None = None,
    ranks: int = 1,
) -> Iterator[Job]:
    """Yield the job of an extractor, whose modules are in evaluation mode for that long."""
    check_source(dataset)
    check_loader_kwargs(loader_kwargs)
    again = partial(provenance_of, extractor, collate_fn_of(dataset, loader_kwargs))
    made_with = again()
    made_from = {"stage": name_of(stage), **settings_of(extractor), **fingerprint}
    precision = getattr(extractor, "eval_precision", None)
    with computing(made_with, again):
        watch = Watch([made_with], lambda: [again()], made_from)
        job = Job(
            source=dataset,
            ids=visible_ids(dataset),
            compute=partial(features_of, extractor, stage),
            loader_kwargs=loader_kwargs,
            fingerprint=watch.fingerprint,
            witnesses=partial(witnesses, made_with, extractor, dataset),
            mentioned=made_with.mentioned,
            by=watch,
            device=lambda: extractor.device,
            precision=precision if isinstance(precision, str) else "fp32",
        )
        if parallel is not None:
            sent = dataset, stage, loader_kwargs, made_with, made_from
            job = replace(
                job,
                ids=ids_for_workers(dataset, ranks),
                by=OnWorkers(parallel, partial(environment_of, extractor, *sent)),
                lengths=visible_lengths(dataset),
                copied=_copied,
            )
        yield job
