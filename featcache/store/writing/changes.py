"""Changes of utterances that are stored: new stamps, and deletions."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featcache.container_files import sync_directory
from featcache.interface import Ints
from featcache.store.format.column_file import save_columns
from featcache.store.format.manifest import Manifest
from featcache.store.format.manifest_entries import Restamps
from featcache.store.format.part import SealedPart
from featcache.store.format.roots import NO_ROOTS, Roots
from featcache.store.format.stamps import StampColumns, Stamps
from featcache.store.writing.tombstones import without_rows


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that a publish makes beside adding parts.

    Of ids that are not stored nothing comes.
    """

    stamps: Mapping[str, Stamps] = field(default_factory=dict)  # new ones, by id
    deleted: Collection[str] = ()  # ids
    emptied: Collection[str] = ()  # names of parts that hold no row that counts, and go
    files: Collection[str] = ()  # names of files of roles that go
    untagged: Collection[str] = ()  # names of tags that go
    alone: bool = False  # the generation before is not kept
    roots: Roots = field(default_factory=lambda: NO_ROOTS)  # of adopted parts, where they moved


def with_changes(
    cache: Path, parts: list[SealedPart], changes: Changes, manifest: Manifest
) -> list[SealedPart]:
    """Write changes beside the parts that hold the utterances; return the parts with them."""
    parts = [part for part in parts if part.entry.name not in changes.emptied]
    if changes.deleted:
        ids = list(changes.deleted)
        rows = (_rows_of(cache, part, ids) for part in parts)
        found = zip(parts, rows, strict=True)
        parts = [
            without_rows(cache, part, some[some >= 0], manifest, changes.roots)
            for part, some in found
        ]
    return [_restamped(cache, part, changes.stamps) for part in parts] if changes.stamps else parts


def _restamped(cache: Path, part: SealedPart, stamps: Mapping[str, Stamps]) -> SealedPart:
    """Give utterances of a part other stamps, in a file of columns beside it."""
    ids = list(stamps)
    rows = _rows_of(cache, part, ids)
    new = {int(rows[at]): stamps[ids[at]] for at in np.flatnonzero(rows >= 0).tolist()}
    if not new:
        return part
    before = part.stamped_index(cache, []).stamps or StampColumns.unknown(part.entry.rows)
    after = before.replaced(new)
    if all(map(np.array_equal, before, after)):
        return part
    file = f"stamps-{secrets.token_hex(4)}.columns"
    columns = zip(StampColumns._fields, after, strict=True)
    digest = save_columns(cache / part.directory / file, columns)
    sync_directory(cache / part.directory)
    entry = dataclasses.replace(part.entry, stamps=Restamps(file, digest))
    return dataclasses.replace(part, entry=entry)


def _rows_of(cache: Path, part: SealedPart, ids: Sequence[str]) -> Ints:
    """Return the rows of ids in a part, -1 for those that have none that counts."""
    rows = part.index(cache, []).find_many(ids)
    rows[np.isin(rows, part.tombstones(cache))] = -1
    return rows
