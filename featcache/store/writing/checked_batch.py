"""`CheckedBatch`: a batch of utterances that can be stored, in pieces that are handed over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from featcache.container_files import EncodedArrays
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import FeatureError, nearest
from featcache.store.format.annotations import NONE, Values
from featcache.store.format.ids import check_id
from featcache.store.format.part import checksums
from featcache.store.format.stamps import UNKNOWN, Stamps
from featcache.store.writing.casts import ArrayLike, check_features
from featcache.store.writing.copy_memory import CopyMemory
from featcache.store.writing.open_part import OpenPart
from featcache.store.writing.packed_batch import (
    PIECE_ROWS,
    BatchLayout,
    LengthsByFeature,
    Packed,
    lengths_of,
    pack,
)
from featcache.store.writing.utterance_batch import UtteranceBatch


@dataclass(frozen=True)
class CheckedBatch:
    """Utterances that were checked, cast and copied together."""

    ids: list[str]
    features: Mapping[str, Packed]
    stamps: Mapping[str, Stamps]
    annotations: Mapping[str, Values]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, before any codec."""
        return sum(each.array.nbytes for each in self.features.values())

    def dims(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of a frame, by feature."""
        return {name: each.array.shape[1:] for name, each in self.features.items()}

    def pieces(self, part: OpenPart) -> list[UtteranceBatch]:
        """Return the utterances, `PIECE_ROWS` of them together.

        Raises `FeatureError` for one that a format or a lossy codec of the part cannot hold.
        """
        if part.checks:
            self._check(part)
        pieces = []
        for number, start in enumerate(range(0, len(self.ids), PIECE_ROWS)):
            stop = min(start + PIECE_ROWS, len(self.ids))
            piece = UtteranceBatch()
            piece.ids = self.ids[start:stop]
            piece.arrays = part.prepare_piece(self.ids, self.features, start, stop)
            piece.checksums = {
                name: checksums(each)
                for name, each in piece.arrays.items()
                if isinstance(each, EncodedArrays)
            }
            piece.stamps = [self.stamps.get(id, UNKNOWN) for id in piece.ids]
            piece.annotations = [self.annotations.get(id, NONE) for id in piece.ids]
            piece.add_stats(
                {name: each.stats[number] for name, each in self.features.items() if each.stats},
                sum(each.rows(start, stop).nbytes for each in self.features.values()),
            )
            pieces.append(piece)
        return pieces

    def _check(self, part: OpenPart) -> None:
        row_bytes = {
            name: each.array.nbytes // max(len(each.array), 1)
            for name, each in self.features.items()
        }
        lengths = zip(*(each.lengths for each in self.features.values()), strict=True)
        for id, rows in zip(self.ids, lengths, strict=True):
            sizes = zip(row_bytes.items(), rows, strict=True)
            part.check(id, {name: (length, length * row) for (name, row), length in sizes})


def check_batch(
    ids: Sequence[str],
    arrays: Mapping[str, ArrayLike],
    lengths: LengthsByFeature,
    layout: BatchLayout,
    annotations: Mapping[str, Values],
    stamps: Mapping[str, Stamps],
    features: Mapping[str, FeatureStorageConfig],
    memory: CopyMemory,
) -> CheckedBatch:
    """Return a batch of the declared features as it is stored; annotations and stamps are checked.

    Raises `FeatureError` for what cannot be stored, naming the utterance where it can.
    """
    listed = _checked_ids(ids, annotations, stamps)
    check_features(listed[0] if listed else "", arrays, features)
    rows = lengths_of(listed, lengths, features)
    packed = {
        name: pack(listed, arrays[name], rows[name], layout, feature, memory)
        for name, feature in features.items()
    }
    return CheckedBatch(listed, packed, stamps, annotations)


def _checked_ids(ids: Sequence[str], *by_id: Mapping[str, object]) -> list[str]:
    """Return the ids of a batch; raises `FeatureError` for one twice, and for what is by others."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise FeatureError(f"ids are a list of strings, not {ids!r}")
    listed = list(ids)
    for id in listed:
        check_id(id)
    known = set(listed)
    if len(known) < len(listed):
        twice = next(id for id in listed if listed.count(id) > 1)
        raise FeatureError(f"utterance {twice!r} is in the batch twice")
    for given in by_id:
        for id in given:
            if id not in known:
                raise FeatureError(
                    f"annotations or stamps are given for {id!r}, which is not in the batch; "
                    f"{nearest(str(id), listed)}"
                )
    return listed
