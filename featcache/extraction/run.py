"""`Run`: a job under way; its ranks, the annotations of its data set, and its plan."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import Subset

from featcache.errors import (
    ComputeError,
    ConfigError,
    FeatureError,
    IncompleteError,
    describe,
    nearest,
)
from featcache.extraction.computation import Loading
from featcache.extraction.datasets import DynamicItems, is_dynamic, is_map_style
from featcache.extraction.destination import Destination, rows_of
from featcache.extraction.job import Job, RunOptions
from featcache.extraction.stamping import Entries
from featcache.format import (
    Manifest,
    Value,
    check_annotations,
    check_name,
    kind_of,
    wider_kind,
    with_kinds,
)
from featcache.interface import Ints
from featcache.samplers.batches import Batches, HasTable
from featcache.samplers.epoch import connected_rank
from featcache.store import Cache, FeatureReader
from featcache.writing.part_writer import PartWriter

if TYPE_CHECKING:
    from datasets import Dataset
    from speechbrain.dataio.dataset import DynamicItemDataset

# The processes of one `torchrun`, which share the work and wait for each other.

T = TypeVar("T")
_CONNECT = (
    "call ddp_init_group(run_opts) of speechbrain.utils.distributed, or "
    "torch.distributed.init_process_group, first"
)


class Ranks:
    """This process's place among those that `torch.distributed` connects, or `alone`.

    A context manager: in it, the ranks talk through a group of their own, in which one may wait for
    the others as long as it takes. The usual group would give up after minutes (NCCL) while another
    rank still computes.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._group: Any = None
        self.rank, self.size = (0, 1) if alone else connected_rank(_CONNECT)

    def __enter__(self) -> Self:
        if self.size > 1:
            self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=365))
        return self

    def __exit__(self, *error: object) -> None:
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, once all have come here; they must be picklable."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def together(self, task: Callable[[], T]) -> list[T]:
        """Run `task` on every rank and return what all of them return.

        A task that fails on one rank fails on all: there with its own error, elsewhere with
        `IncompleteError`.
        """
        if self._group is None:
            return [task()]
        result, error = None, None
        try:
            result = task()
        except BaseException as failure:
            error = failure
        outcomes = self.gather((result, describe(error) if error is not None else None))
        if error is not None:
            raise error
        self.refuse_failures(text for _, text in outcomes)
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def each(self, task: Callable[[], T]) -> T:
        """Run `task` as `together` does; return what it returns here, which nobody else gets."""
        mine: list[T] = []
        self.together(lambda: mine.append(task()))
        return mine[0]

    def refuse_failures(self, errors: Iterable[str | None]) -> None:
        """Raise `IncompleteError` if another rank has failed, given each one's error, or None."""
        for rank, error in enumerate(errors):
            if error is not None and rank != self.rank:
                raise IncompleteError(f"rank {rank} failed with {error}; what was computed is kept")


# Annotations of a data set: values of its utterances by name, taken without loading any item.

_Value = Callable[[int], object]  # of an utterance, by its number; None where it is missing


