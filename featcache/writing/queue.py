"""Utterances on their way from the caller's thread to the one that stores, some together."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from featcache.container_files import sync_directory
from featcache.declaration import FeatureStorageConfig
from featcache.errors import ClosedError, StaleCacheError
from featcache.format.annotations import Values
from featcache.format.files import explained, from_storage
from featcache.format.index import Stamps
from featcache.format.journal import Header
from featcache.format.manifest import NAME, PARTS, Manifest, read_manifest
from featcache.format.part import remove_part
from featcache.interface import Array, Bytes, EncodedArray
from featcache.stats import FeatureStats
from featcache.writing.arrays import BLOCK_BYTES, CopyMemory, Packed, UtteranceBatch
from featcache.writing.background import Background, nothing
from featcache.writing.held import HeldCache
from featcache.writing.known_ids import KnownIds
from featcache.writing.open_part import Declarations, OpenPart

# `PartsUnderWay`: the parts of a writer that are open or sealed, and not yet published.

MAPPED_PARTS = 128  # whose ids take no memory: ten million utterances; each keeps a file open


class PartsUnderWay:
    """Commits and seals the parts of a writer, in the thread that stores.

    Args:
        cache: the cache directory.
        known: told of the ids that are sealed.
        held: the cache in the hand of the one that writes the parts; None: another holds it.

    Attributes:
        unsealed: open parts, oldest first, as the thread works them off.
        committed: how many utterances of the writer are durable.
    """

    def __init__(self, cache: Path, known: KnownIds, held: HeldCache | None) -> None:
        self._cache = cache
        self._held = held
        self._known = known
        self.unsealed: list[OpenPart] = []
        self._sealed: list[str] = []
        self._sealed_rows = 0
        self.committed = 0

    def kept(self) -> str:
        """Return which part of the work is safe."""
        return f"{self.committed} utterances of this run are committed and kept"

    def start(self, features: Declarations, header: Header) -> OpenPart:
        """Open a part; in the thread of the one who writes, who is told what library is missing.

        Raises `CacheError` where nobody would have it: the cache was overwritten meanwhile, has
        become a feature set, or is gone.
        """
        with explained(self._cache, self.kept):
            if self._held is None:  # who made it may have been killed before its names were durable
                sync_directory(self._cache)
            part = OpenPart(self._cache, features, header)
            try:  # with the part's lock: whoever changes the cache from now on sees that
                self._check_wanted(header)
            except BaseException:
                part.discard()
                raise
        self.unsealed.append(part)
        return part

    def _check_wanted(self, header: Header) -> None:
        if not self._manifest().is_building(header.build, header.fingerprint):
            raise StaleCacheError(
                f"cache {str(self._cache)!r} is being overwritten, or was, since this writer was "
                f"opened; open another one: {self.kept()}"
            )

    def _manifest(self) -> Manifest:
        if self._held is None or not (self._cache / NAME).exists():
            return read_manifest(self._cache)
        return self._held.manifest

    def commit(self) -> None:
        """Make what was stored durable."""
        if self.unsealed:
            self.committed = self._sealed_rows + self.unsealed[0].commit()

    def show(self) -> None:
        """Show other processes what was stored, before it is durable."""
        for part in self.unsealed:
            part.show()

    def seal(self, part: OpenPart) -> None:
        """Finish the oldest part."""
        ids = part.ids()
        sealed = part.seal()
        self.unsealed.remove(part)
        if sealed is not None:
            self._sealed.append(sealed.entry.name)
            if self._held is not None:
                self._held.take(sealed)
            self._sealed_rows += sealed.entry.rows
            self.committed = self._sealed_rows
            mapped = self._known.count <= MAPPED_PARTS
            self._known.sealed(ids, sealed.index(self._cache, [], mapped=mapped))

    def published(self) -> None:
        """Take note that what was sealed is published: `discard` leaves it alone from now on."""
        self._sealed.clear()

    def release(self) -> None:
        """Release the open parts, once the thread has ended."""
        for part in self.unsealed:
            part.release()

    def discard(self) -> None:
        """Remove what is not published, once the thread has ended."""
        for part in self.unsealed:
            part.discard()
        if not self._sealed:
            return
        # a publish may have failed, or been interrupted (Ctrl-C), after its manifest was out
        there = (self._cache / NAME).exists()
        published = {entry.name for entry in self._manifest().parts} if there else set()
        for name in self._sealed:
            if name not in published:
                remove_part(self._cache / PARTS / name)


# `Staging`: utterances that wait until there are enough to be stored together.
#
# Their arrays are copied one behind the other, so that statistics and files take many as one.

MOST_ROWS = 256  # utterances that are handed over together
LEAST_BYTES = 1 << 12  # of the memory of a feature
COUNTED_VALUES = 1 << 16  # whose statistics are taken together, while they are in cache


class Staging:
    """Utterances that were checked and cast, in the order in which they were given.

    Args:
        part: takes them.
        features: the declarations, by name.
        memory: takes the copies.
        first: the arrays of the first utterance, by feature; memory is shared out as they share it.

    Attributes:
        nbytes: of their arrays, before any codec.
        memory: bytes that are taken for them.
    """

    def __init__(
        self,
        part: OpenPart,
        features: Mapping[str, FeatureStorageConfig],
        memory: CopyMemory,
        first: Mapping[str, Array],
    ) -> None:
        self.part = part
        self.nbytes = self.memory = 0
        total = max(sum(array.nbytes for array in first.values()), 1)
        self._rows: dict[str, _Rows] = {}
        for name, array in first.items():
            share = min(BLOCK_BYTES * array.nbytes // total, 2 * MOST_ROWS * array.nbytes)
            taken = memory.take(max(share, array.nbytes, LEAST_BYTES))
            self._rows[name] = _Rows(features[name], array, taken, is_raw=part.is_raw(name))
            self.memory += len(taken)
        self._utterances: list[_Utterance] = []
        self._batch: UtteranceBatch | None = None

    def __len__(self) -> int:
        return len(self._utterances)

    def has_room(self, arrays: Mapping[str, Array]) -> bool:
        """Whether one more utterance fits, before `batch` is called."""
        if self._batch is not None:
            return False
        for name, array in arrays.items():
            if self._rows[name].room < array.nbytes:
                return False
        return len(self._utterances) < MOST_ROWS

    def add(
        self,
        id: str,
        arrays: Mapping[str, Array],
        encoded: Mapping[str, EncodedArray],
        stamps: Stamps,
        annotations: Values,
    ) -> None:
        """Copy arrays of an utterance, (rows, *dims), storage dtype; some are `encoded` as well.

        An interrupt (Ctrl-C) leaves all of it or nothing that counts.
        """
        number = len(self._utterances)
        for name, array in arrays.items():
            self._rows[name].add(number, array)
            self.nbytes += array.nbytes
        self._utterances.append(_Utterance(id, encoded, stamps, annotations))
        for rows in self._rows.values():
            rows.count()

    def batch(self) -> UtteranceBatch:
        """Return the utterances as the part takes them: the same object each time."""
        self._batch = self._batch or self._made_batch()
        return self._batch

    def _made_batch(self) -> UtteranceBatch:
        ids, encoded, stamps, annotations = zip(*self._utterances, strict=True)
        for rows in self._rows.values():
            rows.end(len(ids))
        raw = {n: rows.packed() for n, rows in self._rows.items() if n not in encoded[0]}
        batch = UtteranceBatch()
        batch.ids, batch.stamps, batch.annotations = [*ids], [*stamps], [*annotations]
        batch.arrays = self.part.prepare_piece(ids, raw, 0, len(ids))
        batch.arrays |= {name: [each[name] for each in encoded] for name in encoded[0]}
        batch.checksums = {n: rows.checksums for n, rows in self._rows.items() if rows.is_raw}
        batch.add_stats({n: r.stats() for n, r in self._rows.items() if r.has_stats}, self.nbytes)
        return batch


class _Utterance(NamedTuple):
    id: str
    encoded: Mapping[str, EncodedArray]
    stamps: Stamps
    annotations: Values


class _Rows:
    """Arrays of a feature, such as the first, one behind the other.

    Attributes:
        room: bytes for more.
        checksums: of the arrays, if they are raw.
    """

    def __init__(
        self, feature: FeatureStorageConfig, first: Array, memory: Bytes, *, is_raw: bool
    ) -> None:
        self._dtype, self.has_stats, self.is_raw = feature.dtype, feature.stats, is_raw
        self._dims = first.shape[1:]
        self._width = math.prod(self._dims)
        self._values = memory[: len(memory) - len(memory) % first.itemsize].view(first.dtype)
        self.room = self._values.nbytes
        self.checksums: list[int] = []
        self._lengths: list[int] = []
        self._used = 0  # rows
        self._counted: tuple[int, list[FeatureStats]] = 0, []  # rows, and their statistics

    def add(self, number: int, array: Array) -> None:
        """Copy the array of an utterance, behind those of so many."""
        if len(self._lengths) > number:
            self.end(number)
        self._lengths.append(len(array))  # first, so that `end` finds what an interrupt cut off
        begin, self._used = self._used, self._used + len(array)
        copy = self._values[begin * self._width : self._used * self._width]
        np.copyto(copy.reshape(array.shape), array)
        if self.is_raw:
            self.checksums.append(xxhash.xxh3_64_intdigest(copy.data))
        self.room -= array.nbytes

    def end(self, number: int) -> None:
        """Forget what an interrupt left behind the arrays of so many utterances."""
        lengths = self._lengths[:number]
        self.checksums = self.checksums[:number]
        self._used = sum(lengths)
        self.room = self._values.nbytes - self._used * self._width * self._values.itemsize
        self._lengths = lengths  # last, so that one more interrupt leaves that to the next call

    def count(self, least: int = COUNTED_VALUES) -> None:
        """Take the statistics of those that wait for that, if they are enough."""
        counted, stats = self._counted
        if self.has_stats and (self._used - counted) * max(self._width, 1) >= least:
            values = self._values[counted * self._width : self._used * self._width]
            frames = values.reshape(self._used - counted, *self._dims)
            taken = FeatureStats.of(from_storage(frames, self._dtype))
            self._counted = self._used, [*stats, taken]

    def stats(self) -> FeatureStats:
        """Return the statistics of all."""
        self.count(1)
        _, stats = self._counted
        return FeatureStats.empty(self._dims).merge_all(stats)

    def packed(self) -> Packed:
        """Return all arrays."""
        ends = [0, *np.cumsum(self._lengths, dtype=np.int64).tolist()]
        array = self._values[: self._used * self._width].reshape(self._used, *self._dims)
        return Packed(array, self._lengths, ends, [])


# `HandOver`: utterances on their way from those who write to the thread that stores.

COMMIT_INTERVAL_S = 2.0  # what a killed writer loses at most, in time, of what has reached the disk
QUEUE_BYTES = 64 << 20  # arrays that wait for the disk; more would only cost fresh memory

NOTE_BYTES = 1 << 10  # of memory, beside the arrays of an utterance


class HandOver:
    """Gives utterances to the thread that stores: some together, which saves most of the work.

    Those that wait for more to come are stored with the next commit at the latest. One thread at a
    time may use it.

    Args:
        path: the cache directory.
        features: the declarations, by name.
        memory: takes the copies of arrays.
        under_way: the parts to store in.

    Attributes:
        may_commit: asked by that thread before it commits.
    """

    def __init__(
        self, path: Path, features: Declarations, memory: CopyMemory, under_way: PartsUnderWay
    ) -> None:
        self._pid = os.getpid()
        self.may_commit: Callable[[], bool] = _yes
        self._path, self._kept, self._commit = path, under_way.kept, under_way.commit
        self._features, self._memory = features, memory
        self._waiting: Staging | None = None  # for more
        self._taking = threading.Lock()  # either thread takes what waits
        self._background = Background(self._idle, COMMIT_INTERVAL_S, QUEUE_BYTES)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays that are not stored yet."""
        waiting = self._waiting
        return self._background.queued_bytes + (waiting.nbytes if waiting else 0)

    @property
    def is_stopping(self) -> bool:
        """True once `stop` has begun: nothing more is taken."""
        return self._background.is_stopping

    def check_process(self) -> None:
        """Raise `ClosedError` in a child: the thread is not there, what it is given were lost."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the writer of {str(self._path)!r} belongs to process {self._pid}, and this is "
                f"{os.getpid()}, forked from it; let one process write, give each a cache of its "
                "own, or use featcache.extract(parallel=...)"
            )

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self._background.error is not None:
            self.drain()

    def add(
        self,
        part: OpenPart,
        id: str,
        arrays: Mapping[str, Array],
        encoded: Mapping[str, EncodedArray],
        stamps: Stamps,
        annotations: Values,
    ) -> None:
        """Copy an utterance, as `Staging.add` does, and hand it over, maybe with some to follow."""
        waiting = self._waiting
        if waiting is not None and not waiting.has_room(arrays):
            self._put_waiting()
        with self._taking:
            waiting = self._waiting
            if waiting is None:
                waiting = Staging(part, self._features, self._memory, arrays)
            waiting.add(id, arrays, encoded, stamps, annotations)
            self._waiting = waiting  # which is never empty, whatever interrupts this

    def put_batch(self, part: OpenPart, batch: UtteranceBatch) -> None:
        """Hand over utterances."""
        self._put_waiting()
        self._put(part, batch, batch.nbytes)

    def put(self, task: Callable[[], object]) -> None:
        """Run a task behind all that was handed over before."""
        self._put_waiting()
        with explained(self._path, self._kept):
            self._background.put(task, 0, 0)

    def drain(self) -> None:
        """Return once all that was handed over before is stored; raises what went wrong."""
        self._put_waiting()
        with explained(self._path, self._kept):
            self._background.drain()

    def stop(self, finish: bool) -> None:
        """End the thread, after what was handed over or before that; never raises."""
        self._background.stop(finish)
        self._waiting = None
        # or those who gave them live on in a circle
        self._commit, self._kept, self.may_commit = nothing, str, _yes

    def _put_waiting(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            with explained(self._path, self._kept):
                self._background.wait_for_room(waiting.memory + NOTE_BYTES * len(waiting))
            with self._taking:
                # an interrupt (Ctrl-C) anywhere here leaves them waiting, to be put once more
                if self._waiting is not None:
                    self._put(waiting.part, waiting.batch(), waiting.memory)
                    self._waiting = None

    def _put(self, part: OpenPart, batch: UtteranceBatch, memory: int) -> None:
        with explained(self._path, self._kept):
            task = partial(_store, part, batch)
            self._background.put(task, batch.nbytes, memory + NOTE_BYTES * len(batch))

    def _idle(self) -> None:
        with self._taking:
            waiting, self._waiting = self._waiting, None
            batch = waiting.batch() if waiting is not None else None
        if waiting is not None and batch is not None:
            _store(waiting.part, batch)
        if self.may_commit():
            self._commit()


def _store(part: OpenPart, batch: UtteranceBatch) -> None:
    if not batch.is_stored:
        batch.is_stored = True
        part.append(batch)


def _yes() -> bool:
    return True
