"""Dask alone: clients, their workers, and tasks that outlive a lost worker.

Knows neither features nor caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from featcache._loading import load

if TYPE_CHECKING:
    from featcache.workers.client import get_client as get_client
    from featcache.workers.environments import with_worker_env as with_worker_env
    from featcache.workers.environments import worker_env as worker_env

_HOMES = {
    "get_client": "featcache.workers.client",
    "with_worker_env": "featcache.workers.environments",
    "worker_env": "featcache.workers.environments",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    value = globals()[name] = load("featcache.workers", _HOMES, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
