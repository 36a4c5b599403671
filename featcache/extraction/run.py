"""`Run`: one extraction, from what is missing to the published cache; ranks, plan, annotations."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import Subset

from featcache._checks import whole_number
from featcache._closing import close_after
from featcache._interval import Interval
from featcache.errors import (
    ComputeError,
    ConfigError,
    FeatureError,
    IncompleteError,
    StaleCacheError,
    describe,
    nearest,
)
from featcache.extraction.changed_inputs import rows_of
from featcache.extraction.checking import Checking
from featcache.extraction.datasets import DynamicItems, IdNumbers, counted, is_dynamic, is_map_style
from featcache.extraction.destination import Destination, retry_while_locked
from featcache.extraction.outcomes import Failure, Outcome, ProgressBar
from featcache.extraction.stamping import Entries
from featcache.extraction.unfinished import add_resume_note, is_overwriting
from featcache.format.annotations import (
    Value,
    check_annotations,
    check_name,
    kind_of,
    wider_kind,
    with_kinds,
)
from featcache.format.feature_sets import stored_sets
from featcache.interface import Ints
from featcache.reading.reader import FeatureReader
from featcache.samplers.batches import Batches
from featcache.samplers.epoch import connected_rank
from featcache.store import Cache
from featcache.tables.table import FeatureTable, HasTable
from featcache.writing.cache_writer import CacheWriter

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

    def refuse_failures(self, errors: Iterable[str | None]) -> None:
        """Raise `IncompleteError` if another rank has failed, given each one's error, or None."""
        for rank, error in enumerate(errors):
            if error is not None and rank != self.rank:
                raise IncompleteError(f"rank {rank} failed with {error}; what was computed is kept")


# Annotations of a data set: values of its utterances by name, taken without loading any item.

_Value = Callable[[int], object]  # of an utterance, by its number; None where it is missing


class DatasetAnnotations:
    """Annotations that a cache is to have, as a data set tells them.

    They are read and checked before anything is computed, and stored when all utterances are:
    those of utterances that were in the cache before, too, where they are new or other than stored.

    Args:
        source: the data set, or a loader, whose data set it is.
        names: of the annotations.
        features: names that no annotation can have.

    Raises `ConfigError` for names that the data set does not have, `FeatureError` for names that
    cannot be an annotation's.
    """

    def __init__(self, source: Any, names: str | Iterable[str], features: Iterable[str]) -> None:
        dataset = source if is_map_style(source) else getattr(source, "dataset", source)
        self.names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
        for name in self.names:
            check_name(name, list(features))
        self._values = {name: values_of(dataset, name) for name in self.names}
        self._known: dict[str, list[object]] = {}
        self._ids: Sequence[str] = ()

    @classmethod
    def of(
        cls, source: Any, names: str | Iterable[str], features: Iterable[str]
    ) -> DatasetAnnotations | None:
        """Return the annotations of these names; None where there is none."""
        return cls(source, names, features) if names else None

    def read(self, ids: Sequence[str] | None) -> None:
        """Read the annotations of all utterances of the data set, and check them.

        Raises `FeatureError` for a value that is no annotation, or of another kind than those of
        the other utterances, `ComputeError` where the data set fails to tell one, `ConfigError` for
        a data set that shows no ids.
        """
        if self.names and ids is None:
            raise ConfigError(
                "annotations belong to ids, and this data set shows none; give it an attribute "
                "`ids`, a list of strings"
            )
        self._ids = ids or ()
        self._known = {name: self._column(name, value) for name, value in self._values.items()}

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

    def refuse_other_kinds(self, path: Path) -> None:
        """Raise `FeatureError` if a cache has an annotation of another kind, before any computing.

        Integers and floats are of one kind.
        """
        for directory, manifest in stored_sets(path):
            stored = {
                name: each.kind for name, each in manifest.annotations.items() if name in self.names
            }
            for name, kind in stored.items():
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


def values_of(dataset: Any, name: str) -> _Value:
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
    if callable(getattr(dataset, "annotation", None)):
        values: _Value = dataset.annotation(name).__getitem__
        return values
    if is_dynamic(dataset) and (dynamic := _dynamic(dataset, name)) is not None:
        return dynamic
    loaded = sys.modules.get("datasets")
    if loaded is not None and isinstance(dataset, loaded.Dataset):
        return _of_table(dataset, name)
    return _of_entries(dataset, name)


def _dynamic(dataset: Any, name: str) -> _Value | None:
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


def _of_table(dataset: Any, name: str) -> _Value:
    if name not in dataset.column_names:
        known = nearest(name, dataset.column_names)
        raise ConfigError(f"the data set has no column {name!r}; {known}")
    return list(dataset.with_format(None)[name]).__getitem__


