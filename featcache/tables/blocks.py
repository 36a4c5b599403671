"""Blocks of a table: rows of one cache, or of caches joined by id, and the arrays that map them.

Arrays of rows are mapped or shared with other processes, never copied into each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache._cached import cached_property
from featcache.declaration import FrameTimes
from featcache.errors import ConfigError, KeyNotFoundError, StaleCacheError, nearest
from featcache.format import Column, Hashes, SharedArray, Strings, common_kind, digest, wider_kind
from featcache.interface import Ints
from featcache.reading import Expectation, FeatureArrays, Generation, OpenSettings, open_generation

# `RowMap`: the rows that something has of what lies below it, both ways.


class RowMap:
    """Row numbers of what lies below: row r here is row `below[r]` there. None comes twice.

    But in a mix, where an utterance has a row for each time that an epoch can take it.

    Args:
        below: the numbers.
        back: what `find` needs, where it is made.
        made: what tells these numbers from others, where that is less than the numbers.
        ascends: whether none is below the one before, where that is known.
    """

    def __init__(
        self,
        below: Ints | SharedArray[np.int64],
        back: SharedArray[np.int32] | None = None,
        made: str | None = None,
        ascends: bool | None = None,
    ) -> None:
        self._shared = below if isinstance(below, SharedArray) else SharedArray(below)
        self._back = back
        self._made = made
        self._known_to_ascend = ascends

    @property
    def below(self) -> Ints:
        """The row below of each row, int64, read-only."""
        return self._shared.values

    @property
    def digest(self) -> str:
        """A digest of the numbers."""
        return self._shared.digest if self._made is None else digest(self._made.encode())

    def __len__(self) -> int:
        return len(self._shared)

    @cached_property
    def _ascends(self) -> bool:
        if self._known_to_ascend is not None:
            return self._known_to_ascend
        return bool((self.below[1:] >= self.below[:-1]).all())

    def share(self) -> None:
        """Make now what `find` needs, for processes that are forked or spawned later to share."""
        if self._back is None and not self._ascends:
            back = np.full(int(self.below.max()) + 1, -1, np.int32)
            back[self.below] = np.arange(len(self), dtype=np.int32)
            self._back = SharedArray(back)

    def find(self, below: Ints) -> Ints:
        """Return a row here of rows below, -1 where there is none, and of -1."""
        if not len(self):
            return np.full(len(below), -1, np.int64)
        self.share()
        if self._back is not None:
            # in few arrays: each batch of a worker goes this way
            found = self._back.values.take(below, mode="clip").astype(np.int64)
            found[(below < 0) | (below >= len(self._back))] = -1
            return found
        places = self.below.searchsorted(below)
        np.minimum(places, len(self) - 1, out=places)
        places[self.below[places] != below] = -1
        return places

    def __reduce__(self) -> tuple[object, ...]:
        return RowMap, (self._shared, self._back, self._made, self._known_to_ascend)


# `BlockMember`: a cache of a block, with the rows of it that count.


class BlockMember(NamedTuple):
    """A generation of a cache, and the rows of it in a block's order; None: all, in its own.

    `names` are the features of it that count; None: all. A pickle opens the same generation again,
    or the current one where that is gone: where rows have other numbers then, a `StaleCacheError`
    says so.
    """

    opened: Generation
    rows: RowMap | None = None
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.opened.index) if self.rows is None else len(self.rows)

    def __reduce__(self) -> tuple[object, ...]:
        opened = self.opened
        how = (opened.cache_path, Expectation.of_opened(opened), OpenSettings.of(opened))
        return _unpickled_member, (*how, opened.manifest.generation, self.rows, self.names)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(self.opened.features) if self.names is None else self.names

    def with_features(self, names: Container[str]) -> BlockMember:
        """Return a member of the same rows without the features that `names` leaves out."""
        kept = tuple(name for name in self.features if name in names)
        return self if kept == self.features else BlockMember(self.opened, self.rows, kept)

    def inner(self, rows: Ints) -> Ints:
        """Return the cache's rows of rows of the block."""
        return rows if self.rows is None else self.rows.below[rows]


def _unpickled_member(
    path: Path,
    expectation: Expectation,
    settings: OpenSettings,
    number: int,
    rows: RowMap | None,
    names: tuple[str, ...] | None,
) -> BlockMember:
    opened = open_generation(path, expectation, settings)
    if opened.manifest.generation != number:
        raise StaleCacheError(
            f"cache {str(path)!r} was written on since it was opened (generation {number}, now "
            f"{opened.manifest.generation}), and its rows have other numbers now; open it again"
        )
    return BlockMember(opened, rows, names)


# `Block` and `TableBlocks`: caches side by side, and such blocks one after another.
#
# Here row numbers become those of caches. Views and segments lie above, in `FeatureTable`.


