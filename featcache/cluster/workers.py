"""`Workers`: keeps a Dask client's workers going.

Gives them their environment, replaces lost ones, shuts them down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from featcache.cluster.answers import answers_within
from featcache.cluster.client import get_client, wanted_workers
from featcache.cluster.config import ParallelConfig
from featcache.cluster.launch import names_of, replace_workers
from featcache.cluster.pickling import returned
from featcache.cluster.worker_env import SetupFn, env_of, run_env
from featcache.errors import FeatcacheError

if TYPE_CHECKING:
    from distributed import Client, Nanny, Worker
    from distributed.deploy.cluster import Cluster

# Dask drops a lost worker after 15 s and can then be asked for another
REPLACE_AFTER_S = 30.0
RESTARTING_S = 30.0  # how long Dask may take to restart workers that hang
ASKING_S = 10.0  # how long the scheduler may take to list its workers
STOPPING_S = 30.0  # how long a worker may take to finish its batch
INTERRUPTED_S = 2.0  # how long, after Ctrl-C, a worker on this machine may take to do so
KILLED_S = 5.0  # how long a killed process may take to end
SEALING_S = 600.0  # how long a worker between tasks may take to seal its part
_log = logging.getLogger("featcache")


@runtime_checkable
class Finishable(Protocol):
    """An entry of an environment that each worker finishes at the end of a run."""

    def finish(self) -> None:
        """End the current task after its batch, and make durable what it wrote."""


@contextmanager
def workers_of(parallel: ParallelConfig | Client, setup_fn: SetupFn) -> Iterator[Workers]:
    """Give workers an environment: new ones that end with the block, or a client's, that stay."""
    with ExitStack() as exits:
        client = (
            exits.enter_context(get_client(parallel))
            if isinstance(parallel, ParallelConfig)
            else parallel
        )
        yield Workers(
            client, exits.enter_context(run_env(client, setup_fn)), stay=client is parallel
        )


def number_of_workers(parallel: ParallelConfig | Client) -> int:
    """Return how many workers there are to be."""
    if isinstance(parallel, ParallelConfig):
        return parallel.n_workers
    there = len(parallel.nthreads())  # type: ignore[no-untyped-call]
    return wanted_workers(parallel) or max(there, 1)


class Workers:
    """Workers of a client that share an environment.

    Args:
        client: the client.
        env: the name of the environment.
        stay: whether the workers outlive the run.
    """

    def __init__(self, client: Client, env: str, *, stay: bool) -> None:
        self.client, self.env = client, env
        self.addresses = list(client.nthreads())  # type: ignore[no-untyped-call]
        self.interrupted = False  # by Ctrl-C: the end is to come soon
        self._stay = stay
        self._wanted = wanted_workers(client)  # None: somebody else sees to their number
        self._seen: set[str] = set()  # the names of those that were there
        self._checked_at = self._complete_at = time.monotonic()
        self._level = logging.WARNING  # of the next word on workers that are not there

    def look_after(self) -> None:
        """List the workers, at most once a second, and replace those that stay away."""
        now = time.monotonic()
        if now - self._checked_at < 1:
            return
        self._checked_at = now
        self.addresses = list(self.client.nthreads())  # type: ignore[no-untyped-call]
        if self._wanted is not None:
            self._seen |= names_of(cast("Cluster", self.client.cluster))
        there = len(self.addresses)
        if self._wanted is None or there >= self._wanted:
            self._complete_at, self._level = now, logging.WARNING
        elif now - self._complete_at > REPLACE_AFTER_S:
            self._complete_at = now
            # in a full queue that may be for hours
            _log.log(
                self._level,
                "%d of %d workers are there; asking for the others",
                there,
                self._wanted,
            )
            self._level = logging.DEBUG
            replace_workers(cast("Cluster", self.client.cluster), self._seen, self._wanted)

    def finish(self, *, at_work: bool) -> None:
        """Have every worker seal its part of the cache, after its batch if it is at work.

        A worker that takes too long is given up, and killed after Ctrl-C if it is a process of
        ours: what it has committed is recovered when it has ended.
        """
        now_there = answers_within(ASKING_S, {"nthreads": self.client.nthreads}).get("nthreads")
        addresses = list(now_there) if isinstance(now_there, dict) else self.addresses
        nannies = self._nannies() if self.interrupted else {}
        patience_s = STOPPING_S if at_work else SEALING_S
        if nannies:
            patience_s = INTERRUPTED_S
        elif at_work:
            _log.warning(
                "stopping: up to %.0f s for %d workers to end their batch",
                patience_s,
                len(addresses),
            )
        answers = self._ask(addresses, patience_s)
        silent = [address for address in addresses if address not in answers]
        if nannies:
            self._kill([nannies[address] for address in silent if address in nannies])
        elif silent:
            self._give_up(silent, patience_s)
        for answer in answers.values():
            # another error is that of a connection that is lost, or of a worker that dies now: its
            # part is recovered
            for result in answer.values() if isinstance(answer, dict) else ():
                if isinstance(result, FeatcacheError):
                    raise result

    def _ask(self, addresses: Iterable[str], patience_s: float) -> dict[str, object]:
        """Ask workers to finish; returns the answers that come in time."""
        calls = {
            address: partial(
                self.client.run, finish_work, self.env, workers=[address], on_error="return"
            )
            for address in addresses
        }
        return cast(dict[str, object], answers_within(patience_s, calls))

    def _give_up(self, silent: list[str], patience_s: float) -> None:
        """Tell of workers that do not answer, and restart those that outlive the run."""
        _log.warning(
            "given up after %.0f s, what it committed is kept: worker %s",
            patience_s,
            ", ".join(silent),
        )
        if self._stay and self._wanted is not None:
            restart = partial(
                self.client.restart_workers, silent, timeout=RESTARTING_S, raise_for_error=False
            )
            answers_within(RESTARTING_S, {"restart": restart})

    def _nannies(self) -> dict[str, Nanny]:
        """Return, by address, what starts and restarts those workers that we started here."""
        from distributed import Nanny

        started = getattr(self.client.cluster, "workers", {}) if self._wanted is not None else {}
        found = (nanny for nanny in list(started.values()) if isinstance(nanny, Nanny))
        return {nanny.worker_address: nanny for nanny in found if nanny.worker_address}

    def _kill(self, nannies: Iterable[Nanny]) -> None:
        """Kill workers, and wait until they have ended and let go of their parts."""
        if not self._stay:  # of the connections that break now nobody needs to hear
            logging.getLogger("distributed").setLevel(logging.CRITICAL)
        killed = {}
        for nanny in nannies:
            if not self._stay:
                nanny.close_gracefully()  # it starts no other worker then
            pid = nanny.pid
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed[pid] = nanny
        until = time.monotonic() + KILLED_S
        while time.monotonic() < until and any(nanny.pid == pid for pid, nanny in killed.items()):
            time.sleep(0.02)


async def finish_work(env: str, dask_worker: Worker) -> Exception | None:
    """Finish a worker's part of the run; returns errors, of which Dask would make much noise."""
    try:
        entries = env_of(dask_worker, env).values()
    except Exception:  # the worker has just come, or its environment failed
        return None
    loop = asyncio.get_running_loop()
    for entry in entries:
        if isinstance(entry, Finishable):
            error = await loop.run_in_executor(None, returned, entry.finish)
            if error is not None:
                return error
    return None
