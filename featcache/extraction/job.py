"""`Job`: what to compute, from what, made with what; `RunOptions`: how a run goes about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from featcache._checks import whole_number
from featcache.errors import ConfigError
from featcache.extraction.datasets import is_map_style, size_of
from featcache.staleness.watch import Watch
from featcache.workers.config import ParallelConfig

if TYPE_CHECKING:
    from distributed import Client

Environment = Mapping[str, Any]
# makes an environment, and what begins to compare what features are made with, if anything does
Build = Callable[[], tuple[Environment, Callable[[], Watch] | None]]
Check = int | Literal["probe", "all"] | None


class OnWorkers(NamedTuple):
    """The processes that compute in place of this one.

    Args:
        parallel: workers to be started, or a client, whose workers stay.
        builder: makes the function that builds the environment of a worker.
    """

    parallel: ParallelConfig | Client
    builder: Callable[[], Build]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Features to be computed: of what, by what, made with what.

    Args:
        source: a data set, or a loader, which is used as it is.
        ids: of all utterances; None: the data set shows none.
        compute: makes a list of dicts, "id" and arrays, of a batch's data, in this process.
        loader_kwargs: arguments of a DataLoader.
        fingerprint: what the features are made from.
        witnesses: makes the record of what they are made with.
        mentioned: keys of an item that count as its input.
        by: workers; or where this process computes, what compares meanwhile what features are made
            with.
        lengths: of all utterances: the longest come first; None keeps the data set's order.
        device: tells what device computes here.
        precision: of the computation; widened by what the processor is set to.
        copied: makes the data set that a probe is loaded from, where loading might leave traces in
            one that is still to be sent to workers.
        forget: called once this process computes no more: a model takes memory.
    """

    source: Any
    ids: Sequence[str] | None
    compute: Callable[[object], object]
    loader_kwargs: Mapping[str, Any]
    fingerprint: Mapping[str, object]
    witnesses: Callable[[], Mapping[str, object]]
    mentioned: frozenset[str]
    by: Watch | OnWorkers
    lengths: Sequence[float] | None = None
    device: Callable[[], torch.device | str | None] = lambda: None
    precision: str = "fp32"
    copied: Callable[[object], object] = lambda dataset: dataset
    forget: Callable[[], object] = lambda: None

    @property
    def by_number(self) -> bool:
        """Whether utterances of the data set can be picked by number."""
        return is_map_style(self.source)

    @property
    def size(self) -> int | None:
        """Number of utterances of the data set; None if unknown."""
        return size_of(self.source)

    @property
    def in_workers(self) -> bool:
        """Whether other processes compute."""
        return isinstance(self.by, OnWorkers)

    @property
    def same_device(self) -> bool:
        """Whether the cache is computed on a device like this process's, as far as is known."""
        if not isinstance(self.by, OnWorkers):
            return True
        parallel = self.by.parallel
        if not isinstance(parallel, ParallelConfig) or not parallel.env.startswith("local"):
            return False
        return not torch.cuda.is_available() or torch.device(self.device() or "cpu").type == "cuda"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run, as `featcache.extract` explains them; raises `ConfigError` for wrong ones.

    Args:
        colour: of the bar; None: the terminal's.
        most_batches: a run ends after these, as incomplete.
    """

    resume: bool = True
    overwrite: bool = False
    append: bool = False
    annotations: str | Sequence[str] = ()
    on_error: Literal["raise", "skip"] = "raise"
    on_changed: Literal["raise", "recompute"] = "raise"
    retries: int = 2
    publish_every_s: float | None = None
    check: Check = "probe"
    accept: bool = False
    progressbar: bool = True
    colour: str | None = None
    most_batches: int | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error is 'raise' or 'skip', not {self.on_error!r}")
        if self.on_changed not in ("raise", "recompute"):
            raise ConfigError(f"on_changed is 'raise' or 'recompute', not {self.on_changed!r}")
        whole_number("retries", self.retries, 0)
        every = self.publish_every_s
        if every is not None and not (isinstance(every, int | float) and every > 0):
            raise ConfigError(
                f"publish_every_s is a number of seconds, above 0, or None, not {every!r}"
            )
        if isinstance(self.check, str) and self.check not in ("probe", "all"):
            raise ConfigError(
                f"check is 'probe', 'all', a number of utterances or None, not {self.check!r}"
            )
        if not isinstance(self.check, str | None):
            whole_number("check", self.check, 1)

    @property
    def skips_failures(self) -> bool:
        """Whether a run goes on after an utterance that fails."""
        return self.on_error == "skip"