class Block:
    """Caches side by side: different features of the same utterances.

    Attributes:
        members: the caches; the first one names the rows.
        features: the member that has each feature, by name.
    """

    def __init__(self, members: Sequence[BlockMember]) -> None:
        self.members = tuple(members)
        if len({len(member) for member in members}) != 1:
            raise ConfigError(
                f"members of a block have {[len(member) for member in members]} rows, not one "
                "number of them"
            )
        self.features = {name: member for member in members for name in member.features}
        self._index = self.members[0].opened.index

    def __len__(self) -> int:
        return len(self.members[0])

    @property
    def whole(self) -> bool:
        """Whether each member is a whole cache in its order, with all features."""
        return all(member.rows is None and member.names is None for member in self.members)

    def arrays(self, feature: str) -> FeatureArrays:
        """Return the arrays of a feature, whose rows `inner` gives."""
        return self.features[feature].opened.arrays(feature)

    def lengths(self, feature: str) -> Ints:
        """Return the frames of all rows; the mapped column itself of a whole cache."""
        member, column = self.features[feature], self.arrays(feature).all_lengths
        return column if member.rows is None else column[member.rows.below]

    def lengths_of(self, feature: str, rows: Ints) -> Ints:
        """Return the frames of some rows."""
        return self.arrays(feature).all_lengths[self.features[feature].inner(rows)]

    @property
    def annotations(self) -> dict[str, BlockMember]:
        """The first member that has each annotation, by name."""
        return {
            name: member
            for member in self.members[::-1]
            for name in member.opened.manifest.annotations
        }

    def annotation(self, name: str) -> Column | None:
        """Return an annotation of all rows; None for one that is not there."""
        member = self.annotations.get(name)
        if member is None:
            return None
        column = member.opened.annotation(name)
        return column if member.rows is None else column.view(member.rows.below)

    def id(self, row: int) -> str:
        """Return the id of a row."""
        rows = self.members[0].rows
        return self._index.id(row if rows is None else int(rows.below[row]))

    def ids_of(self, rows: Ints) -> list[str]:
        """Return the ids of some rows."""
        return self._index.ids.some(self.members[0].inner(rows).tolist())

    def packed_ids(self, rows: Ints) -> Strings:
        """Return the ids of some rows, without an object of each."""
        return self._index.ids.take(self.members[0].inner(rows))

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids, -1 where there is none."""
        member = self.members[0]
        found = self._index.find_many(ids)
        return found if member.rows is None else member.rows.find(found)

    def nearest(self, id: str) -> str:
        """Return which ids are close to one that is not there."""
        return self._index.nearest(id)

    def hashes(self) -> Hashes:
        """Return the hash of each row's id, in the order of the rows."""
        of_rows, rows = self._index.hashes_of_rows(), self.members[0].rows
        return of_rows if rows is None else of_rows[rows.below]

    @cached_property
    def digest(self) -> str:
        """A digest of the ids in their order."""
        ids, rows = digest(self._index.hashes.data), self.members[0].rows
        return ids if rows is None else digest((ids + rows.digest).encode())


