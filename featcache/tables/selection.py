"""`Selection`: rows of blocks and segments in an order; their statistics, and rows chosen of it."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache._checks import are_listed, listed_ids
from featcache._recycled import RECYCLED
from featcache.errors import ConfigError, KeyNotFoundError, RowError
from featcache.format import Column, Hashes, Strings, digest, from_storage
from featcache.interface import Array, Bytes, Ints
from featcache.reading import FeatureArrays, Generation, Wanted, memory_for
from featcache.registry import is_lossless
from featcache.stats import FeatureStats
from featcache.tables.blocks import Block, BlockMember, RowMap, TableBlocks
from featcache.tables.segments import Cuts, Segments
from featcache.tables.times import require_times

if TYPE_CHECKING:
    from featcache.tables.mixes import MixPlan

# `Ids`: the utterance ids of numbered rows as a sequence, which holds none of them itself.


class Ids(Sequence[str]):
    """The ids of a cache or a table in the order of its rows.

    Taken out of the index when they are asked for: ten million ids cost no memory. Equal to any
    sequence of the same ids; pickled as a list.
    """

    def __init__(self, rows: Selection) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self._rows.id(each) for each in range(len(self))[row]]
        try:
            return self._rows.id(range(len(self))[row])
        except IndexError:
            raise RowError(f"no row {row}: there are {len(self)} utterances") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        some = ", ".join(map(repr, self[:3]))
        return f"<{len(self)} ids: {some}{', ...' * (len(self) > 3)}>"

    def __reduce__(self) -> tuple[object, ...]:
        return list, (list(self),)


class PaddedFeatures(NamedTuple):
    """Arrays of several utterances in one, padded at the end of the frame axis.

    data: (utterances, longest, *dims), or (utterances, *dims) without a time axis.
    lengths: frames of each utterance, int64; ones without a time axis.
    """

    data: NDArray[Any]
    lengths: Ints


class StoredLengths:
    """Frames of all rows, of the longest of some features, taken as they are asked for.

    A mix may have many more rows than its caches: `lengths[rows]` reads the columns of these, and
    no copy is made of all. The rows are whole utterances.
    """

    def __init__(self, rows: Selection, features: Sequence[str]) -> None:
        self.rows = rows
        self.features = features

    @classmethod
    def longest(cls, columns: Sequence[StoredLengths]) -> StoredLengths:
        """Return those of the longest feature of some columns of the same rows."""
        return cls(columns[0].rows, [name for each in columns for name in each.features])

    def of_caches(self) -> Iterator[list[Ints]]:
        """Yield the columns of each block, one a feature, among them rows that are not taken."""
        for block in self.rows.blocks.blocks:
            yield [block.lengths(name) for name in self.features]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Ints | slice) -> Ints:
        numbers = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        longest = np.empty(len(numbers), np.int64)
        for block, places, inner in self.rows.blocks.split(self.rows.below(numbers)):
            columns = [block.lengths_of(name, inner) for name in self.features]
            longest[places] = columns[0] if len(columns) == 1 else np.max(columns, axis=0)
        return longest


# `Selection`: rows of blocks in some order, whole or cut; a table without its user's words.


class Selection:
    """Numbered utterances of blocks.

    One made of another has one row map over the same blocks, never a chain of them.

    Attributes:
        blocks: the caches.
        row_map: the row in the blocks of each row here; None: all, in their order.
        cuts: ids and frames of the rows, where they are segments; None: whole utterances.
        plan: the rows that an epoch takes of a mix; None: each epoch takes all.
    """

    def __init__(
        self,
        blocks: TableBlocks,
        row_map: RowMap | None = None,
        cuts: Cuts | None = None,
        plan: MixPlan | None = None,
    ) -> None:
        self.blocks = blocks
        self.row_map = row_map
        self.cuts = cuts
        self.plan = plan
        self._stats: dict[str, FeatureStats] = {}
        # lengths of all rows while somebody has them: of several caches, or some rows, a copy
        self._lengths: WeakValueDictionary[str, Ints] = WeakValueDictionary()
        alone = row_map is None and len(generations := blocks.generations) == 1
        # the one generation, where the rows are all of its own, in their order
        self._whole = generations[0] if alone and blocks.blocks[0].whole else None

    @classmethod
    def of(cls, opened: Generation) -> Selection:
        """Return all rows of a generation."""
        return cls(TableBlocks([Block([BlockMember(opened)])]))

    def __len__(self) -> int:
        return len(self.blocks) if self.row_map is None else len(self.row_map)

    def __iter__(self) -> Iterator[str]:
        return map(self.id, range(len(self))) if self._whole is None else iter(self._whole.index)

    @property
    def said(self) -> str:
        """The number of rows in words: of how many they are, and whether they are segments."""
        if self.plan is not None:
            return f"{self.plan.size:,} rows an epoch of {len(self.unlike_rows()):,} utterances"
        cut = "" if self.cuts is None else " segments"
        of = "" if self.row_map is None else f"{cut} of {len(self.blocks):,}"
        return f"{len(self):,}{of} utterances"

    def cut(self, segments: Segments) -> Selection:
        """Return the selection of segments of the rows, which are whole utterances."""
        self.refuse_mix()
        cuts = Cuts.of(segments.ids, segments.spans, segments.annotations)
        return Selection(self.blocks, RowMap(self.below(segments.rows)), cuts)

    def take(self, rows: Ints) -> Selection:
        """Return the selection of some rows, of which none may come twice, in their order."""
        self.refuse_mix()
        cuts = None if self.cuts is None else self.cuts.take(rows)
        return Selection(self.blocks, RowMap(self.below(rows)), cuts)

    def with_features(self, names: Sequence[str]) -> Selection:
        """Return the same rows, and a mix's plan, with these features alone."""
        for name in names:
            self.blocks.require(name)
        return Selection(self.blocks.with_features(names), self.row_map, self.cuts, self.plan)

    def refuse_mix(self) -> None:
        """Raise `ConfigError` for a mix: what is made of it would have no plan."""
        if self.plan is not None:
            raise ConfigError(
                "a mix is made last: filter, split, cut, join and put together its sources, then "
                "mix these"
            )

    def share(self) -> None:
        """Make now what look-ups need, for processes that are forked or spawned later to share."""
        maps = [member.rows for block in self.blocks.blocks for member in block.members[:1]]
        own = (
            self.row_map if self.cuts is None else self.cuts.rows
        )  # segments are found by their ids
        for row_map in (own, *maps):
            if row_map is not None:
                row_map.share()

    def below(self, rows: Ints) -> Ints:
        """Return the rows in the blocks of rows here."""
        return rows if self.row_map is None else self.row_map.below[rows]

    def unlike_rows(self) -> Ints:
        """Return all rows; of those that a mix has of one utterance, which follow on, the first."""
        if self.plan is None:
            return np.arange(len(self))
        return np.concatenate([start + rows for start, rows in self.plan.first_rows()])

    def place(self, row: int) -> tuple[Block, int]:
        """Return the block of a row, and its row there."""
        below = row if self.row_map is None else int(self.row_map.below[row])
        return self.blocks.place(below)

    def check(self, row: int) -> None:
        """Raise `RowError` for a row that is not there."""
        if not 0 <= row < len(self):
            raise RowError(f"no row {row}: there are {len(self)} utterances, counted from 0")

    def id(self, row: int) -> str:
        """Return the id of a row."""
        if self.cuts is not None:
            return self.cuts.id(row)
        block, inner = self.place(row)
        return block.id(inner)

    def ids_of(self, rows: Ints) -> list[str]:
        """Return the ids of some rows: of one cache, in half the time of `id` for each."""
        if self.cuts is not None or len(self.blocks.blocks) > 1:
            return [self.id(row) for row in rows.tolist()]
        return self.blocks.blocks[0].ids_of(self.below(rows))

    def packed_ids(self, rows: Ints) -> Strings:
        """Return the ids of some rows, without an object of each."""
        if self.cuts is not None:
            return self.cuts.packed_ids(rows)
        return self.blocks.packed_ids(self.below(rows))

    def hashes(self) -> Hashes:
        """Return the hash of each row's id, in the order of the rows."""
        if self.cuts is not None:
            return self.cuts.hashes()
        below: Hashes = np.concatenate([block.hashes() for block in self.blocks.blocks])
        return below if self.row_map is None else below[self.row_map.below]

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, -1 where there is none."""
        if self.cuts is not None:
            return self.cuts.find(ids)
        if len(self.blocks.blocks) == 1:
            inner = self.blocks.blocks[0].find(ids)
            return inner if self.row_map is None else self.row_map.find(inner)
        found = np.full(len(ids), -1, np.int64)
        for number, block in enumerate(self.blocks.blocks):
            # blocks may have an id in common, of which a view holds one
            missing = np.flatnonzero(found < 0)
            inner = block.find([ids[place] for place in missing.tolist()] if number else ids)
            inner[inner >= 0] += self.blocks.starts[number]
            found[missing] = inner if self.row_map is None else self.row_map.find(inner)
        return found

    @property
    def annotations(self) -> tuple[str, ...]:
        """Names of the annotations."""
        own = () if self.cuts is None else self.cuts.own
        label = () if self.plan is None or self.plan.label is None else (self.plan.label,)
        return tuple(dict.fromkeys([*self.blocks.annotations, *own, *label]))

    def annotation(self, name: str) -> Column:
        """Return an annotation of all rows; of segments their own, else that of the recordings."""
        if self.plan is not None and name == self.plan.label:
            return self.plan.column()
        if self.cuts is not None and name in self.cuts.own:
            return self.cuts.annotation(name)
        rows = None if self.row_map is None else self.row_map.below
        return self.blocks.annotation(name, rows)

    def lengths(self, feature: str) -> Ints:
        """Return the frames of all rows, read-only."""
        self.blocks.require(feature)
        if self.cuts is not None and self._is_cut(feature):
            return self.cuts.lengths(feature)
        lengths = self._lengths.get(feature)
        if lengths is None:
            column = self.blocks.lengths(feature)
            lengths = column.view() if self.row_map is None else column[self.row_map.below]
            lengths.flags.writeable = False
            self._lengths[feature] = lengths
        return lengths

    def checked_lengths(self, feature: str, rows: Ints) -> Ints:
        """Return the frames of some rows, checked against what is stored."""
        lengths = self.blocks.checked_lengths(feature, self.below(rows))
        span = self.span(feature, rows)
        return lengths if span is None else span[1]

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._find(id) >= 0

    def _find(self, id: str) -> int:
        return int(self.find([id])[0]) if self._whole is None else self._whole.index.find(id)

    def rows(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids; raises `KeyNotFoundError` for an unknown one."""
        listed = listed_ids(ids)
        found = self.find(listed)
        if found.min(initial=0) < 0:
            raise self.not_found(listed[int(found.argmin())])
        return found

    def row(self, id: str) -> int:
        """Return the row of an id; raises `KeyNotFoundError` for an unknown one."""
        row = self._find(id) if isinstance(id, str) else -1
        if row < 0:
            raise self.not_found(id)
        return row

    def read(
        self,
        id: str,
        feature: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        copy: bool = True,
    ) -> NDArray[Any]:
        """Return an array, or some of its frames, as `FeatureTable.read` does."""
        if self._whole is not None:
            arrays, row = self._whole.arrays(feature), self._whole.row(id)
        else:
            self.blocks.require(feature)
            here = self.row(id)
            block, inner = self.place(here)
            member = block.features[feature]
            arrays = member.opened.arrays(feature)
            row = inner if member.rows is None else int(member.rows.below[inner])
            span = None if self.cuts is None else self.span(feature, np.array([here]))
            if span is not None:
                first, length = int(span[0][0]), int(span[1][0])
                begin, end = arrays.window(id, length, start, stop)
                start, stop = first + begin, first + end
        stored = arrays.read(row, start, stop, id=id, copy=copy)
        return from_storage(stored, arrays.declared_dtype, writable=copy)

    def read_into(
        self, rows: Ints, feature: str, starts: Ints, lengths: Ints, out: Sequence[Bytes]
    ) -> None:
        """Read frames of each row into the bytes of one of `out`; zeros fill the rest."""
        span = self.span(feature, rows)
        starts = starts if span is None else starts + span[0]
        for arrays, places, inner in self.blocks.by_block(feature, self.below(rows)):
            mine = out[places] if isinstance(places, slice) else [out[place] for place in places]
            arrays.read_many(inner, starts[places], lengths[places], mine)
        itemsize = self.blocks.of_feature(feature)[0].dtype.itemsize
        frame_bytes = itemsize * math.prod(self.blocks.dims(feature))
        for row, nbytes in zip(out, (lengths * frame_bytes).tolist(), strict=True):
            if nbytes < len(row):
                row[nbytes:] = 0

    def want(self, rows: Ints, feature: str, starts: Ints, lengths: Ints, wanted: Wanted) -> None:
        """Add what `read_into` will read of object stores to what is wanted of them."""
        span = self.span(feature, rows)
        starts = starts if span is None else starts + span[0]
        for arrays, places, inner in self.blocks.by_block(feature, self.below(rows)):
            arrays.want(inner, starts[places], lengths[places], wanted)

    def not_found(self, id: str) -> KeyNotFoundError:
        """Return the error for an id that is not there."""
        blocks = self.blocks.blocks
        if self._whole is not None or not isinstance(id, str):
            return blocks[0].members[0].opened.not_found(id)
        first_members = (block.members[0].opened.cache_path for block in blocks)
        paths = " or ".join(dict.fromkeys(repr(str(path)) for path in first_members))
        if self.row_map is None:
            return KeyNotFoundError(
                f"no utterance {id!r} in {paths}",
                hint=lambda: blocks[0].nearest(id) + self.blocks.written_since(),
            )
        there = self.cuts is None and any(block.find([id])[0] >= 0 for block in blocks)
        return KeyNotFoundError(
            f"no utterance {id!r} in this view of {len(self)} utterances"
            + (f"; {paths} has it" if there else f" of {paths}")
        )

    def read_padded(self, rows: Ints, feature: str) -> PaddedFeatures:
        """Return the arrays of some rows in one, padded with zeros."""
        arrays = self.blocks.of_feature(feature)[0]
        lengths = self.checked_lengths(feature, rows)
        longest = [int(lengths.max(initial=0))] if arrays.has_frames else []
        shape = (*longest, *self.blocks.dims(feature))
        with memory_for(feature, (len(rows), *longest), self.blocks.dims(feature)):
            nbytes = math.prod(shape) * arrays.dtype.itemsize
            out = RECYCLED.empty((len(rows), nbytes), np.dtype(np.uint8))
        self.read_into(rows, feature, np.zeros_like(lengths), lengths, list(out))
        data = out.reshape(-1).view(arrays.dtype).reshape(len(rows), *shape)
        return PaddedFeatures(from_storage(data, arrays.declared_dtype), lengths)

    def span(self, feature: str, rows: Ints) -> tuple[Ints, Ints] | None:
        """Return the first frames and the numbers of frames of segments; None for whole arrays.

        Raises `ConfigError` for a feature with frames that does not say when they are.
        """
        if self.cuts is None or not self._is_cut(feature):
            return None
        return self.cuts.span(feature, rows)

    def _is_cut(self, feature: str) -> bool:
        """Whether rows that are segments have some frames of a feature; else all of it."""
        if self.cuts is not None and feature in self.cuts.spans:
            return True
        require_times(self.blocks, feature)
        return False

    @cached_property
    def digest(self) -> str:
        """A digest of the ids below in their order, and of what was made of them."""
        parts = (self.row_map, self.cuts, self.plan)
        made = [each.digest for each in parts if each is not None]
        below = self.blocks.digest
        return digest("".join([below, *made]).encode()) if made else below

    def stats(self, feature: str) -> FeatureStats:
        """Return the statistics of a feature over all rows, which are kept."""
        self.blocks.require(feature)
        if feature not in self._stats:
            self._stats[feature] = stats_of_rows(self, feature)
        return self._stats[feature]

    def __reduce__(self) -> tuple[object, ...]:
        blocks = [block.members for block in self.blocks.blocks]
        return _unpickled, (blocks, self.row_map, self.cuts, self.plan)


