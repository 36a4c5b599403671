"""Dask alone: clients, their workers, and tasks that outlive a lost worker.

Knows neither features nor caches.
"""

from featcache.workers.client import get_client as get_client
from featcache.workers.worker_env import with_worker_env as with_worker_env
from featcache.workers.worker_env import worker_env as worker_env
