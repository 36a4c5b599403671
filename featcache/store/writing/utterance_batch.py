"""`UtteranceBatch`: utterances on their way to the thread that stores them.

They go together, since to hand over each short one costs more than to store it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from featcache.container_files import EncodedArrays
from featcache.interface import Array, EncodedArray
from featcache.stats import FeatureStats
from featcache.store.format.annotations import Values
from featcache.store.format.stamps import Stamps

# of several utterances: arrays of shape (rows, *dims), C order, storage dtype, or bytes already
PreparedArrays = Sequence[Array | EncodedArray] | EncodedArrays
Gathered = Mapping[str, FeatureStats]  # statistics, by feature


class UtteranceBatch:
    """Utterances that were checked, cast and copied, in the order in which they were given.

    Attributes:
        nbytes: of their arrays, before any codec.
        stats: of some of them together, by feature, in the same order.
        is_stored: True once the thread that stores has begun with it: it may be put twice.
        checksums: of their stored bytes, of the features of which they are known.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.arrays: dict[str, PreparedArrays] = {}
        self.stamps: list[Stamps] = []
        self.annotations: list[Values] = []
        self.stats: list[Gathered] = []
        self.checksums: dict[str, list[int]] = {}
        self.nbytes = 0
        self.is_stored = False

    def __len__(self) -> int:
        return len(self.ids)

    def add_stats(self, stats: Gathered, nbytes: int) -> None:
        """Add the statistics, if there are any, and the bytes of utterances."""
        self.nbytes += nbytes
        if stats:
            self.stats.append(stats)
