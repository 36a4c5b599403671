"""Caches that cannot be written to: locked ones are waited for, refused ones are told apart."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from featcache.errors import CacheError, CacheLockedError, describe
from featcache.extraction.datasets import named
from featcache.store.format.manifest import NAME

T = TypeVar("T")
# how long workers of a killed run, or of this one at its end, may take to finish their batch
PATIENCE_S = 60.0
_log = logging.getLogger("featcache")


def retry_while_locked(do: Callable[[], T], unless: Callable[[], bool] = lambda: False) -> T:
    """Call `do` again and again for up to `PATIENCE_S` while it raises `CacheLockedError`.

    Raises the last of these errors after that time, and at once if `unless()` is true.
    """
    until, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return do()
        except CacheLockedError as error:
            if time.monotonic() >= until or unless():
                raise
            if not told:
                _log.warning("waiting up to %.0f s: %s", PATIENCE_S, error)
                told = True
        time.sleep(0.2)


@contextlib.contextmanager
def refusal_explained(path: Path, missing: Sequence[str] | None) -> Iterator[None]:
    """Say what a cache lacks that cannot be written to."""
    try:
        yield
    except OSError as error:
        if not is_refused(error):
            raise
        if not (path / NAME).exists():
            text = "cannot be made; give another directory, or ask for the right to write there"
        elif missing is None:
            text = (
                "cannot be written to, and the data set shows no ids to compare; give it an "
                "attribute `ids`"
            )
        else:
            text = (
                f"lacks {named(missing, 3)} and cannot be written to: copy it to where you may "
                "write, or leave what it lacks out of the data set"
            )
        raise CacheError(f"cache {str(path)!r} {text} ({describe(error)})") from error


@contextlib.contextmanager
def refusal_passed_over() -> Iterator[None]:
    """Do without writing where this user may not, or somebody else is at it."""
    try:
        yield
    except OSError as error:
        if not (isinstance(error, CacheLockedError) or is_refused(error)):
            raise


def is_refused(error: OSError) -> bool:
    """Say whether an error means that this user may not write there, or nobody may."""
    refused = (errno.EACCES, errno.EPERM, errno.EROFS)
    return any(getattr(cause, "errno", None) in refused for cause in (error, error.__cause__))
