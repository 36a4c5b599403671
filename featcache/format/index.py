"""The index: columns, mapped into memory, of the utterances and of where the bytes of each lie.

Rows are sorted by the UTF-8 bytes of their ids, so that they do not depend on the order of writing.
With it come the stamps of inputs and the checksums of pages.
"""

from __future__ import annotations

import difflib
import operator
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.container_files import PAGE_BYTES, Pages, read_at
from featcache.errors import ConfigError, CorruptCacheError
from featcache.format.columns import DAMAGED, ColumnFile, Strings, ends_of
from featcache.format.files import newer, within
from featcache.format.value_columns import stored_kinds
from featcache.interface import Bytes, Ints
from featcache.stats import FeatureStats

# Stamps: two numbers an utterance, by which a later run sees whether its input has changed.

MOST = (1 << 64) - 1


class Stamps(NamedTuple):
    """Stamps of an utterance: digests of 64 bits, as natural numbers; 0: unknown.

    input: of what the features were computed from, as the data set delivered it.
    entry: of the utterance's entry in the data set, and of size and time of the files it names.
    """

    input: int = 0
    entry: int = 0


UNKNOWN = Stamps()


class StampColumns(NamedTuple):
    """Stamps of all rows of an index."""

    input: NDArray[np.uint64]
    entry: NDArray[np.uint64]

    @classmethod
    def of(cls, stamps: Sequence[Stamps]) -> StampColumns | None:
        """Return stamps as columns; None if none of them is known."""
        if all(each == UNKNOWN for each in stamps):
            return None
        return cls(*np.array(stamps, np.uint64).reshape(-1, 2).T)

    @classmethod
    def unknown(cls, count: int) -> StampColumns:
        """Return columns of that many rows without stamps."""
        return cls(np.zeros(count, np.uint64), np.zeros(count, np.uint64))

    def replaced(self, stamps: Mapping[int, Stamps]) -> StampColumns:
        """Return a copy in which some rows have others."""
        rows = list(stamps)
        changed = StampColumns(*(column.copy() for column in self))
        for column, numbers in zip(changed, zip(*stamps.values(), strict=True), strict=True):
            column[rows] = np.array(numbers, np.uint64)
        return changed


def check_stamps(id: str, stamps: Stamps) -> Stamps:
    """Return the stamps of an utterance; raises `ConfigError` for what are none."""
    try:
        input, entry = map(operator.index, stamps)
        checked = Stamps(input, entry)
    except (TypeError, ValueError):
        checked = Stamps(-1)
    if not all(0 <= number <= MOST for number in checked):
        raise ConfigError(
            f"the stamps of utterance {id!r} are two numbers from 0 to 2**64 - 1, not {stamps!r}"
        )
    return checked


def read_stamps(file: ColumnFile) -> StampColumns | None:
    """Take the stamps out of a file of columns; None if it has none."""
    names = StampColumns._fields
    if file.dtypes.keys().isdisjoint(names):
        return None
    return StampColumns(**file.columns("", dict.fromkeys(names, np.uint64)))


# Pages: checksums of a container file, a page each, so that any piece can be checked alone.

DIGEST_BYTES = 16  # of a container