def _unpickled(
    blocks: Sequence[Sequence[BlockMember]],
    row_map: RowMap | None,
    cuts: Cuts | None,
    plan: MixPlan | None,
) -> Selection:
    return Selection(TableBlocks([Block(members) for members in blocks]), row_map, cuts, plan)


# Statistics of a view: exact, by reading its arrays, or those that a cache has beside them.

_log = logging.getLogger("featcache")
LONG_S = 5.0  # reading for longer is told
AT_ONCE_BYTES = 16 << 20


def stats_of_rows(selection: Selection, feature: str) -> FeatureStats:
    """Return the statistics of a feature over all rows; a frame in two segments counts twice.

    An utterance of which a mix has several rows counts once.

    Raises `KeyNotFoundError` if a cache has collected none.
    """
    began = time.monotonic()
    parts, read_bytes = [], 0
    all_rows = selection.unlike_rows()
    span = selection.span(feature, all_rows)
    for block, places, inner in selection.blocks.split(selection.below(all_rows)):
        member = block.features[feature]
        rows = member.inner(inner)
        if selection.cuts is None:
            stats, nbytes = _of_whole_rows(member.opened, feature, rows)
        else:  # a recording may come several times
            member.opened.stats(feature)
            arrays = member.opened.arrays(feature)
            starts, lengths = np.zeros_like(rows), arrays.lengths[rows]
            if span is not None:
                starts, lengths = span[0][places], span[1][places]
            stats, nbytes = _read(arrays, rows, starts, lengths)
        parts.append(stats)
        read_bytes += nbytes
    took_s = time.monotonic() - began
    if took_s > LONG_S:
        _log.info(
            "statistics of feature %r over %d utterances: %.1f GB read in %.0f s; keep the table, "
            "which knows them now",
            feature,
            len(selection),
            read_bytes / 1e9,
            took_s,
        )
    return reduce(FeatureStats.merge, parts, FeatureStats.empty(selection.blocks.dims(feature)))


