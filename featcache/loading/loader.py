"""`FeatureLoader`: padded batches of a cache, read ahead by threads of this process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Generic, NoReturn, cast

import torch
from torch.utils.data import Subset
from typing_extensions import TypeVar

from featcache._checks import named_settings
from featcache.errors import ConfigError
from featcache.loading.dataset import Dtype, FeatureDataset, Plan, Transform, dataset_of
from featcache.loading.device import check_pinned, on_device, usable_device
from featcache.loading.item_index import Index
from featcache.loading.memory import Allocate, Recycler, pinned
from featcache.loading.padding import Batch, Item
from featcache.loading.position import LoaderState, Position
from featcache.loading.prefetch import Job, Prefetch
from featcache.samplers.plain import PlainBatchSampler
from featcache.store.cache import Cache, CachePath
from featcache.tables.table import FeatureTable

T = TypeVar("T", default=Batch)
_OF_DATASET = (None, None, None, False)  # settings of it where a loader is given one


class FeatureLoader(Generic[T]):
    """Iterable over padded batches of a cache, as `FeatureDataset.__getitems__` makes them.

    Threads of this process read ahead: they copy straight from the mapped files into the batch,
    while numpy lets go of the interpreter lock. No worker process, no copy between processes. The
    memory of a batch is used again once nothing refers to it. Threads live only while there is
    something to read: none is left behind by an iteration that ends before its time.

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
        seed: draws another order.
        annotations: names of the annotations to read, none by default; see `FeatureDataset`.
        dtypes: dtypes to convert features to, e.g. {"ssl": "float32"} or {"ssl": torch.float32};
            else as declared.
        transform: called with each item, in the reading threads; see `FeatureDataset`.
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
        source: FeatureDataset | Subset[Item] | FeatureTable | Cache | CachePath,
        features: str | Sequence[str] | None = None,
        *,
        batch_sampler: Iterable[Sequence[Index]] | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        annotations: str | Sequence[str] = (),
        dtypes: Mapping[str, Dtype] | None = None,
        transform: Transform | None = None,
        collate: Callable[[Batch], T] | None = None,
        threads: int = 2,
        prefetch_bytes: int = 256 << 20,
        pin_memory: bool | None = None,
        device: torch.device | str | None = None,
        allow_incomplete: bool = False,
    ) -> None:
        dataset = dataset_of(source)
        if dataset is None:
            dataset = FeatureDataset(
                cast(FeatureTable | Cache | CachePath, source),
                features,
                annotations=annotations,
                dtypes=dtypes,
                transform=transform,
                allow_incomplete=allow_incomplete,
            )
        elif annotations or (features, dtypes, transform, allow_incomplete) != _OF_DATASET:
            raise ConfigError(
                "features, annotations, dtypes, transform and allow_incomplete are those of the "
                "FeatureDataset; give them there"
            )
        if threads < 0 or prefetch_bytes < 0:
            raise ConfigError(f"{threads=}, {prefetch_bytes=}: neither can be negative")
        if batch_sampler is None:
            batch_sampler = _plain_sampler(dataset.table, batch_size, shuffle, seed)
        elif (batch_size, shuffle, seed) != (None, None, None):
            raise ConfigError("give either batch_sampler, or batch_size, shuffle and seed")
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
        made = FeatureDataset.collate(batch)
        return cast(T, made) if self._collate is None else self._collate(made)

    def __len__(self) -> int:
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
        """Let the next iteration go on from a state.

        Raises `StateError` for a state of other data or of another sampler.
        """
        self._position.load_state_dict(state)

    def _jobs(self) -> Iterator[Job[T]]:
        for indices in self._position.begin():
            plan = self.dataset.plan(indices)
            yield plan.nbytes, partial(self._read, plan)

    def _read(self, plan: Plan) -> T:
        return self.collate_fn(self.dataset.read(plan, self._allocate))


def _plain_sampler(
    table: FeatureTable, batch_size: int | None, shuffle: bool | None, seed: int | None
) -> PlainBatchSampler:
    if batch_size is None:
        raise ConfigError("the loader needs a batch_sampler, or a batch_size to make batches of")
    if seed is not None and not shuffle:
        raise ConfigError(f"seed={seed!r} is for shuffle=True")
    return PlainBatchSampler(table, batch_size, shuffle=bool(shuffle), seed=seed or 0)
