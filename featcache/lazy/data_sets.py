"""Data sets as functions of an id: which item is which, and what the items are made from.

The place of an item in a data set says nothing: in another order, in a shorter list, in another
`random_split` another item has it. So the id of an item is what the data set itself shows of it;
subsets and concatenations are followed down to the data sets that have the items.
"""

from __future__ import annotations

import bisect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset

from featcache.errors import ConfigError, StaleCacheError
from featcache.extraction.datasets import DataSet, DynamicItems, is_dynamic, visible_ids
from featcache.extraction.stamping import Entries, held_rows
from featcache.format import as_id
from featcache.staleness.code import is_users
from featcache.staleness.inputs import entry_digest
from featcache.staleness.provenance import Provenance, provenance

if TYPE_CHECKING:
    import datasets

Kind = TypeVar("Kind", bound=Dataset[object])
_PLAIN = (list, tuple, range)  # whose items are their own entries
_PRIME = np.uint64(0x9E3779B185EBCA87)  # PRIME64_1 of xxHash, to join digests


class _Items(NamedTuple):
    """Items of a data set: those that have them, which of these has an item, and its number."""

    roots: list[DataSet]
    which: NDArray[np.int64]
    number: NDArray[np.int64]


def ids_of_items(dataset: DataSet) -> list[str]:
    """Return the ids of a data set's items: those that it shows, or else by their entries.

    An entry is the row of the item that the data set holds: a path, a text, a row of a table, an
    item of a list. Its "id" is the id, or the entry itself if that is a text, or else its digest.

    Raises `ConfigError` where nothing says which item is which.

    >>> from torch.utils.data import Subset
    >>> ids_of_items(Subset(["a.wav", "b.wav", "c.wav"], [2, 0]))
    ['c.wav', 'a.wav']
    """
    roots, which, number = _items(dataset)
    found: NDArray[np.object_] = np.empty(len(which), object)
    for place, root in enumerate(roots):
        rows = np.flatnonzero(which == place)
        found[rows] = _ids_of(root, number[rows].tolist())
    if len(roots) > 1 and not all(is_shown(root) for root in roots):
        kinds = MadeFromItems(dataset, {}).kinds()[1]
        if len({*kinds}) > 1:  # the same entry is another item where it is computed otherwise
            found[:] = [f"{kinds[place]}:{id}" for place, id in zip(which, found, strict=True)]
    ids: list[str] = found.tolist()
    _check_different(ids)
    return ids


def entries_of_items(dataset: object) -> NDArray[np.uint64]:
    """Return stamps of the items' entries, with size and time of the files that these name.

    A data set that another one holds, as long as itself, has entries of its items, too. 0 where
    nothing is known of an item; so of all items of a table of HuggingFace, which does not change.
    """
    roots, which, number = _items(dataset)
    found = np.zeros(len(which), np.uint64)
    for place, root in enumerate(roots):
        rows = np.flatnonzero(which == place)
        for each in (root, *_data_sets_in(root)):
            if not _is_table(each):
                found[rows] = found[rows] * _PRIME ^ Entries(each).stamps(number[rows].tolist())
    return found


def _data_sets_in(root: Any) -> list[Any]:
    held = [value for _, value in sorted(getattr(root, "__dict__", {}).items())]
    found = [each for each in held if hasattr(each, "__getitem__") and hasattr(each, "__dict__")]
    return [each for each in found if _length(each) == len(root)]


def _is_table(root: object) -> TypeGuard[datasets.Dataset]:
    loaded = sys.modules.get("datasets")
    return loaded is not None and isinstance(root, loaded.Dataset)