def page_count(size: int) -> int:
    """Return the number of pages of a file; the last one may be short, an empty file has none."""
    return -(-size // PAGE_BYTES)


def pages_of(descriptor: int, first: int = 0, count: int | None = None) -> Pages:
    """Read pages of an open file, from page `first` on, and return the xxh3-64 of each."""
    total = page_count(os.fstat(descriptor).st_size)
    last = total if count is None else min(first + count, total)
    found: list[int] = []
    room = memoryview(bytearray(PAGE_BYTES * _AT_ONCE))
    pages = [room[begin : begin + PAGE_BYTES] for begin in range(0, len(room), PAGE_BYTES)]
    for begin in range(first, last, _AT_ONCE):
        wanted = min(_AT_ONCE, last - begin)
        filled = _filled(descriptor, room[: wanted * PAGE_BYTES], begin * PAGE_BYTES)
        whole = filled // PAGE_BYTES
        found.extend(map(xxhash.xxh3_64_intdigest, pages[:whole]))
        if whole < wanted:  # the last one is short, or the file was cut meanwhile
            rest = (room[page * PAGE_BYTES : filled] for page in range(whole, wanted))
            found.extend(map(xxhash.xxh3_64_intdigest, rest))
    return np.array(found, np.uint64)


_AT_ONCE = 8  # pages, which stay in a core's cache until they are hashed


def _filled(descriptor: int, room: memoryview, offset: int) -> int:
    """Read until there is no more room, or the file ends; return how many bytes that were."""
    filled = 0
    while filled < len(room) and (more := read_at(descriptor, room[filled:], offset + filled)):
        filled += more
    return filled


def container_digest(pages: Pages, size: int) -> bytes:
    """Return the digest of a container: 16 bytes, the most significant one first.

    That is the xxh3-128 of the checksums of its pages and of its size, u64 each.
    """
    return xxhash.xxh3_128_digest(pages.astype("<u8").tobytes() + size.to_bytes(8, "little"))


# The index: columns, mapped into memory, of the utterances and of where the bytes of each lie.
#
# Rows are sorted by the UTF-8 bytes of their ids, so that they do not depend on the order of
# writing.

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

    def sizes(self) -> Ints:
        """Return the stored bytes of each array."""
        return np.diff(ends_of(self.nbytes)[self.first])

    def places(self, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return container and offset of the first byte of rows; any of arrays without bytes."""
        if not len(self.offset):
            return np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int64)
        first = np.minimum(self.first[rows], len(self.offset) - 1)
        return self.container[first], self.offset[first]


# the columns of a feature, in the order in which they are stored, and those of its statistics
FEATURE_COLUMNS: Mapping[str, type[np.generic]] = {
    **{"rows": np.int64, "checksum": np.uint64, "first": np.int64},
    **{"container": np.int32, "offset": np.int64, "nbytes": np.int64},
    **{"block_rows": np.int64, "skip": np.int64},
}
OF_EXTENTS = ("container", "offset", "nbytes")
MAYBE_ABSENT = ("block_rows", "skip")
_STATS = {"count": np.int64, "dims": np.int64, "mean": np.float64, "m2": np.float64}
# of all rows, and of the container files
_HASH_COLUMNS: Mapping[str, type[np.generic]] = {"hashes": np.uint64, "hash_rows": np.int64}
_CONTAINER_COLUMNS: Mapping[str, type[np.generic]] = {
    **{"size": np.int64, "digest": np.uint8, "part": np.int32, "mtime": np.int64}
}


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

    @classmethod
    def of(
        cls, paths: Sequence[str], sizes: Sequence[int], digests: bytes | None = None
    ) -> ContainerColumns:
        """Return the columns of the files of one part; digests that are not known are zeros."""
        of_all = bytes(DIGEST_BYTES * len(paths)) if digests is None else digests
        return cls(
            paths=Strings.of(paths),
            sizes=np.array(sizes, np.int64),
            digests=np.frombuffer(of_all, np.uint8),
            parts=np.zeros(len(paths), np.int32),
        )

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

    @classmethod
    def empty(cls, declared: Mapping[str, Mapping[str, object]]) -> Index:
        """Return the index of no utterances of features that are declared so."""
        none, numbers = np.empty(0, np.int64), np.empty(0, np.int32)
        first, checksum = np.zeros(1, np.int64), np.empty(0, np.uint64)
        columns = FeatureColumns(none, checksum, first, numbers, none, none)
        stats = {name: FeatureStats.empty(()) for name, each in declared.items() if each["stats"]}
        return cls.of([], dict.fromkeys(declared, columns), ContainerColumns.of([], []), stats)

    @classmethod
    def of(
        cls,
        ids: Sequence[str],
        features: Mapping[str, FeatureColumns],
        containers: ContainerColumns,
        stats: Mapping[str, FeatureStats],
        stamps: StampColumns | None = None,
    ) -> Index:
        """Return the index of rows in any order, as `rows_of` takes it."""
        keys = [id.encode() for id in ids]
        hashes = np.fromiter(map(hash_of, keys), np.uint64, len(keys))
        rows, strings = np.arange(len(keys)), Strings.of_bytes(keys)
        return cls(hashes, rows, strings, features, containers, stats, stamps)

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
        """Return which ids are close to one that is not there, as the end of a message."""
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

    Raises `CorruptCacheError` if the columns do not fit each other, `FormatVersionError` for a
    column of a feature that tells what this featcache does not know.
    """
    _check_known(file, features)
    files = file.columns("container_", _CONTAINER_COLUMNS, ["mtime"])
    index = Index(
        **file.columns("", _HASH_COLUMNS),
        ids=file.strings("id"),
        features={
            name: FeatureColumns(**file.columns(f"{name}.", FEATURE_COLUMNS, MAYBE_ABSENT))
            for name in features
        },
        containers=ContainerColumns(
            paths=file.strings("container_path"),
            sizes=files["size"],
            digests=files["digest"],
            parts=files["part"],
            mtimes=files.get("mtime"),
        ),
        stats={name: read_stats(file, name) for name in features if f"{name}.count" in file.dtypes},
        stamps=read_stamps(file),
        annotations=stored_kinds(file),
        ids_digest=file.digests("id_ends", "id_bytes"),
    )
    _check_lengths(index, file)
    return index


def _check_known(file: ColumnFile, features: Sequence[str]) -> None:
    """Refuse columns that say of the arrays of a feature what nobody here would heed."""
    wanted = {*features}
    for column in file.dtypes:
        name, dot, what = column.partition(".")
        if dot and name in wanted and what not in (*FEATURE_COLUMNS, *_STATS):
            raise newer(f"feature {name!r} in {str(file.path)!r}", f"the column {column!r}")


def is_sound(index: Index) -> bool:
    """Whether the numbers of an index can be: places ascend, and what is named is there."""
    sound = _ascend(index.ids.ends) and are_below(index.hash_rows, len(index))
    for each in index.features.values():
        sound = sound and bool(each.first[0] == 0) and _ascend(each.first)
        sound = sound and are_below(each.container, len(index.containers))
    return sound


def are_below(numbers: NDArray[np.signedinteger], count: int) -> bool:
    """Whether all numbers are of `count` things, which are counted from 0."""
    return bool(numbers.min(initial=0) >= 0 and numbers.max(initial=-1) < count)


def _ascend(numbers: Ints) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def read_stats(file: ColumnFile, feature: str) -> FeatureStats:
    """Take the statistics of a feature out of a file of columns."""
    count, dims, mean, m2 = file.columns(f"{feature}.", _STATS).values()
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


# Rows of an index: those of the ids of another one, and an index of some of its rows.


def have_same_ids(first: Index, other: Index) -> bool:
    """Whether two indexes are of the same ids: by the digests of their columns, if known."""
    if first.ids_digest and other.ids_digest:
        return first.ids_digest == other.ids_digest
    a, b = first.ids, other.ids
    return np.array_equal(a.ends, b.ends) and np.array_equal(a.data, b.data)


def rows_of_ids(index: Index, of: Index) -> Ints:
    """Return the row in `index` of each id of another index, in the order of its rows, or -1.

    No Python object is made for any of them. Both are in the order of their ids.
    """
    rows = np.full(len(of), -1, np.int64)
    if not len(index) or not len(of):
        return rows
    places = np.minimum(index.hashes.searchsorted(of.hashes), len(index) - 1)
    alike = index.hashes[places] == of.hashes
    rows[of.hash_rows[alike]] = index.hash_rows[places[alike]]
    mine = np.flatnonzero(rows >= 0)
    if not _are_same(of.ids, mine, index.ids, rows[mine]):
        for row in mine.tolist():  # ids of the same hash
            rows[row] = index.find(of.id(row))
    return rows


def _are_same(first: Strings, rows: Ints, other: Strings, others: Ints) -> bool:
    """Whether two lists of rows have the same strings; rows that follow on go together."""
    if not np.array_equal(np.diff(first.ends)[rows], np.diff(other.ends)[others]):
        return False
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(others) != 1)) + 1
    begins, lasts = np.append(0, breaks)[: len(rows)], np.append(breaks, len(rows)) - 1
    bounds = [
        (column.ends[some[begins]].tolist(), column.ends[some[lasts[: len(begins)]] + 1].tolist())
        for column, some in ((first, rows), (other, others))
    ]
    pieces = zip(*bounds[0], *bounds[1], strict=True)
    return all(first.data[a:b].tobytes() == other.data[c:d].tobytes() for a, b, c, d in pieces)


