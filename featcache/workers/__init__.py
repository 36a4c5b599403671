"""Dask alone: clients, workers, attempts at tasks, and how the loss of a worker is noticed.

Knows neither features nor caches. A program of its own on workers has `workers_of`, hands out tasks
with `Dispatch`, and begins each in a worker as one of its `Attempts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from featcache._loading import load

if TYPE_CHECKING:
    from featcache.workers.attempts import Attempt as Attempt
    from featcache.workers.attempts import Attempts as Attempts
    from featcache.workers.client import get_client as get_client
    from featcache.workers.config import config_or_client as config_or_client
    from featcache.workers.environments import with_worker_env as with_worker_env
    from featcache.workers.environments import worker_env as worker_env
    from featcache.workers.workers import Dispatch as Dispatch
    from featcache.workers.workers import LostAttempt as LostAttempt
    from featcache.workers.workers import workers_of as workers_of

_HOMES = {
    "Attempt": "featcache.workers.attempts",
    "Attempts": "featcache.workers.attempts",
    "Dispatch": "featcache.workers.workers",
    "LostAttempt": "featcache.workers.workers",
    "config_or_client": "featcache.workers.config",
    "get_client": "featcache.workers.client",
    "with_worker_env": "featcache.workers.environments",
    "worker_env": "featcache.workers.environments",
    "workers_of": "featcache.workers.workers",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    value = globals()[name] = load("featcache.workers", _HOMES, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
