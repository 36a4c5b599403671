"""Reading a cache: ids, lengths, statistics, and arrays straight from their bytes."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from numpy.typing import NDArray

from featcache._checks import directory
from featcache.errors import (
    CorruptCacheError,
    KeyNotFoundError,
    UnknownNameError,
    WindowError,
    nearest,
)
from featcache.interface import Array, Ints
from featcache.stats import FeatureStats
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.disk_errors import reading
from featcache.store.reading.checks import Checks
from featcache.store.reading.containers import Containers
from featcache.store.reading.feature_arrays import FeatureArrays
from featcache.store.reading.generation import load_generation
from featcache.store.reading.verify import WHAT_TO_DO, all_damage, raise_damage

if TYPE_CHECKING:
    from featcache.store.reading.reader import FeatureReader

CachePath = str | os.PathLike[str]
VERIFY = ("columns", "arrays")


class PaddedFeatures(NamedTuple):
    """Arrays of several utterances in one, padded at the end of the frame axis.

    data: (utterances, longest, *dims), or (utterances, *dims) without a time axis.
    lengths: frames of each utterance, int64; ones without a time axis.
    """

    data: NDArray[Any]
    lengths: Ints


def open(
    path: CachePath,
    *,
    verify: Literal["columns", "arrays"] | None = None,
    check_reads: bool = False,
    mapped: bool = True,
) -> Cache:
    """Open a cache for reading.

    Args:
        path: the cache directory.
        verify: None checks the size of each file when it is first read; "columns" those of all
            files now, and the checksums of index and statistics; "arrays" those of every byte of
            every file, which reads the whole cache. All damage is told at once.
        check_reads: compare whatever is read with its checksum: whole arrays by their own, windows
            by those of the pages that they lie on. The index is compared when the cache is opened.
        mapped: read through memory maps; False uses pread, for network file systems, where a mapped
            file that shrinks kills the process with SIGBUS.

    Raises `NotACacheError`, `FormatVersionError` or `CorruptCacheError`.
    """
    return Cache(path, verify=verify, check_reads=check_reads, mapped=mapped)


class Cache(Mapping[str, dict[str, NDArray[Any]]]):
    """One published generation of a cache.

    Safe to share between threads, to fork and to pickle (it opens again).

    A mapping from utterance ids to dicts of arrays. Rows, and with them iteration and `lengths`,
    are in the order of the ids' UTF-8 bytes.
    """

    def __init__(
        self,
        path: CachePath,
        *,
        verify: Literal["columns", "arrays"] | None = None,
        check_reads: bool = False,
        mapped: bool = True,
    ) -> None:
        if verify not in (None, *VERIFY):
            raise UnknownNameError(f"verify has no level {verify!r}; {nearest(verify, VERIFY)}")
        self.path = directory(path, "a cache").absolute()
        self._mapped = mapped
        self._check_reads = check_reads
        with reading(self.path):
            self._manifest, self._index, self._failed = load_generation(
                self.path, mapped=mapped, checked=check_reads
            )
        columns = self._index.containers
        self._containers = Containers.of(self.path, columns, mapped)
        checks = (
            Checks(self.path, self._manifest, columns, self._containers) if check_reads else None
        )
        self._arrays = {
            name: FeatureArrays(self._manifest, name, self._index, self._containers, checks)
            for name in self._manifest.features
        }
        if verify is not None:
            with reading(self.path):
                raise_damage(
                    all_damage(self.path, self._manifest, self._index, arrays=verify == "arrays"),
                    WHAT_TO_DO,
                )

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.path, self._check_reads, self._mapped)

    def __repr__(self) -> str:
        state = "complete" if self.complete else "incomplete"
        features = ", ".join(self.features)
        return f"<Cache {str(self.path)!r}: {len(self)} utterances of {features}, {state}>"

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return self._index.ids()

    __eq__ = object.__eq__  # a mapping would compare all arrays
    __hash__ = object.__hash__

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._index.find(id) >= 0

    def get(self, id: str, default: Any = None) -> Any:
        """Return the arrays of an utterance, or `default`.

        Unlike `[id]`, quick for one that is not there.
        """
        if id not in self:
            return default
        return self[id]

    def __getitem__(self, id: str) -> dict[str, NDArray[Any]]:
        row = self._row(id)
        return {
            name: from_storage(arrays.read(row), arrays.declared_dtype)
            for name, arrays in self._arrays.items()
        }

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(self._manifest.features)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the cache was made from, the declarations of its features under "features"."""
        return copy.deepcopy(dict(self._manifest.fingerprint))

    @property
    def complete(self) -> bool:
        """Whether each expected utterance is stored or has failed.

        What the writer said where none are expected.
        """
        return self._manifest.complete

    @property
    def expected(self) -> int | None:
        """How many utterances the cache is to hold in the end; None if its writer did not know."""
        return None if self._manifest.expected is None else self._manifest.expected.count

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the expected utterances that could not be computed.

        They are in the order of their UTF-8 bytes.
        """
        return tuple(self._failed)

    @property
    def generation(self) -> int:
        """Number of this generation, counted up with each publish."""
        return self._manifest.generation

    def dtype(self, feature: str) -> str:
        """Return the declared dtype of a feature."""
        return self._feature(feature).declared_dtype

    def read(
        self, id: str, feature: str, start: int | None = None, stop: int | None = None
    ) -> NDArray[Any]:
        """Return a writable copy of an array, or of its frames from `start` to before `stop`.

        Shape (frames, *dims), or `dims` without a time axis; declared dtype, bfloat16 as the
        float32 of the same value. Only the bytes of these frames are read, or the blocks that hold
        them where a codec is used.

        Raises `KeyNotFoundError` for an unknown id or feature, `WindowError` unless 0 <= start <=
        stop <= frames.
        """
        arrays = self._feature(feature)
        return from_storage(self._read_stored(id, arrays, start, stop), arrays.declared_dtype)

    def read_batch(self, ids: Iterable[str], feature: str) -> PaddedFeatures:
        """Return the arrays of several utterances, copied into one array padded with zeros.

        Raises `KeyNotFoundError` for an unknown id or feature.
        """
        arrays = self._feature(feature)
        rows = self._rows(ids)
        lengths = arrays.lengths[rows]
        if len(rows):
            arrays.check_length(int(rows[lengths.argmax()]))
        longest = int(lengths.max(initial=0))
        data = arrays.empty(len(rows), longest)
        for out, row, length in zip(data, rows.tolist(), lengths.tolist(), strict=True):
            arrays.read_into(row, out[:length])
            out[length:] = 0
        if not arrays.has_frames:
            data = data.reshape(len(rows), *arrays.dims)
        return PaddedFeatures(from_storage(data, arrays.declared_dtype), lengths)

    def lengths(self, feature: str, ids: Iterable[str] | None = None) -> Ints:
        """Return the frames of all utterances in row order, or of some.

        Ones for a feature without a time axis.
        """
        arrays = self._feature(feature)
        lengths = arrays.lengths.copy() if ids is None else arrays.lengths[self._rows(ids)]
        if len(lengths) and lengths.min() < 0:
            raise CorruptCacheError(
                f"cache {str(self.path)!r} is damaged: feature {feature!r} has negative lengths"
            )
        return lengths

    def stats(self, feature: str) -> FeatureStats:
        """Return count, mean and variance over all frames of a feature.

        Raises `KeyNotFoundError` if none were collected.
        """
        self._feature(feature)
        if not self._manifest.features[feature]["stats"]:
            raise KeyNotFoundError(
                f"cache {str(self.path)!r} has no statistics of feature {feature!r}; declare it "
                "with stats: true"
            )
        return self._index.stats[feature]

    def reader(self, feature: str) -> FeatureReader:
        """Return a picklable callable that gives the torch tensor of an id.

        It has this cache's settings.
        """
        from featcache.store.reading.reader import reader_of

        self._feature(feature)
        settings = {"check_reads": self._check_reads, "mapped": self._mapped}
        return reader_of(self.path, feature, settings)

    def _read_stored(
        self, id: str, arrays: FeatureArrays, start: int | None, stop: int | None
    ) -> Array:
        row = self._row(id)
        if start is None and stop is None:
            return arrays.read(row)
        return arrays.read(row, *self._window(id, arrays, row, start, stop))

    def _feature(self, feature: str) -> FeatureArrays:
        try:
            return self._arrays[feature]
        except (KeyError, TypeError):  # a list, such as that of ids
            raise KeyNotFoundError(
                f"no feature {feature!r} in cache {str(self.path)!r}; "
                f"{nearest(feature, self._arrays)}"
            ) from None

    def _row(self, id: str) -> int:
        row = self._index.find(id) if isinstance(id, str) else -1
        if row < 0:
            raise self._not_found(id)
        return row

    def _rows(self, ids: Iterable[str]) -> Ints:
        if isinstance(ids, str):
            raise KeyNotFoundError(f"ids are a list of strings, not the one string {ids!r}")
        listed = list(ids)
        for id in listed:
            if not isinstance(id, str):
                raise self._not_found(id)
        rows = self._index.find_many(listed)
        if len(rows) and rows.min() < 0:
            raise self._not_found(listed[int(rows.argmin())])
        return rows

    def _not_found(self, id: str) -> KeyNotFoundError:
        if not isinstance(id, str):
            return KeyNotFoundError(
                f"utterance ids are strings, not {id!r}; rows by number are what "
                "featcache.FeatureDataset gives"
            )
        known = self._index.nearest(id) + (
            "" if self.complete else "; it is incomplete, more may come"
        )
        return KeyNotFoundError(f"no utterance {id!r} in cache {str(self.path)!r}; {known}")

    def _window(
        self, id: str, arrays: FeatureArrays, row: int, start: int | None, stop: int | None
    ) -> tuple[int, int]:
        length = int(arrays.lengths[row])
        try:
            begin = 0 if start is None else operator.index(start)
            end = length if stop is None else operator.index(stop)
        except TypeError:
            raise WindowError(
                f"utterance {id!r}, feature {arrays.name!r}: frames are counted in whole numbers, "
                "from start to before "
                f"stop, not {start!r} and {stop!r}"
            ) from None
        if not arrays.has_frames:
            raise WindowError(
                f"feature {arrays.name!r} has no time axis, so there are no frames to choose from"
            )
        if not 0 <= begin <= end <= length:
            raise WindowError(
                f"utterance {id!r}, feature {arrays.name!r}: frames {begin} to {end} are not "
                f"within 0 to {length}"
            )
        return begin, end


def _reopen(path: Path, check_reads: bool, mapped: bool) -> Cache:
    return Cache(path, check_reads=check_reads, mapped=mapped)
