"""Stamps of the build that is being written, which readers may not see yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from featcache.store.format.manifest import read_manifest
from featcache.store.format.part import as_known
from featcache.store.format.stamps import StampColumns
from featcache.store.writing.publish import sealed_parts


def stored_stamps(cache: Path, ids: Sequence[str]) -> StampColumns:
    """Return the stamps of utterances that are sealed, 0 for those that are not."""
    manifest, found = read_manifest(cache), StampColumns.unknown(len(ids))
    for part in as_known(sealed_parts(cache, manifest), manifest):
        index = part.stamped_index(cache, [])
        if index.stamps is not None:
            rows = index.find_many(list(ids))
            rows[np.isin(rows, part.tombstones(cache))] = -1
            there = rows >= 0
            for column, of_part in zip(found, index.stamps, strict=True):
                column[there] = of_part[rows[there]]
    return found
