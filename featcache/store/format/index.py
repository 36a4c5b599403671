"""The index: columns, mapped into memory, of the utterances and of where the bytes of each lie.

Rows are sorted by the UTF-8 bytes of their ids, so that they do not depend on the order of writing.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.interface import Bytes, Ints
from featcache.stats import FeatureStats
from featcache.store.format.annotation_columns import stored_kinds
from featcache.store.format.checked import within
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.pages import DIGEST_BYTES
from featcache.store.format.stamps import StampColumns, read_stamps
from featcache.store.format.strings import DAMAGED, Strings

Hashes = NDArray[np.uint64]
hash_of = xxhash.xxh3_64_intdigest  # of an id's UTF-8


@dataclass(frozen=True, slots=True)
class FeatureColumns:
    """The places of the arrays of one feature.

    The extents of row r are first[r] to before first[r + 1] of `container`, `offset` and `nbytes`.
    """

    rows: Ints  # frames; 1 for a feature without a time axis
    checksum: Hashes  # xxh3-64 of the stored bytes
    first: Ints  # one longer than the index
    container: NDArray[np.int32]
    offset: Ints
    nbytes: Ints
    # of adopted arrays: the rows of each full block, 0 where the part says; and the rows to leave
    # out at the front of the first block
    block_rows: Ints | None = None
    skip: Ints | None = None


@dataclass(frozen=True, slots=True)
class ContainerColumns:
    """The container files: paths are relative to the part in a part's index, else to the cache.

    Those of an adopted part are relative to its root.
    """

    paths: Strings
    sizes: Ints
    digests: Bytes  # `container_digest` of each, 16 bytes
    parts: NDArray[np.int32]  # the number of the part that each belongs to, in the manifest's list
    mtimes: Ints | None = None  # nanoseconds; of adopted ones, else 0

    def __len__(self) -> int:
        return len(self.sizes)

    def path(self, number: int) -> str:
        """Return a path; raises `CorruptCacheError` for one that leads out of the cache."""
        try:
            return within(self.paths[number])
        except ValueError as error:
            raise CorruptCacheError(f"{DAMAGED}: {error}") from error

    def digest(self, number: int) -> bytes:
        """Return a container's digest."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES].tobytes()


