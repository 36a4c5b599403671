"""Annotations of a table: those of its caches, in the order of its rows."""

from __future__ import annotations

from functools import partial

from featcache.errors import ConfigError, KeyNotFoundError, nearest
from featcache.store.format.annotations import wider_kind
from featcache.store.reading.annotation import Annotation, BlockRows
from featcache.tables.block import Block, Member
from featcache.tables.selection import Selection


def annotation_names(selection: Selection) -> tuple[str, ...]:
    """Return the names of the annotations that any of the caches has."""
    caches = (cache for block in selection.blocks.caches for cache in block)
    return tuple(dict.fromkeys(name for cache in caches for name in cache.annotations))


def annotation_of(selection: Selection, name: str) -> Annotation:
    """Return an annotation of the rows of a selection; a segment has that of its recording.

    Of caches side by side, the first one that has it counts; rows of blocks without it have no
    value. Raises `KeyNotFoundError` for an annotation that no cache has, `ConfigError` for one of
    different kinds.
    """
    owners = [_owner(block, name) for block in selection.blocks.blocks]
    kind: str | None = None
    for member in owners:
        if member is not None:
            of_cache = member.cache.opened.annotation(name).kind
            wider = wider_kind(kind, of_cache)
            if wider is None:
                raise ConfigError(
                    f"annotation {name!r} is {of_cache} in {str(member.cache.path)!r} and {kind} "
                    "in a cache before"
                )
            kind = wider
    if kind is None:
        known = annotation_names(selection)
        raise KeyNotFoundError(f"no annotation {name!r}", hint=partial(nearest, name, known))
    pairs = zip(owners, selection.blocks.blocks, strict=True)
    blocks = [_rows_of(member, name, len(block)) for member, block in pairs]
    row_map = selection.row_map
    return Annotation(name, kind, blocks, None if row_map is None else row_map.below)


def _owner(block: Block, name: str) -> Member | None:
    having = (
        member for member in block.members if name in member.cache.opened.manifest.annotations
    )
    return next(having, None)


def _rows_of(member: Member | None, name: str, count: int) -> BlockRows:
    if member is None:
        return BlockRows(None, None, count)
    rows = None if member.rows is None else member.rows.below
    return BlockRows(member.cache.opened.annotation(name), rows, count)
