"""`FeatureLoader`: padded batches of a cache, read ahead by threads of this process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Generic, Protocol, cast, runtime_checkable

import torch
from typing_extensions import TypeVar

from featcache.errors import ConfigError
from featcache.loading.dataset import FeatureDataset, Index, Plan, Transform
from featcache.loading.device import on_device
from featcache.loading.memory import Allocate, Recycler, pinned
from featcache.loading.padded import Batch
from featcache.loading.prefetch import Job, Prefetch
from featcache.loading.samplers.sharing import whole_number
from featcache.loading.table import FeatureTable
from featcache.store.cache import Cache, CachePath

T = TypeVar("T", default=Batch)
State = Mapping[str, object]


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

    def load_state_dict(self, state: State) -> None:
        """Have the next iteration go on from there."""
        ...


class FeatureLoader(Generic[T]):
    """Iterable over padded batches of a cache, as `FeatureDataset.__getitems__` makes them.

    Threads of this process read ahead: they copy straight from the mapped files into the batch, while numpy lets go of
    the interpreter lock. No worker process, no copy between processes. The memory of a batch is used again once nothing
    refers to it. Threads live only while there is something to read: none is left behind by an iteration that ends
    before its time.

    Args:
        source: a cache or its path, caches put together by `join` or `concat`, or a `FeatureDataset`.
        features: those that are wanted, all by default.
        batch_sampler: gives the batches as lists of row numbers, ids, or `(row or id, slice)`; one of
            `featcache.samplers` or any other. Its `set_epoch` and state are used where it has them.
        dtypes: what features are converted to, e.g. {"ssl": "float32"}; else as declared.
        transform: called with each item, in the reading threads; see `FeatureDataset`.
        collate: what is made of each batch, in the reading threads, e.g. `featcache.interop.speechbrain.padded_batch`.
        threads: how many batches are read side by side; 0 reads each when it is asked for.
        prefetch_bytes: batches are read ahead as long as those that wait take no more than this.
        pin_memory: read into memory that a GPU can copy from while the CPU goes on; by default for a CUDA `device`.
        device: where tensors are copied, one batch ahead, asynchronously from pinned memory.

    After each epoch `waited_s` tells how many seconds the training loop waited for data in it.

    >>> loader = FeatureLoader("features/train", "fbank", batch_sampler=[[0, 1], [2]])  # doctest: +SKIP
    >>> for batch in loader: batch["fbank"], batch["fbank_lengths"]                     # doctest: +SKIP
    """

    def __init__(
        self,
        source: FeatureDataset | FeatureTable | Cache | CachePath,
        features: str | Sequence[str] | None = None,
        *,
        batch_sampler: Iterable[Sequence[Index]],
        dtypes: Mapping[str, str] | None = None,
        transform: Transform | None = None,
        collate: Callable[[Batch], T] | None = None,
        threads: int = 2,
        prefetch_bytes: int = 256 << 20,
        pin_memory: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(source, FeatureDataset):
            source = FeatureDataset(source, features, dtypes=dtypes, transform=transform)
        elif features is not None or dtypes is not None or transform is not None:
            raise ConfigError("features, dtypes and transform are those of the FeatureDataset; give them there")
        if threads < 0 or prefetch_bytes < 0:
            raise ConfigError(f"threads={threads}, prefetch_bytes={prefetch_bytes}: neither can be negative")
        if isinstance(batch_sampler, Iterator) or not isinstance(batch_sampler, Iterable):
            raise ConfigError(f"batch_sampler must be a list of batches or a sampler, not {batch_sampler!r}")
        made_for = getattr(batch_sampler, "table", None)
        if isinstance(made_for, FeatureTable) and made_for.digest != source.table.digest:
            raise ConfigError(
                f"the batch sampler numbers the utterances of {made_for!r}, which are not those of {source.table!r}: "
                "give both the same caches, opened once, as one may grow in between"
            )
        self.dataset = source
        self.batch_sampler = batch_sampler
        self.waited_s = 0.0
        self._collate = collate
        self._threads = threads
        self._prefetch_bytes = prefetch_bytes
        self._device = None if device is None else torch.device(device)
        on_gpu = self._device is not None and self._device.type == "cuda"
        pin = on_gpu if pin_memory is None else pin_memory
        self._allocate: Allocate = pinned if pin else Recycler(prefetch_bytes)
        self._epoch = 0
        self._next_begins_at = 0  # batches that the next iteration leaves out; a sampler with state does so itself
        self._began_at = 0
        self._delivered = 0
        self._running: weakref.WeakSet[Prefetch[T]] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(cast(Sized, self.batch_sampler))

    def __iter__(self) -> Iterator[T]:
        self._began_at, self._next_begins_at, self._delivered, self.waited_s = self._next_begins_at, 0, 0, 0.0
        prefetch = Prefetch(self._jobs(self._began_at), self._threads, self._prefetch_bytes)
        self._running.add(prefetch)
        batches: Iterator[T] = prefetch if self._device is None else on_device(prefetch, self._device)
        try:
            while True:
                began = time.perf_counter()
                found = list(islice(batches, 1))
                self.waited_s += time.perf_counter() - began
                if not found:
                    return
                self._delivered += 1
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
        """Choose the epoch of the next iteration: the batch sampler's order where it has one for each."""
        number = whole_number("epoch", epoch, 0)
        if isinstance(self.batch_sampler, SupportsEpoch):
            self.batch_sampler.set_epoch(number)
        self._enter(number)

    def state_dict(self) -> dict[str, object]:
        """Return where the running or the last iteration is, exact to the batch, as plain numbers and strings."""
        self._enter(getattr(self.batch_sampler, "epoch", self._epoch))  # it may have been told by another
        state: dict[str, object] = {"epoch": self._epoch, "data": self.dataset.table.digest}
        if isinstance(self.batch_sampler, SupportsState):
            state["sampler"] = self.batch_sampler.state_dict(self._delivered)
        else:
            state["batches"] = self._began_at + self._delivered
            state["of"] = self._count()
        return state

    def load_state_dict(self, state: State) -> None:
        """Have the next iteration go on from there; raises `ConfigError` for the state of other data or samplers."""
        sampler = self.batch_sampler
        wanted = {"epoch", "data", *(["sampler"] if isinstance(sampler, SupportsState) else ["batches", "of"])}
        if not isinstance(state, Mapping) or state.keys() != wanted:
            raise ConfigError(f"this is no state of a FeatureLoader over a {type(sampler).__name__}: {state!r}")
        if state["data"] != self.dataset.table.digest:
            raise ConfigError(f"the state is that of a loader over other utterances than those of {self.dataset!r}")
        if isinstance(sampler, SupportsState):
            sampler.load_state_dict(cast(State, state["sampler"]))  # knows its epoch; refused, all stays as it was
            self._epoch = whole_number("epoch", state["epoch"], 0)
        else:
            if state["of"] != self._count():
                raise ConfigError(f"the state is that of {state['of']} batches, but there are {self._count()} now")
            done = whole_number("batches", state["batches"], 0)
            self.set_epoch(cast(int, state["epoch"]))
            self._next_begins_at = self._began_at = done
        self._delivered = 0

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._next_begins_at, self._began_at, self._delivered = epoch, 0, 0, 0

    def _count(self) -> int | None:
        return len(self.batch_sampler) if isinstance(self.batch_sampler, Sized) else None

    def _jobs(self, skip: int) -> Iterator[Job[T]]:
        for indices in islice(self.batch_sampler, skip, None):
            plan = self.dataset.plan(indices)
            yield plan.nbytes, partial(self._read, plan)

    def _read(self, plan: Plan) -> T:
        batch = self.dataset.read(plan, self._allocate)
        return cast(T, batch) if self._collate is None else self._collate(batch)
