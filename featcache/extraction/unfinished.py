"""Extractions that are not finished: notes on failures, and ids that are lacking."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from featcache.errors import ComputeError, ConfigError, MissingDependencyError
from featcache.extraction.datasets import counted, named
from featcache.extraction.outcomes import FAILURES, Failure, read_failures, write_failures
from featcache.format.manifest import read_manifest
from featcache.format.part import committed
from featcache.store import Cache

# Notes on failures: the lines that a cache keeps of them, and what a run says of its own.

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
    """Log which utterances are not tried again."""
    if failed:
        are = "is" if len(failed) == 1 else "are"
        text = f"{counted(len(failed))} failed earlier and {are} left out"
        some, where = named(failed, 3), str(path / FAILURES)
        _log.warning("%s: %s, see %r; on_error='raise' tries again", text, some, where)


# Caches that are not finished: what is there of one, and what a run that stopped says of it.


def is_overwriting(path: Path) -> bool:
    """Whether a cache that is to be overwritten is still the one that readers see."""
    manifest = read_manifest(path)
    return manifest.building > manifest.build


def add_resume_note(error: BaseException, path: Path, ids: Sequence[str] | None) -> None:
    """Add a note to an error: what is kept of a cache's `ids`, and that the same call goes on."""
    # the same call would end in the same way
    if isinstance(error, ConfigError | MissingDependencyError):
        return
    # a cache that cannot be read says nothing of how to go on
    with contextlib.suppress(OSError):
        stored, cache = sum(1 for _ in committed(path)), f"cache {str(path)!r}"
        number = counted(stored)
        if ids is not None:
            number = f"{stored} of {counted(len(ids))}"
        text = f"{number} {'is' if stored == 1 else 'are'} in {cache}"
        if is_overwriting(path):
            text = f"{cache} is as it was; what was computed anew waits beside it"
        text += "; the same call goes on from there"
        error.add_note(text)
        if isinstance(error, KeyboardInterrupt):
            _log.warning("stopped: %s", text)
