"""The caches below a table, taken together: the only one, and whether all are complete."""

from __future__ import annotations

from featcache.errors import ConfigError
from featcache.store.cache import Cache
from featcache.store.reading.complete import check_complete
from featcache.tables.block import Blocks


def only_cache(blocks: Blocks, said: str) -> Cache:
    """Return the one cache of blocks; raises `ConfigError`, as `said`, where there are several."""
    caches = [*dict.fromkeys(cache for block in blocks.caches for cache in block)]
    if len(caches) > 1:
        paths = ", ".join(repr(str(cache.path)) for cache in caches)
        raise ConfigError(f"{said} is made of several caches: {paths}; choose from .caches")
    return caches[0]


def all_complete(blocks: Blocks) -> bool:
    """Tell whether all caches are complete."""
    return all(cache.complete for cache in blocks.as_opened)


def require_all_complete(blocks: Blocks) -> None:
    """Raise `IncompleteError` for a cache that its writer has not finished."""
    for cache in blocks.as_opened:
        check_complete(cache)