def check_item(dataset: object, number: int, id: str) -> None:
    """Raise `StaleCacheError` if the item of a number is not the one that had this id.

    Of a table of HuggingFace, which does not change, nothing is looked at.
    """
    root: Any = dataset
    place = number
    while True:
        if _gets_items_as(root, Subset):
            root, place = root.dataset, int(root.indices[place])
        elif _gets_items_as(root, ConcatDataset):
            part = bisect.bisect_right(root.cumulative_sizes, place)
            place -= root.cumulative_sizes[part - 1] if part else 0
            root = root.datasets[part]
        else:
            break
    if _is_table(root):
        return
    shown = [getattr(root, name, None) for name in ("data_ids", "ids")]
    ids: Any = next((each for each in shown if hasattr(each, "__getitem__")), None)
    now = _name_of(root, Entries(root)[place]) if ids is None else str(as_id(ids[place]))
    if id != now and not id.endswith(f":{now}"):
        raise StaleCacheError(
            f"item {number} of the data set is {now!r} now, and was {id!r} when featcache.through "
            "was called; call it again after a change of the order"
        )


def is_shown(root: object) -> bool:
    """Whether a data set shows ids, or has a column of them."""
    return visible_ids(root) is not None or _column_of_ids(root) is not None


def _items(dataset: Any) -> _Items:
    """Follow subsets and concatenations down; those that change items are data sets of their own.

    >>> from torch.utils.data import ConcatDataset, Subset
    >>> few = ConcatDataset([Subset(["a", "b"], [1]), Subset(["c", "d"], [0, 1])])
    >>> _items(few)
    _Items(roots=[['a', 'b'], ['c', 'd']], which=array([0, 1, 1]), number=array([1, 0, 1]))
    """
    if _gets_items_as(dataset, Subset):
        inner, indices = _items(dataset.dataset), np.array(list(dataset.indices), np.int64)
        return _Items(inner.roots, inner.which[indices], inner.number[indices])
    if _gets_items_as(dataset, ConcatDataset):
        parts = [_items(part) for part in dataset.datasets]
        roots = list({id(root): root for part in parts for root in part.roots}.values())
        places = {id(root): place for place, root in enumerate(roots)}
        which = [np.array([places[id(r)] for r in part.roots])[part.which] for part in parts]
        number = [part.number for part in parts]
        return _Items(roots, np.concatenate(which), np.concatenate(number))
    count = len(dataset)
    return _Items([dataset], np.zeros(count, np.int64), np.arange(count))


def _gets_items_as(dataset: object, kind: type[Kind]) -> TypeGuard[Kind]:
    return isinstance(dataset, kind) and type(dataset).__getitem__ is kind.__getitem__


def _ids_of(root: DataSet, numbers: Sequence[int]) -> list[str]:
    ids = visible_ids(root)
    if ids is not None:
        return [ids[number] for number in numbers]
    column = _column_of_ids(root)
    if column is not None:
        return [_text(root, column[number]) for number in numbers]
    entries = Entries(root)
    if not entries or not _says_which(root):
        raise _unknown(root)
    return [_name_of(root, entries[number]) for number in numbers]


def _column_of_ids(root: object) -> Sequence[object] | None:
    """Return the column "id" of a `datasets.Dataset`."""
    if not _is_table(root) or "id" not in root.column_names:
        return None
    column: Sequence[object] = root.with_format(None)["id"]
    return list(column)


def _says_which(root: object) -> bool:
    """Whether rows of a user's own class name the items, and nothing puts them in order.

    Numbers alone may be labels, or places in something else.
    """
    columns = [rows for held in held_rows(root).values() for rows in held]
    if not columns or _has_entries(root):
        return True
    return any(map(_has_text, columns)) and not any(map(_is_order, columns))


def _has_entries(root: object) -> bool:
    return hasattr(root, "entries") or is_dynamic(root)


def _has_text(rows: Sequence[object]) -> bool:
    first = rows[0]
    values: Iterable[object] = first if isinstance(first, list | tuple) else (first,)
    if isinstance(first, Mapping):
        values = first.values()
    return any(isinstance(each, str) or hasattr(each, "__fspath__") for each in values)


def _is_order(rows: Sequence[Any]) -> bool:
    """Whether a column is a permutation of the places, which others may be read by."""
    if not all(type(each) is int for each in rows):
        return False
    places = list(range(len(rows)))
    return sorted(rows) == places and list(rows) != places


