"""Lines of a journal: what they say, as objects and as JSON."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from featcache.errors import CorruptCacheError
from featcache.interface import Extent
from featcache.stats import FeatureStats
from featcache.store.format.sealed_json import natural, text, unpack_json, within


@dataclass(frozen=True, slots=True)
class Placed:
    """One stored array: its length, the xxh3-64 of its stored bytes, and where they lie."""

    rows: int
    checksum: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Utterance:
    """One stored utterance."""

    id: str
    arrays: Mapping[str, Placed]


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a journal: what its part was started with."""

    build: int  # counts up with each overwrite of the cache
    fingerprint: str  # digest of the cache's fingerprint
    dims: Mapping[str, tuple[int, ...]]
    # rows a block of the codec; 0: the whole array is one block, or raw
    block_rows: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        """Return the header as JSON-able values."""
        return {
            "build": self.build,
            "fingerprint": self.fingerprint,
            "dims": {name: list(dims) for name, dims in self.dims.items()},
            "block_rows": dict(self.block_rows),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Header:
        """Make a header from what `to_json` returned.

        Raises an error of Python's own for anything else.
        """
        return cls(
            build=natural(content["build"]),
            fingerprint=text(content["fingerprint"]),
            dims={
                within(name, 1): tuple(map(natural, dims)) for name, dims in content["dims"].items()
            },
            block_rows={
                within(name, 1): natural(rows) for name, rows in content["block_rows"].items()
            },
        )


@dataclass(frozen=True, slots=True)
class Record:
    """Content of a line."""

    header: Header | None
    utterances: list[Utterance]
    stats: Mapping[str, FeatureStats] | None


def record_of(line: bytes) -> Record | None:
    """Return what a line says; None for a line that does not check."""
    for candidate in (line.removesuffix(b"\n"), line[:-1]):  # the line break itself may be damaged
        with contextlib.suppress(
            CorruptCacheError, LookupError, TypeError, ValueError, AttributeError, OverflowError
        ):
            content = cast(dict[str, Any], unpack_json(candidate, "a line"))
            header = Header.from_json(content["header"]) if "header" in content else None
            utterances = [_utterance_from_json(*each) for each in content.get("utterances", ())]
            stats = content.get("commit")
            if stats is not None:
                stats = {within(name, 1): _stats_from_json(value) for name, value in stats.items()}
            return Record(header, utterances, stats)
    return None


def utterance_to_json(utterance: Utterance) -> list[object]:
    """Return an utterance as JSON-able values."""
    arrays = {
        name: [
            placed.rows,
            f"{placed.checksum:016x}",
            [[e.container, e.offset, e.nbytes] for e in placed.extents],
        ]
        for name, placed in utterance.arrays.items()
    }
    return [utterance.id, arrays]


def _utterance_from_json(id: object, arrays: Mapping[str, Any]) -> Utterance:
    text(id).encode()
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
    return Utterance(text(id), placed)


def stats_to_json(stats: FeatureStats) -> dict[str, object]:
    """Return statistics as JSON-able values."""
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
