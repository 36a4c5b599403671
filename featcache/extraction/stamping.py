"""Stamps of a data set's utterances: digests of the entries and inputs that it shows."""

from __future__ import annotations

import bisect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DataLoader, Subset

from featcache.extraction.datasets import dataset_of, visible_ids
from featcache.format import Stamps, as_id
from featcache.staleness.inputs import UNKNOWN, entry_stamps, input_stamp

if TYPE_CHECKING:
    from datasets import Dataset

# Entries of a data set of the user's own class: its attributes that hold a row for each
# utterance.
#
# A list of rows, of paths, of texts: what is as long as the data set. Beside a text that may name
# a file stands its path in each folder that the data set holds. What looks changed is loaded and
# compared, so nothing is lost where a list of that length is no list of utterances.

_PLAIN = (str, int, float, os.PathLike)
_MOST_VALUES = 64  # of a row; longer ones are data, not entries
_MOST_FOLDERS = 4
_MAY_BE_PATH = re.compile(r"[/\\]|\.\w{1,5}\Z").search


def entry_of_rows(dataset: object) -> Callable[[int], object] | None:
    """Return the entry of an utterance by its number; None if the data set holds no rows.

    >>> class Recordings:
    ...     def __init__(self): self.texts = ["yes", "no"]
    ...     def __len__(self): return 2
    >>> entry_of_rows(Recordings())(1)
    ['no']
    """
    columns = [rows for held in held_rows(dataset).values() for rows in held]
    if not columns:
        return None
    folders = [*_folders(vars(dataset))][:_MOST_FOLDERS]

    def entry(number: int) -> object:
        found = [rows[number] for rows in columns]
        texts = dict.fromkeys(t for value in found for t in _texts(value) if _MAY_BE_PATH(t))
        return [*found, *(os.path.join(folder, text) for folder in folders for text in texts)]  # noqa: PTH118  # of each utterance

    return entry


def held_rows(dataset: object) -> dict[str, list[Sequence[object]]]:
    """Return the columns of rows that a data set holds, by the name of the attribute."""
    held = getattr(dataset, "__dict__", None)
    if not held or not isinstance(dataset, Sized):
        return {}
    found = {name: [*_columns(value, len(dataset))] for name, value in sorted(held.items())}
    return {name: columns for name, columns in found.items() if columns}


def _columns(value: Any, size: int) -> Iterator[Sequence[object]]:
    """Yield what an attribute holds of rows: itself, or the columns of a frame."""
    if hasattr(value, "columns") and hasattr(value, "iloc"):  # of pandas
        if len(value) == size:
            yield from (list(value[name]) for name in value.columns)
    elif isinstance(value, np.ndarray):
        if value.ndim == 1 and len(value) == size and value.dtype.kind in "iufbUS":
            yield value.tolist()
    elif isinstance(value, list | tuple) and len(value) == size and size and _is_row(value[0]):
        yield value


def _is_row(value: object) -> bool:
    if isinstance(value, Mapping):
        return len(value) <= _MOST_VALUES and all(map(_is_value, value.values()))
    if isinstance(value, list | tuple):
        return len(value) <= _MOST_VALUES and all(map(_is_value, value))
    return isinstance(value, _PLAIN)


def _is_value(value: object) -> bool:
    return value is None or isinstance(value, _PLAIN)


def _texts(value: object) -> Iterator[str]:
    inner: Iterable[object] = (value,)
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
    for each in inner:
        if isinstance(each, str | os.PathLike):
            yield os.fsdecode(each)


def _folders(held: Mapping[str, object]) -> Iterator[str]:
    for value in held.values():
        if isinstance(value, str | os.PathLike) and value and Path(value).is_dir():
            yield os.fsdecode(value)


# Stamps of the items of a data set: made where its items are loaded, in any loader's processes.

Entry = Callable[[int], object]  # the entry of an utterance by its number


class Stamped(NamedTuple):
    """A batch as a loader made it, with stamps of the items that it was made of."""

    data: object
    inputs: Sequence[int]
    ids: Sequence[str | None]  # as the items themselves show them


