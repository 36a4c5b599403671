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
from featcache.store.files import Number, digest_file, load_column, save_column, sync_directory
from featcache.store.journal import Utterance
from featcache.store.order import Bytes, Ints, order_of, take

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


def build_index(utterances: Sequence[Utterance], containers: Mapping[str, int], names: Sequence[str]) -> Index:
    """Make the index of a part; `containers` numbers the files, `names` are the features."""
    keys = [utterance.id.encode() for utterance in utterances]
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))
    features = {}
    for name in names:
        placed = [utterance.arrays[name] for utterance in utterances]
        extents = [extent for array in placed for extent in array.extents]
        features[name] = FeatureColumns(
            rows=np.array([array.rows for array in placed], np.int64),
            checksum=np.array([array.checksum for array in placed], np.uint64),
            first=_ends([len(array.extents) for array in placed]),
            container=np.array([containers[extent.container] for extent in extents], np.int32),
            offset=np.array([extent.offset for extent in extents], np.int64),
            nbytes=np.array([extent.nbytes for extent in extents], np.int64),
        )
    return _sorted(np.frombuffer(b"".join(keys), np.uint8), _ends([len(key) for key in keys]), hashes, features)


def merge_indexes(indexes: Sequence[Index], container_counts: Sequence[int], names: Sequence[str]) -> Index:
    """Join the indexes of several parts, the containers of each numbered on from those of the one before."""
    shifts = np.cumsum([0, *container_counts])
    features = {}
    for name in names:
        columns = [index.features[name] for index in indexes]
        features[name] = FeatureColumns(
            rows=_joined([column.rows for column in columns], np.int64),
            checksum=_joined([column.checksum for column in columns], np.uint64),
            first=_ends(_joined([np.diff(column.first) for column in columns], np.int64)),
            container=_joined(
                [column.container + shift for column, shift in zip(columns, shifts, strict=False)], np.int32
            ),
            offset=_joined([column.offset for column in columns], np.int64),
            nbytes=_joined([column.nbytes for column in columns], np.int64),
        )
    return _sorted(
        _joined([index.id_bytes for index in indexes], np.uint8),
        _ends(_joined([np.diff(index.id_ends) for index in indexes], np.int64)),
        _joined([_hashes_by_row(index) for index in indexes], np.uint64),
        features,
    )


def save_index(index: Index, directory: Path) -> dict[str, str]:
    """Write the columns into a new directory, durably; returns the digest of each file."""
    directory.mkdir()
    for name, column in _columns(index).items():
        save_column(directory / f"{name}.npy", column)
    sync_directory(directory)
    return {f"{name}.npy": digest_file(directory / f"{name}.npy") for name in _columns(index)}


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


def _columns(index: Index) -> dict[str, NDArray[np.generic]]:
    columns: dict[str, NDArray[np.generic]] = {
        "hashes": index.hashes,
        "hash_rows": index.hash_rows,
        "id_ends": index.id_ends,
        "id_bytes": index.id_bytes,
    }
    for name, feature in index.features.items():
        for field in FeatureColumns.__slots__:
            columns[f"{name}.{field}"] = getattr(feature, field)
    return columns


def _hashes_by_row(index: Index) -> Hashes:
    hashes = np.empty(len(index), np.uint64)
    hashes[index.hash_rows] = index.hashes
    return hashes


def _sorted(id_bytes: Bytes, id_ends: Ints, hashes: Hashes, features: Mapping[str, FeatureColumns]) -> Index:
    """Make an index of columns by row, in any order of the rows."""
    order = order_of(id_bytes, id_ends)
    id_bytes, id_ends = take(id_bytes, id_ends, order)
    hashes = hashes[order]
    hash_rows = np.argsort(hashes, kind="stable")
    return Index(
        hashes=hashes[hash_rows],
        hash_rows=hash_rows.astype(np.int64, copy=False),
        id_ends=id_ends,
        id_bytes=id_bytes,
        features={name: _reordered(columns, order) for name, columns in features.items()},
    )


def _reordered(columns: FeatureColumns, order: Ints) -> FeatureColumns:
    counts = np.diff(columns.first)[order]
    first = _ends(counts)
    # the extents of row r move, in their order, from columns.first[order[r]] to first[r]
    source = np.repeat(columns.first[order] - first[:-1], counts) + np.arange(first[-1])
    return FeatureColumns(
        rows=columns.rows[order],
        checksum=columns.checksum[order],
        first=first,
        container=columns.container[source],
        offset=columns.offset[source],
        nbytes=columns.nbytes[source],
    )


def _ends(counts: Sequence[int] | Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def _joined(columns: Sequence[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    return np.concatenate([np.empty(0, dtype), *columns]).astype(dtype, copy=False)
