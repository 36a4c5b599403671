"""An array's bytes as they are stored, for those who copy or compare them without decoding."""

from __future__ import annotations

from featcache.interface import EncodedArray
from featcache.store.format.index import FeatureColumns
from featcache.store.reading.containers import Containers


def stored_blocks(columns: FeatureColumns, row: int, containers: Containers) -> EncodedArray:
    """Return the blocks of a row, one an extent; views where the containers are mapped."""
    extents = range(int(columns.first[row]), int(columns.first[row + 1]))
    places = (
        (int(columns.container[at]), int(columns.offset[at]), int(columns.nbytes[at]))
        for at in extents
    )
    blocks = tuple(containers.view(*place).data for place in places)
    return EncodedArray(int(columns.rows[row]), blocks)
