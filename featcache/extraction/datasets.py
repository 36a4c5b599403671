"""Data sets and loaders as an extraction sees them: size, ids and lengths, no item loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import IterableDataset, Subset

from featcache.errors import ConfigError
from featcache.store.format.ids import as_id


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


def is_map_style(source: object) -> bool:
    """Say whether something is a data set whose utterances can be picked by number."""
    return hasattr(source, "__getitem__") and not isinstance(source, IterableDataset)


def size_of(source: object) -> int | None:
    """Return the number of utterances of a data set, or of a loader's; None if it does not tell."""
    dataset: Any = source if is_map_style(source) else getattr(source, "dataset", source)
    return len(dataset) if is_map_style(dataset) else None


def visible_ids(source: Any) -> Sequence[str] | None:
    """Return the ids that a data set shows: its `data_ids` or `ids`, or those of one that it wraps.

    Also those of a loader's data set, and of a `Subset`.
    """
    if isinstance(source, Subset):
        inner = visible_ids(source.dataset)
        return None if inner is None else [inner[index] for index in source.indices]
    wrapped: Any = getattr(source, "dataset", None)
    for dataset in (source, wrapped) if is_map_style(source) or wrapped is None else (wrapped,):
        # a data set that wraps another may well hold some of it alone
        if not hasattr(dataset, "__len__") or size_of(source) not in (None, len(dataset)):
            continue
        for name in ("data_ids", "ids"):
            ids: Any = getattr(dataset, name, None)
            if hasattr(ids, "__getitem__") and len(ids) == len(dataset):
                return as_ids(ids)
    return None


def visible_lengths(source: Any) -> Sequence[float] | None:
    """Return how long utterances are, if the data set shows it; in any unit: only the order counts.

    Either by `lengths`, or as "duration", "length" or "num_samples" in the `data` of a
    `DynamicItemDataset`.
    """
    if isinstance(source, Subset):
        inner = visible_lengths(source.dataset)
        return None if inner is None else [inner[index] for index in source.indices]
    lengths: Any = getattr(source, "lengths", None)
    shown = hasattr(lengths, "__getitem__") and hasattr(lengths, "__len__")
    if shown and len(lengths) == len(source):
        return cast(Sequence[float], lengths)
    data, ids = getattr(source, "data", None), getattr(source, "data_ids", None)
    if isinstance(data, Mapping) and isinstance(ids, list):
        for key in ("duration", "length", "num_samples"):
            # not a number, or not of every utterance
            with contextlib.suppress(LookupError, TypeError, ValueError):
                return [float(data[id][key]) for id in ids]
    return None


def ids_of_batch(data: Any) -> list[str] | None:
    """Return the ids that a batch, an object or a mapping, shows as "id"; None if it does not."""
    ids: Any = as_id(data.get("id") if isinstance(data, Mapping) else getattr(data, "id", None))
    if isinstance(ids, str):
        return [ids]
    # whole numbers come as a tensor
    listed = isinstance(ids, list | tuple) or getattr(ids, "ndim", 0) == 1
    found = as_ids(ids) if listed else None
    return None if found is None else list(found)


def as_ids(ids: Iterable[Any]) -> Sequence[str] | None:
    """Return ids as strings; None if some of them can be none."""
    if isinstance(ids, Sequence) and all(isinstance(id, str) for id in ids):
        return ids
    found = [as_id(id) for id in ids]
    return cast(Sequence[str], found) if all(isinstance(id, str) for id in found) else None


def named(ids: Sequence[str | None], most: int = 10) -> str:
    """Return the first ids, and how many more there are, as a part of a message.

    >>> named(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(map(repr, ids[:most])) + more


def counted(utterances: int) -> str:
    """Return a number of utterances as words.

    >>> counted(1), counted(2000)
    ('1 utterance', '2000 utterances')
    """
    return f"{utterances} utterance{'' if utterances == 1 else 's'}"
