"""Entries of a data set of the user's own class: its attributes that hold a row for each utterance.

A list of rows, of paths, of texts: what is as long as the data set. Beside a text that may name a
file stands its path in each folder that the data set holds. What looks changed is loaded and
compared, so nothing is lost where a list of that length is no list of utterances.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_PLAIN = (str, int, float, os.PathLike)
_MOST_VALUES = 64  # of a row; longer ones are data, not entries
_MOST_FOLDERS = 4
_MAY_BE_PATH = re.compile(r"[/\\]|\.\w{1,5}\Z").search


def entry_of_rows(dataset: Any) -> Callable[[int], object] | None:
    """Return the entry of an utterance by its number; None if the data set holds no rows.

    >>> class Recordings:
    ...     def __init__(self): self.texts = ["yes", "no"]
    ...     def __len__(self): return 2
    >>> entry_of_rows(Recordings())(1)
    ['no']
    """
    held = getattr(dataset, "__dict__", None)
    if not held or not hasattr(dataset, "__len__"):
        return None
    columns = [rows for _, value in sorted(held.items()) for rows in _columns(value, len(dataset))]
    if not columns:
        return None
    folders = [*_folders(held)][:_MOST_FOLDERS]

    def entry(number: int) -> object:
        found = [rows[number] for rows in columns]
        texts = dict.fromkeys(t for value in found for t in _texts(value) if _MAY_BE_PATH(t))
        return [*found, *(os.path.join(folder, text) for folder in folders for text in texts)]  # noqa: PTH118  # of each utterance

    return entry


def _columns(value: Any, size: int) -> Iterator[Sequence[Any]]:
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
