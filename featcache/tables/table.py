"""The utterances of one or several caches as numbered rows."""

from __future__ import annotations

import math
import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, product
from typing import Literal, Protocol, cast, runtime_checkable

import numpy as np

from featcache.errors import ConfigError, KeyNotFoundError, RowError, StaleCacheError, nearest
from featcache.interface import Bytes, Ints
from featcache.store.cache import Cache, CachePath
from featcache.store.format.files import digest
from featcache.store.reading.complete import check_complete
from featcache.store.reading.feature_arrays import FeatureArrays
from featcache.tables import fit


@runtime_checkable
class HasTable(Protocol):
    """A data set over the rows of a table, as `FeatureDataset` is."""

    @property
    def table(self) -> FeatureTable:
        """The rows that it reads."""

    @property
    def features(self) -> Sequence[str]:
        """Names of the features that it reads."""


class FeatureTable:
    """Features of numbered utterances, of one cache or several.

    Several are joined over the same ids, or come one after another. Made by `FeatureTable.of`,
    `join` and `concat`. The rows of one cache are in the order of its ids' UTF-8 bytes, as in
    `Cache.lengths`. Cheap to fork and to pickle; holds nothing but the open caches.

    Attributes:
        caches: blocks that follow each other; the caches of one have different features of the same
            ids.
        features: the names of the features.
    """

    def __init__(self, blocks: Sequence[Sequence[Cache]]) -> None:
        self.caches = tuple(tuple(block) for block in blocks)
        self._arrays = [fit.features_of(block) for block in blocks]
        self.features = tuple(self._arrays[0])
        self._indexes = [block[0].opened.index for block in blocks]
        counts = [len(index) for index in self._indexes]
        self._starts: list[int] = [0, *accumulate(counts)]

    @classmethod
    def of(cls, source: FeatureTable | Cache | CachePath) -> FeatureTable:
        """Return the table of a cache, opened where a path is given; a table as it is."""
        if isinstance(source, FeatureTable):
            return source
        needed = "a cache, its path, or caches put together by join or concat are needed"
        return cls([[_opened(source, needed)]])

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return f"<FeatureTable: {len(self)} utterances of {', '.join(self.features)}>"

    def require_complete(self) -> None:
        """Raise `IncompleteError` for a cache that its writer has not finished."""
        for cache in (cache for block in self.caches for cache in block):
            check_complete(cache)

    def has_frames(self, feature: str) -> bool:
        """Tell whether a feature has a time axis."""
        return self.arrays(feature, 0).has_frames

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of one frame, or of the whole array of a feature without a time axis."""
        blocks = [self.arrays(feature, block) for block in range(len(self.caches))]
        return next((arrays.dims for arrays in blocks if len(arrays.lengths)), ())

    def dtype(self, feature: str) -> str:
        """Return the declared dtype of a feature."""
        return self.arrays(feature, 0).declared_dtype

    def lengths(self, feature: str, *, rows: Ints | None = None) -> Ints:
        """Return the frames of all rows, int64, read-only; or of those that `rows` lists.

        All of one cache are its mapped column, without a copy. Some are checked against what is
        stored, before memory is taken for them.
        """
        if rows is None:
            columns = [self.arrays(feature, block).lengths for block in range(len(self.caches))]
            lengths = columns[0].view() if len(columns) == 1 else np.concatenate(columns)
            lengths.flags.writeable = False
            return lengths
        lengths = np.empty(len(rows), np.int64)
        for arrays, places, inner in self._by_block(feature, rows) if len(rows) else ():
            lengths[places] = found = arrays.lengths[inner]
            for extreme in (found.argmin(), found.argmax()):
                arrays.check_length(int(inner[extreme]))
        return lengths

    def id(self, row: int) -> str:
        """Return the id of a row; raises `RowError` for one that is not there."""
        self._check(row)
        block = bisect_right(self._starts, row) - 1
        return self._indexes[block].id(row - self._starts[block])

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, int64, -1 where there is none.

        Quick for ids that are not there: nothing is looked up that is close to them.
        """
        listed = ids if isinstance(ids, str) else list(ids)
        found = self.caches[0][0].opened.find(listed)
        for index, start in zip(self._indexes[1:], self._starts[1:], strict=False):
            missing = np.flatnonzero(found < 0)
            inner = index.find_many([listed[place] for place in missing.tolist()])
            found[missing] = np.where(inner < 0, -1, inner + start)
        return found

    def rows(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, int64; raises `KeyNotFoundError` for an unknown one."""
        listed = ids if isinstance(ids, str) else list(ids)
        found = self.find(listed)
        if found.min(initial=0) < 0:
            id = listed[int(found.argmin())]
            paths = " or ".join(repr(str(block[0].path)) for block in self.caches)
            raise KeyNotFoundError(
                f"no utterance {id!r} in {paths}", hint=partial(self._indexes[0].nearest, id)
            )
        return found

    def numbers(self, keys: Sequence[int | str]) -> Ints:
        """Return the rows that ids or row numbers, also mixed, stand for.

        Raises `KeyNotFoundError` or `RowError`.
        """
        places = [place for place, key in enumerate(keys) if isinstance(key, str)]
        if len(places) == len(keys):
            return self.rows(cast(Sequence[str], keys))
        numbers = [0 if isinstance(key, str) else _whole(key) for key in keys]
        for end in (min(numbers), max(numbers)):
            self._check(end)
        rows = np.array(numbers, np.int64)
        if places:
            rows[places] = self.rows(cast(str, keys[place]) for place in places)
        return rows

    def read_into(self, rows: Ints, feature: str, starts: Ints, lengths: Ints, out: Bytes) -> None:
        """Read `lengths` frames from `starts` on of each row into the bytes of a row of `out`.

        Zeros fill the rest of the bytes.
        """
        for arrays, places, inner in self._by_block(feature, rows):
            mine = out if isinstance(places, slice) else [out[place] for place in places]
            arrays.read_many(inner, starts[places], lengths[places], mine)
        frame_bytes = self.arrays(feature, 0).dtype.itemsize * math.prod(self.dims(feature))
        for row, nbytes in zip(out, (lengths * frame_bytes).tolist(), strict=True):
            row[nbytes:] = 0

    def _by_block(
        self, feature: str, rows: Ints
    ) -> Iterator[tuple[FeatureArrays, Ints | slice, Ints]]:
        """Give, for each block that has some of the rows: arrays, places in `rows`, rows in it."""
        if len(self.caches) == 1:
            yield self.arrays(feature, 0), slice(None), rows
            return
        blocks = np.searchsorted(self._starts, rows, side="right") - 1
        for block in np.unique(blocks).tolist():
            places = np.flatnonzero(blocks == block)
            yield self.arrays(feature, block), places, rows[places] - self._starts[block]

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise RowError(f"no row {row}: there are {len(self)} utterances, counted from 0")

    def arrays(self, feature: str, block: int) -> FeatureArrays:
        """Return what reads a feature in one block.

        Raises `KeyNotFoundError` for an unknown feature.
        """
        try:
            return self._arrays[block][feature]
        except KeyError:
            raise KeyNotFoundError(
                f"no feature {feature!r}", hint=partial(nearest, feature, self.features)
            ) from None

    @cached_property
    def digest(self) -> str:
        """A digest of the ids in their order."""
        return digest("".join(digest(index.hashes.data) for index in self._indexes).encode())

    def __reduce__(self) -> tuple[object, ...]:
        generations = [cache.generation for block in self.caches for cache in block]
        return _unpickled, (self.caches, generations)


def _opened(source: Cache | CachePath, needed: str) -> Cache:
    if not isinstance(source, Cache | str | os.PathLike):
        raise ConfigError(f"{needed}, not {source!r}")
    return source if isinstance(source, Cache) else Cache(source)


def _whole(key: object) -> int:
    try:
        return operator.index(cast(int, key))
    except TypeError:
        raise RowError(f"utterances are chosen by id or by row number, not by {key!r}") from None


def join(*caches: Cache | CachePath, unlike: Literal["raise", "keep"] = "raise") -> FeatureTable:
    """Put the features of several caches of the same utterances side by side.

    Args:
        caches: caches or their paths.
        unlike: "raise" refuses caches whose fingerprints contradict each other: a key that two of
            them have, such as a sample rate or the weights of one module, must have one value; the
            stage and the declarations aside. "keep" takes them as they are.

    Raises `ConfigError` if the ids differ or a feature is in more than one of them, or if their
    fingerprints are unlike.
    """
    fit.check_unlike(unlike)
    opened = [_opened(source, "join takes caches or their paths one by one") for source in caches]
    if not opened:
        raise ConfigError("join needs at least one cache")
    seen: dict[str, Cache] = {}
    for number, cache in enumerate(opened):
        if cache is not opened[0]:
            fit.check_same_ids(opened[0], cache)
        for name in cache.features:
            if name in seen:
                raise ConfigError(
                    f"feature {name!r} is in {str(seen[name].path)!r} and in {str(cache.path)!r}"
                )
            seen[name] = cache
        for earlier in opened[:number] if unlike == "raise" else ():
            fit.check_nothing_contradicts(earlier, cache)
    return FeatureTable([opened])


def concat(
    *sources: FeatureTable | Cache | CachePath, unlike: Literal["raise", "keep"] = "raise"
) -> FeatureTable:
    """Put the utterances of several caches, or of joined caches, one after another, in this order.

    Args:
        sources: caches, their paths, or tables.
        unlike: "raise" refuses features that were made from something else than those of the first
            source; the stage and their storage aside. "keep" takes them as they are.

    Raises `ConfigError` if their features differ in name, dtype, time axis or shape of a frame, if
    they share an id, or if their fingerprints are unlike.
    """
    fit.check_unlike(unlike)
    tables = [FeatureTable.of(source) for source in sources]
    blocks = [block for table in tables for block in table.caches]
    if not blocks:
        raise ConfigError("concat needs at least one cache")
    for number, block in enumerate(blocks):
        for earlier in blocks[:number]:
            fit.check_same_features(earlier, block)
            fit.check_no_shared_id(earlier[0], block[0])
    # those within one table were compared, or were to be kept, when it was made
    for table in tables[1:] if unlike == "raise" else ():
        for first, other in product(tables[0].caches, table.caches):
            fit.check_made_from_the_same(first, other)
    return FeatureTable(blocks)


def _unpickled(blocks: Sequence[Sequence[Cache]], generations: list[int]) -> FeatureTable:
    caches = [cache for block in blocks for cache in block]
    for cache, number in zip(caches, generations, strict=True):
        if cache.generation != number:
            raise StaleCacheError(
                f"cache {str(cache.path)!r} was written on since it was opened (generation "
                f"{number}, now {cache.generation}), and its rows have other numbers now; open it "
                "again"
            )
    return FeatureTable(blocks)
