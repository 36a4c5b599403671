"""Tombstones: rows of sealed parts that are deleted, and the statistics that remain; new stamps."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featcache.container_files import sync_directory
from featcache.errors import CorruptCacheError
from featcache.format.columns import ColumnFile, save_columns
from featcache.format.files import from_storage
from featcache.format.index import StampColumns, Stamps, are_below
from featcache.format.manifest import Manifest, Restamps, Tombstones
from featcache.format.part import SealedPart, stats_columns
from featcache.interface import Ints
from featcache.reading.feature_arrays import FeatureArrays, OpenedPart
from featcache.reading.roots import NO_ROOTS, Roots
from featcache.reading.verify import raise_damage
from featcache.registry import is_lossless
from featcache.stats import FeatureStats

# Statistics of the rows of a part that remain when others are left out.


def remaining_stats(
    cache: Path,
    part: SealedPart,
    left_out: Ints,
    name: str,
    manifest: Manifest,
    roots: Roots = NO_ROOTS,
) -> FeatureStats:
    """Return the statistics of a feature over the rows of a part that remain.

    The smaller of what remains and what is left out is read, unless digits were lost then.
    """
    index = part.index(cache, [name])
    declared = manifest.features[name]
    arrays = OpenedPart.of(cache, part, {name: declared}, index, roots).arrays[name]
    nbytes = index.features[name].nbytes  # of extents, which are in the order of the rows
    first = index.features[name].first
    gone = sum(int(nbytes[first[row] : first[row + 1]].sum()) for row in left_out.tolist())
    dims = part.header.dims[name]
    if 2 * gone < int(nbytes.sum()) and is_lossless(declared["codec"]):
        found = index.stats[name].without(stats_of(arrays, left_out.tolist(), dims))
        if found is not None:
            return found
    return stats_of(arrays, np.setdiff1d(np.arange(len(index)), left_out).tolist(), dims)


def stats_of(arrays: FeatureArrays, rows: Iterable[int], dims: tuple[int, ...]) -> FeatureStats:
    """Return the statistics of some rows of a feature."""
    stats = FeatureStats.empty(dims)
    for row in rows:
        frames = from_storage(arrays.read(row), arrays.declared_dtype)
        stats = stats.merge(FeatureStats.of(frames if arrays.has_frames else frames[np.newaxis]))
    return stats


# Tombstones: rows of a sealed part that count no more, and the statistics of the others.

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
    """Return a part with the tombstones beside it, where the manifest that named them is lost.

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


# Changes of utterances that are stored: new stamps, and deletions.


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
    retagged: Collection[str] = ()  # names of tags that name the new generation
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
    """Write other stamps of a part's utterances to a file of columns beside it."""
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
