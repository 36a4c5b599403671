"""`join` and `concat`: tables side by side and one behind the other, if they fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Literal

import numpy as np

from featcache.errors import ConfigError
from featcache.format import (
    RULES,
    Column,
    Difference,
    Hashes,
    Strings,
    common_kind,
    differences,
    joined,
)
from featcache.interface import Ints
from featcache.reading import CachePath, FeatureArrays, Generation
from featcache.tables.blocks import Block, BlockMember, RowMap, TableBlocks
from featcache.tables.segments import Cuts
from featcache.tables.selection import Selection
from featcache.tables.table import FeatureTable

# Checks that caches fit together: features and fingerprints, not ids.

# keys of fingerprints that may differ: the features of all splits are made from the same, and
# what matters of the declarations is compared feature by feature
_APART = ("stage", "features", RULES)


def check_same_features(first: Block, other: Block) -> None:
    """Raise `ConfigError` if features differ in name, dtype, time axis or shape of a frame."""
    paths = " and ".join(repr(str(each.members[0].opened.cache_path)) for each in (first, other))
    if first.features.keys() != other.features.keys():
        both = [name for name in first.features if name in other.features]
        hint = f"; take those of both, of each: .select_features({both!r})" if both else ""
        raise ConfigError(
            f"caches {paths} have different features: {', '.join(first.features)} and "
            f"{', '.join(other.features)}{hint}"
        )
    for name in first.features:
        # the shape of a frame is not known of an empty cache
        either_empty = not all(len(block.features[name].opened.index) for block in (first, other))
        kinds = [_kind(block.arrays(name), either_empty) for block in (first, other)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"feature {name!r} of caches {paths} differs: {kinds[0]} and {kinds[1]}"
            )


def _kind(arrays: FeatureArrays, any_dims: bool) -> str:
    dims = ["..."] if any_dims else list(map(str, arrays.dims))
    return f"{arrays.declared_dtype} ({', '.join([*['frames'] * arrays.has_frames, *dims])})"


def check_unlike(unlike: object) -> None:
    """Raise `ConfigError` for a choice that there is not."""
    if unlike not in ("raise", "keep"):
        raise ConfigError(f"unlike is 'raise' or 'keep', not {unlike!r}")


def check_made_from_the_same(first: Block, other: Block) -> None:
    """Raise `ConfigError` if a feature of two blocks was made from something else in each."""
    pairs = {(first.features[name].opened, other.features[name].opened) for name in first.features}
    for one, two in pairs:
        _refuse(one, two, differences(_made_from(one), _made_from(two)))


def check_nothing_contradicts(first: FeatureTable, other: FeatureTable) -> None:
    """Raise `ConfigError` if a key that two fingerprints have has another value in each."""
    for mine, its in product(_generations(first), _generations(other)):
        one, two = _made_from(mine), _made_from(its)
        _refuse(mine, its, differences(_shared(one, two), _shared(two, one)))


def _generations(table: FeatureTable) -> Iterable[Generation]:
    return dict.fromkeys(table.selection.blocks.generations)


def _refuse(first: Generation, other: Generation, unlike: list[Difference]) -> None:
    if unlike:
        lines = "".join(f"\n  {line}" for line in unlike)
        paths = [repr(str(each.cache_path)) for each in (first, other)]
        raise ConfigError(
            f"the features of {paths[0]} and {paths[1]} were made from something else "
            f"('was': the first, 'now': the second):{lines}\n"
            "compute one of them again, or give unlike='keep' if they go together as they are"
        )


def _made_from(opened: Generation) -> dict[str, object]:
    made_from = opened.manifest.fingerprint
    return {key: value for key, value in made_from.items() if key not in _APART}


def _shared(content: object, other: object) -> object:
    """Return what `content` says under keys that `other` has, too."""
    if not isinstance(content, Mapping) or not isinstance(other, Mapping):
        return content
    return {key: _shared(content[key], other[key]) for key in content if key in other}


# The rows that two tables have of the same ids, found by the hashes of all ids at once.

_AT_ONCE = 1 << 16  # ids that are compared at once


def paths_of(table: FeatureTable) -> str:
    """Name the caches of a table, as a part of a message."""
    return " and ".join(repr(str(path)) for path in table.paths)


def rows_by_id(first: FeatureTable, other: FeatureTable) -> Ints:
    """Return the other table's row of each row of the first.

    Raises `ConfigError` if an id is in one of them alone.
    """
    if len(first) == len(other):
        rows = _rows_by_hash(first, other)
        if _same_ids(first, other, rows):
            return rows
    # some hash is that of several ids, or the ids differ
    found = other.find(list(first))
    if len(other) == len(found) and found.min(initial=0) >= 0:
        return found
    pairs = ((first, other, found), (other, first, first.find(list(other))))
    for one, two, missing in pairs:
        if missing.min(initial=0) < 0:
            raise ConfigError(
                f"joined caches need the same ids, but {one.id(int(missing.argmin()))!r} is in "
                f"{paths_of(one)} ({len(one)} utterances) and not in {paths_of(two)} ({len(two)})"
            )
    return found


def check_no_shared_id(tables: Sequence[FeatureTable]) -> None:
    """Raise `ConfigError` if an id is in two of several tables."""
    ordered = [_sorted_hashes(table) for table in tables] if len(tables) > 1 else []
    for one, two in combinations(range(len(ordered)), 2):
        few, many = sorted((one, two), key=lambda number: len(tables[number]))
        if not len(ordered[few]):
            continue
        places = np.minimum(ordered[many].searchsorted(ordered[few]), len(ordered[many]) - 1)
        if (ordered[many][places] == ordered[few]).any():
            _refuse_shared(tables[one], tables[two])


def _refuse_shared(first: FeatureTable, other: FeatureTable) -> None:
    shared = np.flatnonzero(np.isin(first.selection.hashes(), other.selection.hashes()))
    ids = [first.id(row) for row in shared.tolist()]
    for id, row in zip(ids, other.find(ids).tolist(), strict=True):
        if row >= 0:
            raise ConfigError(
                f"utterance {id!r} is in {paths_of(first)} and in {paths_of(other)}, and an id "
                "names one utterance of a table; leave it out of one of them, with select or "
                "filter. Versions of the same utterances (clean, noisy) are features of one cache, "
                "'fbank' and 'fbank_noisy', of which FeatureDataset(variants=) draws, or are "
                "stored under ids of their own"
            )


def _sorted_hashes(table: FeatureTable) -> Hashes:
    blocks = table.selection.blocks.blocks
    if table.selection.row_map is None and len(blocks) == 1 and blocks[0].whole:
        return blocks[0].members[0].opened.index.hashes
    return np.sort(table.selection.hashes())


def _rows_by_hash(first: FeatureTable, other: FeatureTable) -> Ints:
    """Return the row of each hash in another table, right where no two ids have one hash."""
    if not len(first):
        return np.zeros(0, np.int64)
    hashes = other.selection.hashes()
    order = np.argsort(hashes, kind="stable")
    places = np.minimum(hashes[order].searchsorted(first.selection.hashes()), len(order) - 1)
    return order[places]


def _same_ids(first: FeatureTable, other: FeatureTable, rows: Ints) -> bool:
    """Whether each row of the first has the id of the row that is named beside it."""
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        mine = first.selection.packed_ids(np.arange(start, start + len(some)))
        others = other.selection.packed_ids(some)
        if not (np.array_equal(mine.ends, others.ends) and np.array_equal(mine.data, others.data)):
            return False
    return True


# Segments of several tables one after another: their ids, frames and annotations as columns.


def joined_cuts(selections: Sequence[Selection]) -> Cuts | None:
    """Return the cuts of the rows of all, one selection after another; None if none has any.

    A whole utterance among segments is one with all its frames, and with its annotations.
    """
    cuts = [each.cuts for each in selections if each.cuts is not None]
    if not cuts:
        return None
    ids = [each.packed_ids(np.arange(len(each))) for each in selections]
    return Cuts.of(
        Strings.joined(ids),
        {
            name: _joined_spans(selections, name)
            for name in dict.fromkeys(name for each in cuts for name in each.spans)
            if name in selections[0].blocks.features
        },
        {
            name: _joined_annotation(selections, name)
            for name in dict.fromkeys(name for each in cuts for name in each.own)
        },
    )


def _joined_spans(selections: Sequence[Selection], feature: str) -> tuple[Ints, Ints]:
    starts, lengths = [], []
    for each in selections:
        span = each.span(feature, np.arange(len(each)))
        starts.append(np.zeros(len(each), np.int64) if span is None else span[0])
        lengths.append(each.lengths(feature) if span is None else span[1])
    return np.concatenate(starts), np.concatenate(lengths)


def _joined_annotation(selections: Sequence[Selection], name: str) -> Column:
    having = {
        number: each.annotation(name)
        for number, each in enumerate(selections)
        if name in each.annotations
    }
    kind = str(common_kind(name, (found.kind for found in having.values()), "table"))
    columns = [
        having[number] if number in having else Column.empty(len(each), kind)
        for number, each in enumerate(selections)
    ]
    return joined(columns, kind, name)


# `join` and `concat`: tables side by side, and one after another.


def join(
    *sources: FeatureTable | CachePath, unlike: Literal["raise", "keep"] = "raise"
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
    check_unlike(unlike)
    tables = _unplanned(sources)
    if not tables:
        raise ConfigError("join needs at least one cache")
    seen: dict[str, FeatureTable] = {}
    for number, table in enumerate(tables):
        if table.selection.cuts is not None:
            raise ConfigError(f"join takes no segments, as {table!r} has; join first, then cut")
        for name in table.features:
            if name in seen:
                raise ConfigError(
                    f"feature {name!r} is in {paths_of(seen[name])} and in {paths_of(table)}; "
                    "join puts other features of the same utterances side by side: leave one of "
                    "them out, with select_features, or use concat for other utterances"
                )
            seen[name] = table
        for earlier in tables[:number] if unlike == "raise" else ():
            check_nothing_contradicts(earlier, table)
    if len(tables) == 1:
        return tables[0]
    every = np.arange(len(tables[0]))
    rows = [every, *(rows_by_id(tables[0], table) for table in tables[1:])]
    below = [table.selection.below(mine) for table, mine in zip(tables, rows, strict=True)]
    return _side_by_side([table.selection.blocks for table in tables], below)


def _unplanned(sources: Iterable[FeatureTable | CachePath]) -> list[FeatureTable]:
    tables = [FeatureTable.of(source) for source in sources]
    for table in tables:
        table.selection.refuse_mix()
    return tables


def _side_by_side(sources: Sequence[TableBlocks], below: Sequence[Ints]) -> FeatureTable:
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
        members: list[BlockMember] = []
        for blocks, number, rows in zip(sources, numbers, below, strict=True):
            which = int(number[here[0]]) if len(here) else 0
            inner = rows[here] - blocks.starts[which]
            members += [_mapped(member, inner) for member in blocks.blocks[which].members]
        made.append(Block(members))
        places.append(here)
    # the rows of the first block come first, wherever they were
    row_map = None if len(made) == 1 else RowMap(np.argsort(np.concatenate(places)))
    return FeatureTable(Selection(TableBlocks(made), row_map))


def _mapped(member: BlockMember, rows: Ints) -> BlockMember:
    """Return a member of these rows of a member's block."""
    inner = member.inner(rows)
    every = len(member.opened.index)
    if len(inner) == every and bool((inner == np.arange(every)).all()):
        return BlockMember(member.opened, None, member.names)
    return BlockMember(member.opened, RowMap(inner), member.names)


def concat(
    *sources: FeatureTable | CachePath, unlike: Literal["raise", "keep"] = "raise"
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
    check_unlike(unlike)
    tables = _unplanned(sources)
    if not tables:
        raise ConfigError("concat needs at least one cache")
    for number, table in enumerate(tables):
        for earlier in tables[:number]:
            for pair in product(earlier.selection.blocks.blocks, table.selection.blocks.blocks):
                check_same_features(*pair)
    check_no_shared_id(tables)
    # those within one table were compared, or were to be kept, when it was made
    for table in tables[1:] if unlike == "raise" else ():
        for first, other in product(
            tables[0].selection.blocks.blocks, table.selection.blocks.blocks
        ):
            check_made_from_the_same(first, other)
    return _one_after_another(tables)


def _one_after_another(tables: Sequence[FeatureTable]) -> FeatureTable:
    """Concatenate tables; views of one cache share its block."""
    blocks: list[Block] = []
    numbers = [
        [_number(block, blocks) for block in table.selection.blocks.blocks] for table in tables
    ]
    made = TableBlocks(blocks)
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
