"""`PlainBatchSampler`: batches of one size, without regard to lengths."""

from __future__ import annotations

import numpy as np

from featcache._checks import whole_number
from featcache.samplers.batches import Batches
from featcache.samplers.epoch import EpochSampler, State
from featcache.tables.numbering import Numbering
from featcache.tables.table import FeatureTable


class PlainBatchSampler(EpochSampler):
    """Batches of `batch_size` rows of a table, in their order or, other ones each epoch, at random.

    The last batch may be smaller. For how ranks share and resume, see `EpochSampler`.
    """

    def __init__(
        self, table: FeatureTable, batch_size: int, *, shuffle: bool = False, seed: int = 0
    ) -> None:
        super().__init__(seed=seed)
        self.table = table
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.shuffle = shuffle

    def __repr__(self) -> str:
        return (
            f"<PlainBatchSampler: {len(self.table)} utterances, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle}, {self._where()}>"
        )

    def epoch_batches(self, epoch: int) -> Batches:
        """Return the batches of an epoch, in its order."""
        count = len(self.table)
        random = np.random.default_rng((self.seed, epoch))
        rows = random.permutation(count) if self.shuffle else np.arange(count)
        ends = np.append(np.arange(0, count, self.batch_size), count)
        return Batches(rows, ends, numbering=Numbering(count, self.table))

    def settings(self) -> State:
        """Return what the order depends on: the size, whether it is shuffled, and the table."""
        return {
            "data": self.table.digest,
            "batch_size": self.batch_size,
            "shuffle": bool(self.shuffle),
        }