def common_rows(indexes: Sequence[Index]) -> list[Ints | None]:
    """Return, for each index, the rows of the ids that all of them have; None: all its rows.

    Raises `CorruptCacheError` for an index whose rows cannot be taken.
    """
    if all(have_same_ids(indexes[0], each) for each in indexes[1:]):
        return [None] * len(indexes)
    if not all(map(is_sound, indexes)):
        raise CorruptCacheError(f"{DAMAGED}: its columns name what is not there")
    found = [np.arange(len(indexes[0]))]
    found += [rows_of_ids(each, indexes[0]) for each in indexes[1:]]
    there = np.logical_and.reduce([rows >= 0 for rows in found])
    return [rows[there] for rows in found]


def some_rows(index: Index, rows: Ints) -> Index:
    """Return an index of some rows, in their order; its containers are the same."""
    new = np.full(len(index), -1, np.int64)
    new[rows] = np.arange(len(rows))
    hash_rows = new[index.hash_rows]
    stay = hash_rows >= 0
    return Index(
        hashes=index.hashes[stay],
        hash_rows=hash_rows[stay],
        ids=index.ids.take(rows),
        features={name: _some_rows(each, rows) for name, each in index.features.items()},
        containers=index.containers,
        stats=index.stats,
    )


def taken_rows(index: Index, rows: Ints) -> Index:
    """Return an index of some rows, as `rows_of` takes it, without statistics and annotations.

    Of the other rows nothing is looked at: they may be damaged.
    """
    features = {name: _some_rows(each, rows) for name, each in index.features.items()}
    stamps = None if index.stamps is None else StampColumns(*(each[rows] for each in index.stamps))
    return Index.of([*index.ids.take(rows)], features, index.containers, {}, stamps)


def _some_rows(columns: FeatureColumns, rows: Ints) -> FeatureColumns:
    begins = columns.first[rows]
    counts = columns.first[rows + 1] - begins
    first = ends_of(counts)
    extents = np.repeat(begins - first[:-1], counts) + np.arange(first[-1])
    taken = {
        what: column[extents if what in OF_EXTENTS else rows]
        for what in FEATURE_COLUMNS
        if (column := getattr(columns, what)) is not None
    }
    return FeatureColumns(**{**taken, "first": first})
