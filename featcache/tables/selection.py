"""`Selection`: rows of blocks in some order, whole or cut; a table without its user's words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from featcache.errors import KeyNotFoundError, RowError, StaleCacheError
from featcache.interface import Bytes, Ints
from featcache.store.cache import Cache
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.files import digest
from featcache.store.format.index import Hashes
from featcache.store.format.strings import Strings
from featcache.store.reading.annotation import Annotation
from featcache.store.reading.generation import read_row, window
from featcache.store.reading.padded import PaddedFeatures
from featcache.tables.block import Block, Blocks
from featcache.tables.cuts import Cuts
from featcache.tables.member import Member
from featcache.tables.recording_times import require_times
from featcache.tables.row_map import RowMap
from featcache.tables.segments import Segments


class Selection:
    """Numbered utterances of blocks.

    One made of another has one row map over the same blocks, never a chain of them.

    Attributes:
        blocks: the caches.
        row_map: the row in the blocks of each row here; None: all, in their order.
        cuts: ids and frames of the rows, where they are segments; None: whole utterances.
    """

    def __init__(
        self, blocks: Blocks, row_map: RowMap | None = None, cuts: Cuts | None = None
    ) -> None:
        self.blocks = blocks
        self.row_map = row_map
        self.cuts = cuts

    def __len__(self) -> int:
        return len(self.blocks) if self.row_map is None else len(self.row_map)

    def __iter__(self) -> Iterator[str]:
        if self.row_map is None and len(self.blocks.blocks) == 1 and self.blocks.blocks[0].whole:
            return iter(self.blocks.blocks[0].members[0].opened.index)
        return map(self.id, range(len(self)))

    @property
    def said(self) -> str:
        """The number of rows in words: of how many they are, and whether they are segments."""
        cut = "" if self.cuts is None else " segments"
        of = "" if self.row_map is None else f"{cut} of {len(self.blocks)}"
        return f"{len(self)}{of} utterances"

    def cut(self, segments: Segments) -> Selection:
        """Return the selection of segments of the rows, which are whole utterances."""
        cuts = Cuts.of(segments.ids, segments.spans, segments.annotations)
        return Selection(self.blocks, RowMap(self.below(segments.rows)), cuts)

    def take(self, rows: Ints) -> Selection:
        """Return the selection of some rows, of which none may come twice, in their order."""
        cuts = None if self.cuts is None else self.cuts.take(rows)
        return Selection(self.blocks, RowMap(self.below(rows)), cuts)

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
        return tuple(dict.fromkeys([*self.blocks.annotations, *own]))

    def annotation(self, name: str) -> Annotation:
        """Return an annotation of all rows; of segments their own, else that of the recordings."""
        if self.cuts is not None and name in self.cuts.own:
            return self.cuts.annotation(name)
        rows = None if self.row_map is None else self.row_map.below
        return self.blocks.annotation(name, rows)

    def lengths(self, feature: str) -> Ints:
        """Return the frames of all rows, read-only."""
        self.blocks.require(feature)
        if self.cuts is not None and self._is_cut(feature):
            return self.cuts.lengths(feature)
        column = self.blocks.lengths(feature)
        lengths = column.view() if self.row_map is None else column[self.row_map.below]
        lengths.flags.writeable = False
        return lengths

    def checked_lengths(self, feature: str, rows: Ints) -> Ints:
        """Return the frames of some rows, checked against what is stored."""
        lengths = self.blocks.checked_lengths(feature, self.below(rows))
        span = self.span(feature, rows)
        return lengths if span is None else span[1]

    def read(
        self, row: int, feature: str, start: int | None, stop: int | None, *, copy: bool
    ) -> NDArray[np.generic]:
        """Return the frames from `start` to before `stop` of a row, as `Cache.read` does."""
        block, inner = self.place(row)
        member = block.features[feature]
        arrays = member.opened.arrays(feature)
        span = self.span(feature, np.array([row])) if self.cuts is not None else None
        if span is not None:
            first, length = int(span[0][0]), int(span[1][0])
            begin, end = window(self.id(row), feature, length, start, stop)
            start, stop = first + begin, first + end
        below = inner if member.rows is None else int(member.rows.below[inner])
        stored = read_row(arrays, below, block.id(inner), start, stop, copy=copy)
        return from_storage(stored, arrays.declared_dtype, writable=copy)

    def read_into(self, rows: Ints, feature: str, starts: Ints, lengths: Ints, out: Bytes) -> None:
        """Read frames of each row into the bytes of a row of `out`; zeros fill the rest."""
        span = self.span(feature, rows)
        starts = starts if span is None else starts + span[0]
        for arrays, places, inner in self.blocks.by_block(feature, self.below(rows)):
            mine = out if isinstance(places, slice) else [out[place] for place in places]
            arrays.read_many(inner, starts[places], lengths[places], mine)
        itemsize = self.blocks.of_feature(feature)[0].dtype.itemsize
        frame_bytes = itemsize * math.prod(self.blocks.dims(feature))
        for row, nbytes in zip(out, (lengths * frame_bytes).tolist(), strict=True):
            row[nbytes:] = 0

    def not_found(self, id: str) -> KeyNotFoundError:
        """Return the error for an id that is not there."""
        paths = " or ".join(dict.fromkeys(repr(str(block[0].path)) for block in self.blocks.caches))
        first = self.blocks.blocks[0]
        if self.row_map is None:
            return KeyNotFoundError(
                f"no utterance {id!r} in {paths}", hint=partial(first.nearest, id)
            )
        blocks = self.blocks.blocks
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
        out = np.empty((len(rows), math.prod(shape) * arrays.dtype.itemsize), np.uint8)
        self.read_into(rows, feature, np.zeros_like(lengths), lengths, out)
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
        """Tell whether rows that are segments have some frames of a feature; else all of it."""
        if self.cuts is not None and feature in self.cuts.spans:
            return True
        require_times(self.blocks, feature)
        return False

    @cached_property
    def digest(self) -> str:
        """A digest of the ids below in their order, and of what was made of them."""
        made = [each.digest for each in (self.row_map, self.cuts) if each is not None]
        below = self.blocks.digest
        return digest("".join([below, *made]).encode()) if made else below

    def __reduce__(self) -> tuple[object, ...]:
        blocks = [
            [(each.as_opened, each.rows) for each in block.members] for block in self.blocks.blocks
        ]
        generations = [cache.generation for block in blocks for cache, _ in block]
        return _unpickled, (blocks, generations, self.row_map, self.cuts)


def _unpickled(
    blocks: Sequence[Sequence[tuple[Cache, RowMap | None]]],
    generations: list[int],
    row_map: RowMap | None,
    cuts: Cuts | None,
) -> Selection:
    caches = [cache for block in blocks for cache, _ in block]
    for cache, number in zip(caches, generations, strict=True):
        if cache.generation != number:
            raise StaleCacheError(
                f"cache {str(cache.path)!r} was written on since it was opened (generation "
                f"{number}, now {cache.generation}), and its rows have other numbers now; open it "
                "again"
            )
    made = [Block([Member(cache, cache.opened, rows) for cache, rows in block]) for block in blocks]
    return Selection(Blocks(made), row_map, cuts)