class DatasetAnnotations:
    """Annotations that a cache is to have, of all utterances of a data set.

    They are read and checked before anything is computed, and stored when all utterances are:
    those of utterances that were in the cache before, too, where they are new or other than stored.

    Args:
        source: the data set, or a loader, whose data set it is.
        ids: of the data set.
        names: of the annotations.
        features: names that no annotation can have.

    Raises `ConfigError` for names that the data set does not have, and for one that shows no ids,
    `FeatureError` for names that cannot be an annotation's, for a value that is none, or of another
    kind than those of the other utterances, `ComputeError` where the data set fails to tell one.
    """

    def __init__(
        self,
        source: object,
        ids: Sequence[str] | None,
        names: str | Iterable[str],
        features: Iterable[str],
    ) -> None:
        dataset = source if is_map_style(source) else getattr(source, "dataset", source)
        names = [names] if isinstance(names, str) else dict.fromkeys(names)
        for name in names:
            check_name(name, list(features))
        values = {name: values_of(dataset, name) for name in names}
        if values and ids is None:
            raise ConfigError(
                "annotations belong to ids, and this data set shows none; give it an attribute "
                "`ids`, a list of strings"
            )
        self._ids = ids or ()
        self._known = {name: self._column(name, value) for name, value in values.items()}

    def _column(self, name: str, value_of: _Value) -> list[object]:
        kinds: dict[str, str] = {}
        values: list[object] = []
        for number, id in enumerate(self._ids):
            try:
                value = value_of(number)
            except Exception as error:
                text = f"annotation {name!r} of utterance {id!r} failed with {describe(error)}"
                raise ComputeError(text) from error
            checked = check_annotations(id, {name: value})
            kinds = with_kinds(id, checked, kinds)
            values.append(checked.get(name))
        return values

    def refuse_other_kinds(self, stored: Mapping[Path, Manifest]) -> None:
        """Raise `FeatureError` if a cache has an annotation of another kind, before any computing.

        Integers and floats are of one kind. `stored` are the cache's feature sets.
        """
        for directory, manifest in stored.items():
            for name in [each for each in self._known if each in manifest.annotations]:
                kind = manifest.annotations[name].kind
                values = (value for value in self._known[name] if value is not None)
                now = reduce(wider_kind, (kind_of(cast(Value, value)) for value in values), None)
                if now is not None and wider_kind(kind, now) is None:
                    raise FeatureError(
                        f"annotation {name!r} of the data set is {now}, but {kind} in cache "
                        f"{str(directory)!r}; give it another name, or make the cache anew"
                    )

    def unlike(self, cache: Cache) -> dict[str, dict[str, object]]:
        """Return what a cache is to be given, by id and name; None for what it is to forget."""
        rows = rows_of(cache.opened, self._ids)
        there = np.flatnonzero(rows >= 0)
        found: dict[str, dict[str, object]] = {}
        for name, values in self._known.items():
            stored: Sequence[object] = [None] * len(there)
            if name in cache.annotations:
                stored = cache.annotation(name).take(rows[there])
            for number, value in zip(there.tolist(), stored, strict=True):
                if values[number] != value:
                    found.setdefault(self._ids[number], {})[name] = values[number]
        return found


def values_of(dataset: object, name: str) -> _Value:
    """Return what gives an annotation by the number of an utterance.

    A method `annotation(name)` of the data set tells them all; a `FeatureDataset` those of its
    caches; a `DynamicItemDataset` has keys and dynamic items, a `datasets.Dataset` columns; all
    else has entries, see `Entries`.

    Raises `ConfigError` where nothing is known of that name.
    """
    if isinstance(dataset, Subset):
        inner, indices = values_of(dataset.dataset, name), dataset.indices
        return lambda number: inner(indices[number])
    if isinstance(dataset, HasTable):
        dataset = dataset.table
    if callable(annotation := getattr(dataset, "annotation", None)):
        values: _Value = annotation(name).__getitem__
        return values
    if is_dynamic(dataset) and (dynamic := _dynamic(dataset, name)) is not None:
        return dynamic
    loaded = sys.modules.get("datasets")
    if loaded is not None and isinstance(dataset, loaded.Dataset):
        return _of_table(dataset, name)
    return _of_entries(dataset, name)


def _dynamic(dataset: DynamicItemDataset, name: str) -> _Value | None:
    """Return what computes a dynamic item; None for a key of the entries."""
    if name not in dataset.pipeline.key_to_node and any(name in e for e in dataset.data.values()):
        return None  # of some of the entries, not of the first
    items, ids = DynamicItems(dataset, [name]), dataset.data_ids
    if not items.functions:
        return None
    if any(isinstance(function, FeatureReader) for function in items.functions):
        raise ConfigError(
            f"annotation {name!r} of the data set is made of cached features; take it from the "
            "data set before they are attached"
        )
    return lambda number: items.of(ids[number])[name]


def _of_table(dataset: Dataset, name: str) -> _Value:
    if name not in dataset.column_names:
        known = nearest(name, dataset.column_names)
        raise ConfigError(f"the data set has no column {name!r}; {known}")
    return list(dataset.with_format(None)[name]).__getitem__


def _of_entries(dataset: object, name: str) -> _Value:
    entries = Entries(dataset)
    if not entries:
        kind = type(dataset).__name__
        raise ConfigError(
            f"{kind!r} does not show {name!r} of its utterances before they are loaded; give it an "
            "attribute `entries`, a list of dicts, one for each utterance, or add annotations to "
            "the cache with its method `annotate`"
        )
    if not any(_rows_with(name, entries[number]) for number in range(len(entries))):
        first = next((row for row in _rows(entries[0]) if isinstance(row, Mapping)), {})
        raise ConfigError(f"no utterance of the data set has {name!r}; {nearest(name, first)}")
    return lambda number: next((row[name] for row in _rows_with(name, entries[number])), None)


def _rows_with(name: str, entry: object) -> list[Mapping[str, object]]:
    return [row for row in _rows(entry) if isinstance(row, Mapping) and name in row]


def _rows(entry: object) -> Sequence[object]:
    # rows that an object holds, one or several for each utterance; or an entry itself
    return entry if isinstance(entry, list | tuple) else (entry,)


