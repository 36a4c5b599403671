"""Data sets: their ids, their items by number or by id, and SpeechBrain's dynamic items.

Random state lies here, too: kept as the user has it, and seeded by id for items and features that
draw numbers.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from featcache.errors import ConfigError, DuplicateIdError, KeyNotFoundError, nearest
from featcache.format import as_id, check_id, committed, hash_of
from featcache.interface import Ints
from featcache.staleness.probe import Comparison, Probe

if TYPE_CHECKING:
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.utils.data_pipeline import DataPipeline, DynamicItem


# `IdNumbers`: the numbers of a dataset's utterances by their ids, in 16 bytes an utterance.

_AT_ONCE = 65536  # ids that are looked up together


class IdNumbers:
    """Finds utterances by id: in sorted hashes, then by the id itself.

    Args:
        ids: of the dataset; may make each when asked for it.

    Raises `DuplicateIdError` if two utterances share an id.

    >>> IdNumbers(["b", "a"]).find(["a", "c"]).tolist()
    [1]
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        hashes = np.fromiter(map(_hash, ids), np.uint64, len(ids))
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]
        alike = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        for number in np.sort(self._order[alike]).tolist():
            same = self.find([ids[number]]).tolist()
            if len(same) > 1:
                raise DuplicateIdError(
                    f"utterance {ids[number]!r} was given twice: as number {same[0]} and as number "
                    f"{same[1]} of the dataset (counted from 0), which has {len(same)} utterances "
                    f"of the id {ids[number]!r}; ids name one utterance each"
                )

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the numbers of those of some ids that the dataset has."""
        found: list[int] = []
        rest = iter(ids)
        while some := list(islice(rest, _AT_ONCE)):
            hashes = np.fromiter(map(_hash, some), np.uint64, len(some))
            places = np.searchsorted(self._hashes, hashes)
            for id, place, hash_ in zip(some, places.tolist(), hashes.tolist(), strict=True):
                found += (number for number in self._alike(place, hash_) if self._ids[number] == id)
        return np.array(found, np.int64)

    def by_hash(self) -> Iterator[int]:
        """Iterate over all utterances in the order of their ids' hashes, which never changes."""
        return map(int, self._order)

    def committed(self, cache: Path, parts: Iterable[str] | None = None) -> NDArray[np.bool_]:
        """Return which utterances are committed in the build under way, or in some of its parts."""
        stored = np.zeros(len(self._ids), bool)
        stored[self.find(committed(cache, parts))] = True
        return stored

    def _alike(self, place: int, hash_: int) -> Iterator[int]:
        """Iterate over the utterances of a hash, the first of which is at `place`."""
        while place < len(self._hashes) and self._hashes[place] == hash_:
            yield int(self._order[place])
            place += 1


def check_ids(ids: Iterable[str]) -> None:
    """Raise `FeatureError` for what can be no id."""
    for id in ids:
        check_id(id)


def _hash(id: str) -> int:
    return hash_of(id.encode("utf-8", "surrogatepass"))


# Data sets and loaders as an extraction sees them: size, ids and lengths, no item loaded.


class DataSet(Protocol):
    """A data set whose utterances can be picked by number, from 0 on."""

    def __len__(self) -> int:
        """Return the number of utterances."""

    def __getitem__(self, index: int, /) -> object:
        """Return the item of an utterance."""


def check_source(source: object) -> None:
    """Raise `ConfigError` for what is no data set and no loader, or holds nothing."""
    kind = type(source).__name__
    if isinstance(source, Iterator):
        raise ConfigError(
            f"a {kind!r} can be gone through only once, and has no ids to compare; give a data "
            "set: a list of its items, or an object with __getitem__ and __len__, or a torch "
            "IterableDataset"
        )
    iterable = hasattr(source, "__getitem__") or hasattr(source, "__iter__")
    if not iterable or isinstance(source, str | bytes | os.PathLike | Mapping):
        raise ConfigError(
            f"give a data set with items by number, an IterableDataset or a loader, not {kind!r}"
        )
    if is_map_style(source) and not hasattr(source, "__len__"):
        raise ConfigError(f"a data set needs a length, too; give {kind!r} a method __len__")
    if size_of(source) == 0:
        raise ConfigError(
            f"the data set ({kind!r}) is empty; look at what filters it, "
            "or at the file that it is read from"
        )


