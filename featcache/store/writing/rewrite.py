"""Rewrites sealed parts: the rows that count are copied, block by block as they are, into one.

The new part takes the place of the others at the moment of its seal, published or not. Until then
it counts for nothing: what a killed rewriter leaves open is removed.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from featcache.errors import StorageFullError
from featcache.interface import Ints
from featcache.store.format.manifest import Manifest
from featcache.store.format.part import SealedPart
from featcache.store.writing.copied_part import CopiedPart, CopySource
from featcache.store.writing.free_space import margin
from featcache.store.writing.open_part import Declarations
from featcache.store.writing.publish import merged_stats
from featcache.store.writing.small_parts import Sized


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
    copy = CopiedPart(cache, features, header)
    try:
        for part in parts:
            copy.copy(CopySource.of_part(cache, part, list(features)), live_rows(cache, part))
        copy.seal(merged_stats(cache, parts, manifest))
    except BaseException:
        copy.discard()
        raise
