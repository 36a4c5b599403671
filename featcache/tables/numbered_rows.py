"""`NumberedRows`: the ids of a table's utterances, and the numbers of their rows."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence

from featcache._checks import listed_ids
from featcache.interface import Ints
from featcache.store.reading.id_sequence import Ids
from featcache.tables.choosing import rows_of_keys
from featcache.tables.selection import Selection


class NumberedRows(ABC):
    """Utterances that have ids and numbers; nothing of their features.

    Attributes:
        selection: the rows and the caches below.
    """

    selection: Selection

    def __len__(self) -> int:
        return len(self.selection)

    def __iter__(self) -> Iterator[str]:
        return iter(self.selection)

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and bool(self.find([id])[0] >= 0)

    @property
    def ids(self) -> Sequence[str]:
        """The utterance ids, in the order of rows; looked up as they are asked for."""
        return Ids(self)

    def id(self, row: int) -> str:
        """Return the id of a row; raises `RowError` for one that is not there."""
        self.selection.check(row)
        return self.selection.id(row)

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, int64, -1 where there is none.

        Quick for ids that are not there: nothing is looked up that is close to them.
        """
        return self.selection.find(listed_ids(ids))

    def rows(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, int64; raises `KeyNotFoundError` for an unknown one."""
        listed = listed_ids(ids)
        found = self.selection.find(listed)
        if found.min(initial=0) < 0:
            raise self.selection.not_found(listed[int(found.argmin())])
        return found

    def numbers(self, keys: Sequence[int | str]) -> Ints:
        """Return the rows that ids or row numbers, also mixed, stand for.

        Raises `KeyNotFoundError` or `RowError`.
        """
        return rows_of_keys(self, keys)
