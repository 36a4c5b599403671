"""The workers of a Dask client, as a driver keeps them: their environment, others for lost ones, and how they end."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, cast

from featcache.errors import FeatcacheError
from featcache.parallel.client import SetupFn, get_client, run_env, wanted_workers
from featcache.parallel.clusters import names_of, replace_workers
from featcache.parallel.config import ParallelConfig
from featcache.parallel.worker import finish_work

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy.cluster import Cluster

REPLACE_AFTER_S = 30.0  # Dask gives up a lost worker after 15 s, then it starts another if asked to
STOPPING_S = 30.0  # for a worker to come to the end of its batch
SEALING_S = 600.0  # for one that has nothing to do but to seal what it wrote
_log = logging.getLogger("featcache")


@contextmanager
def staff_of(parallel: ParallelConfig | Client, setup_fn: SetupFn) -> Iterator[Staff]:
    """Give workers an environment: new ones, that end with the block, or those of a client, that stay."""
    with ExitStack() as exits:
        client = exits.enter_context(get_client(parallel)) if isinstance(parallel, ParallelConfig) else parallel
        exits.enter_context(run_env(client, setup_fn))
        yield Staff(client)


def number_of_workers(parallel: ParallelConfig | Client) -> int:
    """Return how many workers there are to be."""
    if isinstance(parallel, ParallelConfig):
        return parallel.n_workers
    there = len(parallel.nthreads())  # type: ignore[no-untyped-call]
    return wanted_workers(parallel) or max(there, 1)


class Staff:
    """Sees to the workers of a client, which have been given an environment."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.there = number_of_workers(client)  # how many there are
        self._wanted = wanted_workers(client)  # None: somebody else sees to their number
        self._seen: set[str] = set()  # the names of those that were there
        self._checked_at = self._complete_at = time.monotonic()
        self._level = logging.WARNING  # of the next word on workers that are not there

    def look_after(self) -> None:
        """See who is there, once a second at most, and ask for workers in place of those that stay away."""
        now = time.monotonic()
        if now - self._checked_at < 1:
            return
        self._checked_at = now
        self.there = len(self.client.nthreads())  # type: ignore[no-untyped-call]
        if self._wanted is not None:
            self._seen |= names_of(cast("Cluster", self.client.cluster))
        if self._wanted is None or self.there >= self._wanted:
            self._complete_at, self._level = now, logging.WARNING
        elif now - self._complete_at > REPLACE_AFTER_S:
            self._complete_at = now
            # in a full queue that may be for hours
            _log.log(self._level, "%d of %d workers are there; asking for the others", self.there, self._wanted)
            self._level = logging.DEBUG
            replace_workers(cast("Cluster", self.client.cluster), self._seen, self._wanted)

    def finish(self, under_way: Iterable[str]) -> None:
        """End the tasks of some keys, and have every worker seal its part of the cache.

        A worker that takes too long is left alone: what it has committed is recovered when it has ended.
        """
        patience_s = SEALING_S
        if keys := list(under_way):
            self.client.cancel(keys, force=True)  # type: ignore[no-untyped-call]
            patience_s = STOPPING_S
            _log.warning("stopping: up to %.0f s for %d workers to end the batch they are at", patience_s, self.there)
        answers: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()

        def ask() -> None:
            with suppress(OSError):  # the connection was lost, and nobody waits for the answers any more
                answers.put(self.client.run(finish_work, on_error="return"))

        threading.Thread(target=ask, name="featcache-finish", daemon=True).start()
        try:
            results = answers.get(timeout=patience_s)
        except queue.Empty:
            _log.warning("a worker has not ended after %.0f s, and is given up: what it committed is kept", patience_s)
            return
        for result in results.values():
            if isinstance(result, FeatcacheError):  # another is that of a worker which dies now: its part is recovered
                raise result
