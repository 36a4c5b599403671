"""`Ids`: the utterance ids of numbered rows as a sequence, which holds none of them itself."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Protocol, overload

from featcache.errors import RowError


class HasIds(Protocol):
    """Rows that have ids, as those of an index or of a table."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, id: object) -> bool: ...
    def id(self, row: int) -> str:
        """Return the id of a row, counted from 0."""
        ...


class Ids(Sequence[str]):
    """The ids of a cache or a table in the order of its rows.

    Taken out of the index when they are asked for: ten million ids cost no memory. Equal to any
    sequence of the same ids; pickled as a list.
    """

    def __init__(self, rows: HasIds) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self._rows.id(each) for each in range(len(self))[row]]
        try:
            return self._rows.id(range(len(self))[row])
        except IndexError:
            raise RowError(f"no row {row}: there are {len(self)} utterances") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        some = ", ".join(map(repr, self[:3]))
        return f"<{len(self)} ids: {some}{', ...' * (len(self) > 3)}>"

    def __reduce__(self) -> tuple[object, ...]:
        return list, (list(self),)