@dataclass(frozen=True)
class Index:
    """The columns of a part or of a generation."""

    hashes: Hashes  # xxh3-64 of the ids' UTF-8, sorted
    hash_rows: Ints  # the row of each hash
    ids: Strings
    features: Mapping[str, FeatureColumns]
    containers: ContainerColumns
    stats: Mapping[str, FeatureStats]
    stamps: StampColumns | None = None
    # the kind of each annotation by name, whose columns `read_column` takes out of the file
    annotations: Mapping[str, str] = field(default_factory=dict)
    ids_digest: str = ""  # of the columns of the ids; empty where it is not known

    def __len__(self) -> int:
        return len(self.hashes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self.find(id) >= 0

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        return self.hashes.data, self.hash_rows.data, *self.ids.views

    def id(self, row: int) -> str:
        """Return the id of a row."""
        return self.ids[row]

    def find(self, id: str) -> int:
        """Return the row of an id, -1 if there is none."""
        key = id.encode("utf-8", "surrogatepass")
        hash_ = hash_of(key)
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

    def hashes_of_rows(self) -> Hashes:
        """Return the hash of each id, in the order of the rows."""
        of_rows = np.empty(len(self), np.uint64)
        of_rows[self.hash_rows] = self.hashes
        return of_rows

    def nearest(self, id: str) -> str:
        """Say which ids are close to one that is not there, as the end of a message."""
        if not len(self):
            return "the cache is empty"
        # only those around its place in the order: comparing takes 50 us an id, or more
        key = id.encode("utf-8", "surrogatepass")
        place = bisect_left(range(len(self)), key, key=lambda row: self.id(row).encode())
        around = [self.id(row) for row in range(max(place - 1000, 0), min(place + 1000, len(self)))]
        close = difflib.get_close_matches(id, around, n=3, cutoff=0.0)
        return f"nearest ids: {', '.join(map(repr, close))}"

    def find_many(self, ids: Sequence[str]) -> Ints:
        """Return the rows of many ids at once, -1 where there is none."""
        if len(self) == 0:
            return np.full(len(ids), -1, np.int64)
        if len(ids) == 1:  # in a tenth of the time
            return np.array([self.find(ids[0])])
        keys = [id.encode("utf-8", "surrogatepass") for id in ids]
        hashes = np.fromiter(map(hash_of, keys), np.uint64, len(keys))
        positions = np.minimum(self.hashes.searchsorted(hashes), len(self) - 1)
        rows = self.hash_rows[positions]
        alike = self.hashes[positions] == hashes
        if not are_below(rows, len(self)):
            raise CorruptCacheError(f"{DAMAGED}: it names rows that are not there")
        begins, ends = self.ids.ends[rows].tolist(), self.ids.ends[rows + 1].tolist()
        rows[~alike] = -1
        data = self.ids.data.data
        for number in np.flatnonzero(alike).tolist():
            if data[begins[number] : ends[number]] != keys[number]:  # several ids of the same hash
                rows[number] = self.find(ids[number])
        return rows


def read_index(file: ColumnFile, features: Sequence[str]) -> Index:
    """Take an index out of a file of columns: that of the ids, and of some features.

    Raises `CorruptCacheError` if the columns do not fit each other.
    """
    index = Index(
        hashes=file.column("hashes", np.uint64),
        hash_rows=file.column("hash_rows", np.int64),
        ids=read_strings(file, "id"),
        features={
            name: FeatureColumns(
                rows=file.column(f"{name}.rows", np.int64),
                checksum=file.column(f"{name}.checksum", np.uint64),
                first=file.column(f"{name}.first", np.int64),
                container=file.column(f"{name}.container", np.int32),
                offset=file.column(f"{name}.offset", np.int64),
                nbytes=file.column(f"{name}.nbytes", np.int64),
                block_rows=_optional(file, f"{name}.block_rows"),
                skip=_optional(file, f"{name}.skip"),
            )
            for name in features
        },
        containers=ContainerColumns(
            paths=read_strings(file, "container_path"),
            sizes=file.column("container_size", np.int64),
            digests=file.column("container_digest", np.uint8),
            parts=file.column("container_part", np.int32),
            mtimes=_optional(file, "container_mtime"),
        ),
        stats={name: read_stats(file, name) for name in features if f"{name}.count" in file},
        stamps=read_stamps(file),
        annotations=stored_kinds(file),
        ids_digest=file.digest("id_ends") + file.digest("id_bytes"),
    )
    _check_lengths(index, file)
    return index


def is_sound(index: Index) -> bool:
    """Tell whether the numbers of an index can be: places ascend, and what is named is there."""
    sound = _ascend(index.ids.ends) and are_below(index.hash_rows, len(index))
    for each in index.features.values():
        sound = sound and bool(each.first[0] == 0) and _ascend(each.first)
        sound = sound and are_below(each.container, len(index.containers))
    return sound


def are_below(numbers: NDArray[np.signedinteger[Any]], count: int) -> bool:
    """Tell whether all numbers are of `count` things, which are counted from 0."""
    return bool(numbers.min(initial=0) >= 0 and numbers.max(initial=-1) < count)


def _ascend(numbers: Ints) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def _optional(file: ColumnFile, name: str) -> Ints | None:
    return file.column(name, np.int64) if name in file else None


def read_strings(file: ColumnFile, name: str) -> Strings:
    """Take a column of strings out of a file of columns."""
    strings = Strings(file.column(f"{name}_ends", np.int64), file.column(f"{name}_bytes", np.uint8))
    if not strings.fits():
        raise CorruptCacheError(
            f"{str(file.path)!r} is damaged: the columns of {name!r} do not fit each other"
        )
    return strings


def read_stats(file: ColumnFile, feature: str) -> FeatureStats:
    """Take the statistics of a feature out of a file of columns."""
    count, dims = (file.column(f"{feature}.{key}", np.int64) for key in ("count", "dims"))
    mean, m2 = (file.column(f"{feature}.{key}", np.float64) for key in ("mean", "m2"))
    try:
        return FeatureStats(int(count[0]), mean.reshape(dims), m2.reshape(dims))
    except (LookupError, ValueError, OverflowError, MemoryError) as error:
        raise CorruptCacheError(
            f"{str(file.path)!r} is damaged: the statistics of {feature!r} do not fit each other: "
            f"{error}"
        ) from error


def _check_lengths(index: Index, file: ColumnFile) -> None:
    fits = len(index.ids) == len(index.hash_rows) == len(index)
    for each in index.features.values():
        fits = fits and len(each.rows) == len(each.checksum) == len(each.first) - 1 == len(index)
        extents = {len(each.container), len(each.offset), len(each.nbytes)}
        fits = fits and extents == {each.first[-1]}
        fits = fits and all(
            len(c) == len(index) for c in (each.block_rows, each.skip) if c is not None
        )
    fits = fits and all(len(column) == len(index) for column in index.stamps or ())
    files = index.containers
    fits = fits and len(files) == len(files.paths) == len(files.parts)
    fits = fits and len(files.digests) == DIGEST_BYTES * len(files)
    fits = fits and (files.mtimes is None or len(files.mtimes) == len(files))
    if not fits or files.sizes.min(initial=0) < 0:
        raise CorruptCacheError(
            f"index {str(file.path)!r} is damaged: its columns have different lengths"
        )
