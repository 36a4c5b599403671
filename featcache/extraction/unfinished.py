"""Caches that are not finished: what is there of one, and what a run that stopped says of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from featcache.errors import ConfigError, MissingDependencyError
from featcache.extraction.datasets import counted
from featcache.store.format.committed import committed
from featcache.store.format.manifest import read_manifest

_log = logging.getLogger("featcache")


def is_overwriting(path: Path) -> bool:
    """Say whether a cache that is to be overwritten is still the one that readers see."""
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
