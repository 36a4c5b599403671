"""Refusing to read a cache that lacks utterances, unless that is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from featcache.errors import IncompleteError
from featcache.store.format.lock import holder, holder_text, is_locked


def check_complete(cache: object, *, allow_incomplete: bool = False) -> None:
    """Raise `IncompleteError` for a cache that its writer has not finished, and say who writes it.

    What does not say whether it is complete passes; a table tells which of its caches is not.
    """
    if allow_incomplete or getattr(cache, "complete", True):
        return
    getattr(cache, "require_complete", bool)()
    path, expected = getattr(cache, "path", None), getattr(cache, "expected", None)
    count = len(cache) if hasattr(cache, "__len__") else 0
    of = "" if expected is None else f" of {expected}"
    there = f"{count}{of} {'utterance is' if count == 1 and not of else 'utterances are'} there"
    there += "".join(_lacking(cache))
    with contextlib.suppress(OSError):  # a cache that only others can write to
        if path is not None and holder(path) is not None and is_locked(path):
            there += f"; it is being written by {holder_text(path)}"
    raise IncompleteError(
        f"cache {str(path)!r} is incomplete: {there}; go on with what fills it "
        "(cache_features, extract, CacheWriter; publish(complete=True) of a read-through), or "
        "read what is there: allow_incomplete=True"
    )


def _lacking(cache: Any) -> Iterator[str]:
    """Give, for each feature set of a cache, what it lacks of the others."""
    for set_ in getattr(getattr(cache, "opened", None), "sets", {}).values():
        feature = next(iter(set_.features))
        if missing := len(cache.missing(feature)):
            have = "has" if missing == 1 else "have"
            them = f"cache.missing({feature!r})"
            yield f"; {missing} more {have} no {feature!r}: compute or delete them, {them}"
