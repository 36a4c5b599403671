"""Waiting for those who hold a lock that somebody else needs soon."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from featcache.errors import CacheLockedError

T = TypeVar("T")
# for workers of a killed run, or of this one at its end, to be through with their batch
PATIENCE_S = 60.0
_log = logging.getLogger("featcache")


def patiently(do: Callable[[], T], unless: Callable[[], bool] = lambda: False) -> T:
    """Do something once the writers of parts in its way have ended, at most a minute later.

    Raises the `CacheLockedError` that names one of them when that was in vain, and at once if
    `unless` says so.
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
