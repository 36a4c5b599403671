"""Refusing to read a cache that lacks utterances, unless that is wanted."""

from __future__ import annotations

from pathlib import Path

from featcache.errors import IncompleteError
from featcache.store.format.lock import holder, holder_text, is_locked


def check_complete(cache: object, *, allow_incomplete: bool = False) -> None:
    """Raise `IncompleteError` for a cache that its writer has not finished, and say who writes it.

    What does not say whether it is complete passes.
    """
    if allow_incomplete or getattr(cache, "complete", True):
        return
    path, expected = getattr(cache, "path", None), getattr(cache, "expected", None)
    count = len(cache) if hasattr(cache, "__len__") else 0
    of = "" if expected is None else f" of {expected}"
    there = f"{count}{of} {'utterance is' if count == 1 and not of else 'utterances are'} there"
    raise IncompleteError(
        f"cache {str(path)!r} is incomplete: {there}{_writing(path)}; go on with what fills it "
        "(cache_features, extract, CacheWriter), or read what is there: allow_incomplete=True"
    )


def _writing(path: Path | None) -> str:
    """Name the process that writes a cache, if there is one."""
    try:
        if path is None or holder(path) is None or not is_locked(path):
            return ""
    except OSError:  # one that only others can write to
        return ""
    return f"; it is being written by {holder_text(path)}"
