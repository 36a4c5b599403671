"""Tombstones: rows of a sealed part that count no more, and the statistics of the others."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
from pathlib import Path

import numpy as np

from featcache.container_files import sync_directory
from featcache.errors import CorruptCacheError
from featcache.interface import Ints
from featcache.store.format.column_file import ColumnFile, save_columns
from featcache.store.format.index import are_below
from featcache.store.format.index_writer import stats_columns
from featcache.store.format.manifest import Manifest
from featcache.store.format.manifest_entries import Tombstones
from featcache.store.format.part import SealedPart
from featcache.store.format.roots import NO_ROOTS, Roots
from featcache.store.reading.verify import raise_damage
from featcache.store.writing.remaining_stats import remaining_stats

_log = logging.getLogger("featcache")


def without_doubled(cache: Path, part: SealedPart, rows: Ints, manifest: Manifest) -> SealedPart:
    """Leave out of a part, with a warning, rows whose ids another part holds, too."""
    if len(rows):
        index = part.index(cache, [])
        _log.warning(
            "%d utterances were stored twice (%s%s): what part %r holds of them is left out",
            len(rows),
            ", ".join(repr(index.id(row)) for row in rows[:5].tolist()),
            ", ..." * (len(rows) > 5),
            part.entry.name,
        )
    return without_rows(cache, part, rows, manifest)


def find_tombstones(cache: Path, part: SealedPart, manifest: Manifest) -> SealedPart:
    """Give a part the tombstones that lie beside it, where the manifest that named them is lost.

    What a killed writer left there counts, too: its utterances were to be computed again.
    """
    rows = [np.empty(0, np.int64)]
    for path in sorted((cache / part.directory).glob("tombstones-*.columns")):
        try:
            file = ColumnFile(cache, f"{part.directory}/{path.name}", mapped=False)
        except CorruptCacheError:  # its writer died before it was whole, and nobody named it
            continue
        with file:
            raise_damage(file.damage())
            rows.append(file.column("rows", np.int64))
    found = np.unique(np.concatenate(rows))
    if not are_below(found, part.entry.rows):
        raise CorruptCacheError(
            f"tombstones of part {str(cache / part.directory)!r} are damaged: they name rows that "
            "are not there; remove the part to compute its utterances again"
        )
    return without_rows(cache, part, found, manifest)


def without_rows(
    cache: Path, part: SealedPart, rows: Ints, manifest: Manifest, roots: Roots = NO_ROOTS
) -> SealedPart:
    """Leave rows out of a part: write them beside it, with the statistics of what remains."""
    if not len(rows):
        return part
    out = np.union1d(part.tombstones(cache), rows).astype(np.int64)
    stats = (
        stats_columns(name, remaining_stats(cache, part, out, name, manifest, roots))
        for name, feature in manifest.features.items()
        if feature["stats"] and part.entry.is_collected
    )
    file = f"tombstones-{secrets.token_hex(4)}.columns"
    columns = itertools.chain([("rows", out)], *stats)
    digest = save_columns(cache / part.directory / file, columns)
    sync_directory(cache / part.directory)
    entry = dataclasses.replace(part.entry, tombstones=Tombstones(file, len(out), digest))
    return dataclasses.replace(part, entry=entry)
