"""Segments of several tables one after another: their ids, frames and annotations as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.format.annotation_columns import Column, joined
from featcache.store.format.annotations import wider_kind
from featcache.store.format.strings import Strings, joined_ends
from featcache.tables.cuts import Cuts
from featcache.tables.selection import Selection


def joined_cuts(selections: Sequence[Selection]) -> Cuts | None:
    """Return the cuts of the rows of all, one selection after another; None if none has any.

    A whole utterance among segments is one with all its frames, and with its annotations.
    """
    cuts = [each.cuts for each in selections if each.cuts is not None]
    if not cuts:
        return None
    ids = [each.packed_ids(np.arange(len(each))) for each in selections]
    return Cuts.of(
        Strings(
            joined_ends(each.ends for each in ids), np.concatenate([each.data for each in ids])
        ),
        {
            name: _joined_spans(selections, name)
            for name in dict.fromkeys(name for each in cuts for name in each.spans)
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
    kind: str | None = None
    for found in having.values():
        wider = wider_kind(kind, found.kind)
        if wider is None:
            raise ConfigError(
                f"annotation {name!r} is {kind} in a table and {found.kind} in another"
            )
        kind = wider
    columns = [
        having[number].column() if number in having else Column.missing(len(each), str(kind))
        for number, each in enumerate(selections)
    ]
    return joined(columns, str(kind))
