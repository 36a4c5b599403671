"""The record that a cache keeps of what it was made with; it explains and never refuses.

Kept as the file of role "made-from": witnesses (`featcache.staleness.witnesses`), and under
"accepted" each change that was accepted later.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import cast

from featcache.extraction.destination import Destination
from featcache.staleness.witnesses import changes
from featcache.store.format.kept_files import read_building_file
from featcache.store.reading.generation import Generation
from featcache.store.reading.origin import ROLE, witnesses
from featcache.store.writing.cache_writer import CacheWriter

MOST_LINES = 12  # of changed code that an error shows
_CONTEXT = 1


class Record:
    """The record of a cache, and that of this run.

    Args:
        destination: the cache.
        make: makes the record of this run.
    """

    def __init__(self, destination: Destination, make: Callable[[], Mapping[str, object]]) -> None:
        self._destination, self._make = destination, make

    @cached_property
    def now(self) -> Mapping[str, object]:
        """The record of this run."""
        return self._make()

    @cached_property
    def kept(self) -> Mapping[str, object]:
        """The record that the cache keeps; empty where it keeps none that can be read."""
        with contextlib.suppress(OSError):
            return witnesses(Generation(self._destination.path))
        return {}

    def keep(self, writer: CacheWriter, accepted: Mapping[str, object] | None = None) -> None:
        """Keep the record of this run with a cache that is begun, or has none.

        Or with one of which a change was accepted: its history stays.
        """
        if accepted is None and read_building_file(writer.path, ROLE) is not None:
            return
        earlier = cast(list[object], self.kept.get("accepted", [])) if accepted else []
        history = {"accepted": [*earlier, accepted]} if accepted else {}
        writer.keep_file(ROLE, json.dumps({**self.now, **history}, indent=1).encode())

    def changes(self) -> list[str]:
        """Say what has changed since the cache was made, the most telling first."""
        return changes(self.kept, self.now) if self.kept else []

    def changed_code(self) -> list[str]:
        """Return the first lines of code that has changed, as `diff -u` prints them."""
        was, now = (
            cast(Mapping[str, str], each.get("sources", {})) for each in (self.kept, self.now)
        )
        lines: list[str] = []
        for name in sorted(was.keys() & now.keys()):
            lines += _changed(name, was[name].splitlines(), now[name].splitlines())
        more = len(lines) - MOST_LINES
        return [*lines[:MOST_LINES], *([f"... and {more} lines more"] if more > 0 else [])]


def _changed(name: str, was: Sequence[str], now: Sequence[str]) -> list[str]:
    found = list(difflib.unified_diff(was, now, lineterm="", n=_CONTEXT))
    return [name, *(line for line in found[2:] if not line.startswith("@@"))] if found else []
