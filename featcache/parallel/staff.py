"""The workers of a Dask client, as a driver keeps them: others in place of lost ones, and how they end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from featcache.errors import FeatcacheError
from featcache.parallel.worker import finish_work

if TYPE_CHECKING:
    from distributed import Client

REPLACE_AFTER_S = 30.0  # Dask gives up a lost worker after 15 s, then it starts another if asked to
_log = logging.getLogger("featcache")


class Staff:
    """Keeps a number of workers at work.

    Args:
        client: of the workers.
        wanted: how many there should be.
    """

    def __init__(self, client: Client, wanted: int) -> None:
        self.there = wanted  # how many there are
        self._client, self._wanted = client, wanted
        self._checked_at = self._complete_at = time.monotonic()

    def look_after(self) -> None:
        """See who is there, once a second at most, and ask for workers in place of those that stay away."""
        now = time.monotonic()
        if now - self._checked_at < 1:
            return
        self._checked_at = now
        self.there = len(self._client.nthreads())  # type: ignore[no-untyped-call]
        if self.there >= self._wanted:
            self._complete_at = now
        elif now - self._complete_at > REPLACE_AFTER_S:
            _log.warning("%d of %d workers are there; asking for the others", self.there, self._wanted)
            self._complete_at = now
            if self._client.cluster is not None:
                self._client.cluster.scale(self._wanted)

    def finish(self, under_way: Iterable[str]) -> None:
        """End the tasks of some keys, and have every worker seal its part of the cache."""
        if keys := list(under_way):
            self._client.cancel(keys, force=True)  # type: ignore[no-untyped-call]
        for result in self._client.run(finish_work, on_error="return").values():
            if isinstance(result, FeatcacheError):  # another is that of a worker which dies now: its part is recovered
                raise result
