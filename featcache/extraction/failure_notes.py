"""Notes on failures: the lines that a cache keeps of them, and what a run says of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from featcache.errors import ComputeError
from featcache.extraction.datasets import counted
from featcache.extraction.failures import FAILURES, Failure, read_failures, write_failures
from featcache.store.cache import Cache

_log = logging.getLogger("featcache")


def note_failures(cache: Cache, failures: Sequence[Failure]) -> None:
    """Keep a line for each utterance that failed, now or earlier, and tell of those of now."""
    still = set(cache.failed) - {failure["id"] for failure in failures}
    earlier = [line for line in read_failures(cache.path) if line["id"] in still]
    write_failures(cache.path, [*earlier, *failures])
    if not failures:
        return
    number, path, first = counted(len(failures)), str(cache.path / FAILURES), failures[0]
    told = f"{first['id']!r} with {first['type']}: {first['error']}"
    text = f"{number} failed, see {path!r}; the first, {told}"
    if not len(cache):
        raise ComputeError(f"all {text}")
    _log.warning("%s", text)
