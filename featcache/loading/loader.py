"""`FeatureLoader`: batches of a table, read ahead by threads, resumed at any batch."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from numbers import Real
from typing import Generic, Literal, NoReturn, cast

import torch
from torch.utils.data import Subset
from typing_extensions import TypeVar

from featcache._checks import named_settings, whole_number
from featcache._recycled import MOST_BYTES, RecycledMemory
from featcache._tensors import empty_tensor
from featcache.errors import ConfigError
from featcache.loading.batches import Item
from featcache.loading.dataset import (
    BatchPlan,
    Dtype,
    FeatureDataset,
    Index,
    Transform,
    dataset_of,
    key_and_part,
)
from featcache.loading.layouts import Batch, Layout, layout_for
from featcache.loading.memory import (
    check_pinned,
    on_device,
    pinned,
    usable_device,
)
from featcache.loading.pace import LoopPace
from featcache.loading.position import Delivered, IndexBatches, LoaderState, Position
from featcache.loading.prefetch import Handed, Planned, Prefetch
from featcache.reading.containers import Wanted
from featcache.reading.opening import CachePath
from featcache.samplers.shuffled import PlainBatchSampler
from featcache.tables.table import FeatureTable

_log = logging.getLogger("featcache")

T = TypeVar("T", default=Batch)

_OF_THE_DATASET = "give it to a FeatureDataset, which the loader and the sampler take"


class FeatureLoader(Generic[T]):
    """Iterable over batches of a cache, as `FeatureDataset.__getitems__` makes them.

    Threads of this process read ahead: they copy straight from the mapped files into the batch,
    while numpy lets go of the interpreter lock. No worker process, no copy between processes. The
    memory of a batch is used again once nothing refers to it. Threads live little longer than
    there is something to read: none is left behind by an iteration that ends early. One thread
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
            threads, side by side for several batches; see `FeatureDataset`.
        layout: "padded", "packed" for batches without padding, "jagged" for nested tensors, or an
            object of `featcache.loading` with settings; see `FeatureDataset`. By default packed for
            a `PackedBatchSampler`, else padded, to the lengths of a batch sampler with `pad_to`.
        arrays: "torch", or "numpy" for NumPy arrays in place of tensors.
        collate: makes of each batch what the loop gets, in the reading threads, e.g.
            `featcache.interop.speechbrain.padded_batch`.
        threads: number of batches that are read side by side ahead; 0 reads each when it is asked
            for. One is enough for what is mapped from a local disk (a loop that does nothing
            between batches reads, too, unless there is a `transform` or `collate`: these are called
            by one thread at a time then); codecs, a slow `transform`, network file systems and
            `mapped=False` may want more.
        prefetch_bytes: most bytes of the batches that are read ahead and wait.
        pin_memory: read into memory that a GPU can copy from while the CPU goes on; by default for
            a CUDA `device`.
        device: copies the tensors there, one batch ahead, asynchronously from pinned memory.
        allow_incomplete: also read caches that their writer has not finished; else these are
            refused.
        watchdog_s: warns, in the log, of a batch that the loop has waited for so long, and names
            the file and the place in it that is being read.

    An iteration that came to its end is followed by the next epoch, one that was left before by the
    same again, unless `set_epoch` chooses; one that was left right behind its last batch is at its
    end by samplers of featcache alone. After each epoch `waited_s` tells how many seconds the
    training loop waited for data in it.

    >>> batches = [[0, 1], [2]]
    >>> loader = FeatureLoader("features/train", "fbank", batch_sampler=batches)  # doctest: +SKIP
    >>> for batch in loader: batch["fbank"], batch["fbank_lengths"]  # doctest: +SKIP
    """

    prefetch_factor = None  # HuggingFace's Trainer asks for it: a DataLoader's, without workers

    @named_settings(
        "a FeatureLoader", dict.fromkeys(("variants", "layers", "random_crop_s"), _OF_THE_DATASET)
    )
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
        threads: int = 1,
        prefetch_bytes: int = 256 << 20,
        pin_memory: bool | None = None,
        device: torch.device | str | None = None,
        allow_incomplete: bool = False,
        watchdog_s: float | None = None,
    ) -> None:
        _check_numbers(threads, prefetch_bytes, watchdog_s)
        dataset = dataset_of(source)
        if dataset is None:
            dataset = FeatureDataset(
                cast(FeatureTable | CachePath, source),
                features,
                annotations=annotations,
                dtypes=dtypes,
                transform=transform,
                seed=0 if seed is None else seed,
                layout=layout_for(batch_sampler) if layout is None else layout,
                arrays=arrays,
                allow_incomplete=allow_incomplete,
            )
        else:
            others = arrays != "torch" or allow_incomplete
            _check_none_given(features, annotations, dtypes, transform, layout, others)
        self.dataset = dataset
        plain = batch_size, shuffle, seed, drop_last
        self.batch_sampler = _sampler_of(dataset, batch_sampler, *plain)
        dataset.require_made_for(self.batch_sampler)
        self.waited_s = 0.0
        self._position = Position(self.batch_sampler, dataset.table)
        self._collate = collate
        self._threads, self._prefetch_bytes = threads, prefetch_bytes
        if dataset.arrays == "numpy" and device is not None:
            raise ConfigError("device= is for tensors; arrays='numpy' stay in memory")
        self._device = None if device is None else usable_device(device)
        # of what waits as much as of what was used, and of that as much again to be used next
        self._memory = RecycledMemory(2 * prefetch_bytes + MOST_BYTES)
        is_pinned = _is_pinned(self._device, pin_memory)
        self._allocate = pinned if is_pinned else partial(empty_tensor, self._memory)
        self._watchdog_s = watchdog_s
        self._running: weakref.WeakSet[Prefetch[T]] = weakref.WeakSet()
        self._pace = LoopPace(may_be_beside=collate is None and not dataset.transforms)
        self._last = Handed()  # by the last iteration
        self._asked = 0, 0, 0  # of stores, before it
        self._ahead: weakref.WeakMethod[Callable[[], tuple[int, int]]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the running or the last iteration, or the one that was chosen since."""
        return self._position.epoch

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
        began = time.perf_counter()
        prefetch, delivered = self._begin()
        batches = prefetch if self._device is None else on_device(prefetch, self._device)
        try:
            while True:
                found = list(islice(batches, 1))
                self.waited_s += time.perf_counter() - began
                if prefetch.is_closed or not found:
                    break
                delivered.add()
                yield found.pop()  # and keep nothing of it: its memory may be used again
                began = time.perf_counter()
            if not (found or prefetch.was_cut):
                self._position.end(delivered)
        except GeneratorExit:  # by the garbage collector, perhaps, in a thread that others wait for
            prefetch.leave()
            raise
        except BaseException:
            prefetch.close()
            raise
        prefetch.close()

    def __repr__(self) -> str:
        return f"<FeatureLoader: batches of {self.dataset!r} from {self.batch_sampler!r:.100}>"

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_running": None, "_ahead": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._running = weakref.WeakSet()

    def close(self) -> None:
        """End all iterations that are running, and wait for what is being read.

        From another thread or a handler of a signal, too; the loop ends then as at its end, but the
        state is that of the last batch that it got.
        """
        for prefetch in self._iterations():
            prefetch.close()

    def _iterations(self) -> list[Prefetch[T]]:
        while True:
            try:
                return list(self._running)
            except RuntimeError:  # another thread begins one meanwhile
                continue

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

    def seek(self, step: int) -> None:
        """Begin the next iteration with batch `step`, from 0, of the epoch that the loader is in.

        The number of steps is the end: samplers of featcache go on with the next epoch, others
        have an empty iteration. Raises `ConfigError` for a step that the epoch does not have, and
        for a foreign sampler that knows its place itself.

        >>> loader.set_epoch(3); loader.seek(1200)  # doctest: +SKIP
        """
        self._position.seek(step)

    def skip(self, batches: int) -> None:
        """Leave so many batches out: those behind the last one that was delivered.

        After a loss spike: load the last state, skip the batches around it, and iterate again. That
        of this epoch; raises `ConfigError` for more than are left.

        >>> loader.load_state_dict(state); loader.skip(200)  # doctest: +SKIP
        """
        self._position.seek(self._position.step + whole_number("batches", batches, 0))

    def explain(self, step: int) -> list[str]:
        """Return the ids of batch `step` of this rank, from 0, in the epoch that the loader is in.

        It may be past or to come: nothing is read or replayed. Steps before a resume are as this
        number of ranks shares them. Raises `ConfigError` for a step that the epoch does not have,
        and where the sampler is neither one of `featcache.samplers` nor a list.

        >>> loader.explain(731)  # doctest: +SKIP
        ['spk3/utt-7', 'spk1/utt-2']
        """
        table = self.dataset.table
        keys = [key_and_part(index)[0] for index in self._position.batch(step)]
        return table.selection.ids_of(table.numbers(keys))

    def metrics(self) -> dict[str, float]:
        """Return how the running, or the last, iteration does, for a logger: numbers by name.

        "epoch"; "step", batches of the epoch that are done; "waited_s", as the attribute;
        "gb_per_s", bytes of batches by the seconds since it began, until it ended, the loop's own
        included; "read_gb_per_s", the same by the seconds that threads took to read them; "fill",
        the share of these bytes that is no padding; "ahead_batches" and "ahead_bytes", read and
        waiting. Bytes are those of features in the dtypes asked for, whatever a transform makes of
        them.
        Where nothing is ahead, and "waited_s" grows, reading is too slow for the loop. Of caches
        behind URLs also "gets", requests since it began, those made again and beside late ones
        among them; "get_bytes", that came; and "hits", the share of the bytes read that no request
        was made for. Others that read the same cache in this process are counted, too.

        >>> wandb.log(loader.metrics())  # doctest: +SKIP
        """
        handed = self._last
        ahead = None if self._ahead is None else self._ahead()
        batches, nbytes = (0, 0) if ahead is None else ahead()
        return {
            "epoch": self._position.epoch,
            "step": self._position.step,
            "waited_s": self.waited_s,
            "gb_per_s": handed.nbytes / handed.elapsed_s / 1e9,
            "read_gb_per_s": handed.nbytes / handed.work_s / 1e9 if handed.work_s else 0.0,
            "fill": handed.filled / handed.nbytes if handed.nbytes else 1.0,
            "ahead_batches": batches,
            "ahead_bytes": nbytes,
            **self._requests(),
        }

    def _requests(self) -> dict[str, float]:
        """Return what was asked of object stores since the iteration began; nothing for others."""
        if not self.dataset.is_remote:
            return {}
        gets, nbytes, read = (n - m for n, m in zip(self.dataset.asked, self._asked, strict=True))
        return {"gets": gets, "get_bytes": nbytes, "hits": max(1 - nbytes / max(read, 1), 0.0)}

    def _tell_slow(self, thread: int, seconds: float) -> None:
        generations = self.dataset.table.selection.blocks.generations
        place = next(filter(None, (each.being_read(thread) for each in generations)), None)
        _log.warning(
            "batch %d of epoch %d takes longer than watchdog_s: %.1f s so far, %s",
            self._position.step,
            self._position.epoch,
            seconds,
            "in no file: in transform, collate or decoding" if place is None else f"at {place}",
        )

    def _begin(self) -> tuple[Prefetch[T], Delivered]:
        """Begin to read ahead, with no batch delivered so far."""
        for before in self._iterations():
            if before.is_closed:
                before.close()  # `threads` and `prefetch_bytes` hold for both together
        self.waited_s = 0.0
        batches, delivered = self._position.begin()
        epoch = self._position.epoch
        prefetch = Prefetch(
            (partial(self._plan, indices, epoch) for indices in batches),
            self._threads,
            self._prefetch_bytes,
            self._watchdog_s,
            None if self._watchdog_s is None else self._tell_slow,
            together=self._ask if self.dataset.is_remote else None,
            waits=self._waits_for_stores,
            pace=self._pace,
        )
        self._running.add(prefetch)
        self._last = prefetch.handed
        self._asked = self.dataset.asked
        self._ahead = weakref.WeakMethod(prefetch.ahead)
        return prefetch, delivered

    def _plan(self, indices: Sequence[Index], epoch: int) -> Planned[T]:
        plan = self.dataset.plan(indices, epoch)
        wanted = self.dataset.wanted(plan)
        return Planned(plan.nbytes, partial(self._read, plan), plan.filled, wanted)

    def _waits_for_stores(self) -> bool:
        """Whether what is read may not all be here.

        What is under way from a store takes the room of memory that would wait to be used again.
        """
        lies_afar = self.dataset.lies_afar
        self._memory.keep(MOST_BYTES + (0 if lies_afar else self._prefetch_bytes))
        return lies_afar

    def _ask(self, planned: Sequence[Planned[T]]) -> None:
        """Ask object stores for what several batches read, without waiting."""
        wanted: Wanted = {}
        for each in planned:
            for files, pieces in (each.wanted or {}).items():
                wanted.setdefault(files, []).extend(pieces)
        for files, pieces in wanted.items():
            files.prefetch(pieces, int(min(self._prefetch_bytes, sys.maxsize)))

    def _read(self, plan: BatchPlan) -> T:
        return self.collate_fn(self.dataset.read(plan, self._allocate))


