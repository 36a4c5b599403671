"""A `Brain`, or whatever else has `compute_features`, in worker processes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from featcache.cluster.config import ParallelConfig
from featcache.cluster.pickling import pack, unpack
from featcache.errors import ConfigError
from featcache.extraction.computation import features_of
from featcache.extraction.datasets import is_map_style, visible_lengths
from featcache.extraction.here import Extraction
from featcache.extraction.provenance import modules_of
from featcache.extraction.run import Run
from featcache.extraction.workers.tasks import Environment, checked_environment

if TYPE_CHECKING:
    from dask.distributed import Client

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


def run_of(
    extraction: Extraction,
    parallel: ParallelConfig | Client,
    fingerprint: Mapping[str, object],
    others: Mapping[str, torch.nn.Module],
) -> Run:
    """Return the run that has workers do an extraction.

    `others` are modules that its owner uses beside its own.

    Raises `ConfigError` for what workers cannot share.
    """
    owner, dataset, stage = extraction.owner, extraction.source, extraction.stage
    if extraction.ranks.size > 1:
        raise ConfigError(
            "under torchrun the ranks share the work; leave out parallel, or do without torchrun"
        )
    if not is_map_style(dataset):
        raise ConfigError(
            "parallel needs a map-style dataset, to give each worker utterances of it, not "
            f"{type(dataset).__name__!r}"
        )
    ids = checked_environment({"dataset": dataset, "compute_features": features_of})["ids"]
    colours = getattr(owner, "tqdm_barcolor", {})
    return Run(
        to=dataclasses.replace(extraction.to, ids=ids),
        ids=ids,
        lengths=visible_lengths(dataset),
        builder=partial(environment_of, owner, dataset, stage, extraction.loader_kwargs, others),
        loader_kwargs=extraction.loader_kwargs,
        fingerprint=fingerprint,
        parallel=parallel,
        skip_failures=extraction.skip_failures,
        retries=extraction.retries,
        publish_every_s=extraction.publish_every_s,
        progressbar=extraction.progressbar,
        colour=colours.get(str(getattr(stage, "name", stage)).lower()),
        most_batches=getattr(owner, "debug_batches", 2) if getattr(owner, "debug", False) else None,
    )


def environment_of(
    owner: object,
    dataset: object,
    stage: object,
    loader_kwargs: Mapping[str, object],
    others: Mapping[str, torch.nn.Module],
) -> partial[Environment]:
    """Return what builds in a worker the environment of `owner.compute_features`.

    The owner is sent there as it is now.

    Args:
        owner: the object, whose modules are to be evaluated.
        dataset: the whole dataset.
        stage: given to `compute_features`.
        loader_kwargs: arguments of a DataLoader.
        others: modules that it uses beside its own.

    Raises `ConfigError` if something of it cannot be sent.
    """
    sent = copy.copy(owner)
    for name in _FOR_TRAINING:
        if name in vars(sent):
            setattr(sent, name, None)
    named = {
        "brain": sent,
        "dataset": dataset,
        "stage": stage,
        "loader_kwargs": loader_kwargs,
        "others": dict(others),
    }
    return partial(_build, pack(named))


def _build(packed: bytes) -> Environment:
    found = unpack(packed)
    owner, dataset, stage = found["brain"], found["dataset"], found["stage"]
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    own = [owner] if isinstance(owner, torch.nn.Module) else modules_of(owner).values()
    for module in [*own, *found["others"].values()]:
        module.to(device)
    _tell_device(owner, device)
    return {
        "dataset": dataset,
        "compute_features": partial(features_of, owner, stage),
        "loader_kwargs": found["loader_kwargs"],
    }


def _tell_device(owner: Any, device: str) -> None:
    """Let an object know where its modules are now; the precision of evaluation stays."""
    before = torch.device(owner.device).type
    if str(owner.device) != device:
        owner.device = device
    autocast = getattr(getattr(owner, "evaluation_ctx", None), "context", None)
    if isinstance(autocast, torch.autocast) and not device.startswith(before):
        enabled = autocast._enabled  # noqa: SLF001  # it has no public name
        owner.evaluation_ctx = torch.autocast(
            torch.device(device).type, dtype=autocast.fast_dtype, enabled=enabled
        )
