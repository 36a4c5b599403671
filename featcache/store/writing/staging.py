"""`Staging`: utterances that wait until there are enough to be stored together.

Their arrays are copied one behind the other, so that statistics and files take many as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.interface import Array, Bytes, EncodedArray
from featcache.stats import FeatureStats
from featcache.store.format.annotations import Values
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.stamps import Stamps
from featcache.store.writing.copy_memory import BLOCK_BYTES, CopyMemory
from featcache.store.writing.open_part import OpenPart
from featcache.store.writing.packed_batch import Packed
from featcache.store.writing.utterance_batch import UtteranceBatch

MOST_ROWS = 256  # utterances that are handed over together
LEAST_BYTES = 1 << 12  # of the memory of a feature
COUNTED_VALUES = 1 << 16  # whose statistics are taken together, while they are in cache


class Staging:
    """Utterances that were checked and cast, in the order in which they were given.

    Args:
        part: takes them.
        features: the declarations, by name.
        memory: takes the copies.
        first: the arrays of the first utterance, by feature; memory is shared out as they share it.

    Attributes:
        nbytes: of their arrays, before any codec.
        memory: bytes that are taken for them.
    """

    def __init__(
        self,
        part: OpenPart,
        features: Mapping[str, FeatureStorageConfig],
        memory: CopyMemory,
        first: Mapping[str, Array],
    ) -> None:
        self.part = part
        self.nbytes = self.memory = 0
        total = max(sum(array.nbytes for array in first.values()), 1)
        self._rows: dict[str, _Rows] = {}
        for name, array in first.items():
            share = min(BLOCK_BYTES * array.nbytes // total, 2 * MOST_ROWS * array.nbytes)
            taken = memory.take(max(share, array.nbytes, LEAST_BYTES))
            self._rows[name] = _Rows(features[name], array, taken, is_raw=part.is_raw(name))
            self.memory += len(taken)
        self._utterances: list[_Utterance] = []
        self._batch: UtteranceBatch | None = None

    def __len__(self) -> int:
        return len(self._utterances)

    def has_room(self, arrays: Mapping[str, Array]) -> bool:
        """Tell whether one more utterance fits, before `batch` is called."""
        if self._batch is not None:
            return False
        for name, array in arrays.items():
            if self._rows[name].room < array.nbytes:
                return False
        return len(self._utterances) < MOST_ROWS

    def add(
        self,
        id: str,
        arrays: Mapping[str, Array],
        encoded: Mapping[str, EncodedArray],
        stamps: Stamps,
        annotations: Values,
    ) -> None:
        """Copy arrays of an utterance, (rows, *dims), storage dtype; some are `encoded` as well.

        An interrupt (Ctrl-C) leaves all of it or nothing that counts.
        """
        number = len(self._utterances)
        for name, array in arrays.items():
            self._rows[name].add(number, array)
            self.nbytes += array.nbytes
        self._utterances.append(_Utterance(id, encoded, stamps, annotations))
        for rows in self._rows.values():
            rows.count()

    def batch(self) -> UtteranceBatch:
        """Return the utterances as the part takes them: the same object each time."""
        self._batch = self._batch or self._made_batch()
        return self._batch

    def _made_batch(self) -> UtteranceBatch:
        ids, encoded, stamps, annotations = zip(*self._utterances, strict=True)
        for rows in self._rows.values():
            rows.end(len(ids))
        raw = {n: rows.packed() for n, rows in self._rows.items() if n not in encoded[0]}
        batch = UtteranceBatch()
        batch.ids, batch.stamps, batch.annotations = [*ids], [*stamps], [*annotations]
        batch.arrays = self.part.prepare_piece(ids, raw, 0, len(ids))
        batch.arrays |= {name: [each[name] for each in encoded] for name in encoded[0]}
        batch.checksums = {n: rows.checksums for n, rows in self._rows.items() if rows.is_raw}
        batch.add_stats({n: r.stats() for n, r in self._rows.items() if r.has_stats}, self.nbytes)
        return batch


class _Utterance(NamedTuple):
    id: str
    encoded: Mapping[str, EncodedArray]
    stamps: Stamps
    annotations: Values


class _Rows:
    """Arrays of a feature, such as the first, one behind the other.

    Attributes:
        room: bytes for more.
        checksums: of the arrays, if they are raw.
    """

    def __init__(
        self, feature: FeatureStorageConfig, first: Array, memory: Bytes, *, is_raw: bool
    ) -> None:
        self._dtype, self.has_stats, self.is_raw = feature.dtype, feature.stats, is_raw
        self._dims = first.shape[1:]
        self._width = math.prod(self._dims)
        self._values = memory[: len(memory) - len(memory) % first.itemsize].view(first.dtype)
        self.room = self._values.nbytes
        self.checksums: list[int] = []
        self._lengths: list[int] = []
        self._used = 0  # rows
        self._counted: tuple[int, list[FeatureStats]] = 0, []  # rows, and their statistics

    def add(self, number: int, array: Array) -> None:
        """Copy the array of an utterance, behind those of so many."""
        if len(self._lengths) > number:
            self.end(number)
        self._lengths.append(len(array))  # first, so that `end` finds what an interrupt cut off
        begin, self._used = self._used, self._used + len(array)
        copy = self._values[begin * self._width : self._used * self._width]
        np.copyto(copy.reshape(array.shape), array)
        if self.is_raw:
            self.checksums.append(xxhash.xxh3_64_intdigest(copy.data))
        self.room -= array.nbytes

    def end(self, number: int) -> None:
        """Forget what an interrupt left behind the arrays of so many utterances."""
        lengths = self._lengths[:number]
        self.checksums = self.checksums[:number]
        self._used = sum(lengths)
        self.room = self._values.nbytes - self._used * self._width * self._values.itemsize
        self._lengths = lengths  # last, so that one more interrupt leaves that to the next call

    def count(self, least: int = COUNTED_VALUES) -> None:
        """Take the statistics of those that wait for that, if they are enough."""
        counted, stats = self._counted
        if self.has_stats and (self._used - counted) * max(self._width, 1) >= least:
            values = self._values[counted * self._width : self._used * self._width]
            frames = values.reshape(self._used - counted, *self._dims)
            taken = FeatureStats.of(from_storage(frames, self._dtype))
            self._counted = self._used, [*stats, taken]

    def stats(self) -> FeatureStats:
        """Return the statistics of all."""
        self.count(1)
        _, stats = self._counted
        return FeatureStats.empty(self._dims).merge_all(stats)

    def packed(self) -> Packed:
        """Return all arrays."""
        ends = [0, *np.cumsum(self._lengths, dtype=np.int64).tolist()]
        array = self._values[: self._used * self._width].reshape(self._used, *self._dims)
        return Packed(array, self._lengths, ends, [])