def _of_entries(dataset: Any, name: str) -> _Value:
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


# `Run`: fills a cache with the utterances it lacks, whichever processes compute them.
#
# Opening, progress, publishing, failures and resuming are here; computing is an `Executor`'s.

Publish = Callable[[Callable[[], object]], None]
_Opened = tuple[Mapping[str, object], bool, frozenset[str], int | None]
_log = logging.getLogger("featcache")


class Executor(Protocol):
    """The processes that compute: this one, the ranks of torchrun, or workers."""

    @property
    def by_number(self) -> bool:
        """True if utterances of the dataset can be picked by number."""

    @property
    def size(self) -> int | None:
        """Number of utterances of the dataset; None if unknown."""

    def learn_ids(self) -> Sequence[str] | None:
        """Return the ids of a dataset that shows none, by loading all of it; None if in vain."""

    def compute(self, missing: Ints | None, bar: ProgressBar, publish_if_due: Publish) -> Outcome:
        """Compute and store utterances; whatever happens, all parts are sealed in the end.

        Args:
            missing: their numbers in the dataset; None: whatever comes of the dataset.
            bar: progress and failures are reported to it.
            publish_if_due: to be called often, with what seals the parts of this process.
        """


@dataclass
class Run:
    """Computes the utterances that a cache lacks, and publishes them.

    Args:
        destination: the cache.
        executor: computes.
        ranks: the processes that make this run together.
        checking: computes utterances again, to compare them.
        publish_every_s: how often readers get what is there; None: at the end.
        progressbar: whether there is a bar.
        colour: of the bar.
        annotations: values of the data set that the cache is to have beside features.
    """

    destination: Destination
    executor: Executor
    checking: Checking
    publish_every_s: float | None
    progressbar: bool
    colour: str | None = None
    annotations: DatasetAnnotations | None = None
    ranks: Ranks = field(default_factory=partial(Ranks, alone=True))

    def __post_init__(self) -> None:
        self._publisher: CacheWriter | None = None  # on rank 0
        self._failures: list[Failure] = []
        self._outcome = Outcome()
        self._numbers: IdNumbers | None = None  # on rank 0, where utterances have ids and numbers
        self._publishing = Interval(self.publish_every_s)

    def run(
        self, fingerprint: Callable[[], Mapping[str, object]], *, resume: bool, overwrite: bool
    ) -> FeatureTable:
        """Fill the cache; return its view of the data set.

        `fingerprint` says what the features are made from.
        """
        learnt, opened = self.ranks.together(partial(self._open, fingerprint, resume, overwrite))[0]
        to = self.destination
        to.ids = to.ids if learnt is None else learnt
        if opened is not None:
            to.fingerprint, to.full, to.accepted, to.seed = opened
            try:
                self._fill()
            except BaseException as error:
                if self.ranks.rank == 0:
                    add_resume_note(error, to.path, to.ids)
                raise
        first = self.ranks.rank == 0
        if first and not is_overwriting(to.path):
            self.checking.end(to.cache())
        if self.annotations is not None:
            self.ranks.together(self._annotate)
        return to.view(tell=first)

    def _annotate(self) -> None:
        """On rank 0, store the annotations that the cache lacks, or has others of."""
        to = self.destination
        if self.ranks.rank or self.annotations is None or is_overwriting(to.path):
            return
        cache = to.cache()
        if unlike := self.annotations.unlike(cache):
            cache.annotate(unlike)

    def _fill(self) -> None:
        error: BaseException | None = None
        try:
            self._compute(self.ranks.together(self._find_missing)[0])
        except BaseException as failure:
            error = failure
            raise
        finally:
            close_after(error, partial(self._finish, error))

    def _open(
        self, fingerprint: Callable[[], Mapping[str, object]], resume: bool, overwrite: bool
    ) -> tuple[Sequence[str] | None, _Opened | None]:
        """On rank 0, open the cache for writing.

        Returns what the other ranks need to know: ids that had to be learnt, and, unless nothing is
        missing, the fingerprint, whether the cache was complete, the ids that failed before and are
        left out, and the seed.
        """
        if self.ranks.rank:
            return None, None
        to, checking = self.destination, self.checking
        if not overwrite:
            to.refuse_another()
        if self.annotations is not None:
            self.annotations.read(to.ids)
            self.annotations.refuse_other_kinds(to.storage.path(to.split))
        made_from = checking.begin(fingerprint(), resume=resume, overwrite=overwrite)
        learnt = None if overwrite else self._learn(made_from)
        if to.ids is not None and self.executor.by_number:
            self._numbers = checking.numbers or IdNumbers(to.ids)
        try:
            self._publisher = to.open(made_from, checking, resume=resume, overwrite=overwrite)
        except StaleCacheError as error:
            raise checking.explained(error, made_from) from error
        if self._publisher is None:
            return learnt, None
        return learnt, (made_from, to.full, to.accepted, to.seed)

    def _learn(self, fingerprint: Mapping[str, object]) -> Sequence[str] | None:
        """Load all of a dataset that shows no ids, to compare it with a complete cache."""
        to = self.destination
        cache = to.current(fingerprint) if to.ids is None else None
        if cache is None or not cache.complete:
            return None
        _log.warning(
            "the data set shows no ids: all of it is loaded, to see whether it is what cache %r "
            "holds; give it an attribute `ids`, a list of strings, and this takes no time",
            str(to.path),
        )
        to.ids = self.executor.learn_ids()
        to.refuse_another()
        return to.ids

    def _find_missing(self) -> Ints | None:
        """On rank 0, return the utterances to be computed; None if they have no numbers.

        They are not committed, nor left out because they failed before.
        """
        if self.ranks.rank or not self.executor.by_number:
            return None
        if self._numbers is None:
            return np.arange(self.executor.size or 0)
        missing = ~self._numbers.committed(self.destination.path)
        missing[self._numbers.find(self.destination.accepted)] = False
        return np.flatnonzero(missing)

    def _compute(self, missing: Ints | None) -> None:
        """Compute this rank's share."""
        ranks, total, known = self.ranks, self.executor.size, 0
        if missing is not None:
            known = (total or 0) - len(missing)
            missing = missing[ranks.rank :: ranks.size]
            total = known + len(missing)
        of_ranks = f", rank 0 of {ranks.size}" if ranks.size > 1 else ""
        text = f"caching {self.destination.name}{of_ranks}"
        shown = self.progressbar and ranks.rank == 0
        bar = ProgressBar(text, total, known, self._failures, shown=shown, colour=self.colour)
        with bar.bar:
            self._outcome = self.executor.compute(missing, bar, self._publish_if_due)

    def _publish_if_due(self, seal: Callable[[], object]) -> None:
        """Publish what is sealed, on rank 0 that of all ranks."""
        if self._publishing.due():
            seal()
            if self._publisher is not None:
                self.destination.publish_early(self._publisher)

    def _finish(self, error: BaseException | None) -> None:
        """Wait for all ranks, and publish what they have written."""
        text = None if error is None else describe(error)
        ends = self.ranks.gather((text, self._failures, self._outcome))
        failures = [failure for _, failed, _ in ends for failure in failed]
        outcome = Outcome.of_all([outcome for _, _, outcome in ends])
        interrupted = isinstance(error, KeyboardInterrupt)
        self.ranks.together(partial(self._publish, failures, outcome, interrupted))
        if self.destination.ids is None and outcome.seen is not None:
            self.destination.ids = sorted(outcome.seen)  # of a stream; now they are known
        self.ranks.refuse_failures(text for text, _, _ in ends)

    def _publish(self, failures: Sequence[Failure], outcome: Outcome, interrupted: bool) -> None:
        """On rank 0, gather what all have written, those that died included, and publish it.

        After Ctrl-C nobody waits for those that still write: the next run gathers that.
        """
        writer, to = self._publisher, self.destination
        if writer is None:
            return
        try:
            retry_while_locked(writer.recover, unless=lambda: interrupted)
            remove_runs(to.path)
            lost = 0 if outcome.stopped else self._lost(outcome.left_out, failures)
            to.publish(writer, failures, outcome._replace(stopped=outcome.stopped or lost > 0))
        except BaseException:
            writer.abort()  # of nothing: what is sealed stays
            raise
        if lost:
            raise IncompleteError(
                f"{counted(lost)} of {str(to.path)!r} are neither stored nor reported as failures: "
                "were parts of it removed? The cache is not complete; the same call computes them"
            )

    def _lost(self, left_out: int, failures: Sequence[Failure]) -> int:
        """Count utterances that are neither stored, nor failed, nor left out."""
        missing = None if self._numbers is None else self._find_missing()
        if missing is None:
            return 0
        return len(missing) - left_out - len({failure["id"] for failure in failures})


def check_settings(
    on_error: str, on_changed: str, retries: int, publish_every_s: float | None
) -> None:
    """Raise `ConfigError` for settings of an extraction that cannot work."""
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error is 'raise' or 'skip', not {on_error!r}")
    if on_changed not in ("raise", "recompute"):
        raise ConfigError(f"on_changed is 'raise' or 'recompute', not {on_changed!r}")
    whole_number("retries", retries, 0)
    if publish_every_s is not None and not (
        isinstance(publish_every_s, int | float) and publish_every_s > 0
    ):
        raise ConfigError(
            f"publish_every_s is a number of seconds, above 0, or None, not {publish_every_s!r}"
        )
