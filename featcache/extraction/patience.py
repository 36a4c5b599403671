"""Caches that cannot be written to: locked ones are waited for, refused ones are told apart."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from featcache.errors import CacheLockedError

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


def is_refused(error: OSError) -> bool:
    """Say whether an error means that this user may not write there, or nobody may."""
    refused = (errno.EACCES, errno.EPERM, errno.EROFS)
    return any(getattr(cause, "errno", None) in refused for cause in (error, error.__cause__))