def _name_of(root: object, entry: object) -> str:
    own = entry.get("id") if isinstance(entry, Mapping) else entry
    if isinstance(entry, list) and len(entry) == 1:  # of a data set that holds one column
        own = entry[0]
    if isinstance(own, str) or (isinstance(root, _PLAIN) and isinstance(as_id(own), str)):
        return _text(root, own)
    number = entry_digest(entry)
    if not number:
        raise _unknown(root)
    return f"{number:016x}"


def _text(root: object, value: object) -> str:
    id = as_id(value)
    if not isinstance(id, str):
        raise _unknown(root)
    return id


def _unknown(root: object) -> ConfigError:
    return ConfigError(
        f"nothing says which items of {type(root).__name__!r} these are: a number means another "
        "one in another order, a shorter list or another split; give each item an id of its own "
        "(ids=), or the data set an attribute `ids`; ids=[str(n) for n in range(len(dataset))] if "
        "a number means the same item for ever"
    )


def _check_different(ids: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for number, id in enumerate(ids):
        first = seen.setdefault(id, number)
        if first != number:
            raise ConfigError(
                f"items {first} and {number} of the data set are both known as {id!r}; give each "
                "item an id of its own (ids=)"
            )


@dataclass(frozen=True)
class MadeFromItems:
    """Finds what the items of a data set are made with.

    It is that of the data sets which have the items: one, where they all compute alike.

    Args:
        dataset: the data set.
        given: what else the items are made from.
        ids: of the items; these are no settings.
    """

    dataset: DataSet
    given: Mapping[str, object]
    ids: object = None

    def provenances(self) -> list[Provenance]:
        """Return what the items are made with; of each data set that has any."""
        return [self._of(root) for root in _items(self.dataset).roots]

    def kinds(self) -> tuple[list[dict[str, object]], list[int]]:
        """Return the different fingerprints of the data sets that have the items, and whose.

        The numbers are those of each data set's fingerprint among them.
        """
        found: dict[str, dict[str, object]] = {}
        numbers: list[int] = []
        for made_with in self.provenances():
            one = made_with.fingerprint(self.given)
            text = json.dumps(one, sort_keys=True, default=repr)
            found.setdefault(text, one)
            numbers.append([*found].index(text))
        return list(found.values()), numbers

    def _of(self, root: DataSet) -> Provenance:
        data = [self.ids, *self._entries_of(root)]
        getitem = type(root).__getitem__
        if isinstance(getitem, FunctionType) and is_users(getitem):
            data += [root, self.dataset]
            return provenance(root.__getitem__, named=_code_of(root), data=data)
        return provenance(getitem, named=_settings_of(root), data=data)

    def _entries_of(self, root: DataSet) -> list[object]:
        """Return what a data set holds of its items, which their ids stand for."""
        held = getattr(root, "__dict__", {})
        if self.ids is None and not is_shown(root):
            return [held[name] for name in held_rows(root) if not _are_reals(held[name])]
        ids = visible_ids(root) or self.ids
        alike = (each for each in held.values() if _length(each) == len(root))
        return [each for each in alike if not _are_settings(each, ids)]


def _are_settings(value: object, ids: object) -> bool:
    """Whether a mapping is one of settings by name, and not of items by id."""
    if not isinstance(value, Mapping) or (isinstance(ids, list) and value.keys() == {*ids}):
        return False
    return all(isinstance(key, str) and key.isidentifier() for key in value)


def _are_reals(value: object) -> bool:
    """Whether a column may be a setting that happens to be as long as the data set."""
    first = value[0] if isinstance(value, list | tuple | np.ndarray) else None
    return isinstance(first, float)


def _code_of(root: object) -> dict[str, object]:
    """Return the functions by which a data set of SpeechBrain computes its items."""
    if not is_dynamic(root):
        return {}
    functions = DynamicItems(root).functions
    return {f"item {number}": function for number, function in enumerate(functions)}


def _settings_of(root: object) -> dict[str, object]:
    """Return what counts of a data set of a library's class."""
    if isinstance(root, _PLAIN):
        return {}
    if is_dynamic(root):
        return _code_of(root)
    if _is_table(root):
        return {"format": root.format, "columns": str(root.features)}
    return {"dataset": root}


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) and not isinstance(value, str) else -1
