"""A `Brain`, or the like, as features are computed with it: here alone, or by copies in workers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from featcache.cluster.pickling import pack, unpack
from featcache.errors import ConfigError
from featcache.extraction.computation import features_of
from featcache.extraction.datasets import is_map_style
from featcache.extraction.destination import Destination
from featcache.extraction.id_numbers import check_ids
from featcache.extraction.probe_source import ProbeSource, on_this_device
from featcache.extraction.workers.tasks import Environment, checked_environment
from featcache.staleness.before_computing import noting_changes
from featcache.staleness.extractors import roots_of
from featcache.staleness.in_workers import code_of_driver, refuse_other_code
from featcache.staleness.provenance import Provenance, provenance

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


def ids_for_workers(dataset: Any, ranks: int) -> Sequence[str]:
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


def probe_source_of(
    extractor: Any,
    dataset: Any,
    stage: object,
    loader_kwargs: Mapping[str, object],
    to: Destination,
    parallel: object = None,
    *,
    mentioned: frozenset[str] = frozenset(),
) -> ProbeSource:
    """Return what computes utterances alone for a Brain, whose workers load from copies."""
    precision = getattr(extractor, "eval_precision", None)
    return ProbeSource(
        dataset,
        to.ids,
        partial(features_of, extractor, stage),
        loader_kwargs,
        list(to.features),
        lambda: extractor.device,
        precision if isinstance(precision, str) else "fp32",
        same_device=parallel is None or on_this_device(parallel, extractor.device),
        in_workers=parallel is not None,
        mentioned=mentioned or None,
        copied=_same if parallel is None else _copied,
    )


def _same(dataset: Any) -> Any:
    return dataset


def _copied(dataset: Any) -> Any:
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
    """Let an object compute: evaluate its modules, and note which of its settings that changes."""
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
) -> partial[Environment]:
    """Return a function that builds, in a worker, an environment with a copy of `extractor`.

    The copy is the extractor as it is now, without what only training needs.

    Args:
        extractor: the object, whose modules are to be evaluated.
        dataset: the whole dataset.
        stage: given to `compute_features`.
        loader_kwargs: arguments of a DataLoader.
        made_with: its provenance, with the modules that it uses beside its own.

    Raises `ConfigError` if something of it cannot be sent.
    """
    sent = copy.copy(extractor)
    for name in _FOR_TRAINING:
        if name in vars(sent):
            setattr(sent, name, None)
    named = {"brain": sent, "dataset": dataset, "stage": stage, "loader_kwargs": loader_kwargs}
    others = {"others": dict(made_with.modules), "made_with": code_of_driver(made_with)}
    return partial(_build, pack({**named, **others}))


def _build(packed: bytes) -> Environment:
    found = unpack(packed)
    extractor = found["brain"]
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    for module in [*roots_of(extractor), *found["others"].values()]:
        module.to(device)
    _tell_device(extractor, device)
    collate = collate_fn_of(found["dataset"], found["loader_kwargs"])
    refuse_other_code(found["made_with"], provenance_of(extractor, collate))
    compute = partial(features_of, extractor, found["stage"])
    given = {name: found[name] for name in ("dataset", "loader_kwargs")}
    return {**given, "compute_features": compute}


def _tell_device(extractor: Any, device: str) -> None:
    """Let an object know where its modules are now; the precision of evaluation stays."""
    before, now = torch.device(extractor.device).type, torch.device(device).type
    if str(extractor.device) != device:
        extractor.device = device
    autocast = getattr(getattr(extractor, "evaluation_ctx", None), "context", None)
    if isinstance(autocast, torch.autocast) and now != before:
        dtype, enabled = autocast.fast_dtype, autocast._enabled  # noqa: SLF001  # no public name
        extractor.evaluation_ctx = torch.autocast(now, dtype=dtype, enabled=enabled)
