"""`join` and `concat`: tables side by side, and one after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.cache import Cache, CachePath
from featcache.tables import fit
from featcache.tables.block import Block, Blocks
from featcache.tables.joined_cuts import joined_cuts
from featcache.tables.member import Member
from featcache.tables.row_map import RowMap
from featcache.tables.same_ids import check_no_shared_id, paths_of, rows_by_id
from featcache.tables.selection import Selection
from featcache.tables.table import FeatureTable


def join(
    *sources: FeatureTable | Cache | CachePath, unlike: Literal["raise", "keep"] = "raise"
) -> FeatureTable:
    """Put the features of several caches or views of the same utterances side by side.

    The rows are in the order of the first source.

    Args:
        sources: caches, their paths, or tables.
        unlike: "raise" refuses caches whose fingerprints contradict each other: a key that two of
            them have, such as a sample rate or the weights of one module, must have one value; the
            stage and the declarations aside. "keep" takes them as they are.

    Raises `ConfigError` if the ids differ or a feature is in more than one of them, or if their
    fingerprints are unlike.
    """
    fit.check_unlike(unlike)
    tables = [FeatureTable.of(source) for source in sources]
    if not tables:
        raise ConfigError("join needs at least one cache")
    _refuse_cuts(tables)
    seen: dict[str, FeatureTable] = {}
    for number, table in enumerate(tables):
        for name in table.features:
            if name in seen:
                raise ConfigError(
                    f"feature {name!r} is in {paths_of(seen[name])} and in {paths_of(table)}"
                )
            seen[name] = table
        for earlier in tables[:number] if unlike == "raise" else ():
            fit.check_nothing_contradicts(earlier, table)
    if len(tables) == 1:
        return tables[0]
    every = np.arange(len(tables[0]))
    rows = [every, *(rows_by_id(tables[0], table) for table in tables[1:])]
    below = [table.selection.below(mine) for table, mine in zip(tables, rows, strict=True)]
    return _side_by_side([table.selection.blocks for table in tables], below)


def _side_by_side(sources: Sequence[Blocks], below: Sequence[Ints]) -> FeatureTable:
    """Join blocks: row r has the rows `below[source][r]` of each source."""
    numbers = [
        np.searchsorted(blocks.starts, rows, side="right") - 1
        for blocks, rows in zip(sources, below, strict=True)
    ]
    apart = np.zeros(len(below[0]), np.int64)  # a number for each combination of blocks
    for blocks, number in zip(sources, numbers, strict=True):
        apart = apart * len(blocks.blocks) + number
    made, places = [], []
    for combination in np.unique(apart) if len(apart) else [0]:
        here = np.flatnonzero(apart == combination)
        members: list[Member] = []
        for blocks, number, rows in zip(sources, numbers, below, strict=True):
            which = int(number[here[0]]) if len(here) else 0
            inner = rows[here] - blocks.starts[which]
            members += [_mapped(member, inner) for member in blocks.blocks[which].members]
        made.append(Block(members))
        places.append(here)
    # the rows of the first block come first, wherever they were
    row_map = None if len(made) == 1 else RowMap(np.argsort(np.concatenate(places)))
    return FeatureTable(Selection(Blocks(made), row_map))


def _mapped(member: Member, rows: Ints) -> Member:
    """Return a member of these rows of a member's block."""
    inner = member.inner(rows)
    every = len(member.opened.index)
    if len(inner) == every and bool((inner == np.arange(every)).all()):
        return Member(member.cache, member.opened)
    return Member(member.cache, member.opened, RowMap(inner))


def concat(
    *sources: FeatureTable | Cache | CachePath, unlike: Literal["raise", "keep"] = "raise"
) -> FeatureTable:
    """Put the utterances of several caches, or of tables, one after another, in this order.

    Where some are segments, all others are segments of all their frames.

    Args:
        sources: caches, their paths, or tables.
        unlike: "raise" refuses features that were made from something else than those of the first
            source; the stage and their storage aside. "keep" takes them as they are.

    Raises `ConfigError` if their features differ in name, dtype, time axis or shape of a frame, if
    they share an id, or if their fingerprints are unlike.
    """
    fit.check_unlike(unlike)
    tables = [FeatureTable.of(source) for source in sources]
    if not tables:
        raise ConfigError("concat needs at least one cache")
    for number, table in enumerate(tables):
        for earlier in tables[:number]:
            for pair in product(earlier.selection.blocks.blocks, table.selection.blocks.blocks):
                fit.check_same_features(*pair)
    check_no_shared_id(tables)
    # those within one table were compared, or were to be kept, when it was made
    for table in tables[1:] if unlike == "raise" else ():
        for first, other in product(
            tables[0].selection.blocks.blocks, table.selection.blocks.blocks
        ):
            fit.check_made_from_the_same(first, other)
    return _one_after_another(tables)


def _one_after_another(tables: Sequence[FeatureTable]) -> FeatureTable:
    """Concatenate tables; views of one cache share its block."""
    blocks: list[Block] = []
    numbers = [
        [_number(block, blocks) for block in table.selection.blocks.blocks] for table in tables
    ]
    made = Blocks(blocks)
    whole = all(table.selection.row_map is None for table in tables)
    if whole and len(blocks) == sum(map(len, numbers)):
        return FeatureTable(Selection(made))
    rows = []
    for table, mine in zip(tables, numbers, strict=True):
        below = table.selection.below(np.arange(len(table)))
        starts = np.array(table.selection.blocks.starts)
        which = np.searchsorted(starts, below, side="right") - 1
        rows.append(below - starts[which] + np.array(made.starts)[np.array(mine)][which])
    cuts = joined_cuts([table.selection for table in tables])
    return FeatureTable(Selection(made, RowMap(np.concatenate(rows)), cuts))


def _number(block: Block, blocks: list[Block]) -> int:
    """Return the place of a block in a list, to which it is added if it is not there."""
    for number, other in enumerate(blocks):
        if other.members == block.members:
            return number
    blocks.append(block)
    return len(blocks) - 1


def _refuse_cuts(tables: Sequence[FeatureTable]) -> None:
    for table in tables:
        if table.selection.cuts is not None:
            raise ConfigError(f"join takes no segments, as {table!r} has; join first, then cut")