def _of_whole_rows(joined: Generation, feature: str, rows: Ints) -> tuple[FeatureStats, int]:
    """Return the statistics of some rows of a cache, and how many bytes were read for them."""
    whole, (opened, rows) = joined.stats(feature), joined.in_set(feature, rows)
    arrays, number = opened.arrays(feature), len(opened.index)  # all that `whole` is about
    if len(rows) == number:
        return whole, 0
    lengths = arrays.all_lengths
    rest = np.delete(np.arange(number), rows)
    read_bytes = 0
    codec = opened.manifest.features[feature]["codec"]
    if is_lossless(codec) and lengths[rest].sum() < lengths[rows].sum():
        others, read_bytes = _read(arrays, rest, np.zeros_like(rest), lengths[rest])
        left = whole.without(others)
        if left is not None:
            return left, read_bytes
    rows = np.sort(rows)  # about the order that they lie in
    stats, nbytes = _read(arrays, rows, np.zeros_like(rows), lengths[rows])
    return stats, nbytes + read_bytes


def _read(
    arrays: FeatureArrays, rows: Ints, starts: Ints, lengths: Ints
) -> tuple[FeatureStats, int]:
    """Read frames of rows; return their statistics, and how many bytes they have."""
    frame_bytes = arrays.dtype.itemsize * math.prod(arrays.dims)
    parts = [FeatureStats.empty(arrays.dims)]
    for some in pieces(lengths * frame_bytes, AT_ONCE_BYTES):
        parts.append(FeatureStats.of(cut_frames(arrays, rows[some], starts[some], lengths[some])))
    return reduce(FeatureStats.merge, parts), int(lengths.sum()) * frame_bytes


