"""The outcome of writing: which ids are expected, which of them failed, and what that comes to."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from featcache.interface import Ints
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.index import Index, read_strings
from featcache.store.format.manifest import Manifest
from featcache.store.format.manifest_entries import Expected
from featcache.store.format.strings import Strings

Stored = Sequence[tuple[Index, Ints]]  # of each part the index, and its rows that count no more


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ids that a writer expects, and those of them that failed."""

    complete: bool  # what the writer says, where no ids are expected
    expected: Collection[str] | None = None
    failed: Collection[str] = ()
    unchanged: bool = False  # the same utterances as before: complete or not as it was
    forgotten: Collection[str] = ()  # ids that have failed no more


def failed_ids(
    cache: Path, before: Manifest, manifest: Manifest, outcome: Outcome, stored: Stored
) -> list[str]:
    """Return the ids that failed, now or earlier in this build, and are not stored, in order."""
    failed = set(outcome.failed)
    if before.index and before.build == manifest.building:
        with ColumnFile(cache, before.index, mapped=False, expected=before.index_digest) as file:
            failed |= set(read_strings(file, "failed"))
    failed.difference_update(outcome.forgotten)
    if failed and outcome.expected is not None:  # one that has left the data set counts no more
        failed.intersection_update(outcome.expected)
    return sorted(failed - _among(stored, failed), key=str.encode)


def completeness(
    outcome: Outcome, before: Manifest, ids: Strings, failed: Sequence[str], stored: Stored
) -> tuple[bool, Expected | None]:
    """Compare what is there with what is expected: these ids, and all that are there."""
    if outcome.unchanged:
        return before.complete, before.expected
    if outcome.expected is None:
        return outcome.complete, None
    missing: set[str] = set()
    expected = iter(outcome.expected)
    while some := list(itertools.islice(expected, 65536)):  # ten million ids need no second set
        missing.update({*some}.difference(failed, _among(stored, some)))
    everything: Iterable[str] = ids
    if failed or missing:
        everything = sorted({*ids, *failed, *missing}, key=str.encode)
    count = len(ids) + len(failed) + len(missing)
    return not missing, Expected(count, expected_digest(everything))


def _among(stored: Stored, ids: Iterable[str]) -> set[str]:
    """Return those of some ids that are stored."""
    found: set[str] = set()
    rest = list(ids)
    for index, left_out in stored:
        rows = index.find_many(rest)
        held = (rows >= 0) & ~np.isin(rows, left_out)
        found.update(itertools.compress(rest, held))
        rest = list(itertools.compress(rest, ~held))
    return found


def expected_digest(ids: Iterable[str]) -> str:
    """Return the xxh3-128 of ids in the order of their UTF-8, with a zero byte behind each.

    >>> expected_digest(["a", "b"])
    'b061d902c67ac49e07b999952ccfc0e4'
    """
    state = xxhash.xxh3_128()
    for id in ids:
        state.update(id.encode() + b"\0")
    return state.hexdigest()
