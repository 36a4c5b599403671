"""A batch in pieces that are handed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from featcache.store.format.annotations import NONE, Values
from featcache.store.format.stamps import UNKNOWN, Stamps
from featcache.store.writing.open_part import OpenPart
from featcache.store.writing.packed_batch import PIECE_ROWS, Packed
from featcache.store.writing.utterance_batch import UtteranceBatch


def cut_batch(
    part: OpenPart,
    ids: Sequence[str],
    packed: Mapping[str, Packed],
    stamps: Mapping[str, Stamps],
    annotations: Mapping[str, Values],
) -> list[UtteranceBatch]:
    """Return the utterances of a batch, `PIECE_ROWS` of them together.

    Raises `FeatureError` for one that a format or a lossy codec of the part cannot hold.
    """
    if part.checks:
        _check(part, ids, packed)
    pieces = []
    for number, start in enumerate(range(0, len(ids), PIECE_ROWS)):
        stop = min(start + PIECE_ROWS, len(ids))
        piece = UtteranceBatch()
        piece.ids = list(ids[start:stop])
        piece.arrays = part.prepare_piece(ids, packed, start, stop)
        piece.stamps = [stamps.get(id, UNKNOWN) for id in piece.ids]
        piece.annotations = [annotations.get(id, NONE) for id in piece.ids]
        piece.add_stats(
            {name: each.stats[number] for name, each in packed.items() if each.stats},
            sum(each.rows(start, stop).nbytes for each in packed.values()),
        )
        pieces.append(piece)
    return pieces


def _check(part: OpenPart, ids: Sequence[str], packed: Mapping[str, Packed]) -> None:
    row_bytes = {n: each.array.nbytes // max(len(each.array), 1) for n, each in packed.items()}
    lengths = zip(*(each.lengths for each in packed.values()), strict=True)
    for id, rows in zip(ids, lengths, strict=True):
        sizes = zip(packed, rows, strict=True)
        part.check(id, {name: (length, length * row_bytes[name]) for name, length in sizes})
