"""Lines of a journal, as objects and as JSON."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from featcache.container_files import Extents
from featcache.errors import CorruptCacheError
from featcache.interface import Extent
from featcache.stats import FeatureStats
from featcache.store.format.annotations import NONE, Values, check_annotations
from featcache.store.format.checked import (
    NOT_AS_WRITTEN,
    OPTIONAL,
    Name,
    natural,
    read_as,
    within,
)
from featcache.store.format.sealed_json import pack_json, unpack_json
from featcache.store.format.stamps import MOST, UNKNOWN, Stamps


class Placed(NamedTuple):
    """One stored array: its length, the xxh3-64 of its stored bytes, and where they lie."""

    rows: int
    checksum: int
    extents: tuple[Extent, ...]


class Utterance(NamedTuple):
    """One stored utterance."""

    id: str
    arrays: Mapping[str, Placed]
    stamps: Stamps = UNKNOWN
    annotations: Values = NONE


class PlacedArrays(NamedTuple):
    """Stored arrays of several utterances, as columns of what `Placed` says of one."""

    rows: Sequence[int]
    checksums: Sequence[int]
    extents: Extents


@dataclass(frozen=True, slots=True)
class Header:
    """Start of a part, as the first line of its journal tells it."""

    build: int  # counts up with each overwrite of the cache
    fingerprint: str  # digest of the cache's fingerprint
    dims: Mapping[Name, tuple[int, ...]]
    # rows a block of the codec; 0: the whole array is one block, or raw
    block_rows: Mapping[Name, int]
    # the parts whose utterances it holds in their place, from the moment of its seal
    replaces: tuple[Name, ...] = field(default=(), metadata=OPTIONAL)

    def to_json(self) -> dict[str, object]:
        """Return the header as JSON has it; `replaces` is absent where it is empty."""
        content = dataclasses.asdict(self)
        return {key: each for key, each in content.items() if key != "replaces" or each}


@dataclass(frozen=True, slots=True)
class Record:
    """Content of a line."""

    header: Header | None = None
    utterances: Sequence[Utterance] = ()
    stats: Mapping[str, FeatureStats] | None = None  # by feature; None: this is no commit


def line_of(
    *,
    header: Header | None = None,
    entries: Sequence[list[object]] = (),
    stats: Mapping[str, FeatureStats] | None = None,
) -> bytes:
    """Return a line; `entries` are what `entries_of` returns of utterances."""
    content: dict[str, object] = {}
    if entries:
        content["utterances"] = entries
    if stats is not None:
        content["commit"] = {name: _stats_to_json(each) for name, each in stats.items()}
    if header is not None:
        content["header"] = header.to_json()
    return pack_json(content) + b"\n"


def entries_of(
    ids: Sequence[str],
    placed: Mapping[str, PlacedArrays],
    stamps: Sequence[Stamps],
    annotations: Sequence[Values],
) -> list[list[object]]:
    """Return utterances as a line has them."""
    names = list(placed)
    columns = [
        [
            [rows, f"{checksum:016x}", extents]
            for rows, checksum, extents in zip(*each[:2], each.extents.each(), strict=True)
        ]
        for each in placed.values()
    ]
    arrays = [dict(zip(names, of_one, strict=True)) for of_one in zip(*columns, strict=True)]
    told = zip(ids, arrays, stamps, annotations, strict=True)
    return [_entry(*each) for each in told]


def record_of(line: bytes) -> Record | None:
    """Return what a line says; None for a line that does not check."""
    for candidate in (line.removesuffix(b"\n"), line[:-1]):  # the line break itself may be damaged
        with contextlib.suppress(CorruptCacheError, *NOT_AS_WRITTEN):
            content = cast(dict[str, Any], unpack_json(candidate, "a line"))
            header = read_as(Header, content["header"]) if "header" in content else None
            utterances = [_utterance_from_json(*each) for each in content.get("utterances", ())]
            stats = content.get("commit")
            if stats is not None:
                stats = {within(name, 1): _stats_from_json(each) for name, each in stats.items()}
            return Record(header, utterances, stats)
    return None


def _entry(
    id: str, arrays: dict[str, list[object]], stamps: Stamps, annotations: Values
) -> list[object]:
    if stamps is UNKNOWN and annotations is NONE:
        return [id, arrays]
    known = [f"{stamp:016x}" for stamp in stamps] if stamps != UNKNOWN else []
    if not known and not annotations:
        return [id, arrays]
    return [id, arrays, known, *([dict(annotations)] if annotations else [])]


def _utterance_from_json(
    id: str,
    arrays: Mapping[str, Any],
    stamps: Sequence[str] = (),
    annotations: Mapping[str, object] = NONE,
) -> Utterance:
    id.encode()
    placed = {
        within(name, 1): Placed(
            natural(rows),
            int(checksum, 16),
            tuple(
                Extent(within(file), natural(offset), natural(nbytes))
                for file, offset, nbytes in extents
            ),
        )
        for name, (rows, checksum, extents) in arrays.items()
    }
    known = Stamps(*(natural(int(stamp, 16), MOST) for stamp in stamps))
    return Utterance(id, placed, known, check_annotations(id, annotations) if annotations else NONE)


def _stats_to_json(stats: FeatureStats) -> dict[str, object]:
    return {
        "count": stats.count,
        "mean": base64.b64encode(stats.mean.astype("<f8").tobytes()).decode(),
        "m2": base64.b64encode(stats.m2.astype("<f8").tobytes()).decode(),
        "dims": list(stats.mean.shape),
    }


def _stats_from_json(content: Mapping[str, Any]) -> FeatureStats:
    mean, m2 = (
        np.frombuffer(base64.b64decode(content[key]), "<f8").reshape(content["dims"])
        for key in ("mean", "m2")
    )
    return FeatureStats(natural(content["count"]), mean, m2)
