"""`ProbeSource`: loads utterances of a data set one by one, and computes them alone."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from featcache.cluster.config import ParallelConfig
from featcache.errors import FeatureError
from featcache.extraction.computation import checked_result
from featcache.extraction.dataset_batches import Batch, DatasetBatches, Loading, worker_failed
from featcache.extraction.datasets import dataset_of, is_map_style, visible_lengths
from featcache.extraction.seeding import COMPUTING, seed_generators
from featcache.extraction.stamping import Entries
from featcache.interface import Ints
from featcache.staleness.inputs import input_digests
from featcache.staleness.probe import Probed, as_rows

_OF_BATCHES = {"batch_size", "sampler", "batch_sampler", "persistent_workers", "prefetch_factor"}
_OF_LOADERS = ("collate_fn", "num_workers", "worker_init_fn", "multiprocessing_context")


class Failed(NamedTuple):
    """The error of an utterance that cannot be loaded, or not be computed."""

    error: Exception
    loading: bool


@dataclass
class ProbeSource:
    """Computes utterances alone, in this process.

    Args:
        source: a data set, or a loader of one.
        ids: its ids; None: it shows none, and no utterance can be picked.
        compute: makes a list of dicts, "id" and arrays, of a batch's data.
        loader_kwargs: arguments of a DataLoader.
        features: names of the features.
        device: tells what device computes.
        precision: of the computation; widened by what the processor is set to.
        same_device: whether the utterances of the cache are computed on that device, too.
        in_workers: whether other processes compute them.
        mentioned: names of inputs that count; None: all.
        lengths: of the utterances; None: those that the data set shows, if any.
        copied: makes the data set that is loaded from, where loading might leave traces in one that
            is still to be sent to workers.
    """

    source: Any
    ids: Sequence[str] | None
    compute: Callable[[Any], Any]
    loader_kwargs: Mapping[str, Any]
    features: Sequence[str]
    device: Callable[[], torch.device | str | None] = lambda: None
    precision: str = "fp32"
    same_device: bool = True
    in_workers: bool = False
    mentioned: frozenset[str] | None = None
    lengths: Sequence[float] | None = None
    copied: Callable[[Any], Any] = field(default=lambda dataset: dataset)

    def __post_init__(self) -> None:
        dataset = dataset_of(self.source)
        self.is_loader = dataset is not self.source and not is_map_style(self.source)
        self.by_id = self.ids is not None and is_map_style(dataset)
        self._options = self._one_at_a_time()
        self._dataset: Any = None

    @property
    def batch_size(self) -> int:
        """Utterances of a batch of the extraction, as far as that is known; else 2."""
        options: Any = vars(self.source) if self.is_loader else self.loader_kwargs
        sampler = options.get("batch_sampler")
        size = getattr(sampler, "batch_size", 2) if sampler else options.get("batch_size", 1)
        return int(size or 1)

    @property
    def size(self) -> int:
        """Number of utterances of the data set."""
        return len(self.ids or ())

    def known_lengths(self) -> Sequence[float] | None:
        """Return how long the utterances are, if anybody knows."""
        if self.lengths is not None:
            return self.lengths
        return visible_lengths(dataset_of(self.source))

    def forget(self) -> None:
        """Let go of what computes: a model takes memory."""
        self.compute = lambda data: ()
        self._dataset = None

    def alone(self, numbers: Iterable[int], seed: int) -> Iterator[tuple[str, Probed | Failed]]:
        """Load and compute utterances one by one, each under generators of the seed and its id."""
        listed, done = np.fromiter(numbers, np.int64), 0
        try:
            for batch, entry in zip(self._singly(listed, seed), self._entries(listed), strict=True):
                id, found = self._alone(batch, seed)
                yield id, replace(found, entry=entry) if isinstance(found, Probed) else found
                done += 1
        except RuntimeError as error:
            if not worker_failed(error):
                raise
            for number in listed[done:].tolist():
                yield self.ids[number] if self.ids else "", Failed(error, loading=True)

    def together(self, numbers: Sequence[int]) -> dict[str, Probed]:
        """Compute utterances as one batch; nothing if that fails, of which the extraction tells."""
        options = self._options | {"batch_size": len(numbers)}
        (batch,) = DatasetBatches(self._items(), numbers, options, self.ids)
        try:
            with torch.no_grad():
                utterances = checked_result(self.compute(batch.data), batch.ids)
            return {id: self._probed({}, id, arrays) for id, arrays in utterances}
        except Exception:
            return {}

    def used_precision(self, utterances: Iterable[Probed]) -> str:
        """Return the precision of what was computed, by the settings of the processor."""
        if self.precision in ("fp16", "bf16"):
            return self.precision
        halves = {
            rows.array.dtype.itemsize == 2 and rows.array.dtype.kind == "f"
            for probed in utterances
            for rows in probed.features.values()
        }
        if True in halves:
            return "fp16"
        on_gpu = torch.device(self.device() or "cpu").type == "cuda"
        single = torch.get_float32_matmul_precision() == "highest"
        tf32 = on_gpu and (not single or torch.backends.cudnn.allow_tf32)
        return "tf32" if tf32 else "fp32"

    def device_name(self) -> str:
        """Return the name of the processor or GPU that computes."""
        device = torch.device(self.device() or "cpu")
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return f"{device.type} {_processor()}"

    def _singly(self, numbers: Ints, seed: int) -> Iterable[Batch]:
        if not len(numbers):
            return []
        return DatasetBatches(self._items(), numbers, self._options, self.ids, Loading(seed=seed))

    def _entries(self, numbers: Ints) -> list[int]:
        entries = Entries(dataset_of(self.source))
        return cast(list[int], entries.stamps(numbers.tolist()).tolist())

    def _alone(self, batch: Batch, seed: int) -> tuple[str, Probed | Failed]:
        (id,) = batch.ids or ("",)
        if batch.error is not None:
            return id, Failed(batch.error, loading=True)
        seed_generators(seed, id, COMPUTING)
        try:
            return id, self._computed(batch, id)
        except Exception as error:
            return id, Failed(error, loading=False)

    def _computed(self, batch: Batch, id: str) -> Probed:
        inputs = input_digests(batch.data, id, self.mentioned)  # before anybody works in place
        with torch.no_grad():
            ((_, arrays),) = checked_result(self.compute(batch.data), [id])
        return self._probed(inputs, id, arrays)

    def _probed(self, inputs: Mapping[str, str], id: str, arrays: Mapping[str, Any]) -> Probed:
        for name in self.features:
            if name not in arrays:
                raise FeatureError(f"utterance {id!r}: feature {name!r} is missing")
        return Probed(inputs, {name: as_rows(arrays[name]) for name in self.features})

    def _items(self) -> Any:
        if self._dataset is None:
            self._dataset = self.copied(dataset_of(self.source))
        return self._dataset

    def _one_at_a_time(self) -> dict[str, Any]:
        """Return the arguments of a loader of single utterances, with at most one process.

        Where the extraction loads in processes of its own, so does this: files that a data set
        opens when it is first used must not be inherited by them.
        """
        given = self.loader_kwargs
        if self.is_loader:
            given = {name: getattr(self.source, name, None) for name in _OF_LOADERS}
            given["batch_size"] = None if self.source.batch_sampler is None else 1
        options = {name: value for name, value in given.items() if name not in _OF_BATCHES}
        if "num_workers" in options:
            options["num_workers"] = min(options["num_workers"] or 0, 1)
        if not options.get("num_workers"):
            options.pop("multiprocessing_context", None)
            options.pop("timeout", None)
        return options | {"batch_size": 1 if given.get("batch_size", 1) is not None else None}


def on_this_device(parallel: object, device: torch.device | str | None) -> bool:
    """Say whether workers compute on a device like this process's, as far as that is known."""
    if isinstance(parallel, Mapping):
        parallel = ParallelConfig.of(parallel)
    if not isinstance(parallel, ParallelConfig) or not parallel.env.startswith("local"):
        return False
    return not torch.cuda.is_available() or torch.device(device or "cpu").type == "cuda"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
