"""The index: which utterances there are, and where the bytes of each lie, as columns mapped into memory.

Rows are sorted by the UTF-8 bytes of their ids, so that they do not depend on the order of writing.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.store.files import Number, load_column
from featcache.store.order import Bytes, Ints

Hashes = NDArray[np.uint64]
DAMAGED = "the index is damaged (open the cache with verify='columns' to see which file)"


@dataclass(frozen=True, slots=True)
class FeatureColumns:
    """Where the arrays of one feature lie; all columns as long as the index, but for the last three.

    The extents of row r are first[r] to first[r + 1] of `container`, `offset` and `nbytes`.
    """

    rows: Ints  # frames; 1 for a feature without a time axis
    checksum: Hashes  # xxh3-64 of the stored bytes
    first: Ints  # one longer than the index
    container: NDArray[np.int32]
    offset: Ints
    nbytes: Ints


@dataclass(frozen=True)
class Index:
    """The columns of a part or of a generation."""

    hashes: Hashes  # xxh3-64 of the ids' UTF-8, sorted
    hash_rows: Ints  # the row of each hash
    id_ends: Ints  # where each id ends in id_bytes; one longer than the index, begins with 0
    id_bytes: Bytes
    features: Mapping[str, FeatureColumns]

    def __len__(self) -> int:
        return len(self.hashes)

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        # one item of a memoryview costs a third of one of an array
        return self.hashes.data, self.hash_rows.data, self.id_ends.data, self.id_bytes.data

    def id(self, row: int) -> str:
        """Return the id of a row."""
        _, _, ends, data = self._views
        try:
            return str(data[ends[row] : ends[row + 1]], "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptCacheError(f"{DAMAGED}: {error}") from error

    def ids(self) -> Iterator[str]:
        """Iterate over all ids in row order."""
        for start in range(0, len(self), 65536):  # in pieces, so that ten million ids are never all in memory
            ends = self.id_ends[start : start + 65537].tolist()
            data = self.id_bytes[ends[0] : ends[-1]].tobytes()
            try:
                yield from [data[begin - ends[0] : end - ends[0]].decode() for begin, end in pairwise(ends)]
            except UnicodeDecodeError as error:
                raise CorruptCacheError(f"{DAMAGED}: {error}") from error

    def find(self, id: str) -> int:
        """Return the row of an id, -1 if there is none."""
        key = id.encode("utf-8", "surrogatepass")
        hash_ = xxhash.xxh3_64_intdigest(key)
        hashes, hash_rows, ends, data = self._views
        position = bisect_left(hashes, hash_)
        try:
            while position < len(hashes) and hashes[position] == hash_:
                row: int = hash_rows[position]
                if data[ends[row] : ends[row + 1]] == key:
                    return row
                position += 1
        except IndexError as error:
            raise CorruptCacheError(f"{DAMAGED}: {error}") from error
        return -1

    def nearest(self, id: str) -> str:
        """Say which ids are close to one that is not there, as the end of a message."""
        if not len(self):
            return "the cache is empty"
        # only those around its place in the order: comparing takes 50 us an id, and more for long ones
        key = id.encode("utf-8", "surrogatepass")
        place = bisect_left(range(len(self)), key, key=lambda row: self.id(row).encode())
        around = [self.id(row) for row in range(max(place - 1000, 0), min(place + 1000, len(self)))]
        close = difflib.get_close_matches(id, around, n=3, cutoff=0.0)
        return f"nearest ids: {', '.join(map(repr, close))}"

    def find_many(self, ids: Sequence[str]) -> Ints:
        """Return the rows of many ids at once, -1 where there is none."""
        keys = [id.encode("utf-8", "surrogatepass") for id in ids]
        if len(self) == 0 or not keys:
            return np.full(len(keys), -1, np.int64)
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))
        positions = np.minimum(self.hashes.searchsorted(hashes), len(self) - 1)
        rows = self.hash_rows[positions]
        if rows.min() < 0 or rows.max() >= len(self):
            raise CorruptCacheError(f"{DAMAGED}: it names rows that are not there")
        begins, ends = self.id_ends[rows].tolist(), self.id_ends[rows + 1].tolist()
        data = self.id_bytes.data
        for number, (key, begin, end) in enumerate(zip(keys, begins, ends, strict=True)):
            if data[begin:end] != key:  # absent, or one of several ids of the same hash
                rows[number] = self.find(ids[number])
        return rows


def load_index(directory: Path, names: Sequence[str], mapped: bool = True) -> Index:
    """Map or read the columns of an index; raises `CorruptCacheError` if they do not fit each other."""

    def column(name: str, dtype: type[Number]) -> NDArray[Number]:
        return load_column(directory / f"{name}.npy", dtype, mapped)

    features = {
        name: FeatureColumns(
            rows=column(f"{name}.rows", np.int64),
            checksum=column(f"{name}.checksum", np.uint64),
            first=column(f"{name}.first", np.int64),
            container=column(f"{name}.container", np.int32),
            offset=column(f"{name}.offset", np.int64),
            nbytes=column(f"{name}.nbytes", np.int64),
        )
        for name in names
    }
    index = Index(
        hashes=column("hashes", np.uint64),
        hash_rows=column("hash_rows", np.int64),
        id_ends=column("id_ends", np.int64),
        id_bytes=column("id_bytes", np.uint8),
        features=features,
    )
    _check_lengths(index, directory)
    return index


def _check_lengths(index: Index, directory: Path) -> None:
    count = len(index.hashes)
    fits = len(index.hash_rows) == count and len(index.id_ends) == count + 1
    fits = fits and int(index.id_ends[-1]) == len(index.id_bytes)
    for columns in index.features.values():
        fits = fits and len(columns.rows) == len(columns.checksum) == len(columns.first) - 1 == count
        fits = fits and len(columns.container) == len(columns.offset) == len(columns.nbytes) == int(columns.first[-1])
    if not fits:
        raise CorruptCacheError(f"index {str(directory)!r} is damaged: its columns have different lengths")