def cut_frames(arrays: FeatureArrays, rows: Ints, starts: Ints, lengths: Ints) -> Array:
    """Return the frames of rows one after the other, (frames, *dims), in the declared dtype."""
    sizes = lengths * (arrays.dtype.itemsize * math.prod(arrays.dims))
    for row in rows.tolist():
        arrays.check_length(row)
    ends = np.cumsum(sizes)
    data = np.empty(int(sizes.sum()), np.uint8)
    outs = [data[e - n : e] for e, n in zip(ends.tolist(), sizes.tolist(), strict=True)]
    arrays.read_many(rows, starts, lengths, outs)
    frames = data.view(arrays.dtype).reshape(int(lengths.sum()), *arrays.dims)
    return from_storage(frames, arrays.declared_dtype)


def pieces(sizes: Ints, at_once: int) -> Iterator[slice]:
    """Cut rows into pieces of about so many bytes, one row at least."""
    ends, begin = np.cumsum(sizes), 0
    while begin < len(sizes):
        done = int(ends[begin]) - int(sizes[begin])
        end = max(int(ends.searchsorted(done + at_once, side="right")), begin + 1)
        yield slice(begin, end)
        begin = end


# Rows that a view is made of: chosen by id or by number.


def chosen_rows(selection: Selection, keys: Iterable[str] | Iterable[int]) -> Ints:
    """Return the rows that ids or row numbers name, in their order, each once.

    Raises `KeyNotFoundError`, `RowError`, or `ConfigError` for an utterance that comes twice.
    """
    if not are_listed(keys):
        raise ConfigError(f"utterances are chosen by a list of ids or rows, not by {keys!r}")
    listed = keys if isinstance(keys, Sized) else list(keys)
    if hasattr(listed, "dtype"):
        rows = _numbers(selection, np.asarray(listed))
    else:
        given = list(cast(Iterable[str | int], listed))
        rows = rows_of_keys(selection, given) if given else np.zeros(0, np.int64)
    twice = np.flatnonzero(np.bincount(rows, minlength=1) > 1)
    if len(twice):
        raise ConfigError(
            f"utterance {selection.id(int(twice[0]))!r} is chosen twice; each can be in a view once"
        )
    return rows


