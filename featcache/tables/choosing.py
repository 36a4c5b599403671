"""Rows that a view is made of: chosen by id or by number."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import numpy as np

from featcache._checks import are_listed
from featcache.errors import ConfigError, RowError
from featcache.interface import Ints

if TYPE_CHECKING:
    from featcache.tables.numbered_rows import NumberedRows
    from featcache.tables.table import FeatureTable


def chosen_rows(table: FeatureTable, keys: Iterable[str] | Iterable[int]) -> Ints:
    """Return the rows that ids or row numbers name, in their order, each once.

    Raises `KeyNotFoundError`, `RowError`, or `ConfigError` for an utterance that comes twice.
    """
    if not are_listed(keys):
        raise ConfigError(f"utterances are chosen by a list of ids or rows, not by {keys!r}")
    listed = keys if isinstance(keys, Sized) else list(keys)
    if hasattr(listed, "dtype"):
        rows = _numbers(table, np.asarray(listed))
    else:
        given = list(cast(Iterable[str | int], listed))
        rows = rows_of_keys(table, given) if given else np.zeros(0, np.int64)
    twice = np.flatnonzero(np.bincount(rows, minlength=1) > 1)
    if len(twice):
        raise ConfigError(
            f"utterance {table.id(int(twice[0]))!r} is chosen twice; each can be in a view once"
        )
    return rows


def rows_of_keys(table: NumberedRows, keys: Sequence[int | str]) -> Ints:
    """Return the rows that ids or row numbers, also mixed, stand for."""
    places = [place for place, key in enumerate(keys) if isinstance(key, str)]
    if len(places) == len(keys):
        return table.rows(cast(Sequence[str], keys))
    numbers = [0 if isinstance(key, str) else _whole(key) for key in keys]
    for end in (min(numbers), max(numbers)):
        table.selection.check(end)
    rows = np.array(numbers, np.int64)
    if places:
        rows[places] = table.rows(cast(str, keys[place]) for place in places)
    return rows


def _whole(key: object) -> int:
    with suppress(TypeError):
        if not isinstance(key, bool):  # of a mask, which would choose rows 0 and 1
            return operator.index(cast(int, key))
    raise RowError(f"utterances are chosen by id or by row number, not by {key!r}")


def _numbers(table: FeatureTable, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Ints:
    if array.shape == (0,):  # whatever its dtype is
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuUTO":
        hint = "; give np.flatnonzero of a mask" if array.dtype.kind == "b" else ""
        raise RowError(
            "utterances are chosen by ids or row numbers along one axis, not by "
            f"{array.dtype} of shape {array.shape}{hint}"
        )
    if array.dtype.kind in "UTO":
        return chosen_rows(table, array.tolist())
    if len(array):
        rows_of_keys(table, [int(array.min()), int(array.max())])
    return array.astype(np.int64)
