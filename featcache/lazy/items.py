"""A map-style data set with a cache before it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Protocol, Self, cast

from torch.utils.data import Dataset

from featcache.errors import ConfigError
from featcache.extraction.datasets import visible_ids
from featcache.lazy.share import Plan
from featcache.lazy.through import MadeFrom, ReadThrough


class SizedItems(Protocol):
    """A map-style data set of a known length."""

    def __getitem__(self, number: int, /) -> object: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class _ItemOf:
    """Computes an item of a data set."""

    dataset: SizedItems

    def __call__(self, id: str, number: int) -> object:
        return self.dataset[number]


class ReadThroughDataset(Dataset[object]):
    """A map-style data set whose items are kept in a cache, by id; see `ReadThrough`.

    The cache is complete once it holds all items. The items are what the data set returns, the
    types of the first one being those of all: tensors, arrays, lists of numbers and numbers, alone,
    as a tuple or as a dict.
    """

    def __init__(self, dataset: SizedItems, plan: Plan, ids: Sequence[str] | None) -> None:
        size = len(dataset)
        if ids is None:
            ids = visible_ids(dataset)
        self.dataset = dataset
        self.ids = [str(number) for number in range(size)] if ids is None else list(ids)
        if len(self.ids) != size or len({*self.ids}) != size:
            raise ConfigError(
                f"the data set has {size} items, and {len(self.ids)} ids were given, "
                f"{len({*self.ids})} of them different; give each item an id of its own"
            )
        given = cast(MadeFrom, plan.fingerprint).given
        own = getattr(dataset, "__dict__", {}).values()
        # lists of files and texts of its items are what ids stand for
        data = [dataset, self.ids, ids, *(each for each in own if _length(each) == size)]
        made_from = MadeFrom(dataset.__getitem__, given, data)
        self.read = ReadThrough(
            _ItemOf(dataset), replace(plan, fingerprint=made_from, expected=self.ids)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> object:
        if not -len(self.ids) <= number < len(self.ids):
            raise IndexError(f"the data set has {len(self.ids)} items, and none at {number}")
        number %= len(self.ids)
        return self.read(self.ids[number], number)

    def publish(self) -> None:
        """Let readers of the cache see all that is stored."""
        self.read.publish()

    def close(self) -> None:
        """Publish what this process wrote; used again, it begins anew."""
        self.read.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) and not isinstance(value, str) else -1
