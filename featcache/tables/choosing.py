"""Rows that a view is made of: chosen by id or by number."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING, cast

import numpy as np

from featcache.errors import ConfigError, RowError
from featcache.interface import Ints

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable


def chosen_rows(table: FeatureTable, keys: Iterable[str] | Iterable[int]) -> Ints:
    """Return the rows that ids or row numbers name, in their order, each once.

    Raises `KeyNotFoundError`, `RowError`, or `ConfigError` for an utterance that comes twice.
    """
    if isinstance(keys, str):
        raise ConfigError(f"utterances are chosen by a list of ids or rows, not by {keys!r}")
    listed = keys if isinstance(keys, Sized) else list(keys)
    if hasattr(listed, "dtype"):
        rows = _numbers(table, np.asarray(listed))
    else:
        given = list(cast(Iterable[str | int], listed))
        rows = table.numbers(given) if given else np.zeros(0, np.int64)
    twice = np.flatnonzero(np.bincount(rows, minlength=1) > 1)
    if len(twice):
        raise ConfigError(
            f"utterance {table.id(int(twice[0]))!r} is chosen twice; each can be in a view once"
        )
    return rows


def _numbers(table: FeatureTable, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Ints:
    if array.ndim != 1 or array.dtype.kind not in "iuUO":
        hint = "; give np.flatnonzero of a mask" if array.dtype.kind == "b" else ""
        raise RowError(
            "utterances are chosen by ids or row numbers along one axis, not by "
            f"{array.dtype} of shape {array.shape}{hint}"
        )
    if array.dtype.kind in "UO":
        return chosen_rows(table, array.tolist())
    if len(array):
        table.numbers([int(array.min()), int(array.max())])
    return array.astype(np.int64)
