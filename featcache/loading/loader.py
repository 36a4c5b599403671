"""`FeatureLoader`: batches of a table, read ahead by threads, resumed at any batch."""

from __future__ import annotations

import atexit
import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from os import getpid
from typing import Any, Generic, Literal, NoReturn, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import Subset
from typing_extensions import TypeVar

from featcache._checks import named_settings, number_in_state, whole_number
from featcache.errors import ClosedError, ConfigError, StateError
from featcache.loading.batches import Item
from featcache.loading.dataset import BatchPlan, Dtype, FeatureDataset, Index, Transform, dataset_of
from featcache.loading.layouts import Batch, Layout, Packed, Padded
from featcache.loading.memory import (
    Allocate,
    Recycler,
    check_pinned,
    on_device,
    pinned,
    usable_device,
)
from featcache.reading.opening import CachePath
from featcache.samplers.epoch import EpochSampler, Iteration
from featcache.samplers.order import VERSION, check_version
from featcache.samplers.packed import PackedBatchSampler
from featcache.samplers.shuffled import PlainBatchSampler
from featcache.tables.table import FeatureTable

# Place of a loader within its epochs: counts batches that it delivered, not those read ahead.

LoaderState = Mapping[str, object]
IndexBatches = Iterable[Sequence[Index]]


@runtime_checkable
class SupportsEpoch(Protocol):
    """A batch sampler with another order each epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        ...


@runtime_checkable
class SupportsState(Protocol):
    """A batch sampler that can go on from where it was."""

    def state_dict(self, steps: int | None = None) -> dict[str, object]:
        """Return the state after `steps` batches of the running iteration."""
        ...

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue from there in the next iteration."""
        ...


class Position:
    """The epoch that a loader is in, and how many of its batches were delivered, for any sampler.

    featcache's samplers know both. For others both are counted here, unless they have a state of
    their own; one that shows its `epoch` is told the next one when an iteration came to its end.
    """

    def __init__(self, sampler: IndexBatches, table: FeatureTable) -> None:
        self._sampler = sampler
        self._table = table
        self._epoch = 0
        self._start = 0  # batches that the running or the next iteration leaves out
        self._delivered = 0
        self._ended = False  # the next iteration is that of the next epoch
        self._told = False  # set_epoch was called since the iteration began
        self._iteration: Iteration | None = None  # of a sampler that knows what was delivered

    def begin(self) -> Iterator[Sequence[Index]]:
        """Begin an iteration: return its batches."""
        self._follow()
        if self._ended:
            self._move_on()
        self._delivered, self._told, self._ended = 0, False, False
        batches = iter(self._sampler)
        if isinstance(batches, Iteration):
            self._iteration, batches.delivered = batches, 0
        return islice(batches, self._start, None)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that was begun last."""
        return self._epoch

    def deliver(self) -> None:
        """Count a batch that is handed on."""
        self._delivered += 1
        if self._iteration is not None:
            self._iteration.delivered = self._delivered

    def end(self) -> None:
        """Note that the iteration came to its end."""
        if self._iteration is not None:
            self._iteration.ended = True
        elif not isinstance(self._sampler, SupportsState):
            self._follow()
            self._delivered, self._start = self._start + self._delivered, 0
            self._ended = not self._told

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        number = whole_number("epoch", epoch, 0)
        if isinstance(self._sampler, SupportsEpoch):
            self._sampler.set_epoch(number)
        self._told, self._ended = True, False
        self._enter(number)

    def state_dict(self) -> dict[str, object]:
        """Return epoch, place in it and a digest of the data, as plain numbers and strings."""
        sampler, known = self._sampler, {"data": self._table.digest, "version": VERSION}
        if isinstance(sampler, EpochSampler):
            state = sampler.state_dict()
            return {"epoch": state["epoch"], "sampler": state, **known}
        self._follow()
        if isinstance(sampler, SupportsState):
            if not inspect.signature(sampler.state_dict).parameters:
                raise StateError(
                    f"{type(sampler).__name__}.state_dict() tells where the sampler is, and the "
                    "loader reads ahead of what it delivered; let it take the number of batches"
                )
            state = sampler.state_dict(self._delivered)
            return {"epoch": self._epoch, "sampler": state, **known}
        done = self._start + self._delivered
        here = {"batches": done, "of": self._count(), "ended": self._ended}
        return {"epoch": self._epoch, **here, **known}

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue from a state in the next iteration.

        Raises `StateError` for the state of other data or samplers, and of another version of the
        order that a seed gives; all then stays as it was.
        """
        sampler = self._sampler
        counted = {"sampler"} if isinstance(sampler, SupportsState) else {"batches", "of", "ended"}
        keys = {"epoch", "data", "version", *counted}
        if not isinstance(state, Mapping) or state.keys() != keys:
            raise StateError(
                f"this is no state of a FeatureLoader over a {type(sampler).__name__}: {state!r}"
            )
        check_version(state)
        if state["data"] != self._table.digest:
            raise StateError(
                f"the state is that of a loader over other utterances than those of {self._table!r}"
            )
        epoch = number_in_state("epoch", state)
        if isinstance(sampler, SupportsState):
            sampler.load_state_dict(cast(LoaderState, state["sampler"]))
            self._epoch, self._start, self._delivered = epoch, 0, 0
            return
        if state["of"] != self._count():
            raise StateError(
                f"the state is that of {state['of']} batches, but there are {self._count()} now"
            )
        done = number_in_state("batches", state)
        self.set_epoch(epoch)
        self._start, self._delivered, self._ended = done, 0, state["ended"] is True

    def _follow(self) -> None:
        """Enter the epoch that the sampler shows, which another may have told it."""
        self._enter(getattr(self._sampler, "epoch", self._epoch))

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._start, self._delivered = epoch, 0, 0
            self._told, self._ended = True, False

    def _move_on(self) -> None:
        """Enter the next epoch; a sampler with `set_epoch` that shows none goes by its own rule."""
        shows = hasattr(self._sampler, "epoch")
        if isinstance(self._sampler, SupportsEpoch):
            if shows:
                self._sampler.set_epoch(self._epoch + 1)
            self._epoch += shows
        else:
            self._epoch += not shows
        self._start = 0

    def _count(self) -> int | None:
        return len(self._sampler) if isinstance(self._sampler, Sized) else None


