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
from featcache.stats import FeatureStats
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.column_file import ColumnFile, save_columns
from featcache.store.format.index import are_below
from featcache.store.format.index_writer import stats_columns
from featcache.store.format.manifest import Manifest, Tombstones
from featcache.store.format.part import SealedPart
from featcache.store.reading.containers import Containers
from featcache.store.reading.feature_arrays import FeatureArrays
from featcache.store.reading.verify import raise_damage

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


def without_rows(cache: Path, part: SealedPart, rows: Ints, manifest: Manifest) -> SealedPart:
    """Leave rows out of a part: write them beside it, with the statistics of what remains."""
    if not len(rows):
        return part
    out = np.union1d(part.tombstones(cache), rows).astype(np.int64)
    stats = (
        stats_columns(name, _stats_of(cache, part, out, name, manifest))
        for name, feature in manifest.features.items()
        if feature["stats"]
    )
    file = f"tombstones-{secrets.token_hex(4)}.columns"
    columns = itertools.chain([("rows", out)], *stats)
    digest = save_columns(cache / part.directory / file, columns)
    sync_directory(cache / part.directory)
    entry = dataclasses.replace(part.entry, tombstones=Tombstones(file, len(out), digest))
    return dataclasses.replace(part, entry=entry)


def _stats_of(
    cache: Path, part: SealedPart, left_out: Ints, name: str, manifest: Manifest
) -> FeatureStats:
    """Compute the statistics of a feature over the rows of a part that remain."""
    index = part.index(cache, [name])
    alone = dataclasses.replace(manifest, dims=part.header.dims, parts=(part.entry,))
    containers = Containers.of(cache / part.directory, index.containers)
    arrays = FeatureArrays(alone, name, index, containers)
    stats = FeatureStats.empty(part.header.dims[name])
    for row in np.setdiff1d(np.arange(len(index)), left_out).tolist():
        frames = from_storage(arrays.read(row), arrays.declared_dtype)
        stats = stats.merge(FeatureStats.of(frames if arrays.has_frames else frames[np.newaxis]))
    return stats