def _sampler_of(
    dataset: FeatureDataset,
    batch_sampler: IndexBatches | None,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int | None,
    drop_last: bool | None,
) -> IndexBatches:
    """Return the batch sampler, or one of plain batches; else raise `ConfigError`."""
    if batch_sampler is not None:
        if (batch_size, shuffle, seed, drop_last) != (None, None, None, None):
            raise ConfigError(
                "give either batch_sampler, or batch_size, shuffle, seed and drop_last; a batch "
                "sampler has such settings of its own"
            )
        if isinstance(batch_sampler, Iterator) or not isinstance(batch_sampler, Iterable):
            raise ConfigError(
                f"batch_sampler must be a list of batches or a sampler, not {batch_sampler!r}"
            )
        return batch_sampler
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


def _is_pinned(device: torch.device | None, pin_memory: bool | None) -> bool:
    """Whether batches lie in pinned memory, as those for a GPU do unless it is said."""
    on_gpu = device is not None and device.type == "cuda"
    is_pinned = on_gpu if pin_memory is None else pin_memory
    if is_pinned:
        check_pinned()
    return is_pinned


def _check_none_given(*settings: object) -> None:
    if any(setting is not None and setting not in (False, ()) for setting in settings):
        raise ConfigError(
            "features, annotations, dtypes, transform, layout, arrays and allow_incomplete are "
            "those of the FeatureDataset; give them there"
        )


def _check_numbers(threads: int, prefetch_bytes: float, watchdog_s: float | None) -> None:
    whole_number("threads", threads, 0)
    if not isinstance(prefetch_bytes, Real) or not prefetch_bytes >= 0:
        raise ConfigError(f"prefetch_bytes is a number of bytes from 0 on, not {prefetch_bytes!r}")
    if watchdog_s is not None and not (isinstance(watchdog_s, Real) and watchdog_s > 0):
        raise ConfigError(f"watchdog_s is a number of seconds above 0, not {watchdog_s!r}")