# Work done ahead in threads, results in order, bounded in bytes.

MOST_AHEAD = 64
R = TypeVar("R")
Job = tuple[int, Callable[[], R]]  # the bytes of its result, and what makes it


class Prefetch(Iterator[R]):
    """Iterator over the results of jobs, in their order; threads work on the next ones meanwhile.

    Jobs are taken from their iterator in the caller's thread. Threads live only while there is a
    job to do: an iteration that is left, by an exception or otherwise, leaves none behind once the
    few jobs that were taken are done.

    Args:
        jobs: the size of a result in bytes, and the function that makes it.
        threads: number of jobs at a time; 0 does each when its result is asked for.
        most_bytes: most bytes of the results that wait or are worked on; at least one job is taken
            in any case, and `MOST_AHEAD` at most.

    An error of a job, or of their iterator, is raised in its place: after the results before it.
    """

    def __init__(self, jobs: Iterator[Job[R]], threads: int, most_bytes: int) -> None:
        self._jobs = jobs
        self._next: Job[R] | None = None
        self._most_threads = threads
        self._most_bytes = most_bytes if threads else 0
        self._process = getpid()
        self._results: deque[tuple[int, Future[R]]] = deque()
        self._todo: deque[tuple[Future[R], Callable[[], R]]] = deque()
        self._bytes = 0
        self._threads: list[threading.Thread] = []
        self._busy = 0  # threads that look for another job when they have done one
        self._at_work: set[int] = set()  # idents of the threads that are at a job
        # reentrant: the garbage collector may close an iteration in any thread, at any moment
        self._state = threading.Condition(threading.RLock())
        _iterations.add(self)
        # no job is begun any more; none is being done any more
        self._closed, self._is_over = _ending.is_set(), False
        self._advance()

    def __next__(self) -> R:
        try:
            return self._next_result()
        finally:
            if _ending.is_set():
                _stop_thread()

    def _next_result(self) -> R:
        if getpid() != self._process:
            raise ClosedError(
                "this iteration belongs to the process that began it; begin another one in this "
                "process"
            )
        self._take_jobs()
        with self._state:
            if not self._results:
                raise StopIteration
            nbytes, future = self._results.popleft()
        if not self._most_threads:
            self._busy += 1
            self._work()
        result = future.result()
        self._bytes -= nbytes
        self._take_jobs()
        return result

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait for those that have."""
        if self._is_over or getpid() != self._process:
            return  # a fork has none of the threads, and one of them may have held the lock
        me = threading.get_ident()
        with self._state:
            self._closed = True
            self._next = None
            self._results.clear()
            self._todo.clear()
            # also for one that iterates without threads
            self._state.wait_for(lambda: self._at_work <= {me})
        for thread in self._threads:
            if thread.ident != me:
                thread.join()  # without a job it ends at once
        self._is_over = True

    def _take_jobs(self) -> None:
        """Take jobs as long as there is room for their results."""
        while True:
            with self._state:
                if self._next is None:
                    return
                nbytes, make = self._next
                fits = len(self._results) < MOST_AHEAD and self._bytes + nbytes <= self._most_bytes
                if self._results and not fits:
                    return
                future: Future[R] = Future()
                self._bytes += nbytes
                self._results.append((nbytes, future))
                self._todo.append((future, make))
                if self._busy < self._most_threads:
                    self._start_thread()
            self._advance()

    def _start_thread(self) -> None:
        # as a daemon: else the interpreter would wait at its end until all jobs that were taken
        # are done
        thread = threading.Thread(target=self._work, name="featcache-loader", daemon=True)
        thread.start()
        self._busy += 1
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _advance(self) -> None:
        try:
            job = next(self._jobs, None)
        except Exception as error:
            job = 0, partial(_raise, error)  # in its place: after the results before it
        with self._state:
            if not self._closed:  # by another thread, when the interpreter ends
                self._next = job

    def _work(self) -> None:
        me = threading.get_ident()
        while True:
            with self._state:
                self._at_work.discard(me)
                self._state.notify_all()
                if not self._todo:
                    self._busy -= 1
                    return
                future, make = self._todo.popleft()
                self._at_work.add(me)
            try:
                future.set_result(make())
            except BaseException as error:  # it is raised where the result is asked for
                # and would look like the end there
                stops = isinstance(error, StopIteration)
                future.set_exception(RuntimeError(f"a job raised {error!r}") if stops else error)


def _raise(error: Exception) -> NoReturn:
    raise error


# An iteration that is left may live as long as the interpreter. Closed when that begins to end, it
# needs nothing of what is taken apart then.
_iterations: weakref.WeakSet[Prefetch[Any]] = weakref.WeakSet()
_ending = threading.Event()


@atexit.register
def _close_all() -> None:
    _ending.set()
    with suppress(KeyError):  # there are none left
        while True:
            _iterations.pop().close()


def _stop_thread() -> None:
    """Stop a daemon thread that iterates when the interpreter ends.

    Python ends such threads when they next want its lock; within torch, such as when a batch is
    dropped, that aborts the process.
    """
    if threading.current_thread() is threading.main_thread():
        raise ClosedError("the interpreter is ending: no more batches are read")
    threading.Event().wait()


# `FeatureLoader`: batches of a cache, read ahead by threads of this process.

T = TypeVar("T", default=Batch)


class FeatureLoader(Generic[T]):
    """Iterable over batches of a cache, as `FeatureDataset.__getitems__` makes them.

    Threads of this process read ahead: they copy straight from the mapped files into the batch,
    while numpy lets go of the interpreter lock. No worker process, no copy between processes. The
    memory of a batch is used again once nothing refers to it. Threads live only while there is
    something to read: none is left behind by an iteration that ends before its time. One thread
    iterates over it, whose place is the loader's; forks and pickles have a place of their own.

    Args:
        source: a cache or its path, a table, a `FeatureDataset`, or some items of one, as
            `torch.utils.data.Subset` and `random_split` give them.
        features: names of the features to read, all by default.
        batch_sampler: gives the batches as lists of row numbers, ids, or `(row or id, slice)`; one
            of `featcache.samplers` or any other. Its `set_epoch` is called where it has one.
        batch_size: utterances of a batch, in place of a batch sampler; ranks share them as with a
            sampler.
        shuffle: whether these are drawn at random, anew in each epoch; else they come in the order
            of the rows.
        seed: draws another order, and other numbers for `transform`.
        drop_last: leaves out the last batch of an epoch where it is smaller than the others, and
            what then does not come out even for the ranks.
        annotations: names of the annotations to read, none by default; see `FeatureDataset`.
        dtypes: dtypes to convert features to, e.g. {"ssl": "float32"} or {"ssl": torch.float32};
            else as declared.
        transform: called with each item and a generator, `transform(item, rng)`, in the reading
            threads; see `FeatureDataset`.
        layout: "padded", "packed" for batches without padding, "jagged" for nested tensors, or an
            object of `featcache.loading` with settings; see `FeatureDataset`. By default packed for
            a `PackedBatchSampler`, else padded, to the lengths of a batch sampler with `pad_to`.
        arrays: "torch", or "numpy" for NumPy arrays in place of tensors.
        collate: makes of each batch what the loop gets, in the reading threads, e.g.
            `featcache.interop.speechbrain.padded_batch`.
        threads: number of batches that are read side by side; 0 reads each when it is asked for.
        prefetch_bytes: most bytes of the batches that are read ahead and wait.
        pin_memory: read into memory that a GPU can copy from while the CPU goes on; by default for
            a CUDA `device`.
        device: copies the tensors there, one batch ahead, asynchronously from pinned memory.
        allow_incomplete: also read caches that their writer has not finished; else these are
            refused.

    An iteration that came to its end is followed by the next epoch, one that was left before by the
    same again, unless `set_epoch` chooses. After each epoch `waited_s` tells how many seconds the
    training loop waited for data in it.

    >>> batches = [[0, 1], [2]]
    >>> loader = FeatureLoader("features/train", "fbank", batch_sampler=batches)  # doctest: +SKIP
    >>> for batch in loader: batch["fbank"], batch["fbank_lengths"]  # doctest: +SKIP
    """

    prefetch_factor = None  # HuggingFace's Trainer asks for it: a DataLoader's, without workers

    @named_settings("a FeatureLoader")
    def __init__(
        self,
        source: FeatureDataset | Subset[Item] | FeatureTable | CachePath,
        features: str | Sequence[str] | None = None,
        *,
        batch_sampler: Iterable[Sequence[Index]] | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        drop_last: bool | None = None,
        annotations: str | Sequence[str] = (),
        dtypes: Mapping[str, Dtype] | None = None,
        transform: Transform | None = None,
        layout: str | Layout | None = None,
        arrays: Literal["torch", "numpy"] = "torch",
        collate: Callable[[Batch], T] | None = None,
        threads: int = 2,
        prefetch_bytes: int = 256 << 20,
        pin_memory: bool | None = None,
        device: torch.device | str | None = None,
        allow_incomplete: bool = False,
    ) -> None:
        pad_to = getattr(batch_sampler, "pad_to", None)
        dataset = dataset_of(source)
        if dataset is None:
            dataset = FeatureDataset(
                cast(FeatureTable | CachePath, source),
                features,
                annotations=annotations,
                dtypes=dtypes,
                transform=transform,
                seed=0 if seed is None else seed,
                layout=_layout_for(batch_sampler) if layout is None else layout,
                arrays=arrays,
                allow_incomplete=allow_incomplete,
            )
        elif (
            annotations
            or allow_incomplete
            or (features, dtypes, transform, layout, arrays)
            != (
                *[None] * 4,
                "torch",
            )
        ):
            raise ConfigError(
                "features, annotations, dtypes, transform, layout, arrays and allow_incomplete are "
                "those of the FeatureDataset; give them there"
            )
        if pad_to is not None and dataset.layout != Padded(pad_to):
            raise ConfigError(
                f"the batch sampler makes batches to pad to {pad_to!r}, and the layout is "
                f"{dataset.layout!r}; give layout=featcache.loading.Padded(pad_to={pad_to!r})"
            )
        if threads < 0 or prefetch_bytes < 0:
            raise ConfigError(f"{threads=}, {prefetch_bytes=}: neither can be negative")
        if batch_sampler is None:
            batch_sampler = _plain_sampler(dataset, batch_size, shuffle, seed, drop_last)
        elif (batch_size, shuffle, seed, drop_last) != (None, None, None, None):
            raise ConfigError(
                "give either batch_sampler, or batch_size, shuffle, seed and drop_last; a batch "
                "sampler has such settings of its own"
            )
        if isinstance(batch_sampler, Iterator) or not isinstance(batch_sampler, Iterable):
            raise ConfigError(
                f"batch_sampler must be a list of batches or a sampler, not {batch_sampler!r}"
            )
        dataset.require_rows(batch_sampler)
        self.dataset = dataset
        self.batch_sampler = batch_sampler
        self.waited_s = 0.0
        self._position = Position(batch_sampler, dataset.table)
        self._collate = collate
        self._threads = threads
        self._prefetch_bytes = prefetch_bytes
        if arrays == "numpy" and device is not None:
            raise ConfigError("device= is for tensors; arrays='numpy' stay in memory")
        self._device = None if device is None else usable_device(device)
        on_gpu = self._device is not None and self._device.type == "cuda"
        pin = on_gpu if pin_memory is None else pin_memory
        if pin:
            check_pinned()
        self._allocate: Allocate = pinned if pin else Recycler(prefetch_bytes)
        self._running: weakref.WeakSet[Prefetch[T]] = weakref.WeakSet()

    @property
    def sampler(self) -> FeatureLoader[T]:
        """The loader itself: Lightning looks here for `set_epoch`."""
        return self

    def collate_fn(self, batch: Batch | list[Item]) -> T:
        """Make the loader's batch of one that `dataset` read, or of a list of items.

        HuggingFace's Trainer gives it to a DataLoader over `dataset` and `batch_sampler`, by which
        it skips the batches that came before a resume.
        """
        made = self.dataset.collated(batch)
        return cast(T, made) if self._collate is None else self._collate(made)

    def __len__(self) -> int:
        """Count the batches of a whole epoch for this rank, also where a state goes on within one.

        Hosts ask once, and count on from the batches that came before: Lightning ends an epoch,
        and HuggingFace's Trainer finds the epoch of a step, by the number of all of its batches.
        """
        return len(cast(Sized, self.batch_sampler))

    def __getitem__(self, index: object) -> NoReturn:
        """Raise `TypeError`: SpeechBrain's `Brain` asks for items where it should iterate."""
        raise TypeError(
            "a FeatureLoader gives batches one after the other, not by number; to give it to a "
            "SpeechBrain Brain, add the mixin: class ASR(featcache.FeatureCacheMixin, sb.Brain)"
        )

    def __iter__(self) -> Iterator[T]:
        self.waited_s = 0.0
        prefetch = Prefetch(self._jobs(), self._threads, self._prefetch_bytes)
        self._running.add(prefetch)
        batches = prefetch if self._device is None else on_device(prefetch, self._device)
        try:
            while True:
                began = time.perf_counter()
                found = list(islice(batches, 1))
                self.waited_s += time.perf_counter() - began
                if not found:
                    self._position.end()
                    return
                self._position.deliver()
                yield found.pop()  # and keep nothing of it: its memory may be used again
        finally:
            prefetch.close()

    def __repr__(self) -> str:
        return f"<FeatureLoader: batches of {self.dataset!r} from {self.batch_sampler!r:.100}>"

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_running": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._running = weakref.WeakSet()

    def close(self) -> None:
        """End all iterations that are running, and wait for what is being read."""
        for prefetch in list(self._running):
            prefetch.close()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, also for a batch sampler with `set_epoch`."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the place of the running or the last iteration, exact to the batch.

        JSON can hold it.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue from a state in the next iteration.

        Raises `StateError` for a state of other data or of another sampler.
        """
        self._position.load_state_dict(state)

    def _jobs(self) -> Iterator[Job[T]]:
        batches = self._position.begin()
        epoch = self._position.epoch
        for indices in batches:
            plan = self.dataset.plan(indices, epoch)
            yield plan.nbytes, partial(self._read, plan)

    def _read(self, plan: BatchPlan) -> T:
        return self.collate_fn(self.dataset.read(plan, self._allocate))


def _layout_for(sampler: object) -> Layout:
    if isinstance(sampler, PackedBatchSampler):
        return Packed()
    return Padded(getattr(sampler, "pad_to", None))


def _plain_sampler(
    dataset: FeatureDataset,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int | None,
    drop_last: bool | None,
) -> PlainBatchSampler:
    if batch_size is None:
        raise ConfigError("the loader needs a batch_sampler, or a batch_size to make batches of")
    if seed is not None and not shuffle and not dataset.transforms:
        raise ConfigError(f"seed={seed!r} is for shuffle=True, or for a transform")
    return PlainBatchSampler(
        dataset.table,
        batch_size,
        shuffle=bool(shuffle),
        seed=dataset.seed if seed is None else seed,
        drop_last=bool(drop_last),
    )