def rows_of_keys(selection: Selection, keys: Sequence[int | str]) -> Ints:
    """Return the rows that ids or row numbers, also mixed, stand for."""
    numbers: Sequence[int] = cast(Sequence[int], keys)
    places: list[int] = []
    if set(map(type, keys)) != {int}:  # which those of samplers are
        places = [place for place, key in enumerate(keys) if isinstance(key, str)]
        if len(places) == len(keys):
            return selection.rows(cast(Sequence[str], keys))
        numbers = [0 if isinstance(key, str) else _whole(key) for key in keys]
    for end in (min(numbers), max(numbers)):
        selection.check(end)
    rows = np.array(numbers, np.int64)
    if places:
        rows[places] = selection.rows(cast(str, keys[place]) for place in places)
    return rows


def _whole(key: object) -> int:
    with suppress(TypeError):
        if not isinstance(key, bool):  # of a mask, which would choose rows 0 and 1
            return operator.index(cast(int, key))
    raise RowError(f"utterances are chosen by id or by row number, not by {key!r}")


def _numbers(
    selection: Selection, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> Ints:
    if array.shape == (0,):  # whatever its dtype is
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuUTO":
        hint = "; give np.flatnonzero of a mask" if array.dtype.kind == "b" else ""
        raise RowError(
            "utterances are chosen by ids or row numbers along one axis, not by "
            f"{array.dtype} of shape {array.shape}{hint}"
        )
    if array.dtype.kind in "UTO":
        return chosen_rows(selection, array.tolist())
    if len(array):
        rows_of_keys(selection, [int(array.min()), int(array.max())])
    return array.astype(np.int64)
