"""`Admission`: what a destination asks whoever compares its cache with what is computed now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from featcache.store.cache import Cache
from featcache.store.writing.cache_writer import CacheWriter


class Admission(Protocol):
    """Whatever looks at a cache before it is filled."""

    def admit(
        self, changed: Sequence[str], stored: Cache | CacheWriter, *, overwrite: bool = False
    ) -> bool:
        """Raise `StaleCacheError` unless a cache, less its changed utterances, is still right.

        With `overwrite` return False instead.
        """

    def keep(self, writer: CacheWriter) -> None:
        """Keep files with a cache that is begun."""
