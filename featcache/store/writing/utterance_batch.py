"""`UtteranceBatch`: utterances on their way to the thread that stores them.

They go together, since to hand over each short one costs more than to store it.
"""

from __future__ import annotations

from collections.abc import Mapping

from featcache.interface import Array, EncodedArray
from featcache.stats import FeatureStats
from featcache.store.format.annotations import Values
from featcache.store.format.stamps import Stamps

# arrays of shape (rows, *dims), C order, storage dtype, and those that are bytes already
Prepared = Mapping[str, Array | EncodedArray]
Gathered = Mapping[str, FeatureStats]  # statistics, by feature

BATCH_BYTES = 1 << 20
BATCH_ROWS = 64  # those of a line of the journal


class UtteranceBatch:
    """Utterances that were checked, cast and copied, in the order in which they were given.

    Attributes:
        nbytes: of their arrays, before any codec.
        stats: of some of them together, by feature, in the same order.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.arrays: list[Prepared] = []
        self.stamps: list[Stamps] = []
        self.annotations: list[Values] = []
        self.stats: list[Gathered] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, id: str, arrays: Prepared, stamps: Stamps, annotations: Values) -> None:
        """Add an utterance, but for its statistics and its bytes."""
        self.ids.append(id)
        self.arrays.append(arrays)
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
