"""The journal of an open part: what of it is durable.

One JSON line a record, sealed as in `pack_json`: first the header, then utterances, some to a line,
and after those that one commit made durable a commit line with the part's statistics so far, and
the header once more. Lines that no commit line follows do not count.

A writer that is killed leaves a torn end, which never counted. Anything else that does not check is
damage: the lines around it still hold, and `Journal.damaged` tells.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from featcache.container_files import sync_directory
from featcache.errors import CacheError, CorruptCacheError
from featcache.interface import Extent
from featcache.stats import FeatureStats
from featcache.store.format.files import MAX_JSON_BYTES, open_within
from featcache.store.format.sealed_json import natural, pack_json, text, unpack_json, within

NAME = "journal.jsonl"
LINE_UTTERANCES = 64  # most utterances of a line: ten million short ones must not cost a line each
LINE_EXTENTS = 1024
_HOLE = bytes(8)  # zeros where a sector never reached the disk


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


class JournalWriter:
    """Appends to a journal; nothing counts before `commit`."""

    def __init__(self, directory: Path, header: Header) -> None:
        self._header = header.to_json()
        self._waiting: list[Utterance] = []
        self._waiting_extents = 0
        self._file: BinaryIO = (directory / NAME).open("xb")
        try:
            self._write({"header": self._header})
            self._sync()
            sync_directory(directory)
        except BaseException:
            self.close()
            raise

    def add(self, utterance: Utterance) -> None:
        """Note an utterance; its bytes must be durable before the next `commit`."""
        self._waiting.append(utterance)
        self._waiting_extents += sum(len(placed.extents) for placed in utterance.arrays.values())
        if len(self._waiting) >= LINE_UTTERANCES or self._waiting_extents >= LINE_EXTENTS:
            self._write_waiting()

    def commit(self, stats: Mapping[str, FeatureStats]) -> None:
        """Make all notes count, durably, with the part's statistics up to here."""
        self.check_there()
        self._write_waiting()
        self._write(
            {
                "commit": {name: _stats_to_json(value) for name, value in stats.items()},
                "header": self._header,
            }
        )
        self._sync()
        self.check_there()

    def check_there(self) -> None:
        """Raise `CacheError` if another writer took this one for dead.

        That may be where locks do not hold.
        """
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise CacheError(
                f"journal {self._file.name!r} is gone: another writer has taken the part for that "
                "of a dead one, "
                "and sealed what was committed; let one writer at a time work, and run the same "
                "again"
            )

    def close(self) -> None:
        """Let go of the file; what was not committed does not count; never raises."""
        with contextlib.suppress(OSError):  # closing writes what waits, on a full disk too
            self._file.close()

    def _write_waiting(self) -> None:
        if self._waiting:
            self._write({"utterances": [_utterance_to_json(each) for each in self._waiting]})
            self._waiting = []
            self._waiting_extents = 0

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
    stats: Mapping[str, FeatureStats]  # of exactly these utterances; none if the journal is damaged
    # lines are lost, and `utterances` are those of all lines that check, committed or not
    damaged: bool = False


def read_journal(cache: Path, directory: str) -> Journal | None:
    """Read what the journal of a part proves; None if nothing of it names a header.

    Args:
        cache: the cache directory.
        directory: that of the part, relative to it.
    """
    header: Header | None = None
    committed: list[Utterance] = []
    pending: list[Utterance] = []
    stats: dict[str, FeatureStats] = {}
    lines = _lines(cache, f"{directory}/{NAME}")
    records = [_record(line) for line in lines]
    del records[_torn_from(lines, records) :]
    for record in records:
        if record is None:
            continue
        header = record.header or header
        pending += record.utterances
        if record.stats is not None:
            committed, pending, stats = committed + pending, [], dict(record.stats)
    if header is None:
        return None
    if None in records:
        return Journal(header, committed + pending, {}, damaged=True)
    return Journal(header, committed, stats)


def _torn_from(lines: Sequence[bytes], records: Sequence[_Record | None]) -> int:
    """Return the number of the line from which on there are no whole lines.

    A writer that died, or a power cut, left it so.

    A power cut may also leave lines behind a hole, if they came after the last sync that had ended;
    each commit ends with one, and only the last may not have come to it.
    """
    end = len(records)
    while end and records[end - 1] is None and _is_torn(lines[end - 1]):
        end -= 1
    commits = [
        number for number in range(end) if (record := records[number]) and record.stats is not None
    ]
    synced = commits[-2] + 1 if len(commits) > 1 else 1
    bad = [number for number in range(end) if records[number] is None]
    if bad and bad[0] >= synced and all(_HOLE in lines[number] for number in bad):
        return bad[0]
    return end


def has_lines(cache: Path, directory: str) -> bool:
    """Tell whether a part has a journal in which more stands than a torn first line."""
    return any(_record(line) or not _is_torn(line) for line in _lines(cache, f"{directory}/{NAME}"))


@dataclass(frozen=True, slots=True)
class _Record:
    header: Header | None
    utterances: list[Utterance]
    stats: Mapping[str, FeatureStats] | None


def _lines(cache: Path, path: str) -> list[bytes]:
    try:
        descriptor = open_within(cache, path)
    except FileNotFoundError:
        return []
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
        lines = []
        while line := file.readline(MAX_JSON_BYTES):
            lines.append(line)
    return lines


def _is_torn(line: bytes) -> bool:
    """Tell the end that a killed writer leaves from a line that was whole once."""
    return not line.endswith(b"\n") or _HOLE in line


def _record(line: bytes) -> _Record | None:
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
            return _Record(header, utterances, stats)
    return None


def _utterance_to_json(utterance: Utterance) -> list[object]:
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
