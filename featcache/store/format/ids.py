"""Utterance ids: which strings are usable, and numbers as ids."""

from __future__ import annotations

import operator

from featcache.errors import FeatureError


def as_id(value: object) -> object:
    """Return a whole number as text, be it a tensor or an array without axes; all else as it is.

    `DynamicItemDataset.from_arrow_dataset` numbers its utterances.

    >>> as_id(7), as_id("utt-7")
    ('7', 'utt-7')
    """
    if isinstance(value, str):  # first, and alone: a union is made anew each time
        return value
    if isinstance(value, bool) or getattr(value, "ndim", None):
        return value
    try:
        return str(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        return value


def check_id(id: str) -> None:
    """Raise `FeatureError` unless `id` is a non-empty Unicode string without NUL."""
    if not isinstance(id, str) or not id or "\0" in id:
        hint = "; give str(id)" if not isinstance(id, str) else ""
        raise FeatureError(
            f"utterance id {id!r} is not usable: a non-empty string without NUL is needed{hint}"
        )
    try:
        id.encode()
    except UnicodeEncodeError as error:
        raise FeatureError(
            f"utterance id {id!r} is not usable: it is not valid Unicode ({error.reason})"
        ) from error