# The plan of an extraction: the batches of utterances of each task; and a run's directory.

TASKS_PER_WORKER = 32  # so that nobody waits for the last one longer than a thirtieth of the time
LARGEST_TASK = 200_000  # utterances; larger messages are hard on Dask
RUN = "work-extraction-"  # then 8 hexadecimal digits: the directory of a run, in that of the cache


def longest_first(indices: Ints, lengths: NDArray[np.float64] | None) -> Ints:
    """Sort utterances by their lengths, the longest first; as they are without lengths."""
    return indices if lengths is None else indices[np.argsort(-lengths[indices], kind="stable")]


def cut(batches: Batches, lengths: NDArray[np.float64] | None, tasks: int) -> list[Batches]:
    """Cut batches, in their order, into at most `tasks` tasks of about equal total length.

    Without lengths, utterances are counted. No task is longer than an equal share plus its last
    batch.

    >>> [list(task) for task in cut(Batches.of([[0], [1], [2], [3]]), np.array([6.0, 2, 2, 2]), 2)]
    [[[0]], [[1], [2], [3]]]
    """
    sums = batches.ends[1:].astype(float)
    if lengths is not None:
        sums = np.append(0, np.cumsum(np.maximum(lengths[batches.items], 0)))[batches.ends[1:]]
    if not len(sums) or sums[-1] == 0:
        return [batches] if len(sums) else []
    shares = np.searchsorted(sums, sums[-1] * np.arange(1, tasks + 1) / tasks * (1 - 1e-12)) + 1
    shares[-1] = len(sums)  # whatever weighs nothing at the end
    bounds = np.unique(np.append(0, np.minimum(shares, len(sums))))
    items, ends = batches.items, batches.ends
    return [
        Batches(items[ends[start] : ends[stop]], ends[start : stop + 1] - ends[start])
        for start, stop in pairwise(bounds)
    ]


def digest_of(ids: Iterable[str]) -> str:
    """Return the xxh3-64 of ids in their order, the same in every process."""
    state = xxhash.xxh3_64()
    for id in ids:
        state.update(id.encode("utf-8", "surrogatepass") + b"\0")
    return state.hexdigest()


def check_lengths(lengths: object, size: int) -> NDArray[np.float64]:
    """Return lengths as an array; raises `ConfigError` unless there is one for each utterance."""
    try:
        found = np.asarray(lengths, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lengths are numbers, one for each utterance: {error}") from error
    if found.shape != (size,):
        raise ConfigError(
            f"lengths are {size} numbers, one for each utterance, not an array of {found.shape}"
        )
    for number in np.flatnonzero(~np.isfinite(found)):
        raise ConfigError(
            f"lengths are finite numbers, one for each utterance, but number {number} is "
            f"{found[number]}"
        )
    return found


def make_run(cache: Path) -> Path:
    """Make a directory for a run, and remove those of killed runs."""
    remove_runs(cache)
    directory = cache / f"{RUN}{secrets.token_hex(4)}"
    directory.mkdir()
    return directory


def remove_runs(cache: Path) -> None:
    """Remove the directories of runs; what cannot be removed does no harm.

    By another name first: a worker that wakes up late then finds its run over, and writes nothing
    more into it.
    """
    for directory in cache.glob(f"{RUN}*"):
        gone = directory.with_name(f"work-removed-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            directory.rename(gone)
    for directory in cache.glob("work-removed-*"):
        shutil.rmtree(directory, ignore_errors=True)  # NFS keeps files that are open


# `Run`: a job under way, as the processes see it that compute.

Publish = Callable[[Callable[[], object]], None]


class Opened(NamedTuple):
    """Facts of a cache that all ranks know, once the first one has opened it.

    Args:
        fingerprint: of the run, with the seed where features are random.
        seed: of random features.
        ids: of all utterances; None: the data set shows none, and nothing else tells.
        full: whether the cache was complete before.
        accepted: ids that failed before, and are left out now.
    """

    fingerprint: Mapping[str, object]
    seed: int | None
    ids: Sequence[str] | None
    full: bool = False
    accepted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Run:
    """A job under way: a cache is filled, which was opened for it."""

    job: Job
    destination: Destination
    options: RunOptions
    ranks: Ranks
    opened: Opened

    @property
    def loading(self) -> Loading:
        """Treatment of the items that are loaded."""
        return Loading(self.job.mentioned, self.opened.seed)

    @property
    def open_part(self) -> Callable[..., PartWriter]:
        """Function that begins a part of the cache."""
        to = self.destination
        return partial(PartWriter, to.path.absolute(), to.features, self.opened.fingerprint)
