"""Utterances of a cache that no generation holds yet: in sealed parts, and in those being written.

Whoever fills a cache together with others looks here for what they have computed. Nothing is
locked; what is read from an open part is compared with its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.container_files import bytes_at
from featcache.container_files.lock import HOLDER, Holder, holder, is_locked, may_live
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.format import (
    JOURNAL,
    PART_NAME,
    PARTS,
    SEAL,
    UNKNOWN,
    Column,
    Header,
    Index,
    Manifest,
    Placed,
    SealedPart,
    Stamps,
    Utterance,
    as_known,
    checksum,
    every_directory,
    open_within,
    part_directories,
    read_journal,
    read_part,
    record_of,
)
from featcache.interface import Array, EncodedArray, Ints
from featcache.reading.feature_arrays import FeatureArrays, OpenedPart, joined
from featcache.reading.generation import Generation

# The journal of a part that another process may be writing, read on as it grows.


class JournalTail:
    """Utterances as a journal notes them, committed or not: checksums tell which bytes are there.

    It is read to its end also when the part is sealed meanwhile and the journal removed.

    Attributes:
        header: that of the part; None until it was read.
        noted: how many utterances were read.
        committed: how many of these are durable, the first ones.

    Raises `FileNotFoundError` if the part has no journal.
    """

    def __init__(self, cache: Path, part: str) -> None:
        self.header: Header | None = None
        self.committed = 0
        self.noted = 0  # utterances
        self._read = 0  # bytes
        self._descriptor = open_within(cache, f"{part}/{JOURNAL}")

    def look(self) -> list[Utterance]:
        """Return the utterances that were noted since the last look.

        Lines that do not check are passed over: recovery judges them.
        """
        size = os.fstat(self._descriptor).st_size
        if size <= self._read:
            return []
        data = bytes_at(self._descriptor, size - self._read, self._read)
        whole = data.rfind(b"\n") + 1  # the rest is being written
        self._read += whole
        found: list[Utterance] = []
        for line in data[:whole].splitlines(keepends=True):
            record = record_of(line)
            if record is not None:
                self.header = record.header or self.header
                found += record.utterances
                self.noted += len(record.utterances)
                if record.stats is not None:
                    self.committed = self.noted
        return found

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_descriptor"):
            close(self._descriptor)  # when the interpreter ends, `os` may be gone before this


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A part that is sealed and not published."""

    index: Index
    left_out: Ints  # rows that count no more
    arrays: Mapping[str, FeatureArrays]
    annotation: Callable[[str], Column]

    def row(self, id: str) -> int:
        row = self.index.find(id)
        return -1 if row in self.left_out else row


class _Noted(NamedTuple):
    """An utterance of an open part, and its number in that."""

    part: str
    number: int
    utterance: Utterance


