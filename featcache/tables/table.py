"""The utterances of one or several caches, or some of them, as numbered rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from featcache.declaration.frame_times import TOLERANCE_FRAMES
from featcache.errors import ConfigError, KeyNotFoundError, RowError
from featcache.interface import Bytes, Ints
from featcache.store.cache import Cache, CachePath, PaddedFeatures
from featcache.store.format.bfloat16 import from_storage
from featcache.store.reading.complete import check_complete
from featcache.store.reading.id_sequence import Ids
from featcache.tables.block import Block, Blocks, Member, opened
from featcache.tables.choosing import chosen_rows
from featcache.tables.recording_times import Align, Alignment
from featcache.tables.segment_list import SegmentSource
from featcache.tables.segments import Segments, listed, windows
from featcache.tables.selection import Selection


@runtime_checkable
class HasTable(Protocol):
    """A data set over the rows of a table, as `FeatureDataset` is."""

    @property
    def table(self) -> FeatureTable:
        """The rows that it reads."""

    @property
    def features(self) -> Sequence[str]:
        """Names of the features that it reads."""


class FeatureTable(Mapping[str, dict[str, NDArray[Any]]]):
    """Features of numbered utterances: of one cache or several, or a view of some of them.

    Several are joined over the same ids, or come one after another. Made by `Cache.table`,
    `FeatureTable.of`, `join` and `concat`; a view by the methods of another table. A view holds
    row numbers and no data. The rows of one cache are in the order of its ids' UTF-8 bytes, as in
    `Cache.lengths`. Cheap to fork and to pickle; workers share the row numbers.

    As a cache is, a mapping from utterance ids to dicts of arrays.

    Attributes:
        features: the names of the features.
        selection: the rows and the caches below, for what is built on tables.
    """

    def __init__(self, selection: Selection) -> None:
        self.features = selection.blocks.features
        self.selection = selection

    @classmethod
    def of(cls, source: FeatureTable | Cache | CachePath) -> FeatureTable:
        """Return the table of a cache, opened where a path is given; a table as it is."""
        if isinstance(source, FeatureTable):
            return source
        needed = "a cache, its path, or caches put together by join or concat are needed"
        return cls(Selection(Blocks([Block([Member(opened(source, needed))])])))

    def __len__(self) -> int:
        return len(self.selection)

    def __repr__(self) -> str:
        of = "" if self.selection.row_map is None else f" of {len(self.selection.blocks)}"
        return f"<FeatureTable: {len(self)}{of} utterances of {', '.join(self.features)}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self.selection)

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and bool(self.find([id])[0] >= 0)

    def __getitem__(self, id: str) -> dict[str, NDArray[Any]]:
        return {name: self.read(id, name) for name in self.features}

    __eq__ = object.__eq__  # a mapping would compare all arrays
    __hash__ = object.__hash__

    @property
    def ids(self) -> Sequence[str]:
        """The utterance ids, in the order of rows; looked up as they are asked for."""
        return Ids(self)

    @property
    def caches(self) -> tuple[tuple[Cache, ...], ...]:
        """The caches below: blocks that follow each other, of caches that are side by side."""
        return self.selection.blocks.caches

    @property
    def cache(self) -> Cache:
        """The one cache below; raises `ConfigError` where there are several."""
        caches = dict.fromkeys(cache for block in self.caches for cache in block)
        if len(caches) > 1:
            paths = ", ".join(repr(str(cache.path)) for cache in caches)
            raise ConfigError(f"{self!r} is made of several caches: {paths}; choose from .caches")
        return self.caches[0][0]

    @property
    def complete(self) -> bool:
        """True if all caches below are complete."""
        return all(cache.complete for block in self.caches for cache in block)

    def require_complete(self) -> None:
        """Raise `IncompleteError` for a cache that its writer has not finished."""
        for cache in (cache for block in self.caches for cache in block):
            check_complete(cache)

    def has_frames(self, feature: str) -> bool:
        """Tell whether a feature has a time axis."""
        return self.selection.blocks.has_frames(feature)

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of one frame, or of the whole array of a feature without a time axis."""
        return self.selection.blocks.dims(feature)

    def dtype(self, feature: str) -> str:
        """Return the declared dtype of a feature."""
        return self.selection.blocks.of_feature(feature)[0].declared_dtype

    def lengths(self, feature: str, *, rows: Ints | None = None) -> Ints:
        """Return the frames of all rows, int64, read-only; or of those that `rows` lists.

        All of one cache are its mapped column, without a copy. Some are checked against what is
        stored, before memory is taken for them.
        """
        if rows is None:
            return self.selection.lengths(feature)
        return self.selection.checked_lengths(feature, rows)

    def id(self, row: int) -> str:
        """Return the id of a row; raises `RowError` for one that is not there."""
        self.selection.check(row)
        return self.selection.id(row)

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, int64, -1 where there is none.

        Quick for ids that are not there: nothing is looked up that is close to them.
        """
        return self.selection.find(ids if isinstance(ids, str) else list(ids))

    def rows(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, int64; raises `KeyNotFoundError` for an unknown one."""
        listed = ids if isinstance(ids, str) else list(ids)
        found = self.find(listed)
        if found.min(initial=0) < 0:
            raise self._not_found(listed[int(found.argmin())])
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
            self.selection.check(end)
        rows = np.array(numbers, np.int64)
        if places:
            rows[places] = self.rows(cast(str, keys[place]) for place in places)
        return rows

    def read(
        self, id: str, feature: str, start: int | None = None, stop: int | None = None
    ) -> NDArray[Any]:
        """Return a writable copy of an array, or of its frames from `start` to before `stop`.

        As `Cache.read` does.
        """
        self.selection.blocks.require(feature)
        return self.selection.read(int(self.rows([id])[0]), feature, start, stop)

    def read_batch(self, ids: Iterable[str], feature: str) -> PaddedFeatures:
        """Return the arrays of several utterances, copied into one array padded with zeros.

        Raises `KeyNotFoundError` for an unknown id or feature.
        """
        arrays = self.selection.blocks.of_feature(feature)[0]
        rows = self.rows(ids)
        lengths = self.lengths(feature, rows=rows)
        longest = [int(lengths.max(initial=0))] if arrays.has_frames else []
        shape = (*longest, *self.dims(feature))
        out = np.empty((len(rows), math.prod(shape) * arrays.dtype.itemsize), np.uint8)
        self.read_into(rows, feature, np.zeros_like(lengths), lengths, out)
        data = out.reshape(-1).view(arrays.dtype).reshape(len(rows), *shape)
        return PaddedFeatures(from_storage(data, arrays.declared_dtype), lengths)

    def read_into(self, rows: Ints, feature: str, starts: Ints, lengths: Ints, out: Bytes) -> None:
        """Read `lengths` frames from `starts` on of each row into the bytes of a row of `out`.

        Zeros fill the rest of the bytes.
        """
        self.selection.read_into(rows, feature, starts, lengths, out)

    def select(self, keys: Iterable[str] | Iterable[int]) -> FeatureTable:
        """Return the view of these utterances, ids or row numbers, in their order.

        Raises `KeyNotFoundError` or `RowError` for one that is not there, and `ConfigError` for
        one that comes twice.
        """
        return self._take(chosen_rows(self, keys))

    def segments(
        self,
        source: SegmentSource,
        *,
        align: Align = "trim",
        tolerance_frames: int = TOLERANCE_FRAMES,
    ) -> FeatureTable:
        """Return a view whose rows are segments of these utterances, with ids of their own.

        All features are cut at the frames that their `frame_s` and `offset_s` give: frame k stands
        for the time from `offset_s + k * frame_s` on, and each cut goes to the nearest boundary
        between frames, half-way to the later one. So neighbouring segments neither share a frame
        nor leave one out. Features without a time axis are given whole.

        Args:
            source: `{id: (recording, start_s, stop_s)}`, or the path of a CSV file with the columns
                id (or ID), recording, start_s and stop_s; recordings are ids of this table.
            align: "trim" ends all features of a recording where the first of them ends; "error"
                refuses a segment of which any feature lacks a frame.
            tolerance_frames: most frames, of the feature with the longest, that "trim" may leave
                out of a segment; with more it is refused.

        Raises `WindowError` for a stop beyond the end of its recording, `KeyNotFoundError` for a
        recording that is not there, `ConfigError` for a source that cannot be used or features
        none of which declares `frame_s`; one that does not is refused when it is read.

        >>> table.segments({"a": ("meeting-7", 12.5, 14.0)})["a"]  # doctest: +SKIP
        """
        return self._cut(listed(self, source, Alignment(align, tolerance_frames)))

    def windows(
        self,
        length_s: float,
        hop_s: float | None = None,
        *,
        align: Align = "trim",
        tolerance_frames: int = TOLERANCE_FRAMES,
    ) -> FeatureTable:
        """Return a view of windows over all utterances, `<id>:<start_s>-<stop_s>`.

        They begin every `hop_s` seconds, `length_s` by default, until one reaches the end of the
        utterance; that one may be shorter (`filter` leaves short ones out), but has a frame of
        each feature. All else is as in `segments`.

        >>> len(table.windows(10.0, hop_s=5.0))  # doctest: +SKIP
        """
        return self._cut(windows(self, length_s, hop_s, Alignment(align, tolerance_frames)))

    @property
    def digest(self) -> str:
        """A digest of the ids in their order: of those below, and of what was made of them."""
        return self.selection.digest

    def _cut(self, segments: Segments) -> FeatureTable:
        return FeatureTable(self.selection.cut(segments))

    def _take(self, rows: Ints) -> FeatureTable:
        return FeatureTable(self.selection.take(rows))

    def _not_found(self, id: str) -> KeyNotFoundError:
        paths = " or ".join(dict.fromkeys(repr(str(block[0].path)) for block in self.caches))
        first = self.selection.blocks.blocks[0]
        if self.selection.row_map is None:
            return KeyNotFoundError(
                f"no utterance {id!r} in {paths}", hint=partial(first.nearest, id)
            )
        blocks = self.selection.blocks.blocks
        there = self.selection.cuts is None and any(block.find([id])[0] >= 0 for block in blocks)
        return KeyNotFoundError(
            f"no utterance {id!r} in this view of {len(self)} utterances"
            + (f"; {paths} has it" if there else f" of {paths}")
        )


def _whole(key: object) -> int:
    try:
        return operator.index(cast(int, key))
    except TypeError:
        raise RowError(f"utterances are chosen by id or by row number, not by {key!r}") from None
