"""`UtteranceBatch`: utterances on their way to the thread that stores them.

They go together, since to hand over each short one costs more than to store it.
"""

from __future__ import annotations

from collections.abc import Mapping

from featcache.container_files import EncodedArrays
from featcache.interface import Array, EncodedArray
from featcache.stats import FeatureStats
from featcache.store.format.annotations import Values
from featcache.store.format.stamps import Stamps

# arrays of shape (rows, *dims), C order, storage dtype, and those that are bytes already
Prepared = Mapping[str, Array | EncodedArray]
PreparedArrays = list[Array | EncodedArray] | EncodedArrays  # of several utterances
Gathered = Mapping[str, FeatureStats]  # statistics, by feature

BATCH_BYTES = 1 << 22
BATCH_ROWS = 256


class UtteranceBatch:
    """Utterances that were checked, cast and copied, in the order in which they were given.

    Attributes:
        nbytes: of their arrays, before any codec.
        stats: of some of them together, by feature, in the same order.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.arrays: dict[str, PreparedArrays] = {}
        self.stamps: list[Stamps] = []
        self.annotations: list[Values] = []
        self.stats: list[Gathered] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, id: str, arrays: Prepared, stamps: Stamps, annotations: Values) -> None:
        """Add an utterance, but for its statistics and its bytes."""
        self.ids.append(id)
        for name, array in arrays.items():
            column = self.arrays.setdefault(name, [])
            if isinstance(column, list):
                column.append(array)
        self.stamps.append(stamps)
        self.annotations.append(annotations)

    def add_stats(self, stats: Gathered, nbytes: int) -> None:
        """Add the statistics, if there are any, and the bytes of utterances."""
        self.nbytes += nbytes
        if stats:
            self.stats.append(stats)

    @property
    def is_full(self) -> bool:
        """True when the next utterance belongs to the next batch."""
        return self.nbytes >= BATCH_BYTES or len(self.ids) >= BATCH_ROWS