def is_map_style(source: object) -> TypeGuard[DataSet]:
    """Whether something is a data set whose utterances can be picked by number."""
    return hasattr(source, "__getitem__") and not isinstance(source, IterableDataset)


def dataset_of(source: object) -> object:
    """Return the data set of a loader; a data set is its own, whatever it is made of.

    >>> class Part:
    ...     dataset = [1, 2, 3]
    ...     def __getitem__(self, number): return self.dataset[number + 1]
    >>> part = Part()
    >>> dataset_of(part) is part
    True
    """
    if hasattr(source, "__getitem__") or isinstance(source, IterableDataset):
        return source
    return getattr(source, "dataset", source)


def size_of(source: object) -> int | None:
    """Return the number of utterances of a data set, or of a loader's; None if it does not tell."""
    dataset = dataset_of(source)
    return len(dataset) if is_map_style(dataset) else None


def visible_ids(source: object) -> Sequence[str] | None:
    """Return the ids that a data set, or that of a loader, shows: its `data_ids` or `ids`."""
    dataset = dataset_of(source)
    if isinstance(dataset, Subset):
        whole = visible_ids(dataset.dataset)
        return None if whole is None else [whole[number] for number in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [visible_ids(part) for part in dataset.datasets]
        return None if None in parts else [id for part in parts for id in part or ()]
    for name in ("data_ids", "ids"):
        ids: Any = getattr(dataset, name, None)
        if not hasattr(ids, "__getitem__") or not isinstance(dataset, Sized):
            continue
        if len(ids) == len(dataset):
            return as_ids(ids)
    return None


def visible_lengths(source: object) -> Sequence[float] | None:
    """Return how long utterances are, if the data set shows it; in any unit: only the order counts.

    Either by `lengths`, or as "duration", "length" or "num_samples" in the `data` of a
    `DynamicItemDataset`.
    """
    if isinstance(source, Subset):
        inner = visible_lengths(source.dataset)
        return None if inner is None else [inner[index] for index in source.indices]
    lengths: Any = getattr(source, "lengths", None)
    shown = hasattr(lengths, "__getitem__") and hasattr(lengths, "__len__")
    if shown and isinstance(source, Sized) and len(lengths) == len(source):
        return cast(Sequence[float], lengths)
    data, ids = getattr(source, "data", None), getattr(source, "data_ids", None)
    if isinstance(data, Mapping) and isinstance(ids, list):
        for key in ("duration", "length", "num_samples"):
            # not a number, or not of every utterance
            with contextlib.suppress(LookupError, TypeError, ValueError):
                return [float(data[id][key]) for id in ids]
    return None


def ids_of_batch(data: object) -> list[str] | None:
    """Return the ids that a batch, an object or a mapping, shows as "id"; None if it does not."""
    ids: Any = as_id(data.get("id") if isinstance(data, Mapping) else getattr(data, "id", None))
    if isinstance(ids, str):
        return [ids]
    # whole numbers come as a tensor
    listed = isinstance(ids, list | tuple) or getattr(ids, "ndim", 0) == 1
    found = as_ids(ids) if listed else None
    return None if found is None else list(found)


def as_ids(ids: Iterable[object]) -> Sequence[str] | None:
    """Return ids as strings; None if some of them can be none."""
    if isinstance(ids, Sequence) and all(isinstance(id, str) for id in ids):
        return cast(Sequence[str], ids)
    found = [as_id(id) for id in ids]
    return cast(Sequence[str], found) if all(isinstance(id, str) for id in found) else None


def named(ids: Sequence[str | None], most: int = 10) -> str:
    """Return the first ids, and how many more there are, as a part of a message.

    >>> named(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(map(repr, ids[:most])) + more


# `DynamicItems`: items that a SpeechBrain data set computes of an utterance, by id, in threads.


class DynamicItems:
    """Some items of a `DynamicItemDataset` by utterance id, and nothing else computed.

    The data set itself stays as it is, its output keys too. Threads may ask at a time: each has a
    pipeline of its own, since one that runs a generator is not to be shared. Picklable if the data
    and the functions of these items are.

    Args:
        dataset: the data set.
        keys: of its entries or dynamic items; as a mapping, from the names that they get; its
            output keys, as they are now, if None.

    Raises `ConfigError` for another data set, and for a key that it does not have.
    """

    def __init__(
        self, dataset: object, keys: Iterable[str] | Mapping[str, str] | None = None
    ) -> None:
        if not is_dynamic(dataset):
            kind = type(dataset).__name__
            raise ConfigError(f"a DynamicItemDataset of SpeechBrain is needed, not {kind!r}")
        pipeline = dataset.pipeline
        keys = pipeline.output_mapping if keys is None else keys
        keys = [keys] if isinstance(keys, str) else keys
        self.keys = dict(keys) if isinstance(keys, Mapping) else {key: key for key in keys}
        for key in self.keys.values():
            if key not in pipeline.key_to_node:
                known = nearest(key, pipeline.key_to_node)
                raise ConfigError(f"the data set has no key {key!r}; {known}")
        self._data: Mapping[str, Mapping[str, Any]] = dataset.data
        self._static, self._items = _needed(pipeline, self.keys.values())
        self._pipelines = threading.local()

    @property
    def functions(self) -> list[Callable[..., object]]:
        """The functions that compute the items, those of what they take included."""
        return [item.func for item in self._items]

    def of(self, id: str, less: Iterable[str] = ()) -> dict[str, object]:
        """Return the items of an utterance, except those of the names `less`.

        Raises `KeyNotFoundError` for an id that the data set does not have.
        """
        entry = self._data.get(id)
        if entry is None:
            hint = partial(nearest, id, self._data)
            raise KeyNotFoundError(f"the data set has no utterance {id!r}", hint=hint)
        wanted = tuple(name for name in self.keys if name not in less)
        made: Any = self._pipelines
        if getattr(made, "wanted", None) != wanted:
            made.wanted, made.pipeline = wanted, self._pipeline(wanted)
        found: dict[str, object] = made.pipeline.compute_outputs({**entry, "id": id})
        return found

    def _pipeline(self, wanted: Iterable[str]) -> DataPipeline:
        from speechbrain.utils.data_pipeline import DataPipeline

        names = {name: self.keys[name] for name in wanted}
        return DataPipeline(self._static, list(map(_unused, self._items)), names)

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key != "_pipelines"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._pipelines = threading.local()


def is_dynamic(dataset: object) -> TypeGuard[DynamicItemDataset]:
    """Whether something is a `DynamicItemDataset`, or made like one."""
    return hasattr(getattr(dataset, "pipeline", None), "key_to_node") and isinstance(
        getattr(dataset, "data", None), Mapping
    )


def _needed(pipeline: DataPipeline, keys: Iterable[str]) -> tuple[list[str], list[DynamicItem]]:
    """Return the keys of entries and the dynamic items that some keys are made of.

    Raises `ConfigError` where an item takes what nothing provides.
    """
    order = pipeline.dg.get_evaluation_order(pipeline.get_selected_node_ids(keys))
    nodes = [node.data for node in order]
    static = [node.key for node in nodes if not hasattr(node, "takes")]
    chosen = {id(node) for node in nodes if hasattr(node, "takes")}
    items = [item for item in pipeline.dynamic_items if id(item) in chosen]
    for key in (key for item in items for key in item.takes):
        if key not in pipeline.key_to_node:
            known = nearest(key, pipeline.key_to_node)
            raise ConfigError(f"a dynamic item takes {key!r}, which the data set lacks; {known}")
    return static, items


def _unused(item: DynamicItem) -> DynamicItem:
    """Return a copy of a dynamic item, which has not begun to generate anything."""
    item = copy.copy(item)
    if hasattr(item, "current_generator"):
        item.current_generator, item.num_provided_items = None, 0
    return item


# The global random generators, which an extraction leaves as it found them.


@dataclass(frozen=True, eq=False)
class RandomState:
    """A state of the generators of Python, NumPy and torch.

    >>> before = RandomState.now()
    >>> drawn = torch.rand(2)
    >>> before.is_now()
    False
    >>> before.put_back()
    >>> bool((torch.rand(2) == drawn).all())
    True
    """

    python: Any
    arrays: Any
    cpu: torch.Tensor
    devices: list[torch.Tensor] | None  # of CUDA, where it is in use

    @classmethod
    def now(cls) -> RandomState:
        """Return the state of now."""
        devices = torch.cuda.get_rng_state_all() if _has_begun() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices)

    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        now = RandomState.now()
        arrays = zip(self.arrays, now.arrays, strict=True)
        return (
            self.python == now.python
            and all(np.array_equal(one, other) for one, other in arrays)
            and torch.equal(self.cpu, now.cpu)
            and len(self.devices or ()) == len(now.devices or ())
            and all(map(torch.equal, self.devices or (), now.devices or ()))
        )

    def put_back(self) -> None:
        """Give the generators this state."""
        random.setstate(self.python)
        np.random.set_state(self.arrays)
        torch.set_rng_state(self.cpu)
        if self.devices is not None:
            torch.cuda.set_rng_state_all(self.devices)
        elif _has_begun():  # since then: back to the seeds that it began with
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Yield the generators of Python, NumPy and torch back the state that they had.

    A DataLoader draws the seed of its workers from torch's, also where it needs none; data sets and
    features draw from all of them. A training with the same seed must not go another way because
    its features were cached now.
    """
    state = RandomState.now()
    try:
        yield
    finally:
        state.put_back()


def _has_begun() -> bool:
    """Whether CUDA is in use; looking must not begin it: processes may be forked yet."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


# Random features: each utterance has generators of its own, from the seed and its id.

LOADING, COMPUTING = "load", "compute"


def seed_generators(seed: int, id: str, step: str) -> None:
    """Seed the global generators for one step of one utterance."""
    text = f"{seed}\0{step}\0{id}".encode("utf-8", "surrogatepass")
    number = xxhash.xxh3_64_intdigest(text)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    # not torch.manual_seed: for devices that are not in use yet it notes each call, in 3 ms
    torch.default_generator.manual_seed(number & 0x7FFFFFFFFFFFFFFF)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number & 0x7FFFFFFFFFFFFFFF)


class SeededItems:
    """A data set whose utterances are loaded from generators of their own.

    Args:
        dataset: the data set, which all else is asked of.
        ids: its ids.
        seed: of the generators.
    """

    def __init__(self, dataset: DataSet, ids: Sequence[str], seed: int) -> None:
        self.seeded, self._ids, self._seed = dataset, ids, seed

    def __len__(self) -> int:
        return len(self.seeded)

    def __getitem__(self, index: int) -> object:
        seed_generators(self._seed, self._ids[index], LOADING)
        return self.seeded[index]

    def __getattr__(self, name: str) -> object:
        # pickle asks before there is a data set; torch loads several at once by __getitems__
        if name in ("seeded", "__getitems__") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.seeded, name)


# Random features: how a run says that they are, and what that means for them.

_log = logging.getLogger("featcache")


def tell_random(probe: Probe, twice: Comparison | None) -> None:
    """Log that features are random, if computing utterances twice has shown it.

    Args:
        probe: the utterances.
        twice: how those computed twice differ; None: they do not.
    """
    if twice is None:
        return
    if twice.features:
        of = twice.features[0]
        what = f"{of.feature} of {of.id!r}, computed twice, {of.told()}"
    else:
        id, name = twice.inputs[0]
        what = f"input {name!r} of {id!r} is another each time"
    text = (
        "and even from the same seed (it keeps a state or a generator of its own, or the data "
        "come from a loader, which is used as it is): the cache cannot be checked by computing "
        "again"
    )
    if probe.seed is not None:
        text = (
            f"so each utterance is loaded and computed alone, under generators of the seed and "
            f"its id, and the seed, {probe.seed}, counts (torch.manual_seed sets it)"
        )
    _log.warning("features are random: %s; %s", what, text)