class Unpublished:
    """Utterances that no generation holds yet; `look` is called by one thread at a time.

    Args:
        cache: the cache directory.
        features: the declarations, by name.
    """

    def __init__(self, cache: Path, features: Mapping[str, FeatureStorageConfig]) -> None:
        self._cache = cache
        self._features = features
        self._tails: dict[str, JournalTail] = {}
        self._sealed: dict[str, _Sealed] = {}
        self._noted: dict[str, _Noted] = {}  # by id

    def look(self, manifest: Manifest) -> None:
        """Find out what was written since the last look, beside the generation of `manifest`."""
        known = {entry.name for entry in manifest.parts}.union(manifest.replaced)
        try:
            names = set(os.listdir(self._cache / PARTS)) - known  # noqa: PTH208  # each miss waits
        except FileNotFoundError:
            names = set()
        for name in sorted((self._tails.keys() | self._sealed.keys()) - names):
            self._forget(name)
        for name in sorted(names):
            if name not in self._sealed and PART_NAME.fullmatch(name):
                self._look_at(name, manifest)

    def __contains__(self, id: str) -> bool:
        """Whether an utterance is noted, be its bytes there or not."""
        return id in self._noted or any(each.row(id) >= 0 for each in self._sealed.values())

    @property
    def parts(self) -> set[str]:
        """The names of the parts that hold them."""
        return {*self._tails, *self._sealed}

    def read(self, id: str) -> dict[str, Array] | None:
        """Return the arrays of an utterance, by feature, as they are stored and in user's shape.

        None if there is none, or its bytes are not to be seen yet.
        """
        for sealed in [*self._sealed.values()]:
            if (row := sealed.row(id)) >= 0:
                return {name: arrays.read(row) for name, arrays in sealed.arrays.items()}
        noted = self._noted.get(id)
        tail = None if noted is None else self._tails.get(noted.part)
        if noted is None or tail is None or tail.header is None:
            return None
        part, utterance = noted.part, noted.utterance
        if utterance.arrays.keys() != self._features.keys():
            return None
        if self._is_lost_one(noted, tail):
            return None
        read = {
            name: self._array(part, name, utterance.arrays[name], tail.header)
            for name in self._features
        }
        found = {name: array for name, array in read.items() if array is not None}
        return found if len(found) == len(read) else None

    def stamps(self, id: str) -> Stamps:
        """Return the stamps of an utterance."""
        for sealed in [*self._sealed.values()]:
            if (row := sealed.row(id)) >= 0:
                columns = sealed.index.stamps
                return UNKNOWN if columns is None else Stamps(*(each.item(row) for each in columns))
        noted = self._noted.get(id)
        return UNKNOWN if noted is None else noted.utterance.stamps

    def annotations(self, id: str, names: Sequence[str]) -> dict[str, object]:
        """Return these annotations of an utterance."""
        for sealed in [*self._sealed.values()]:
            if (row := sealed.row(id)) >= 0:
                return {name: sealed.annotation(name)[row] for name in names}
        noted = self._noted[id].utterance.annotations
        return {name: noted[name] for name in names}

    def _is_lost_one(self, noted: _Noted, tail: JournalTail) -> bool:
        return noted.number >= tail.committed and self._is_lost(noted.part)

    def _is_lost(self, part: str) -> bool:
        """Whether a writer died, and with it what it had not committed.

        Its lock alone does not tell: whoever looks takes it for a moment, and recovery holds it
        longer, and names itself as the holder after the last line of the journal was written.
        """
        directory = self._cache / PARTS / part
        try:
            if (directory / SEAL).exists():
                return False
            journal = (directory / JOURNAL).stat().st_mtime_ns
            if not may_live(holder(directory)) or (directory / HOLDER).stat().st_mtime_ns > journal:
                return True
            return not is_locked(directory)
        except FileNotFoundError:
            return not (directory / SEAL).exists()

    def _look_at(self, name: str, manifest: Manifest) -> None:
        part = f"{PARTS}/{name}"
        tail = self._tails.get(name)
        if tail is None:
            try:
                tail = JournalTail(self._cache, part)
            except FileNotFoundError:
                self._take_sealed(name, manifest)
                return
        first, noted = tail.noted, tail.look()
        header = tail.header
        if header is None or not manifest.is_building(header.build, header.fingerprint):
            return
        self._tails[name] = tail
        for number, utterance in enumerate(noted, first):
            known = self._noted.get(utterance.id)
            other = None if known is None else self._tails.get(known.part)
            if known is None or other is None or self._is_lost_one(known, other):
                self._noted[utterance.id] = _Noted(name, number, utterance)

    def _take_sealed(self, name: str, manifest: Manifest) -> None:
        part = read_part(self._cache, name)
        if part is None or not manifest.is_building(part.header.build, part.header.fingerprint):
            return
        if not part.header.replaces:  # a copy of what is there already
            self._sealed[name] = self._opened(as_known([part], manifest)[0], manifest)

    def _opened(self, part: SealedPart, manifest: Manifest) -> _Sealed:
        index = part.index(self._cache, list(self._features))
        declared = {name: manifest.features[name] for name in self._features}
        arrays = OpenedPart.of(self._cache, part, declared, index).arrays
        kinds = index.annotations

        def annotation(name: str) -> Column:
            return part.annotation(self._cache, name, kinds[name])

        return _Sealed(index, part.tombstones(self._cache), arrays, lru_cache(annotation))

    def _forget(self, name: str) -> None:
        self._sealed.pop(name, None)
        if self._tails.pop(name, None) is not None:
            kept = ((id, each) for id, each in self._noted.items() if each.part != name)
            self._noted = dict(kept)

    def _array(self, part: str, name: str, placed: Placed, header: Header) -> Array | None:
        """Read an array of an open part; None if its bytes are not what its writer has noted."""
        try:
            blocks = tuple(
                self._bytes(f"{PARTS}/{part}/{each.container}", each.offset, each.nbytes)
                for each in placed.extents
            )
        except (FileNotFoundError, CorruptCacheError):  # sealed elsewhere by a recovery
            return None
        if checksum(blocks) != placed.checksum:
            return None
        feature = self._features[name]
        spec = feature.spec(header.dims[name])
        array = np.array(joined(spec, EncodedArray(placed.rows, blocks), header.block_rows[name]))
        return array if feature.time_axis == 0 else array[0, ...]

    def _bytes(self, path: str, offset: int, nbytes: int) -> bytes:
        descriptor = open_within(self._cache, path)
        try:
            return bytes_at(descriptor, nbytes, offset)
        finally:
            os.close(descriptor)


def count_unpublished(cache: Path, manifest: Manifest) -> int:
    """Count the durable utterances of the build that is written which no generation holds yet."""
    known = {entry.name for entry in manifest.parts}.union(manifest.replaced)
    deleted = {each.name: each.tombstones for each in manifest.building_parts}
    count = 0
    for directory in part_directories(cache):
        name = directory.name
        if name in known:
            continue
        found = read_part(cache, name) or read_journal(cache, f"{PARTS}/{name}")
        if found is None or found.header.replaces:  # copies of what is there
            continue
        if not manifest.is_building(found.header.build, found.header.fingerprint):
            continue
        if isinstance(found, SealedPart):
            stones = deleted.get(name)
            count += found.entry.rows - (0 if stones is None else stones.rows)
        else:
            count += len(found.utterances)
    return count


class Pending(NamedTuple):
    """Utterances of a cache that are durable and in no generation yet, and who writes it."""

    utterances: int = 0
    writer: Holder | None = None  # None: nobody, so that a writer that was killed has left them


def pending_of(opened: Generation) -> Pending:
    """Return what is pending of a cache; of a version nothing is."""
    if opened.settings.version:
        return Pending()
    sets, places = list(opened.sets.values()) or [opened], every_directory(opened.cache_path)
    known = {part.name for each in sets for part in each.manifest.parts}
    parts = (part for place in places for part in part_directories(place))
    found = map(holder, (*places, *(part for part in parts if part.name not in known)))
    writer = next((each for each in found if may_live(each)), None)
    return Pending(sum(count_unpublished(each.path, each.manifest) for each in sets), writer)