class StampingCollate:
    """A collate function, which stamps the items before it collates them.

    Args:
        collate: the loader's own.
        mentioned: keys that count as input.
        batched: whether it gets a list of items, or one item.
    """

    def __init__(
        self, collate: Callable[[Any], object], mentioned: frozenset[str], *, batched: bool
    ) -> None:
        self.collate, self.mentioned, self.batched = collate, mentioned, batched

    def __call__(self, items: Any) -> Stamped:
        """Collate items; stamps come first, since collating may change them."""
        each = list(items) if self.batched else [items]
        inputs = [input_stamp(item, self.mentioned) for item in each]
        ids = [id_of_item(item) for item in each]
        return Stamped(self.collate(items), inputs, ids)


class InputsOnly:
    """A collate function that returns the stamps of items, and lets go of the items."""

    def __init__(self, mentioned: frozenset[str], *, batched: bool) -> None:
        self._stamping = StampingCollate(_nothing, mentioned, batched=batched)

    def __call__(self, items: object) -> list[int]:
        """Return the stamps."""
        return list(self._stamping(items).inputs)


def _nothing(items: object) -> None:
    """Collate nothing."""


def id_of_item(item: object) -> str | None:
    """Return the id that an item, a mapping, shows as "id"."""
    id = as_id(item.get("id")) if isinstance(item, Mapping) else None
    return id if isinstance(id, str) else None


def stamp_items(loader: DataLoader[object], mentioned: frozenset[str]) -> None:
    """Make a loader of our own stamp its items."""
    batched = loader.batch_sampler is not None
    loader.collate_fn = StampingCollate(loader.collate_fn, mentioned, batched=batched)


def iterate_stamping(loader: Iterable[object], mentioned: frozenset[str]) -> Iterator[object]:
    """Iterate over a loader that was given; it stamps its items if that leaves no trace in it.

    Its batches are `Stamped` then. A loader takes its collate function when an iteration begins;
    one whose processes stay would keep ours for the training, and what a loader of another class
    makes of its batches is not known.
    """
    if not _takes_collate(loader):
        return iter(loader)
    own = loader.collate_fn
    stamp_items(loader, mentioned)
    try:
        return iter(loader)
    finally:
        loader.collate_fn = own


def _takes_collate(loader: object) -> TypeGuard[DataLoader[object]]:
    known = [DataLoader.__iter__]
    if (ours := sys.modules.get("speechbrain.dataio.dataloader")) is not None:
        known.append(ours.SaveableDataLoader.__iter__)
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ in known
        and not loader.persistent_workers
    )


class Entries:
    """The entries of a data set by number, without loading anything; empty where it has none.

    They are its `entries`, a sequence; the `data` of a `DynamicItemDataset`; the items of a list;
    the rows of a `datasets.Dataset`, audio not decoded; rows that an object of any other class
    holds.
    """

    def __init__(self, dataset: object) -> None:
        self._dataset, self._entry = dataset, _find_entry(dataset)
        self._size = 0
        if self._entry is not None and isinstance(dataset, Sized):
            self._size = len(dataset)

    def __reduce__(self) -> tuple[object, ...]:
        return Entries, (self._dataset,)

    def __bool__(self) -> bool:
        return self._entry is not None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> object:
        return self._of(number)

    def stamps(self, numbers: Iterable[int]) -> NDArray[np.uint64]:
        """Return the stamps of the entries of these numbers."""
        if self._entry is None:
            return np.zeros(len(list(numbers)), np.uint64)
        return entry_stamps(map(self._of, numbers))

    def input_of(self, number: int) -> int:
        """Return a stamp of the input of an item that has none: its entry, with files' contents."""
        entry = self._of(number)
        return UNKNOWN if entry is _NONE else input_stamp(entry)

    def _of(self, number: int) -> object:
        if self._entry is None:
            return _NONE
        try:
            return self._entry(int(number))
        except (LookupError, OSError, ValueError):  # whoever loads the item is told
            return _NONE


_NONE = object()  # no entry: nothing describes it


