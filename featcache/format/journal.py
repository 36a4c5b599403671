"""The journal of an open part, and its lines as JSON: what of the part is durable."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from featcache.container_files import Extents, sync_file
from featcache.errors import CacheError, CorruptCacheError
from featcache.format.annotations import NONE, Values, check_annotations, nbytes_of
from featcache.format.files import (
    MAX_JSON_BYTES,
    NOT_AS_WRITTEN,
    OPTIONAL,
    Json,
    Name,
    natural,
    open_within,
    pack_json,
    read_as,
    unpack_json,
    within,
)
from featcache.format.index import MOST, UNKNOWN, Stamps
from featcache.interface import Extent
from featcache.stats import FeatureStats

# Lines of a journal, as objects and as JSON.


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
        content["header"] = header
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
    arrays: Json,
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


def _stats_from_json(content: Json) -> FeatureStats:
    mean, m2 = (
        np.frombuffer(base64.b64decode(content[key]), "<f8").reshape(content["dims"])
        for key in ("mean", "m2")
    )
    return FeatureStats(natural(content["count"]), mean, m2)


# The journal of an open part: what of it is durable.
#
# One JSON line a record, sealed as in `pack_json`: first the header, then utterances, some to a
# line, and after those that one commit made durable a commit line with the part's statistics so
# far, and the header once more. Lines that no commit line follows do not count.
#
# A writer that is killed leaves a torn end, which never counted. Anything else that does not
# check is damage: the lines around it still hold, and `Journal.damaged` tells.

JOURNAL = "journal.jsonl"
LINE_UTTERANCES = 64  # most utterances of a line: ten million short ones must not cost a line each
LINE_EXTENTS = 1024
LINE_BYTES = 1 << 20  # of annotations
BUFFER_BYTES = 1 << 18  # of lines that no commit has followed
_HOLE = bytes(8)  # zeros where a sector never reached the disk


class JournalWriter:
    """Appends to a journal, which is empty at first; nothing counts before `commit`.

    Its name is for the caller to make durable, before the first `commit`.
    """

    def __init__(self, directory: Path, header: Header) -> None:
        self._header = header
        self._bare_commit = line_of(header=header, stats={})
        self._waiting: list[list[object]] = []
        self._waiting_extents = self._waiting_bytes = 0
        self._is_begun = False
        self._file: BinaryIO = (directory / JOURNAL).open("xb", buffering=BUFFER_BYTES)

    def add(
        self,
        ids: Sequence[str],
        placed: Mapping[str, PlacedArrays],
        stamps: Sequence[Stamps],
        annotations: Sequence[Values],
    ) -> None:
        """Note utterances; their bytes must be durable before the next `commit`."""
        entries = entries_of(ids, placed, stamps, annotations)
        counts = [each.extents.counts for each in placed.values()]
        extents = np.sum(counts, axis=0).tolist()
        for entry, count, values in zip(entries, extents, annotations, strict=True):
            self._waiting.append(entry)
            self._waiting_extents += count
            if values:
                self._waiting_bytes += nbytes_of(values)
            full = self._waiting_extents >= LINE_EXTENTS or self._waiting_bytes >= LINE_BYTES
            if full or len(self._waiting) >= LINE_UTTERANCES:
                self._write_waiting()

    def commit(self, stats: Mapping[str, FeatureStats], *, durably: bool = True) -> None:
        """Make all notes count, durably, with the part's statistics up to here.

        Recovery counts features anew that `stats` lacks.
        """
        self._write_waiting()
        self._write(line_of(header=self._header, stats=stats) if stats else self._bare_commit)
        self._sync() if durably else self._file.flush()
        self.check_there()

    def show(self) -> None:
        """Show other processes all notes, which do not count yet."""
        self._write_waiting()
        self._file.flush()

    def check_there(self) -> None:
        """Raise `CacheError` if another writer took this one for dead: locks may not hold."""
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise CacheError(
                f"journal {self._file.name!r} is gone: another writer has taken the part for that "
                "of a dead one, and sealed what was committed; let one writer at a time work, and "
                "run the same again"
            )

    def close(self) -> None:
        """Release the file; what was not committed does not count; never raises."""
        with contextlib.suppress(OSError):  # closing writes what waits, on a full disk too
            self._file.close()

    def _write_waiting(self) -> None:
        if self._waiting:
            self._write(line_of(entries=self._waiting))
            self._waiting = []
            self._waiting_extents = self._waiting_bytes = 0

    def _write(self, line: bytes) -> None:
        """Write a line; a hole in the header, with lines behind it, would be taken for damage."""
        if not self._is_begun:
            self._file.write(line_of(header=self._header))
            self._sync()
            self._is_begun = True
        self._file.write(line)

    def _sync(self) -> None:
        self._file.flush()
        sync_file(self._file)


@dataclass(frozen=True, slots=True)
class Journal:
    """Utterances that a journal proves to be durable."""

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
    lines = _lines(cache, f"{directory}/{JOURNAL}")
    records = [record_of(line) for line in lines]
    del records[_torn_from(lines, records) :]
    for record in filter(None, records):
        header = record.header or header
        pending += record.utterances
        if record.stats is not None:
            committed, pending, stats = committed + pending, [], dict(record.stats)
    if header is None:
        return None
    if None in records:
        return Journal(header, committed + pending, {}, damaged=True)
    return Journal(header, committed, stats)


def _torn_from(lines: Sequence[bytes], records: Sequence[Record | None]) -> int:
    """Return the number of the line from which on a writer that died left no whole lines.

    A power cut may also leave lines behind a hole, if they came after the last sync that had ended;
    each commit ends with one, and only the last may not have come to it.
    """
    end = len(records)
    while end and records[end - 1] is None and _is_torn(lines[end - 1]):
        end -= 1
    commits = [at for at, record in enumerate(records[:end]) if record and record.stats is not None]
    synced = commits[-2] + 1 if len(commits) > 1 else 1
    bad = [at for at in range(end) if records[at] is None]
    if bad and bad[0] >= synced and all(_HOLE in lines[at] for at in bad):
        return bad[0]
    return end


def has_lines(cache: Path, directory: str) -> bool:
    """Whether a part has a journal in which more stands than a torn first line."""
    lines = _lines(cache, f"{directory}/{JOURNAL}")
    return any(record_of(line) or not _is_torn(line) for line in lines)


def _lines(cache: Path, path: str) -> list[bytes]:
    try:
        descriptor = open_within(cache, path)
    except FileNotFoundError:
        return []
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
        return list(iter(partial(file.readline, MAX_JSON_BYTES), b""))


def _is_torn(line: bytes) -> bool:
    """Whether a line is the end that a killed writer leaves, and was never whole."""
    return not line.endswith(b"\n") or _HOLE in line
