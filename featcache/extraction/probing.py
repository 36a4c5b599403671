"""Probing of a cache: which utterances are computed again, and what is stored of them."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from featcache.declaration import FeatureStorageConfig
from featcache.errors import ComputeError, FeatureError, counted, describe
from featcache.extraction.computation import (
    DatasetBatches,
    LoadedBatch,
    Loading,
    checked_result,
    worker_failed,
)
from featcache.extraction.datasets import (
    COMPUTING,
    DataSet,
    IdNumbers,
    dataset_of,
    is_map_style,
    seed_generators,
    visible_lengths,
)
from featcache.extraction.job import Job
from featcache.extraction.stamping import Entries
from featcache.interface import Array, Ints
from featcache.reading import joined
from featcache.registry import is_lossless
from featcache.staleness.inputs import UNKNOWN, input_digests
from featcache.staleness.probe import (
    Comparison,
    Probe,
    Probed,
    Tolerance,
    Unlike,
    as_rows,
    compare,
    seen_frames,
    spread,
    tolerance,
    unlike,
    worst,
)
from featcache.writing.arrays import encoded

# `ProbeSource`: loads utterances of a data set one by one, and computes them alone.

_OF_BATCHES = {"batch_size", "sampler", "batch_sampler", "persistent_workers", "prefetch_factor"}
_OF_LOADERS = ("collate_fn", "num_workers", "worker_init_fn", "multiprocessing_context")


class Failed(NamedTuple):
    """The error of an utterance that cannot be loaded, or not be computed."""

    error: Exception
    loading: bool


class ProbeSource:
    """Computes utterances of a job alone, in this process.

    Args:
        job: what is computed.
        features: names of the features that are looked at.

    Attributes:
        by_id: whether utterances can be picked by their ids.
        in_workers: whether other processes compute those of the cache.
    """

    def __init__(self, job: Job, features: Sequence[str]) -> None:
        self._job, self._features = job, features
        self._of_job = dataset_of(job.source)
        self.is_loader = self._of_job is not job.source and not job.by_number
        self.by_id = job.ids is not None and is_map_style(self._of_job)
        self.in_workers = job.in_workers
        self._options = self._one_at_a_time()
        self._dataset: DataSet | None = None  # that items are loaded from

    @property
    def ids(self) -> Sequence[str]:
        """The ids of the data set; none if it shows none."""
        return self._job.ids or ()

    @property
    def batch_size(self) -> int:
        """Utterances of a batch of the extraction, as far as that is known; else 2."""
        options: Any = vars(self._job.source) if self.is_loader else self._job.loader_kwargs
        sampler = options.get("batch_sampler")
        size = getattr(sampler, "batch_size", 2) if sampler else options.get("batch_size", 1)
        return int(size or 1)

    @property
    def size(self) -> int:
        """Number of utterances of the data set."""
        return len(self.ids)

    def known_lengths(self) -> Sequence[float] | None:
        """Return how long the utterances are, if anybody knows."""
        if self._job.lengths is not None:
            return self._job.lengths
        return visible_lengths(self._of_job)

    def forget(self) -> None:
        """Release the copy of the data set."""
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
                yield self.ids[number], Failed(error, loading=True)

    def together(self, numbers: Sequence[int]) -> dict[str, Probed]:
        """Compute utterances as one batch; nothing if that fails, of which the extraction tells."""
        options = self._options | {"batch_size": len(numbers)}
        (batch,) = DatasetBatches(self._items(), numbers, options, self._job.ids)
        try:
            with torch.no_grad():
                utterances = checked_result(self._job.compute(batch.data), batch.ids)
            return {id: self._probed({}, id, arrays) for id, arrays in utterances}
        except Exception:
            return {}

    def used_precision(self, utterances: Iterable[Probed]) -> str:
        """Return the precision of what was computed, by the settings of the processor."""
        if self._job.precision in ("fp16", "bf16"):
            return self._job.precision
        halves = {
            rows.array.dtype.itemsize == 2 and rows.array.dtype.kind == "f"
            for probed in utterances
            for rows in probed.features.values()
        }
        if True in halves:
            return "fp16"
        on_gpu = torch.device(self._job.device() or "cpu").type == "cuda"
        single = torch.get_float32_matmul_precision() == "highest"
        tf32 = on_gpu and (not single or torch.backends.cudnn.allow_tf32)
        return "tf32" if tf32 else "fp32"

    def device_name(self) -> str:
        """Return the name of the processor or GPU that computes."""
        device = torch.device(self._job.device() or "cpu")
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return f"{device.type} {_processor()}"

    def _singly(self, numbers: Ints, seed: int) -> Iterable[LoadedBatch]:
        if not len(numbers):
            return []
        loading = Loading(seed=seed)
        return DatasetBatches(self._items(), numbers, self._options, self._job.ids, loading)

    def _entries(self, numbers: Ints) -> list[int]:
        entries = Entries(self._of_job)
        return cast(list[int], entries.stamps(numbers.tolist()).tolist())

    def _alone(self, batch: LoadedBatch, seed: int) -> tuple[str, Probed | Failed]:
        (id,) = batch.ids or ("",)
        if batch.error is not None:
            return id, Failed(batch.error, loading=True)
        seed_generators(seed, id, COMPUTING)
        try:
            return id, self._computed(batch, id)
        except Exception as error:
            return id, Failed(error, loading=False)

    def _computed(self, batch: LoadedBatch, id: str) -> Probed:
        # before anybody works in place; all inputs where none are named
        inputs = input_digests(batch.data, id, self._job.mentioned or None)
        with torch.no_grad():
            ((_, arrays),) = checked_result(self._job.compute(batch.data), [id])
        return self._probed(inputs, id, arrays)

    def _probed(self, inputs: Mapping[str, str], id: str, arrays: Mapping[str, object]) -> Probed:
        for name in self._features:
            if name not in arrays:
                raise FeatureError(f"utterance {id!r}: feature {name!r} is missing")
        return Probed(inputs, {name: as_rows(arrays[name]) for name in self._features})

    def _items(self) -> DataSet:
        if self._dataset is None:
            self._dataset = cast(DataSet, self._job.copied(self._of_job))
        return self._dataset

    def _one_at_a_time(self) -> dict[str, object]:
        """Return the arguments of a loader of single utterances, with at most one process.

        Where the extraction loads in processes of its own, so does this: files that a data set
        opens when it is first used must not be inherited by them.
        """
        given, source = self._job.loader_kwargs, self._job.source
        if self.is_loader:
            given = {name: getattr(source, name, None) for name in _OF_LOADERS}
            given["batch_size"] = None if source.batch_sampler is None else 1
        options = {name: value for name, value in given.items() if name not in _OF_BATCHES}
        if "num_workers" in options:
            options["num_workers"] = min(options["num_workers"] or 0, 1)
        if not options.get("num_workers"):
            options.pop("multiprocessing_context", None)
            options.pop("timeout", None)
        return options | {"batch_size": 1 if given.get("batch_size", 1) is not None else None}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


# Stored features compared with the same ones computed alone, and what makes them differ.

_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
_SMALLEST = {"float16": 2.0**-24}  # below these, numbers become zero


def spreads_of(utterances: Mapping[str, Probed], features: Sequence[str]) -> dict[str, float]:
    """Return the spread of each feature over some utterances."""
    return {name: spread(seen_frames(utterances, name)) for name in features}


def unlike_stored(
    id: str,
    stored: Mapping[str, object],
    alone: Probed,
    spreads: Mapping[str, float],
    tolerance: Tolerance,
    declared: Mapping[str, FeatureStorageConfig],
) -> Iterator[Unlike]:
    """Iterate over the features of an utterance that are stored otherwise than computed alone.

    The rounding of the declared dtype and the loss of the declared codec are no difference.
    """
    for name, config in declared.items():
        there, computed = as_rows(stored[name]), alone.features[name]
        slack = _loss(computed.array, config) if computed.array.dtype.kind == "f" else 0.0
        found = unlike((id, name), computed, there, spreads[name], tolerance, slack)
        if found is not None:
            yield found


def _loss(array: Array, config: FeatureStorageConfig) -> Array:
    """Return what storing as declared may move each number by."""
    rounding = np.abs(array.astype(np.float64)) * _EPSILON.get(config.dtype, 0.0)
    rounding += _SMALLEST.get(config.dtype, 0.0)
    if is_lossless(config.codec) or config.dtype != "float32":
        return rounding
    rows = np.ascontiguousarray(array if config.time_axis == 0 else array[None], np.float32)
    spec, blocks = config.spec(rows.shape[1:]), config.blocks(rows.shape[1:])
    if blocks is None:
        return rounding
    read = joined(spec, encoded("", rows, spec, blocks), blocks.rows or 0)
    return rounding + 2 * float(np.abs(np.subtract(read, rows)).max(initial=0))


def cause_of(found: Sequence[Unlike], source: ProbeSource, in_batch: Sequence[Unlike]) -> str:
    """Return why stored features differ: "batches", "workers", "either" or "neither".

    Args:
        found: the differences.
        source: knows batch size and workers.
        in_batch: differences of utterances that were computed here, as one batch and alone.
    """
    rounded = any(each.shapes is not None for each in found)
    if in_batch or (source.batch_size > 1 and (rounded or not source.in_workers)):
        return "batches"
    if source.in_workers:
        return "either" if source.batch_size > 1 else "workers"
    return "neither"


def told(compared: int, found: Sequence[Unlike], cause: str) -> str:
    """Return the warning about stored features that are others than those computed alone.

    Args:
        compared: utterances that were compared.
        found: the differences.
        cause: as `cause_of` gives it.
    """
    number = len({each.id for each in found})
    each = "; ".join(f"{one.feature} of {one.id!r} {one.told()}" for one in worst(found))
    are = "is" if number == 1 else "are"
    cures = {"batches": [_of_batches(found)], "workers": [_WORKERS], "neither": [_NEITHER]}
    cure = " Or: ".join(cures.get(cause, [_of_batches(found), _WORKERS]))
    of = f"{number} of {counted(compared, 'utterance')}"
    return f"{of} {are} stored otherwise than computed alone ({each}). {cure}"


_WORKERS = (
    "Workers compute in another state than this process: globals that were set, or classes that "
    "were patched after their import, environment variables, another device; set these where "
    "workers set them, too, and overwrite the cache"
)
_NEITHER = (
    "Something has changed while they were computed, or computing one utterance changes the next; "
    "keep no state between utterances, and overwrite the cache"
)


def _of_batches(found: Sequence[Unlike]) -> str:
    if any(each.shapes is not None for each in found):
        how = "count frames from absolute lengths, since relative ones are rounded,"
    elif all(each.at_the_end for each in found):
        how = "keep the padding out of the last frames (zero it in each layer),"
    else:
        how = "give the model a mask of the lengths and take means within each utterance only,"
    return (
        "Features depend on the other utterances of their batch, through the padding: "
        f"{how} or compute one utterance at a time (batch_size 1), and overwrite the cache"
    )


# The utterances of a probe: which they are, what they are now, and whether they are random.

TRIES = 4  # utterances that are tried for each one of a new probe: some may not be computable
_log = logging.getLogger("featcache")


@dataclass(frozen=True)
class Computed:
    """A probe as it is computed now.

    Attributes:
        probe: its utterances, with all their rows.
        numbers: of the utterances in the data set.
        comparison: with the probe that was kept; None: none was, or they cannot be compared.
        twice: how the features differ that are random.
        other_entries: ids of those whose entry in the data set is another than that of the probe
            that was kept.
    """

    probe: Probe = field(default_factory=Probe)
    numbers: tuple[int, ...] = ()
    comparison: Comparison | None = None
    twice: Comparison | None = None
    other_entries: Sequence[str] = ()


def new_probe(source: ProbeSource, numbers: IdNumbers, count: int, seed: int) -> Computed:
    """Choose utterances that can be computed, and compute them: twice, to see what is random."""
    chosen: dict[str, Probed] = {}
    found: list[int] = []
    candidates = islice(choice(source, numbers), TRIES * count)
    while len(chosen) < count and (some := list(islice(candidates, count - len(chosen)))):
        for number, (id, probed) in zip(some, source.alone(some, seed), strict=True):
            if isinstance(probed, Probed):
                chosen[id] = probed
                found.append(number)
    computed = Computed(_described(source, chosen), tuple(found))
    return _seen_twice(source, computed, seed)


def again(source: ProbeSource, numbers: IdNumbers, kept: Probe, seed: int) -> Computed:
    """Compute the utterances of a probe again, and compare them.

    Raises `ComputeError` if one cannot be computed any more; one that cannot be loaded is logged.
    """
    there = [int(number) for number in numbers.find(kept.utterances)]
    chosen, failed = {}, []
    for number, (id, probed) in zip(there, source.alone(there, seed), strict=True):
        if isinstance(probed, Probed):
            chosen[id] = probed
        elif probed.loading:
            failed.append(number)
            _log.warning(
                "%r, an utterance by which the cache is checked, cannot be loaded any more: %s",
                id,
                describe(probed.error),
            )
        else:
            raise ComputeError(
                f"the features of {id!r} could be computed when the cache was begun, and now fail "
                f"with {describe(probed.error)}; check=None uses the cache unchecked"
            ) from probed.error
    left = tuple(number for number in there if number not in failed)
    computed = Computed(_described(source, chosen), left)
    if not kept.repeatable or kept.seed not in (None, seed):
        return replace(computed, probe=replace(computed.probe, repeatable=kept.repeatable))
    same_device = kept.device == computed.probe.device
    near = tolerance(computed.probe.precision, same_device=same_device)
    comparison = compare(kept.utterances, chosen, near)
    others = [id for id, now in chosen.items() if _entry_differs(kept.utterances[id], now)]
    computed = replace(computed, comparison=comparison, other_entries=others)
    if comparison.alike:
        return replace(computed, probe=replace(computed.probe, seed=kept.seed))
    return _seen_twice(source, computed, seed)


def choice(source: ProbeSource, numbers: IdNumbers) -> Iterator[int]:
    """Iterate over the data set: the shortest utterance, the median one, the others by their ids.

    Without lengths all are in the order of their ids' hashes, which is the same in any data set.
    """
    lengths = source.known_lengths()
    first: list[int] = []
    if lengths is not None and len(lengths) == source.size:
        order = np.argsort(np.asarray(lengths, np.float64), kind="stable")
        first = list(dict.fromkeys([int(order[0]), int(order[len(order) // 2])]))
    yield from first
    yield from (number for number in numbers.by_hash() if number not in first)


def _seen_twice(source: ProbeSource, computed: Computed, seed: int) -> Computed:
    """Whether utterances are other ones from other generators, and even from the same."""
    probe = computed.probe
    near = tolerance(probe.precision, same_device=True)

    def compared_with(another: int) -> Comparison:
        return compare(probe.utterances, _good(source.alone(computed.numbers, another)), near)

    twice = compared_with(seed + 1)
    if twice.alike:
        return computed
    repeatable = not source.is_loader and compared_with(seed).alike
    probe = replace(probe, repeatable=repeatable, seed=seed if repeatable else None)
    return replace(computed, probe=probe, twice=twice)


def _entry_differs(before: Probed, now: Probed) -> bool:
    known = before.entry != UNKNOWN and now.entry != UNKNOWN
    return known and before.entry != now.entry


def _good(found: Iterable[tuple[str, Probed | Failed]]) -> dict[str, Probed]:
    return {id: probed for id, probed in found if isinstance(probed, Probed)}


def _described(source: ProbeSource, utterances: Mapping[str, Probed]) -> Probe:
    precision = source.used_precision(utterances.values())
    batched = source.batch_size > 1
    return Probe(utterances, source.device_name(), precision, batched=batched)