def _find_entry(dataset: object) -> Entry | None:
    entries: Any = getattr(dataset, "entries", None)
    listed = hasattr(entries, "__getitem__") and hasattr(entries, "__len__")
    if listed and isinstance(dataset, Sized):
        return cast(Entry, entries.__getitem__) if len(entries) == len(dataset) else None
    data: Any = getattr(dataset, "data", None)
    ids: Any = getattr(dataset, "data_ids", None)
    if isinstance(data, Mapping) and isinstance(ids, Sequence):
        return lambda number: data[ids[number]]
    if isinstance(dataset, list | tuple | range):
        return dataset.__getitem__
    if isinstance(dataset, Subset):
        inner, indices = _find_entry(dataset.dataset), dataset.indices
        return None if inner is None else lambda number: inner(indices[number])
    if isinstance(dataset, ConcatDataset):
        return _entry_of_parts(dataset)
    loaded = sys.modules.get("datasets")
    if loaded is not None and isinstance(dataset, loaded.Dataset):
        return _entry_of_table(dataset)
    return entry_of_rows(dataset)


def _entry_of_parts(dataset: ConcatDataset[object]) -> Entry | None:
    """Return the entries of a `ConcatDataset`; None unless each of its parts has some."""
    parts, ends = [_find_entry(part) for part in dataset.datasets], dataset.cumulative_sizes

    def entry(number: int) -> object:
        part = bisect.bisect_right(ends, number)
        return cast(Entry, parts[part])(number - (ends[part - 1] if part else 0))

    return None if None in parts else entry


def _entry_of_table(dataset: Dataset) -> Entry:
    """Return the entries of a `datasets.Dataset`.

    Bytes that lie in it count by the data set's own fingerprint: to read them is to load it.
    """
    for name, kind in dataset.features.items():
        if hasattr(kind, "decode"):
            dataset = dataset.cast_column(name, type(kind)(decode=False))
    fingerprint, rows = dataset._fingerprint, dataset.with_format(None)  # noqa: SLF001  # no other
    return lambda number: _without_bytes(rows[number], fingerprint)


def _without_bytes(value: object, fingerprint: str) -> object:
    if isinstance(value, dict):
        return {key: _without_bytes(each, fingerprint) for key, each in value.items()}
    return fingerprint if isinstance(value, bytes) else value


class BatchStamps:
    """Makes the stamps of the batches of a data set.

    Args:
        dataset: the data set.
        ids: its ids, if it shows them.
    """

    def __init__(self, dataset: object, ids: Sequence[str] | None) -> None:
        self._entries, self._ids = Entries(dataset), ids
        self._noted: dict[int, NDArray[np.uint64]] = {}

    def begin(self, batch: int, numbers: Sequence[int]) -> None:
        """Note the entries of a batch before it is loaded: a file that changes later is unlike."""
        self._noted[batch] = self._entries.stamps(numbers)

    def end(self, batch: int, numbers: Sequence[int], data: object) -> dict[str, Stamps]:
        """Return the stamps of a batch, by id, as far as they are known."""
        entries = self._noted.pop(batch)
        if not isinstance(data, Stamped) or len(data.inputs) != len(numbers):
            return {}
        ids = data.ids if self._ids is None else [self._ids[number] for number in numbers]
        rows = zip(ids, data.inputs, entries.tolist(), numbers, strict=True)
        return {
            id: Stamps(input or self._entries.input_of(number), entry)
            for id, input, entry, number in rows
            if id is not None
        }


class StreamStamps:
    """Makes the stamps of the batches of a loader that was given, by the ids of their items.

    Args:
        loader: the loader. Its data set may have entries, if it shows its ids.
    """

    def __init__(self, loader: object) -> None:
        dataset = dataset_of(loader)
        ids = None if dataset is loader else visible_ids(dataset)
        self._entries = Entries(dataset if ids is not None else None)
        self._numbers: dict[str, int] = {}
        if ids is not None and self._entries:
            self._numbers = {id: number for number, id in enumerate(ids)}

    def of(self, data: object) -> dict[str, Stamps]:
        """Return the stamps of a batch, by id, as far as they are known."""
        if not isinstance(data, Stamped):
            return {}
        found = {id: input for id, input in zip(data.ids, data.inputs, strict=True) if id}
        numbers = [self._numbers.get(id) for id in found]
        there = [number for number in numbers if number is not None]
        entries = iter(self._entries.stamps(there).tolist())
        stamps: dict[str, Stamps] = {}
        for (id, input), number in zip(found.items(), numbers, strict=True):
            if number is None:
                stamps[id] = Stamps(input)
            else:
                stamps[id] = Stamps(input or self._entries.input_of(number), next(entries))
        return stamps


def unstamped(data: object) -> object:
    """Return a batch as its loader made it."""
    return data.data if isinstance(data, Stamped) else data
