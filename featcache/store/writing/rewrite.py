"""Rewrites sealed parts: the rows that count are copied, block by block as they are, into one.

The new part takes the place of the others at the moment of its seal, published or not. Until then
it counts for nothing: what a killed rewriter leaves open is removed.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.errors import CorruptCacheError, StorageFullError
from featcache.interface import EncodedArray, Ints
from featcache.store.format.annotation_columns import Column
from featcache.store.format.annotations import Values
from featcache.store.format.files import remedy
from featcache.store.format.index import FeatureColumns
from featcache.store.format.manifest import Manifest
from featcache.store.format.part import SealedPart
from featcache.store.format.stamps import UNKNOWN, Stamps
from featcache.store.reading.containers import Containers
from featcache.store.writing.free_space import margin
from featcache.store.writing.open_part import Declarations, OpenPart
from featcache.store.writing.publish import merged_stats
from featcache.store.writing.small_parts import Sized


class _Row(NamedTuple):
    id: str
    arrays: dict[str, EncodedArray]
    checksums: dict[str, int]
    stamps: Stamps
    annotations: Values


def what_counts(cache: Path, part: SealedPart, names: Sequence[str]) -> Sized:
    """Return a part with the rows that count, and the bytes of their arrays as they are stored."""
    index, rows = part.index(cache, [*names]), live_rows(cache, part)
    stays = np.zeros(len(index), bool)
    stays[rows] = True
    columns = index.features.values()
    kept = (each.nbytes[np.repeat(stays, np.diff(each.first))].sum() for each in columns)
    return Sized(part, len(rows), sum(map(int, kept)))


def live_rows(cache: Path, part: SealedPart) -> Ints:
    """Return the rows of a part that count, ascending."""
    return np.setdiff1d(np.arange(part.entry.rows), part.tombstones(cache))


def check_space(cache: Path, parts: Iterable[Sized], manifest: Manifest) -> None:
    """Raise `StorageFullError` unless the disk has room for copies, and to publish them."""
    listed = list(parts)
    rows = sum(each.rows for each in listed)
    needed = sum(each.nbytes for each in listed)
    needed += margin(len(manifest.features), manifest.rows + 2 * rows)
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise StorageFullError(
            f"{free:,} bytes are free on the disk of {str(cache)!r}; to rewrite {rows:,} "
            f"utterances, {needed:,} are needed until the old files go: free some space and run "
            "the same again; nothing was changed"
        )


def rewrite(
    cache: Path, features: Declarations, manifest: Manifest, parts: Sequence[SealedPart]
) -> None:
    """Copy what counts of parts of one shape into a new part, and seal that.

    Only the holder of the cache's lock may call this. Raises `CorruptCacheError` for an array that
    is not what was written; then nothing has changed.
    """
    header = dataclasses.replace(
        parts[0].header,
        build=manifest.build,
        fingerprint=manifest.building_fingerprint,
        replaces=tuple(part.entry.name for part in parts),
    )
    copy = OpenPart(cache, features, header)
    try:
        for part in parts:
            for row in _rows(cache, part, list(features)):
                _append(copy, row, part)
        copy.stats = merged_stats(cache, parts, manifest)
        copy.seal()
    except BaseException:
        copy.discard()
        raise


def _append(copy: OpenPart, row: _Row, part: SealedPart) -> None:
    written = copy.append_encoded(row.id, row.arrays, row.stamps, row.annotations).arrays
    for name, expected in row.checksums.items():
        if written[name].checksum != expected:
            raise CorruptCacheError(
                f"utterance {row.id!r}, feature {name!r}, in part {part.entry.name!r} is not what "
                f"was written; {remedy(copy.directory.parents[1], part.directory)}"
            )


def _rows(cache: Path, part: SealedPart, names: list[str]) -> Iterator[_Row]:
    """Give what counts of a part, in the order in which the bytes lie."""
    index = part.stamped_index(cache, names)
    containers = Containers.of(cache / part.directory, index.containers)
    rows = live_rows(cache, part)
    rows = rows[_in_order_of_bytes(index.features[names[0]], rows)]
    annotations = {
        name: part.annotation(cache, name, kind).take(rows)
        for name, kind in index.annotations.items()
    }
    for place, row in enumerate(rows.tolist()):
        arrays = {name: _encoded(each, row, containers) for name, each in index.features.items()}
        checksums = {name: int(each.checksum[row]) for name, each in index.features.items()}
        known = index.stamps
        stamps = UNKNOWN if known is None else Stamps(*(int(column[row]) for column in known))
        yield _Row(index.id(row), arrays, checksums, stamps, _values(annotations, place))


def _values(annotations: Mapping[str, Column], row: int) -> Values:
    found = {name: column.values(row, row + 1)[0] for name, column in annotations.items()}
    return {name: value for name, value in found.items() if value is not None}


def _encoded(columns: FeatureColumns, row: int, containers: Containers) -> EncodedArray:
    extents = range(int(columns.first[row]), int(columns.first[row + 1]))
    places = (
        (int(columns.container[at]), int(columns.offset[at]), int(columns.nbytes[at]))
        for at in extents
    )
    blocks = tuple(containers.view(*place).data for place in places)
    return EncodedArray(int(columns.rows[row]), blocks)


def _in_order_of_bytes(columns: FeatureColumns, rows: Ints) -> Ints:
    first = columns.first[rows]
    if not len(columns.offset):
        return np.arange(len(rows))
    first = np.minimum(first, len(columns.offset) - 1)  # of arrays without bytes, any place will do
    return np.lexsort((columns.offset[first], columns.container[first]))
