"""The journal of an open part: what of it is durable.

One JSON line a record, sealed as in `pack_json`. The first line is the header, then come the lines of utterances, and
after those that one commit made durable, one commit line with the part's statistics so far. Lines that no commit line
follows do not count, nor does anything from the first torn line on.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from featcache.errors import CorruptCacheError
from featcache.interface import Extent
from featcache.stats import FeatureStats
from featcache.store.files import pack_json, sync_directory, unpack_json, within

NAME = "journal.jsonl"


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
    """What an open part was started with."""

    build: int  # counts up with each overwrite of the cache
    fingerprint: str  # digest of the cache's fingerprint
    dims: Mapping[str, tuple[int, ...]]
    block_rows: Mapping[str, int]  # rows a block of the codec; 0: the whole array is one block, or raw

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
        """Make a header from what `to_json` returned."""
        return cls(
            build=content["build"],
            fingerprint=content["fingerprint"],
            dims={name: tuple(dims) for name, dims in content["dims"].items()},
            block_rows=dict(content["block_rows"]),
        )


class JournalWriter:
    """Appends to a journal; nothing counts before `commit`."""

    def __init__(self, directory: Path, header: Header) -> None:
        self._file: BinaryIO = (directory / NAME).open("xb")
        try:
            self._write({"header": header.to_json()})
            self._sync()
            sync_directory(directory)
        except BaseException:
            self.close()
            raise

    def add(self, utterance: Utterance) -> None:
        """Note an utterance; its bytes must be durable before the next `commit`."""
        arrays = {
            name: [placed.rows, f"{placed.checksum:016x}", [[e.container, e.offset, e.nbytes] for e in placed.extents]]
            for name, placed in utterance.arrays.items()
        }
        self._write({"id": utterance.id, "arrays": arrays})

    def commit(self, stats: Mapping[str, FeatureStats]) -> None:
        """Make all notes count, durably, with the part's statistics up to here."""
        self._write({"commit": {name: _stats_to_json(value) for name, value in stats.items()}})
        self._sync()

    def close(self) -> None:
        """Let go of the file; what was not committed does not count; never raises."""
        with contextlib.suppress(OSError):  # closing writes what waits in memory, on a full disk too
            self._file.close()

    def _write(self, record: object) -> None:
        self._file.write(pack_json(record) + b"\n")

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal proves to be durable."""

    header: Header
    utterances: list[Utterance]
    stats: dict[str, FeatureStats]


def read_header(directory: Path) -> Header | None:
    """Read what an open part was started with; None if its writer died before it had written that."""
    record = next(_records(directory / NAME), None)
    return None if record is None else Header.from_json(record["header"])


def read_journal(directory: Path) -> Journal | None:
    """Read what was committed; None if the writer died before it had written the header."""
    header: Header | None = None
    committed: list[Utterance] = []
    pending: list[Utterance] = []
    stats: dict[str, FeatureStats] = {}
    for record in _records(directory / NAME):
        if header is None:
            header = Header.from_json(record["header"])
        elif "commit" in record:
            committed += pending
            pending = []
            stats = {name: _stats_from_json(value) for name, value in record["commit"].items()}
        else:
            pending.append(_utterance(record))
    return None if header is None else Journal(header, committed, stats)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield cast(dict[str, Any], unpack_json(line, f"line {number} of {str(path)!r}"))
            except CorruptCacheError:
                return  # the torn end that a killed writer leaves


def _utterance(record: Mapping[str, Any]) -> Utterance:
    return Utterance(
        record["id"],
        {
            name: Placed(rows, int(checksum, 16), tuple(Extent(within(file), *place) for file, *place in extents))
            for name, (rows, checksum, extents) in record["arrays"].items()
        },
    )


def _stats_to_json(stats: FeatureStats) -> dict[str, object]:
    return {
        "count": stats.count,
        "mean": base64.b64encode(stats.mean.astype("<f8").tobytes()).decode(),
        "m2": base64.b64encode(stats.m2.astype("<f8").tobytes()).decode(),
        "dims": list(stats.mean.shape),
    }


def _stats_from_json(content: Mapping[str, Any]) -> FeatureStats:
    mean, m2 = (
        np.frombuffer(base64.b64decode(content[key]), "<f8").reshape(content["dims"]) for key in ("mean", "m2")
    )
    return FeatureStats(content["count"], mean, m2)
