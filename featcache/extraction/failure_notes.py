"""Notes on failures: the lines that a cache keeps of them, and what a run says of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from featcache.errors import ComputeError
from featcache.extraction.datasets import counted, named
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


def tell_left_out(path: Path, failed: Sequence[str]) -> None:
    """Say which utterances are not tried again."""
    if failed:
        are = "is" if len(failed) == 1 else "are"
        text = f"{counted(len(failed))} failed earlier and {are} left out"
        some, where = named(failed, 3), str(path / FAILURES)
        _log.warning("%s: %s, see %r; on_error='raise' tries again", text, some, where)