class TableBlocks:
    """Blocks one after another, with rows counted through; all have the same features.

    Attributes:
        blocks: the blocks.
        starts: the first row of each, and the number of all rows.
        features: the names of the features.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)
        self.starts: list[int] = [0, *accumulate(map(len, self.blocks))]
        self.features = tuple(self.blocks[0].features)

    def __len__(self) -> int:
        return self.starts[-1]

    def with_features(self, names: Container[str]) -> TableBlocks:
        """Return the same rows without the features that `names` leaves out."""
        return TableBlocks(
            [
                Block([member.with_features(names) for member in block.members])
                for block in self.blocks
            ]
        )

    @property
    def generations(self) -> list[Generation]:
        """The generations that are read, block by block."""
        return [member.opened for block in self.blocks for member in block.members]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The cache directories, each once."""
        return tuple(dict.fromkeys(opened.cache_path for opened in self.generations))

    def require(self, feature: str) -> None:
        """Raise `KeyNotFoundError` for an unknown feature, `StaleCacheError` for a stale one."""
        if not isinstance(feature, str) or feature not in self.features:
            if len(generations := self.generations) == 1:
                generations[0].arrays(feature)  # which raises an error that names the cache
            self.refuse_stale(feature)
            raise KeyNotFoundError(
                f"no feature {feature!r}",
                hint=lambda: nearest(feature, self.features) + self.written_since(),
            )

    def written_since(self) -> str:
        """Return the end of a message where a cache below was written on since it was opened."""
        advice = "open it again, and make tables of it anew"
        return next(filter(None, (each.written_since(advice) for each in self.generations)), "")

    def refuse_stale(self, name: str) -> None:
        """Raise `StaleCacheError` for a feature that was made from something else."""
        for opened in self.generations if isinstance(name, str) else ():
            if name in opened.refused:
                opened.arrays(name)  # which says why it is not there

    def of_feature(self, feature: str) -> list[FeatureArrays]:
        """Return the arrays of a feature in each block."""
        self.require(feature)
        return [block.arrays(feature) for block in self.blocks]

    def has_frames(self, feature: str) -> bool:
        """Whether a feature has a time axis."""
        return self.of_feature(feature)[0].has_frames

    def frame_times(self, feature: str) -> FrameTimes | None:
        """Return the times of a feature's frames; None where its declaration does not say.

        Raises `ConfigError` where the declarations of two blocks say otherwise.
        """
        first, *others = self.of_feature(feature)
        for number, other in enumerate(others, 1):
            if other.times != first.times:
                paths = [self.blocks[n].features[feature].opened.cache_path for n in (0, number)]
                said = [_said(each.times) for each in (first, other)]
                raise ConfigError(
                    f"feature {feature!r} is declared with {said[0]} in {str(paths[0])!r} and with "
                    f"{said[1]} in {str(paths[1])!r}, so they cannot be cut in seconds together"
                )
        return first.times

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of one frame, or of the whole array without a time axis."""
        found = self.of_feature(feature)
        filled = [each.dims for each in found if len(each.lengths)]  # others may not know them
        return next(iter(filled or filter(None, (each.dims for each in found))), ())

    def lengths(self, feature: str) -> Ints:
        """Return the frames of all rows; those of one whole cache are its mapped column."""
        self.require(feature)
        columns = [block.lengths(feature) for block in self.blocks]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def checked_lengths(self, feature: str, rows: Ints) -> Ints:
        """Return the frames of some rows, checked against what is stored of the longest."""
        self.require(feature)
        lengths = np.empty(len(rows), np.int64)
        for arrays, places, inner in self.by_block(feature, rows) if len(rows) else ():
            lengths[places] = found = arrays.lengths[inner]
            for extreme in (found.argmin(), found.argmax()):
                arrays.check_length(int(inner[extreme]))
        return lengths

    def place(self, row: int) -> tuple[Block, int]:
        """Return the block of a row, and its row there."""
        number = bisect_right(self.starts, row) - 1
        return self.blocks[number], row - self.starts[number]

    @property
    def annotations(self) -> tuple[str, ...]:
        """Names of the annotations of any cache."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.annotations))

    def annotation_kinds(self) -> dict[str, str]:
        """Return the kind of each annotation by name, as the manifests have it."""
        kinds: dict[str, str] = {}
        for block in self.blocks:
            for name, member in block.annotations.items():
                kind = member.opened.manifest.annotations[name].kind
                kinds[name] = wider_kind(kinds.get(name), kind) or kind
        return kinds

    def annotation(self, name: str, rows: Ints | None) -> Column:
        """Return an annotation of some rows, or of all.

        Raises `KeyNotFoundError` for an unknown one, `ConfigError` where the blocks have values
        that are not of one kind.
        """
        columns = [block.annotation(name) for block in self.blocks]
        there = (column.kind for column in columns if column is not None)
        kind = common_kind(name, there, "cache")
        if kind is None:
            if len(generations := self.generations) == 1:
                generations[0].annotation(name)  # which raises an error that names the cache
            raise KeyNotFoundError(
                f"no annotation {name!r}",
                hint=lambda: nearest(name, self.annotations) + self.written_since(),
            )
        pieces = [
            Column.empty(len(block), kind) if column is None else column
            for block, column in zip(self.blocks, columns, strict=True)
        ]
        column = Column.after(pieces, kind, name)
        return column if rows is None else column.view(rows)

    def packed_ids(self, rows: Ints) -> Strings:
        """Return the ids of some rows, without an object of each."""
        pieces = [(places, block.packed_ids(inner)) for block, places, inner in self.split(rows)]
        if len(pieces) == 1:
            return pieces[0][1]
        order = np.concatenate([np.arange(len(rows))[places] for places, _ in pieces] or [rows])
        together = Strings.joined([strings for _, strings in pieces])
        return together.take(np.argsort(order))

    def split(self, rows: Ints) -> Iterator[tuple[Block, Ints | slice, Ints]]:
        """Give, for each block that has some of the rows: block, places in `rows`, rows in it."""
        if len(self.blocks) == 1:
            yield self.blocks[0], slice(None), rows
            return
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        for number in np.flatnonzero(np.bincount(numbers)).tolist():
            places = np.flatnonzero(numbers == number)
            yield self.blocks[number], places, rows[places] - self.starts[number]

    def by_block(
        self, feature: str, rows: Ints
    ) -> Iterator[tuple[FeatureArrays, Ints | slice, Ints]]:
        """Give, for each block that has some of the rows: arrays, places in `rows`, their rows."""
        for block, places, inner in self.split(rows):
            yield block.arrays(feature), places, block.features[feature].inner(inner)

    @cached_property
    def digest(self) -> str:
        """A digest of the ids in their order."""
        return digest("".join(block.digest for block in self.blocks).encode())


def _said(times: FrameTimes | None) -> str:
    return "no frame_s" if times is None else f"frame_s {times.frame_s}, offset_s {times.offset_s}"
